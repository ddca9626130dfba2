"""Sessions of agents: what waits for what is AIPerf's interval order, and what is shared is what its ids say."""

import json
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.workload.agent_plays import Interval, WekaTrace, frontiers
from pdsim.workload.client import ClientDriver, ClosedLoop, OpenLoop, Poisson, sessions_of
from pdsim.workload.request_spec import Streams

BLOCK = 64
TIMES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=10)


@given(TIMES)
def test_a_call_follows_those_that_ended_last(times):
    """By AIPerf's definition (`timing/replay_dependencies.py`), each call on a stream of its own."""
    calls = [Interval(start, start + took, (i,)) for i, (start, took) in enumerate(times)]
    for i, target in enumerate(calls):
        ended = [one for one in calls if one.start_ns < target.start_ns and one.end_ns <= target.start_ns]
        last = {
            one.calls[0]
            for one in ended
            if not any(one.start_ns < later.start_ns and one.end_ns <= later.start_ns for later in ended)
        }
        assert set(frontiers(calls, calls)[i]) == last


def play(draw_ids, num_calls, name="a"):
    requests, ids, fresh = [], [], 0
    for i in range(num_calls):
        kept = ids[: draw_ids(len(ids))]
        ids = [*kept, *range(fresh, fresh + 2)]
        fresh += 2
        call = {
            "t": 2.0 * i,
            "type": "s",
            "model": "m",
            "in": len(ids) * BLOCK - 5,
            "out": 3,
            "hash_ids": ids,
            "api_time": 0.5,
        }
        requests.append(call)
    return {"id": name, "models": ["m"], "block_size": BLOCK, "hash_id_scope": "local", "requests": requests}


@settings(max_examples=50)
@given(data=st.data())
def test_an_endless_cache_hits_the_blocks_that_aiperf_counts(tmp_path_factory, data):
    """`weka_metric_prepass.py`: a request's leading ids that its session has had before."""
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    plays = [play(lambda n: data.draw(st.integers(0, n)), data.draw(st.integers(1, 6)), f"s{i}") for i in range(2)]
    path.write_text("".join(json.dumps(one) + "\n" for one in plays))
    specs = WekaTrace(path=path).requests(Streams(0))
    number = 0
    for one in plays:
        seen, before = set(), []
        for call in one["requests"]:
            hits = next((i for i, each in enumerate(call["hash_ids"]) if each not in seen), len(call["hash_ids"]))
            spec = specs[number]
            shared = max((spec.prompt.common_prefix(0, other.prompt, 0) for other in before), default=0)
            assert shared // BLOCK <= hits <= -(-max(shared, 0) // BLOCK)
            seen.update(call["hash_ids"])
            before.append(spec)
            number += 1
    assert number == len(specs)


SUBAGENT = {
    "t": 3.0, "type": "subagent", "agent_id": "x", "subagent_type": "Explore", "status": "completed", "models": ["m"],
    "duration_ms": 4000,
    "requests": [
        {"t": 3.2, "type": "s", "model": "m", "in": 100, "out": 9, "hash_ids": [90, 91], "api_time": 1.0},
        {"t": 5.0, "type": "n", "model": "m", "in": 190, "out": 9, "hash_ids": [90, 91, 92], "api_time": 1.5},
    ],
}  # fmt: skip


def with_subagent():
    made = play(lambda n: n, 3)
    made["requests"] = [*made["requests"][:2], SUBAGENT, {**made["requests"][2], "t": 8.0}]
    return made


def test_a_parent_waits_for_its_subagent(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(with_subagent(), indent=1))
    specs = WekaTrace(path=path).requests(Streams(0))
    assert [spec.after for spec in specs] == [(), (0,), (1,), (2,), (3,)]
    assert [spec.think_ns / 1e9 for spec in specs] == pytest.approx([0, 1.5, 0.7, 0.8, 1.5])
    assert {spec.session for spec in specs} == {0}


def test_a_subagents_call_never_waits_for_itself(tmp_path):
    """Its recorded end may lie before its calls, or be the start of a call that took no time."""
    for duration_ms, took_s in ((100, 1.0), (200, 1.0), (1000, 1.0), (None, 0.0)):
        calls = [{**SUBAGENT["requests"][0], "api_time": took_s}]
        late = {**SUBAGENT, "duration_ms": duration_ms, "requests": calls}
        path = tmp_path / "t.json"
        path.write_text(json.dumps({**play(lambda n: n, 1), "requests": [late, {**late, "t": 3.1}]}))
        specs = WekaTrace(path=path).requests(Streams(0))
        assert [spec.after for spec in specs] == [(), ()]
        assert sent(specs, OpenLoop()).keys() == {0, 1}


class Timeline:
    """Calls back in order of time."""

    def __init__(self):
        self.now_ns, self._due, self._numbers = 0, [], count()

    def after(self, delay_ns, callback):
        self._due.append((self.now_ns + delay_ns, next(self._numbers), callback))

    def run(self):
        while self._due:
            self._due.sort()
            self.now_ns, _, callback = self._due.pop(0)
            callback(None)


def sent(specs, client, took_ns=1_000_000_000):
    """Times of sending by request, where each takes so long."""
    timeline, times = Timeline(), {}

    def send(spec):
        times[spec.request_id] = timeline.now_ns
        timeline.after(took_ns, lambda _: driver.on_end(spec.request_id))

    driver = ClientDriver(timeline, client, specs, streams=Streams(0), send=send)
    driver.start()
    timeline.run()
    return times


@given(seed=st.integers(0, 50), lanes=st.integers(1, 3))
def test_lanes_warm_up_then_go_on_and_begin_others(tmp_path_factory, seed, lanes):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    path.write_text("".join(json.dumps({**with_subagent(), "id": str(i)}) + "\n" for i in range(2)))
    specs = WekaTrace(path=path, lanes=lanes, num_sessions=7).requests(Streams(seed))
    primes = [spec for spec in specs if spec.primes]
    others = [spec for spec in specs if not spec.primes]
    assert all(len(spec.output) == 1 for spec in primes)
    assert len(sessions_of(others)) == 7
    times = sent(specs, ClosedLoop(lanes))
    assert times.keys() == {spec.request_id for spec in specs}
    if primes:
        assert min(times[spec.request_id] for spec in others) >= max(times[spec.request_id] for spec in primes) + 1e9
    ends_ns = sent(specs, ClosedLoop(lanes, duration_ns=6_000_000_000))
    begin_ns = 1e9 if primes else 0
    assert all(at < begin_ns + 6e9 for at in ends_ns.values())


@given(seed=st.integers(0, 50), rate=st.sampled_from([None, 0.1, 20.0]))
def test_an_open_loop_warms_up_first_too(tmp_path_factory, seed, rate):
    """So the requests that arrive first, which metrics leave out, are the priming requests."""
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    path.write_text("".join(json.dumps({**with_subagent(), "id": str(i)}) + "\n" for i in range(2)))
    specs = WekaTrace(path=path, lanes=2, num_sessions=4).requests(Streams(seed))
    num_primes = sum(spec.primes for spec in specs)
    times = sent(specs, OpenLoop(None if rate is None else Poisson(rate)))
    assert times.keys() == {spec.request_id for spec in specs}
    first = sorted(times, key=lambda number: (times[number], number))[:num_primes]
    assert all(specs[number].primes for number in first)
    others = [times[spec.request_id] for spec in specs if not spec.primes]
    assert min(others) >= (1e9 if num_primes else 0)
