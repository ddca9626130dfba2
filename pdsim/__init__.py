"""Simulate prefill/decode disaggregated LLM serving with the scheduler that real hardware runs.

from pdsim import load_scenario, simulate
result = simulate(load_scenario("scenario.yaml", ["decode.radix_cache=true"]))
print(result.summary()["request_throughput"])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdsim.metrics.run_folder import StoredRun
    from pdsim.metrics.tables import RunFolderError
    from pdsim.scenario.loading import load_scenario
    from pdsim.scenario.schema import Scenario
    from pdsim.scenario.yaml_file import ConfigError
    from pdsim.sim.result import RunResult
    from pdsim.sim.simulation import Observation, simulate
    from pdsim.study.planning.planning import plan
    from pdsim.study.questions.answering import ask
    from pdsim.study.sweeping.sweep import sweep

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Observation",
    "RunFolderError",
    "RunResult",
    "Scenario",
    "StoredRun",
    "__version__",
    "ask",
    "load_scenario",
    "plan",
    "simulate",
    "sweep",
]

_PLACES = {
    "ConfigError": "scenario.yaml_file",
    "Observation": "sim.simulation",
    "RunFolderError": "metrics.tables",
    "RunResult": "sim.result",
    "Scenario": "scenario.schema",
    "StoredRun": "metrics.run_folder",
    "ask": "study.questions.answering",
    "load_scenario": "scenario.loading",
    "plan": "study.planning.planning",
    "simulate": "sim.simulation",
    "sweep": "study.sweeping.sweep",
}
"""Modules of the public names. A name is imported when it is first used, because a command needs few of them."""


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"pdsim.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_compiled() -> bool:
    """True if the core runs as machine code, from a compiled wheel or after `make fast`."""
    return not (import_module("pdsim.core.instance").__file__ or "").endswith(".py")
