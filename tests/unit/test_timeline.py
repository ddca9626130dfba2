"""The Chrome trace of a run: what Perfetto needs to open it, and nothing that it would draw wrong."""

import gzip
import json
from collections import Counter
from itertools import pairwise

import pytest

from pdsim.metrics.explain import STAGES
from pdsim.metrics.timeline import trace_events, write_timeline
from tests.support import run, small

KEYS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
}
"""What the format asks of each kind of event."""


@pytest.fixture(scope="module")
def records():
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
    )
    return run(scenario, levels=True).records


@pytest.fixture(scope="module")
def events(records):
    return list(trace_events(records))


def of_phase(events, *phases):
    return [event for event in events if event["ph"] in phases]


def by_track(events, *keys):
    tracks = {}
    for event in events:
        tracks.setdefault(tuple(event[key] for key in keys), []).append(event)
    return tracks.values()


def test_the_file_is_the_events_as_json(records, events, tmp_path):
    write_timeline(tmp_path / "t.json.gz", records)
    with gzip.open(tmp_path / "t.json.gz", "rt") as file:
        trace = json.load(file)
    assert trace["traceEvents"] == events
    json.dumps(events, allow_nan=False)


def test_every_event_has_what_its_kind_needs(events):
    assert {event["ph"] for event in events} == KEYS.keys()
    for event in events:
        assert event.keys() >= KEYS[event["ph"]]
        assert event.get("ts", 0) >= 0


def test_every_process_has_one_name(events):
    names = Counter(event["pid"] for event in of_phase(events, "M"))
    assert names.keys() == {event["pid"] for event in events}
    assert set(names.values()) == {1}
    instances = ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert [e["args"]["name"] for e in of_phase(events, "M")] == ["requests", "transfers", *instances]


def test_slices_of_a_track_last_and_do_not_overlap(events, records):
    slices = of_phase(events, "X")
    assert len(slices) == len(records.steps)
    for track in by_track(slices, "pid", "tid"):
        assert all(event["dur"] > 0 for event in track)
        for one, following in pairwise(sorted(track, key=lambda event: event["ts"])):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-6


def test_asynchronous_slices_nest_and_all_end(events, records):
    for track in by_track(of_phase(events, "b", "e"), "cat", "id"):
        begun = []
        for event in track:
            if event["ph"] == "b":
                assert not begun or begun[-1]["ts"] <= event["ts"]
                begun.append(event)
            else:
                began = begun.pop()
                assert began["name"] == event["name"]
                assert began["ts"] <= event["ts"]
        assert not begun


def test_a_request_shows_its_stages_and_a_transfer_its_bytes(events, records):
    begun = of_phase(events, "b")
    names = Counter(event["name"] for event in begun if event["cat"] == "request")
    took_time = Counter(
        stage
        for request in records.requests
        for stage, (first, last, _) in STAGES.items()
        if getattr(request, first) < getattr(request, last)
    )
    assert took_time["decode_forward"] == 30
    assert {name: names.pop(name, 0) for name in STAGES} == {name: took_time[name] for name in STAGES}
    assert names == Counter(f"request {request.request_id}" for request in records.requests)
    sent = [event["args"]["bytes"] for event in begun if event["cat"] == "transfer"]
    assert sent == [transfer.num_bytes for transfer in records.transfers]


def test_counters_are_numbers_from_zero(events):
    counters = of_phase(events, "C")
    assert {event["name"] for event in counters} == {"KV pages", "requests"}
    assert all(value >= 0 for event in counters for value in event["args"].values())


def test_a_counter_is_written_when_it_changes(events, records):
    for track in by_track(of_phase(events, "C"), "pid", "name"):
        assert all(one["args"] != following["args"] for one, following in pairwise(track))
    used = [event["args"]["used"] for event in of_phase(events, "C") if event["name"] == "KV pages"]
    assert max(used) == max(row.levels.num_used_pages for row in records.levels)
