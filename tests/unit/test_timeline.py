"""The Chrome trace of a run: what Perfetto needs to open it, and nothing that it would draw wrong."""

import gzip
import json
from collections import Counter
from itertools import pairwise

import pytest

from pdsim.metrics.explanation.stages import STAGES
from pdsim.metrics.timeline import trace_events, write_timeline
from tests.support import run, small
from tests.trace_check import problems

STAGED = {"prefill__tp": 2, "decode__tp": 1, "network__staging": {"ring": "1 GB"}}


def observed(**changes):
    scenario = small(
        workload={
            "use": "random_lengths",
            "num_requests": 30,
            "input_tokens": {"use": "uniform", "low": 20, "high": 150},
            "output_tokens": 20,
        },
        prefill__instances=2,
        decode__instances=2,
        decode__pool_tokens=400,
        client={"use": "open_loop", "arrivals": {"use": "poisson", "rate": "20/s"}},
        **changes,
    )
    return run(scenario, levels=True).records


@pytest.fixture(scope="module")
def records():
    return observed()


@pytest.fixture(scope="module")
def events(records):
    return trace_events(records)


def of_phase(events, *phases):
    return [event for event in events if event["ph"] in phases]


def named(events, kind):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in of_phase(events, "M") if e["name"] == kind}


def test_the_file_is_the_events_as_json(records, events, tmp_path):
    write_timeline(tmp_path / "t.json.gz", records)
    with gzip.open(tmp_path / "t.json.gz", "rt") as file:
        trace = json.load(file)
    assert trace["traceEvents"] == events
    json.dumps(events, allow_nan=False)


def test_nothing_is_wrong_with_it(events):
    assert problems(events) == []


def test_instances_have_tracks_for_gpu_workers_grants_and_merges(events):
    assert list(named(events, "process_name").values()) == [
        "requests",
        "links",
        "decode-0",
        "decode-1",
        "prefill-0",
        "prefill-1",
    ]
    tracks = named(events, "thread_name")
    processes = {name: pid for (pid, _), name in named(events, "process_name").items()}
    titles = {name: {title for (pid, _), title in tracks.items() if pid == processes[name]} for name in processes}
    assert titles["decode-0"] == {"GPU", "grants pages", "merges requests"}
    assert titles["prefill-0"] >= {"GPU", "transfer worker 0"}


def test_every_step_and_every_transfer_is_a_slice(events, records):
    slices = of_phase(events, "X")
    kinds = Counter(event["cat"] for event in slices)
    assert kinds["prefill"] + kinds["decode"] == len(records.steps)
    sent = [event["args"]["bytes"] for event in slices if event["cat"] == "transfer" and event["args"]]
    assert sorted(sent) == sorted(transfer.num_bytes for transfer in records.transfers)


def test_a_request_shows_its_stages(events, records):
    names = Counter(event["name"] for event in of_phase(events, "b") if event["cat"] == "request")
    took_time = Counter(
        stage
        for request in records.requests
        for stage, (first, last, _) in STAGES.items()
        if getattr(request, first) < getattr(request, last)
    )
    assert took_time["decode_forward"] == 30
    assert {name: names.pop(name, 0) for name in STAGES} == {name: took_time[name] for name in STAGES}
    assert names == Counter(f"request {request.request_id}" for request in records.requests)


def test_arrows_lead_from_grant_to_forward_and_from_worker_to_merge(events, records):
    process = {pid: name for (pid, _), name in named(events, "process_name").items()}
    ends = {}
    for event in of_phase(events, "s", "f"):
        ends.setdefault((event["name"], event["id"]), []).append((process[event["pid"]], event["ts"] * 1e3))
    grants = sorted(tuple(way) for (name, _), way in ends.items() if name == "grant")
    assert grants == sorted(
        ((r.decode_id, r.admitted_ns), (r.prefill_id, r.prefill_start_ns)) for r in records.requests
    )
    merges = sorted(way[1] for (name, _), way in ends.items() if name == "KV")
    assert merges == sorted((r.decode_id, r.streamed_ns) for r in records.requests)


def test_a_counter_is_written_when_it_changes(events, records):
    counters = {}
    for event in of_phase(events, "C"):
        counters.setdefault((event["pid"], event["name"]), []).append(event["args"])
    assert {name for _, name in counters} > {"KV pages", "requests", "prefill-0 -> decode-0"}
    for (_, name), values in counters.items():
        if " -> " not in name:
            assert all(one != following for one, following in pairwise(values))
    used = [value["used"] for (_, name), values in counters.items() for value in values if name == "KV pages"]
    assert max(used) == max(row.levels.num_used_pages for row in records.levels)


def test_links_end_empty(events):
    last = {(e["pid"], e["name"]): e["args"] for e in of_phase(events, "C") if " -> " in e["name"]}
    assert all(args == {"moving": 0} for args in last.values())


def test_waits_for_the_ring_are_seen():
    events = trace_events(observed(**STAGED))
    assert problems(events) == []
    assert any(event["cat"] == "ring" for event in of_phase(events, "b"))


BROKEN = {
    "unknown phase": lambda e: e[-1].update(ph="Q"),
    "missing": lambda e: of_phase(e, "X")[0].pop("dur"),
    "before what precedes it": lambda e: e.append(e.pop(len(e) // 2)),
    "ends after the slice around it": lambda e: next(
        x for x in of_phase(e, "X") if x["cat"] == "transfer" and not x["args"]
    ).update(dur=1e9),
    "never ends": lambda e: e.remove(of_phase(e, "e")[-1]),
    "arrow": lambda e: e.remove(of_phase(e, "f")[0]),
    "no slice around": lambda e: of_phase(e, "f")[0].update(tid=77),
    "two names": lambda e: e.insert(0, e[0]),
    "no name": lambda e: e.remove(next(m for m in e if m["name"] == "thread_name")),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_the_check_finds_what_is_broken(problem):
    """On a trace with set-up inside its transfers."""
    events = trace_events(observed(network__transfer_latency="1 ms"))
    assert problems(events) == []
    BROKEN[problem](events)
    assert any(problem in found for found in problems(events)), problems(events)
