"""Simulates the load of an observation, and compares the result with the times that the observing client measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.calibration.observe.observation import read_load, summary_of
from pdsim.calibration.validate.case import ArmErrors, MetricError, Simulate
from pdsim.dataclass import dataclass
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.profile import read_profile
from pdsim.workload.client import ClosedLoop
from pdsim.workload.request_spec import RequestSpec, Streams, alone

COMPARED = (
    "request_throughput",
    "output_throughput",
    *(
        f"{statistic}_{time}_ms"
        for time in ("ttft", "tpot", "itl", "e2e_latency")
        for statistic in ("mean", "median", "p90")
    ),
)


@dataclass(frozen=True)
class SentRequests:
    """A workload with the requests that `pdsim observe` sent to a server. Prompts share no prefix."""

    lengths: tuple[tuple[int, int], ...]
    """Number of prompt tokens and of output tokens of each request."""

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        del rng
        return [alone(i, prompt, output) for i, (prompt, output) in enumerate(self.lengths)]


def compare_load(scenario: Path, observed: Path, profile: Path | None, simulate: Simulate) -> list[ArmErrors]:
    """Simulates each run of the load that `pdsim observe` sent, and returns the errors of the simulated metrics. Times
    of stages are compared, too, if the server's metrics have them. Metrics that are 0 or unknown in the measurement, or
    that the simulation lacks, are left out.

    scenario: scenario of the server. observed: folder of the observation, or its load file. profile: cost, network and
    front_end of this profile replace those of the scenario; None: none are replaced.
    """
    changes = () if profile is None else profile_changes(profile)
    served = load_scenario(scenario, changes)
    return [_compare(arm, of_load(served, arm), observed.name, simulate) for arm in read_load(observed)]


def profile_changes(profile: Path) -> tuple[str, ...]:
    """Changes of a scenario, as for --set, that take the sections cost, network and front_end from the profile, as far
    as the profile has them.
    """
    there = read_profile(profile)
    sections = ("cost", *(section for section in ("network", "front_end") if section in there))
    return tuple(f"{section}.profile={profile.resolve()}" for section in sections)


def of_load(served: Scenario, arm: Mapping[str, Any]) -> Scenario:
    """The scenario `served`, with the requests and the number of clients of one observed run (`arm`)."""
    lengths = tuple((one["prompt_tokens"], one["output_tokens"]) for one in arm["requests"])
    return served.model_copy(
        update={"workload": SentRequests(lengths), "client": ClosedLoop(arm["concurrency"], warm_up_requests=0)}
    )


def _compare(arm: Mapping[str, Any], scenario: Scenario, case: str, simulate: Simulate) -> ArmErrors:
    stages = arm.get("stages", {})
    measured, simulated = {**summary_of(arm["requests"]), **stages}, simulate(scenario)
    errors = {
        name: MetricError(measured[name], simulated[name], None)
        for name in (*COMPARED, *stages)
        if measured[name]  # none: TPOT of one token, or a stage that did not happen
        if name in simulated
    }
    return ArmErrors(case, str(arm["name"]), fitted=False, metrics=errors)
