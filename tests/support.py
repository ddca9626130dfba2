"""Small scenarios for tests, and functions that run and check them."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from pdsim.core.invariants import check
from pdsim.core.journal.calls import KILLED, Entry
from pdsim.core.journal.message_json import to_json
from pdsim.core.messages import DecodeStep, MixedStep, PrefillChunk, PrefillStep, Step, Wait
from pdsim.core.sequence import Spans
from pdsim.metrics.summary import itl_samples
from pdsim.scenario.building.cluster import Cluster, build
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.schema import Scenario
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, Simulation
from pdsim.workload.request_spec import RequestSpec, Streams

MILLISECOND = 1_000_000


def examples(count: int, **others: Any) -> settings:
    """Settings of Hypothesis with `count` examples, multiplied by the variable PDSIM_EXAMPLES: 50 for a run at night,
    0.25 for tests that run in full elsewhere.
    """
    return settings(max_examples=math.ceil(count * float(os.environ.get("PDSIM_EXAMPLES", "1"))), **others)


@dataclass(frozen=True)
class Given:
    """A workload with given requests."""

    specs: tuple[RequestSpec, ...] = field(default=())

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        return self.specs


def request(i: int, prompt: int | Spans, output: int, **changes: Any) -> RequestSpec:
    """Request number i. prompt: number of tokens, which no other request shares; or the prompt itself. output: number
    of tokens. changes: of the RequestSpec's fields.
    """
    spans = Spans.of(10_000 + 2 * i, prompt) if isinstance(prompt, int) else prompt
    spec = RequestSpec(i, spans, Spans.of(10_001 + 2 * i, output), output)
    return spec._replace(**changes)


def small(*requests: RequestSpec, **changes: Any) -> Scenario:
    """A scenario with one prefill and one decode instance and round times: prefill takes 1 ms per token, a decode step
    10 ms. changes: values by field path, with two underscores for each dot, such as decode__tp=2.
    """
    data: dict[str, Any] = {
        "model": "qwen3-0.6b",
        "page_size": 4,
        "prefill": {"gpu": "h100", "pool_tokens": 4096, "chunked_prefill_tokens": 64, "overlap": False},
        "decode": {
            "gpu": "h100",
            "pool_tokens": 4096,
            "admission": {"use": "reserve_decode_tokens", "reserved_tokens": 8},
            "retraction_backup": False,
        },
        "router": "round_robin",
        "network": {
            "bandwidth": "100 GB/s",
            "transfer_latency": "1 ms",
            "descriptor_latency": 0,
            "message_latency": "1 ms",
        },
        "cost": {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"},
        "workload": Given(tuple(requests)),
        "client": "open_loop",
    }
    return _changed(data, changes)


def small_aggregated(*requests: RequestSpec, **changes: Any) -> Scenario:
    """A scenario with the times of `small` and one aggregated instance. changes: as for `small`."""
    data: dict[str, Any] = {
        "model": "qwen3-0.6b",
        "page_size": 4,
        "aggregated": {"gpu": "h100", "pool_tokens": 4096, "chunked_prefill_tokens": 64, "overlap": False},
        "router": "round_robin",
        "network": {"message_latency": "1 ms"},
        "cost": {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"},
        "workload": Given(tuple(requests)),
        "client": "open_loop",
    }
    return _changed(data, changes)


def _changed(data: dict[str, Any], changes: dict[str, Any]) -> Scenario:
    for path, value in changes.items():
        at = data
        *parents, last = path.split("__")
        for key in parents:
            at = at.setdefault(key, {})
        at[last] = value
    return parse_scenario(data, base=Path())


@dataclass
class Traced:
    result: RunResult
    journal: list[Entry]
    cluster: Cluster
    machines: list[Any]
    """State machines that live at the end of the run."""

    @property
    def records(self) -> Any:
        return self.result.records


def run(scenario: Scenario, *, single_steps: bool = False, checked: bool = False, levels: bool = False) -> Traced:
    """Simulates a scenario and keeps the journal. single_steps: True: decode steps are simulated one by one. checked:
    True: after every call, all invariants of the called instance are checked. levels: True: record requests and pages
    over time.
    """
    cluster = build(scenario)
    instances = {instance.instance_id for instance in cluster.instances}
    journal: list[Entry] = []

    def record(entry: Entry) -> None:
        journal.append(entry)
        if checked and entry.instance_id in instances and entry.call != KILLED:
            check(simulation.instance(entry.instance_id))

    simulation = Simulation(cluster, Observation(journal=record, levels=levels), single_steps=single_steps)
    return Traced(simulation.run(), journal, cluster, simulation.machines())


def run_both_ways(scenario: Scenario) -> tuple[Traced, Traced]:
    """Simulates a scenario twice, with many decode steps at once and one by one, and requires equal decisions,
    requests, transfers and gaps. Returns both runs.
    """
    many, single = run(scenario), run(scenario, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)
    assert many.records.requests == single.records.requests
    assert many.records.transfers == single.records.transfers
    assert many.records.host_copies == single.records.host_copies
    assert sorted(many.records.token_gaps) == sorted(single.records.token_gaps)
    return many, single


def require_whole_gaps(records: Any) -> None:
    """Requires that the gaps between tokens add up to the time after the first. All requests have finished."""
    gaps = itl_samples(records)
    assert gaps.count == sum(r.num_output_tokens - 1 for r in records.requests)
    whole_ms = sum(r.end_ns - r.first_token_ns for r in records.requests) / 1e6
    assert gaps.mean() * gaps.count == pytest.approx(whole_ms)


def parts(step: Step | Wait) -> list[PrefillStep | DecodeStep]:
    """The prefill part and the decode part of a step. Empty: the step is a Wait."""
    if isinstance(step, MixedStep):
        return [step.decode, step.prefill]
    return [] if isinstance(step, Wait) else [step]


def chunks(step: Step | Wait) -> list[PrefillChunk]:
    return [chunk for part in parts(step) if isinstance(part, PrefillStep) for chunk in part.chunks]


def decisions(entries: Iterable[Entry]) -> dict[str, list[Any]]:
    """The calls of a journal by instance. Decode steps that only continue the step before are joined with it.

    A simulation of many steps at once and one of single steps have equal decisions.
    """
    by_instance: dict[str, list[Any]] = {}
    for entry in entries:
        known = by_instance.setdefault(entry.instance_id, [])
        plain = to_json((entry.call, *entry.args, entry.returned))
        match entry:
            case Entry(call=call) if call == KILLED:
                while known and known[-1][0] in {"running", "ran"} and not known[-1][3]:
                    known.pop()  # how far it had run is seen only step by step
                known.append(plain)
            case Entry(call="next_step", returned=(DecodeStep() as step, commands)):
                continues = not (step.joined or step.left or commands)
                if continues and known and known[-1][0] == "ran" and not known[-1][3]:
                    known[-1][0] = "running"
                else:
                    known.append(["decode", entry.args[-1], to_json((replace(step, max_steps=0), commands))])
            case Entry(call="on_step_done", args=(DecodeStep(), result, now_ns), returned=commands):
                what = to_json((result.ended, commands)) if result.ended or commands else None
                if known[-1][0] == "running":
                    known[-1] = ["ran", known[-1][1] + result.num_steps, now_ns, what]
                else:
                    known.append(["ran", result.num_steps, now_ns, what])
            case _:
                known.append(plain)
    return by_instance
