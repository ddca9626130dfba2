"""Simulate prefill/decode disaggregated LLM serving with the scheduler that real hardware runs.

from pdsim import load_scenario, simulate
result = simulate(load_scenario("scenario.yaml", ["decode.radix_cache=true"]))
print(result.summary()["request_throughput"])
"""

from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.simulation import Observation, RunResult, simulate
from pdsim.sweeps.result import SweepResult
from pdsim.sweeps.running import sweep

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Observation",
    "RunResult",
    "Scenario",
    "SweepResult",
    "__version__",
    "load_scenario",
    "simulate",
    "sweep",
]
