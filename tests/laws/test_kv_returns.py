"""Laws of KV that goes back from decode to prefill when a request ends."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.sequence import Spans
from pdsim.core.transfer.kv_returns import LEAST_TOKENS
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.building.wiring import interconnect, wire_of
from pdsim.scenario.schema import Scenario
from tests.strategies import crowded_scenarios, optimistic_scenarios, scenarios, vllm_scenarios
from tests.support import MILLISECOND, examples, request, run, run_both_ways, small

SECOND = 1000 * MILLISECOND
FEW_TOKENS = 2


@pytest.fixture(scope="module", autouse=True)
def little_is_worth_it():
    """Random outputs are short."""
    with patch("pdsim.core.transfer.kv_returns.LEAST_TOKENS", FEW_TOKENS):
        yield


@st.composite
def clusters(draw: st.DrawFn) -> Scenario:
    """Prefix caches on both sides, on pools from tight to plenty."""
    strategy = st.one_of(scenarios(), optimistic_scenarios(), crowded_scenarios(), vllm_scenarios())
    scenario = draw(strategy.filter(lambda one: one.prefill.tp == one.decode.tp and one.health is None))
    prefill = scenario.prefill.model_copy(update={"radix_cache": True})
    decode = scenario.decode.model_copy(update={"radix_cache": True, "returns_kv": True})
    return scenario.model_copy(update={"prefill": prefill, "decode": decode})


@given(clusters())
@examples(150)
def test_every_request_ends_and_nothing_is_held_at_the_end(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome == "finished" or "not fit" in r.reason for r in traced.records.requests)


@given(clusters())
@examples(80)
def test_many_steps_at_once_are_single_steps_with_returns(scenario: Scenario):
    run_both_ways(scenario)


@given(clusters())
@examples(40)
def test_a_journal_with_returns_replays(scenario: Scenario):
    traced = run(scenario)
    written = from_lines([to_line(entry) for entry in traced.journal])
    assert replay(written, state_machines(resolve(scenario))) == len(traced.journal)


@given(clusters())
@examples(40)
def test_no_more_goes_back_than_was_computed_on_decode_or_lost_on_prefill(scenario: Scenario):
    """Once for each request at most, in whole pages, and never less than is worth it."""
    records = run(scenario).records
    by_id = {row.request_id: row for row in records.requests}
    back = [row for row in records.transfers if row.source.startswith("decode")]
    assert len({row.request_id for row in back}) == len(back)
    for row in back:
        known = by_id[row.request_id].num_prompt_tokens + by_id[row.request_id].num_output_tokens - 1
        assert FEW_TOKENS <= row.num_pages * scenario.page_size <= known
        assert row.start_ns >= by_id[row.request_id].end_ns


# Closed forms.


def conversation(output: int = 101, **changes) -> Scenario:
    """Two turns: the second repeats prompt and output of the first, and has 8 tokens more."""
    answer = Spans.of(7, output)
    first = request(0, Spans.of(1, 200), output)._replace(output=answer)
    second = request(1, Spans.of(1, 200).then(answer).then(Spans.of(3, 8)), 2, arrival_ns=20 * SECOND)
    return small(first, second, decode__radix_cache=True, prefill__chunked_prefill_tokens=0, **changes)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_next_turn_computes_its_own_tokens_alone(engine):
    """Of 301 tokens decode has the KV of 300, in pages of 4; the last and the 8 new ones are computed."""
    changes = {"engine": engine, "page_size": 4}
    if engine == "vllm":
        changes |= {"decode__admission": "free_pages"}
    plain, back = (run(conversation(decode__returns_kv=returns, **changes)) for returns in (False, True))
    assert [one.records.requests[1].num_prefill_cached_tokens for one in (plain, back)] == [200, 300]
    times = [one.records.requests[1].prefill_end_ns - one.records.requests[1].prefill_start_ns for one in (plain, back)]
    assert times == [109 * MILLISECOND, 9 * MILLISECOND]


def test_it_takes_a_message_each_way_and_the_time_of_its_bytes():
    scenario = conversation(decode__returns_kv=True, network__bandwidth="1 GB/s")
    traced = run(scenario)
    (row,) = [row for row in traced.records.transfers if row.source == "decode-0"]
    ended_ns = traced.records.requests[0].end_ns
    num_bytes = 25 * interconnect(resolve(scenario)).wire.page_bytes
    assert row.num_bytes == num_bytes
    assert row.queued_ns == ended_ns + 2 * MILLISECOND  # offered and wanted
    assert row.end_ns == pytest.approx(row.start_ns + MILLISECOND + num_bytes, abs=2)  # a batch, and a byte a ns


@pytest.mark.parametrize(("output", "cached"), [(LEAST_TOKENS + 1, 200 + LEAST_TOKENS), (LEAST_TOKENS, 200)])
def test_little_is_computed_again(output, cached):
    with patch("pdsim.core.transfer.kv_returns.LEAST_TOKENS", LEAST_TOKENS):
        records = run(conversation(output, decode__returns_kv=True)).records
    assert records.requests[1].num_prefill_cached_tokens == cached


def test_prefill_without_room_wants_nothing():
    """While the first turn ends, another prompt holds nearly all pages of prefill."""
    scenario = conversation(decode__returns_kv=True, prefill__pool_tokens=340)
    specs = scenario.workload.requests(None)
    long = request(2, 300, 2, arrival_ns=1100 * MILLISECOND)
    busy = scenario.model_copy(update={"workload": type(scenario.workload)((*specs, long))})
    records = run(busy, checked=True).records
    assert all(row.source != "decode-0" for row in records.transfers)


@st.composite
def lone_conversations(draw: st.DrawFn) -> Scenario:
    """Turns one after another over a slow link, on pools that hold the longest of them and little more."""
    page = draw(st.sampled_from([1, 4, 16]))
    specs, history = [], Spans.of(1, draw(st.integers(1, 60)))
    for i in range(draw(st.integers(2, 5))):
        is_next = draw(st.booleans())
        prompt = history if is_next else Spans.of(100 + i, draw(st.integers(1, 60)))
        answer = Spans.of(200 + i, draw(st.integers(1, 60)))
        think_ns = draw(st.sampled_from([0, 1, 20, 300])) * MILLISECOND
        after = {"after": (i - 1,), "think_ns": think_ns} if i else {}
        specs.append(request(i, prompt, len(answer))._replace(output=answer, **after))
        history = prompt.then(answer).then(Spans.of(300 + i, draw(st.integers(1, 20))))
    whole = max(len(one.prompt) + len(one.output) for one in specs)
    pages = -(-whole // page) + draw(st.integers(0, 3))
    return small(
        *specs,
        page_size=page,
        prefill__pool_tokens=max(len(one.prompt) for one in specs) + 2 + draw(st.sampled_from([2, 200])) * page,
        prefill__overlap=draw(st.booleans()),
        decode__pool_tokens=(pages + 1) * page,
        decode__radix_cache=True,
        decode__returns_kv=True,
        decode__admission=draw(st.sampled_from(["free_pages", {"use": "reserve_decode_tokens", "reserved_tokens": 0}])),
        network__bandwidth=draw(st.sampled_from(["1 MB/s", "100 MB/s"])),
    )


@given(lone_conversations())
@examples(150)
def test_nobody_alone_is_lost_to_a_return(scenario: Scenario):
    """A return that holds the pages of the one that runs, or finds none, ends; what needs them waits for it."""
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert [r.reason for r in traced.records.requests if r.outcome != "finished"] == []


def test_a_lone_request_waits_for_the_pages_of_a_return():
    """119 of 124 pages go back to prefill for 13.6 s, while a short prompt's answer grows."""
    first = request(0, 60, 60)
    second = request(1, 1, 60, after=(0,), think_ns=10 * MILLISECOND)
    pools = {"prefill__pool_tokens": 400, "decode__pool_tokens": 124}
    returns = {"decode__radix_cache": True, "decode__returns_kv": True, "decode__admission": "free_pages"}
    scenario = small(first, second, page_size=1, network__bandwidth="1 MB/s", **pools, **returns)
    traced = run(scenario, checked=True)
    assert [r.outcome for r in traced.records.requests] == ["finished", "finished"]
    back = next(row for row in traced.records.transfers if row.source == "decode-0")
    assert traced.records.requests[1].streamed_ns < back.end_ns < traced.records.requests[1].end_ns


def test_windows_go_back_to_prefill_with_the_pages():
    scenario = conversation(model="gpt-oss-120b", decode__returns_kv=True)
    wire = wire_of(resolve(scenario))
    back = next(row for row in run(scenario).records.transfers if row.source == "decode-0")
    window_pages = min(back.num_pages, -(-wire.window_tokens // wire.page_size))
    windows = back.num_bytes - back.num_pages * wire.page_bytes
    assert window_pages * wire.window_page_bytes <= windows <= (window_pages + 1) * wire.window_page_bytes
