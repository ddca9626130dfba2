"""Laws of clusters that copy the KV of retracted requests to host memory, or look at transfers now and then."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pdsim.core.messages import DecodeStep, LoadKv, Retracted, SaveKv
from pdsim.cost.copies import HostCopies, HostMemory
from pdsim.metrics.recorder import Recorder
from pdsim.metrics.records import StepRecord, TokenGap
from pdsim.scenario.building.wiring import host_copies
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import DecodeSettings
from tests.strategies import crowds, scenarios
from tests.support import examples, request, require_whole_gaps, run, run_both_ways, small


@st.composite
def crowded(draw: st.DrawFn) -> Scenario:
    """Requests that outgrow their pool together, beside clusters of every other kind."""
    looks = draw(st.integers(1, 5))
    if draw(st.booleans()):
        scenario = draw(scenarios())
    else:
        scenario = small(*draw(crowds()), decode__pool_tokens=64, decode__admission__reserved_tokens=0)
    changes = {"retraction_backup": draw(st.booleans()), "polling_interval": looks}
    decode = scenario.decode.model_copy(update=changes)
    return scenario.model_copy(update={"decode": decode})


@given(crowded())
@examples(80)
def test_every_request_ends_though_copies_take_time_and_looks_are_rare(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome == "finished" or "not fit" in r.reason for r in traced.records.requests)


@given(crowded())
@examples(80)
def test_many_steps_at_once_are_single_steps_with_copies_and_rare_looks(scenario: Scenario):
    run_both_ways(scenario)


@given(crowded())
@examples(60)
def test_gaps_add_up_to_the_time_after_the_first_token_with_copies(scenario: Scenario):
    records = run(scenario).records
    finished = [r for r in records.requests if r.outcome == "finished"]
    assume(len(finished) == len(records.requests))
    require_whole_gaps(records)


@given(crowded())
@examples(60)
def test_what_is_saved_is_loaded_again_whole(scenario: Scenario):
    traced = run(scenario)
    saved: dict[int, int] = {}
    for command in (c for e in traced.journal if e.call == "next_step" for c in e.returned[1]):
        if isinstance(command, SaveKv):
            assert command.request_id not in saved
            saved[command.request_id] = len(command.pages)
        elif isinstance(command, LoadKv):
            assert saved.pop(command.request_id) == len(command.pages)
        elif isinstance(command, Retracted) and not scenario.decode.retraction_backup:
            saved.clear()
    assert not saved


def test_the_loop_stands_still_while_kv_is_copied():
    """Two requests outgrow 10 pages of 4: the shorter one makes way, then comes back."""
    specs = [request(0, 8, 20), request(1, 8, 24)]
    free = small(*specs, decode__pool_tokens=40, decode__admission__reserved_tokens=0)
    slow = free.model_copy(update={"decode": free.decode.model_copy(update={"retraction_backup": True})})
    quick, copied = run(free), run(slow)
    saves = [c for e in copied.journal if e.call == "next_step" for c in e.returned[1] if isinstance(c, SaveKv)]
    assert len(saves) == quick.result.summary()["pdsim"]["retractions"] == 1
    memory = HostMemory(host_copies(slow))
    copies_ns = memory.save_ns(0, len(saves[0].pages)) + memory.load_ns(0)
    assert sum(step.copying_ns for step in copied.records.steps) == copies_ns
    assert copied.result.summary()["pdsim"]["retraction_copies_s"] == pytest.approx(copies_ns / 1e9)
    last = max(r.end_ns for r in copied.records.requests) - max(r.end_ns for r in quick.records.requests)
    assert last == copies_ns


def test_copies_take_time_unless_they_are_said_not_to():
    """SGLang's default is a copy in host memory."""
    scenario = small(request(0, 8, 20), request(1, 8, 24), decode__pool_tokens=40, decode__admission__reserved_tokens=0)
    backup = DecodeSettings(gpu="h100").retraction_backup
    default = scenario.model_copy(update={"decode": scenario.decode.model_copy(update={"retraction_backup": backup})})
    copies_s = [run(each).result.summary()["pdsim"]["retraction_copies_s"] for each in (scenario, default)]
    assert copies_s[0] == 0 < copies_s[1]


@pytest.mark.parametrize("other_waits", [False, True])
def test_a_new_request_waits_for_copies_whoever_else_waits(other_waits: bool):
    """Its first token is streamed before the copies, and its second comes 60 ns later."""
    recorder = Recorder()
    for i in range(2):
        recorder.on_arrival(i, 4, 3, 0)
        recorder.on_routed(i, "prefill-0", "decode-0", 0)
    if other_waits:
        recorder.on_retracted(1, 90)
    recorder.on_streamed(0, 100)
    step = DecodeStep(0, (0,), (), num_requests=1, num_context_tokens=4, num_distinct_tokens=4, max_steps=1)
    row = StepRecord("decode-0", "decode", 150, 10, 10, 1, 1, 1, 4, 0.0, copying_ns=50)
    recorder.on_step(step, row)
    assert recorder.records.token_gaps == [TokenGap(60, 1)]


def test_memory_that_was_pinned_before_is_used_again():
    costs = HostCopies(
        page_bytes=10,
        all_page_bytes=10,
        num_planes=4,
        copy_ns=3,
        save_bandwidth=1e9,
        load_bandwidth=1e9,
        pinning_bandwidth=0.5e9,
    )
    memory = HostMemory(costs)
    assert memory.save_ns(0, 100) == 1000 + 2 * 4 * 256  # 250 bytes a plane, of which 256 are pinned
    assert memory.load_ns(0) == 1000
    assert memory.save_ns(1, 100) == 1000
    assert memory.save_ns(2, 1) == 12 + 2 * 4 * 4
    memory.forget(1)
    assert memory.save_ns(3, 99) == 990
    assert memory.save_ns(4, 103) == 1030 + 2 * 4 * 512


@given(st.integers(1, 12), st.integers(1, 400))
@examples(40)
def test_queue_and_transfers_are_looked_at_in_every_nth_step(interval: int, arrival_ms: int):
    """One request runs; another comes. It is admitted, and merged, after a whole number of intervals."""
    specs = [request(0, 4, 200), request(1, 4, 5, arrival_ns=arrival_ms * 1_000_000)]
    first, second = run(small(*specs, decode__polling_interval=interval)).records.requests
    if second.admitted_ns < first.streamed_ns:
        return
    for time_ns in (second.admitted_ns, second.streamed_ns):
        assert time_ns <= first.streamed_ns or (time_ns - first.streamed_ns) % (10_000_000 * interval) == 0


@given(st.lists(st.booleans(), max_size=30))
@example([True, False, True, True])
def test_pinned_memory_serves_one_request_at_a_time(saves):
    """Requests of one size: memory is pinned as often as the most of them that are out at once."""
    costs = HostCopies(
        page_bytes=64,
        all_page_bytes=64,
        num_planes=2,
        copy_ns=1,
        save_bandwidth=1e9,
        load_bandwidth=1e9,
        pinning_bandwidth=1e6,
    )
    memory, out, most, num_pinned = HostMemory(costs), [], 0, 0
    for i, is_saved in enumerate(saves):
        if is_saved:
            num_pinned += memory.save_ns(i, 4) > 4 * 64
            out.append(i)
            most = max(most, len(out))
        elif out:
            memory.load_ns(out.pop())
    assert num_pinned == most
