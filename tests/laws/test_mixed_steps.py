"""Laws of vLLM's steps, which decode all that run and compute prompts with what they leave of the token budget."""

import sys
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import DecodeStep, MixedStep, NewRequest, PrefillChunk, PrefillStep
from pdsim.cost.model import FRACTION_BITS
from pdsim.metrics.explanation.usage import instance_usage
from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from tests.strategies import fault_schedules, vllm_aggregated_scenarios
from tests.support import (
    MILLISECOND,
    Traced,
    chunks,
    examples,
    parts,
    request,
    require_whole_gaps,
    run,
    run_both_ways,
    small_aggregated,
)

COST = {"use": "affine", "prefill_base": "3 ms", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
READING = {**COST, "decode_per_context_token": "0.1 ms"}


@given(vllm_aggregated_scenarios())
@examples(120)
def test_every_request_ends_and_nothing_is_left_behind(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert [r.outcome for r in traced.records.requests] == ["finished"] * len(traced.cluster.requests)


@given(vllm_aggregated_scenarios())
@examples(60)
def test_each_output_token_takes_a_decode_step_or_ends_a_prompt(scenario: Scenario):
    traced = run(scenario)
    decoded = sum(step.num_tokens for step in traced.records.steps if step.kind == "decode")
    ends = [chunk for e in traced.journal if e.call == "next_step" for chunk in chunks(e.returned[0]) if chunk.is_last]
    assert len(ends) == sum(1 + r.num_retractions for r in traced.records.requests)
    assert decoded + len(ends) == sum(r.num_output_tokens for r in traced.records.requests)
    require_whole_gaps(traced.records)


@given(vllm_aggregated_scenarios())
@examples(120)
def test_a_step_decodes_all_that_run_and_keeps_to_its_budget(scenario: Scenario):
    aggregated = scenario.aggregated
    running: dict[str, set[int]] = defaultdict(set)
    here: Counter[str] = Counter()
    for entry in run(scenario).journal:
        where = running[entry.instance_id]
        if entry.call == "on_message" and entry.instance_id.startswith("aggregated"):
            here[entry.instance_id] += isinstance(entry.args[0], NewRequest)
        elif entry.call == "next_step":
            step = entry.returned[0]
            num_decoding = 0
            for part in parts(step):
                if isinstance(part, DecodeStep):
                    assert part.num_requests == len(where - set(part.left) | set(part.joined))
                    num_decoding = part.num_requests
            sizes = [chunk.num_tokens for chunk in chunks(step)]
            if sizes and aggregated.chunked_prefill_tokens:
                assert sum(sizes) + num_decoding <= aggregated.chunked_prefill_tokens
            if aggregated.long_prefill_tokens and here[entry.instance_id] > 1:
                budget = aggregated.chunked_prefill_tokens or sys.maxsize
                share = budget // here[entry.instance_id] if aggregated.long_prefill_adaptive else 0
                assert max(sizes, default=0) <= max(aggregated.long_prefill_tokens, share)
        elif entry.call == "on_step_done":
            step, result, _ = entry.args
            for part in parts(step):
                if isinstance(part, DecodeStep):
                    where -= set(part.left)
                    where |= set(part.joined)
            where -= {request_id for request_id, _ in result.ended}
            here[entry.instance_id] -= len(result.ended)


@given(vllm_aggregated_scenarios())
@examples(80)
def test_no_prompt_holds_up_a_token(scenario: Scenario):
    """Nobody that was not preempted waits between two tokens for anything but the step."""
    records = run(scenario).records
    if not any(r.num_retractions for r in records.requests):
        assert records.token_gaps == []


@given(vllm_aggregated_scenarios())
@examples(120)
def test_many_steps_at_once_are_single_steps_and_runs_replay(scenario: Scenario):
    many, _ = run_both_ways(scenario)
    entries = list(from_lines(map(to_line, many.journal)))
    assert replay(entries, state_machines(resolve(scenario))) == len(entries)


@given(fault_schedules(vllm_aggregated_scenarios()))
@examples(60)
def test_nothing_leaks_when_things_go_wrong(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert len(traced.records.requests) == len(traced.cluster.requests)


def mixed(traced: Traced) -> list[tuple[list[int], int]]:
    """Tokens of chunks and running requests of each step with chunks."""
    steps = [entry.returned[0] for entry in traced.journal if entry.call == "next_step"]
    return [
        ([chunk.num_tokens for chunk in chunks(step)], step.decode.num_requests if isinstance(step, MixedStep) else 0)
        for step in steps
        if chunks(step)
    ]


def test_a_prompt_takes_what_running_requests_leave_of_the_budget():
    """3 ms and 1 ms for each of 64 tokens: the first request has a token at the end of every step."""
    load = [request(0, 40, 30), request(1, 150, 2, arrival_ns=60 * MILLISECOND)]
    traced = run(small_aggregated(*load, engine="vllm", cost=COST))
    assert mixed(traced) == [([40], 0), ([63], 1), ([63], 1), ([24], 1)]
    durations = [step.duration_ns for step in traced.records.steps if step.kind == "prefill"]
    assert durations == [(3 + n) * MILLISECOND for n in (40, 64, 64, 25)]


def test_a_limit_of_a_prompt_lets_the_next_begin():
    load = [request(i, 100, 1, arrival_ns=0) for i in range(3)]
    traced = run(small_aggregated(*load, engine="vllm", aggregated__long_prefill_tokens=30, cost=COST))
    sizes = [sizes for sizes, _ in mixed(traced)]
    assert sizes == [[30, 30, 4], [30, 30, 4], [30, 30, 4], [10, 10, 30], [58]]  # the last one is alone


def test_a_limit_of_a_prompt_may_be_at_least_a_fair_share():
    """64 tokens of a step over 4, 3 and 2 requests: 16, 21 and 32; then 30, which is more than 64 / 2 - 3."""
    load = [request(i, length, 1, arrival_ns=0) for i, length in enumerate((40, 50, 60, 70))]
    changes = {"aggregated__long_prefill_tokens": 10, "aggregated__long_prefill_adaptive": True}
    traced = run(small_aggregated(*load, engine="vllm", cost=COST, **changes))
    sizes = [sizes for sizes, _ in mixed(traced)]
    assert sizes == [[16] * 4, [16] * 4, [8, 16, 16, 16], [2, 12, 21], [1]]


@pytest.mark.parametrize("launch_ms", [0, 70, 90])
def test_a_mixed_step_reads_the_kv_of_who_decodes_and_ends_no_earlier_than_its_launch(launch_ms):
    load = [request(0, 40, 30), request(1, 63, 2, arrival_ns=60 * MILLISECOND)]
    cost = {"prefill": READING, "decode": READING, "host": {"launch": f"{launch_ms} ms"}}
    traced = run(small_aggregated(*load, engine="vllm", cost=cost))
    (step,) = [e.returned[0] for e in traced.journal if e.call == "next_step" and isinstance(e.returned[0], MixedStep)]
    (row,) = [row for row in traced.records.steps if row.kind == "prefill" and row.num_tokens == 63]
    computed_ns = (3 + 64) * MILLISECOND + step.decode.num_context_tokens * MILLISECOND // 10
    assert row.duration_ns == max(launch_ms * MILLISECOND, computed_ns)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 4096)), min_size=1, max_size=4), st.integers(1, 512))
@examples(60)
def test_a_mixed_step_takes_no_less_than_either_and_no_more_than_both(
    prompts: list[tuple[int, int]], num_requests: int
):
    scenario = small_aggregated(request(0, 10, 2), model="qwen3-8b", engine="vllm", cost={"use": "roofline"})
    times = build(scenario).costs["aggregated-0"]
    told = tuple(PrefillChunk(i, context, n, is_last=True) for i, (context, n) in enumerate(prompts))
    kv = 1000 * num_requests
    decode = DecodeStep(0, (), (), num_requests, kv, kv, 1)
    line = times.decode_line(num_requests)
    decode_ns = (line.base + (line.per_context_token + line.per_distinct_token) * kv) >> FRACTION_BITS
    prefill_ns = times.prefill_ns(PrefillStep(0, told), 0)
    mixed_ns = times.mixed_ns(MixedStep(PrefillStep(0, told, num_requests), decode), 0)
    assert mixed_ns >= prefill_ns
    assert mixed_ns <= prefill_ns + decode_ns
    assert mixed_ns >= 0.98 * decode_ns


@given(vllm_aggregated_scenarios())
@examples(40)
def test_an_instance_is_busy_for_no_more_than_all_its_time(scenario: Scenario):
    for use in instance_usage(run(scenario).records):
        assert use.computing + use.decoding <= 1 + 1e-9
