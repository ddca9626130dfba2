"""Simulate prefill/decode disaggregated LLM serving with the scheduler that real hardware runs.

from pdsim import load_scenario, simulate
result = simulate(load_scenario("scenario.yaml", ["decode.radix_cache=true"]))
print(result.summary()["request_throughput"])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pdsim.core import instance
from pdsim.metrics.run_folder import RunFolderError, StoredRun
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, simulate

if TYPE_CHECKING:
    from pdsim.study.questions.answering import ask
    from pdsim.study.running import sweep

__version__ = "0.1.0"


def is_compiled() -> bool:
    """Whether the core runs as machine code: a compiled wheel, or `make fast`."""
    return not (instance.__file__ or "").endswith(".py")


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
    "simulate",
    "sweep",
]


_LATER = {"ask": "pdsim.study.questions.answering", "sweep": "pdsim.study.running"}
"""They load Arrow, which takes longer to load than all the rest."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
