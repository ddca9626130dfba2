"""The load of an observation, as a server's clients saw it: its file, its summary, and the errors of its simulation."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pdsim.calibration.case import ArmErrors, MetricError, Simulate
from pdsim.metrics.distribution import Samples
from pdsim.metrics.summary import statistics
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.profile import read_profile
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.workload.client import ClosedLoop
from pdsim.workload.request_spec import RequestSpec, Streams, alone

LOAD = "load.json"
COMPARED = (
    "request_throughput",
    "output_throughput",
    *(
        f"{statistic}_{time}_ms"
        for time in ("ttft", "tpot", "itl", "e2e_latency")
        for statistic in ("mean", "median", "p90")
    ),
)


def read_load(path: Path) -> list[dict[str, Any]]:
    """Arms of a load; path is the observation's folder or the file. Raises ConfigError."""
    path = path / LOAD if path.is_dir() else path
    try:
        arms: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["arms"]
        _check(arms)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: pdsim observe writes it when its load has ended") from None
    except KeyError as lacking:
        raise ConfigError(f"{path} is no load of pdsim observe: it lacks {lacking}") from None
    except (ValueError, TypeError, AttributeError, OSError) as wrong:
        raise ConfigError(f"{path} is no load of pdsim observe: {wrong}") from None
    if not arms:
        raise ConfigError(f"{path}: the observation ended before its load")
    return arms


def _check(arms: Any) -> None:
    """Raises KeyError or ValueError: where, what was found, and what is possible."""
    for i, arm in enumerate(arms):
        arm["name"]
        _at_least(f"arms[{i}].concurrency", arm["concurrency"], 1)
        _at_least(f"arms[{i}].requests: number", len(arm["requests"]), 1)
        for j, one in enumerate(arm["requests"]):
            where = f"arms[{i}].requests[{j}]"
            for name in ("prompt_tokens", "output_tokens"):
                _at_least(f"{where}.{name}", one[name], 1)
            times = [one["sent_s"], *one["event_s"]]
            if len(times) == 1 or not all(isinstance(at, int | float) for at in times) or times != sorted(times):
                raise ValueError(f"{where}.event_s: expected times in s from sent_s on, found {one['event_s']!r}")


def _at_least(where: str, found: Any, least: int) -> None:
    if not isinstance(found, int) or found < least:
        raise ValueError(f"{where}: expected a whole number of at least {least}, found {found!r}")


def summary_of(requests: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The fields of a run's summary that a client can measure."""
    requests = list(requests)
    ttft_ms = [1e3 * (one["event_s"][0] - one["sent_s"]) for one in requests]
    latency_ms = [1e3 * (one["event_s"][-1] - one["sent_s"]) for one in requests]
    tpot_ms = [
        1e3 * (one["event_s"][-1] - one["event_s"][0]) / (one["output_tokens"] - 1)
        for one in requests
        if one["output_tokens"] > 1
    ]
    seconds = max(one["event_s"][-1] for one in requests) - min(one["sent_s"] for one in requests)
    return {
        "request_throughput": len(requests) / seconds,
        "output_throughput": sum(one["output_tokens"] for one in requests) / seconds,
        **statistics("ttft", Samples(ttft_ms)),
        **statistics("tpot", Samples(tpot_ms)),
        **statistics("itl", Samples(_itl_ms(requests))),
        **statistics("e2e_latency", Samples(latency_ms)),
    }


def _itl_ms(requests: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    """Gaps between events, each shared by the tokens of an event."""
    for one in requests:
        tokens_per_event = max(1.0, one["output_tokens"] / len(one["event_s"]))
        yield from (1e3 * (end - begin) / tokens_per_event for begin, end in pairwise(one["event_s"]))


@dataclass(frozen=True)
class SentRequests:
    """Requests of a load as they were sent: prompts share nothing."""

    lengths: tuple[tuple[int, int], ...]
    """Prompt and output tokens."""

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        del rng
        return [alone(i, prompt, output) for i, (prompt, output) in enumerate(self.lengths)]


def compare_load(scenario: Path, observed: Path, profile: Path | None, simulate: Simulate) -> list[ArmErrors]:
    """Errors of each arm of an observation's load, with stages where the server's metrics time them.

    `profile` takes the place of the scenario's costs.
    """
    changes = () if profile is None else profile_changes(profile)
    served = load_scenario(scenario, changes)
    return [_compare(arm, of_load(served, arm), observed.name, simulate) for arm in read_load(observed)]


def profile_changes(profile: Path) -> tuple[str, ...]:
    """Changes of a scenario that take all from a profile that it has."""
    there = read_profile(profile)
    sections = ("cost", *(section for section in ("network", "front_end") if section in there))
    return tuple(f"{section}.profile={profile.resolve()}" for section in sections)


def of_load(served: Scenario, arm: Mapping[str, Any]) -> Scenario:
    """The scenario with the arm's requests and clients."""
    lengths = tuple((one["prompt_tokens"], one["output_tokens"]) for one in arm["requests"])
    return served.model_copy(update={"workload": SentRequests(lengths), "client": ClosedLoop(arm["concurrency"])})


def _compare(arm: Mapping[str, Any], scenario: Scenario, case: str, simulate: Simulate) -> ArmErrors:
    stages = arm.get("stages", {})
    measured, simulated = {**summary_of(arm["requests"]), **stages}, simulate(scenario)
    errors = {
        name: MetricError(measured[name], simulated[name], None)
        for name in (*COMPARED, *stages)
        if measured[name] or name not in stages
        if name in simulated
    }
    return ArmErrors(case, str(arm["name"]), fitted=False, metrics=errors)
