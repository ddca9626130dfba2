"""Forwards of an aggregated instance that compute prompts and decode (SGLang's --enable-mixed-chunk)."""

import pytest
from hypothesis import given

from pdsim.core.aggregated_instance import AggregatedInstance
from pdsim.core.aggregated_limits import AggregatedLimits
from pdsim.core.decode.new_token_ratio import NewTokenRatio
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import DecodeStep, Finished, FirstToken, MixedStep, NewRequest, PrefillStep, StepResult
from pdsim.core.sequence import Spans
from pdsim.policy.pages import FewestOutputsFirst, LeastRecentlyUsed
from pdsim.policy.prefill import FirstComeFirstServed
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from tests.strategies import aggregated_scenarios
from tests.support import examples, run, small_aggregated


def instance(num_pages: int = 100, page_size: int = 1, conservativeness: float = 1.0) -> AggregatedInstance:
    pool = PagePool(num_pages)
    return AggregatedInstance(
        "a",
        cache=KvCache(pool, page_size, RadixCache(pool, page_size, LeastRecentlyUsed())),
        limits=AggregatedLimits(
            max_running_requests=8,
            chunked_prefill_tokens=8,
            schedule_conservativeness=conservativeness,
            max_prefill_tokens=1000,
            overlap=False,
            mixed_chunk=True,
        ),
        policy=FirstComeFirstServed(),
        preemption_policy=FewestOutputsFirst(),
    )


def arrive(a: AggregatedInstance, i: int, num_tokens: int, max_output: int = 4) -> None:
    a.on_message(NewRequest(i, i, Spans.of(i, num_tokens), max_output, "a", "a"), 0)


def chosen(a: AggregatedInstance) -> tuple[list[tuple[int, int]], list[int]]:
    """Chunks of the next step, and the requests that decode in the step, which is run."""
    step, _ = a.next_step(0)
    prefill = step.prefill if isinstance(step, MixedStep) else step
    chunks = [(c.request_id, c.num_tokens) for c in prefill.chunks] if isinstance(prefill, PrefillStep) else []
    decodes = isinstance(step, MixedStep | DecodeStep)
    running = [request.request_id for request in a.batch.requests()] if decodes else []
    a.on_step_done(step, StepResult(), 0)
    return chunks, running


def test_running_requests_take_tokens_of_the_chunk_and_stand_behind_its_prompts():
    a = instance()
    arrive(a, 0, 4)
    assert chosen(a) == ([(0, 4)], [])
    arrive(a, 1, 9)
    assert [chosen(a) for _ in range(3)] == [([(1, 7)], [0]), ([(1, 2)], [0]), ([], [1, 0])]


def test_ends_of_a_mixed_step_are_seen():
    a = instance()
    arrive(a, 0, 4)
    chosen(a)
    arrive(a, 1, 3)
    step, _ = a.next_step(0)
    commands = a.on_step_done(step, StepResult(1, ((0, Spans.of(9, 2)), (1, Spans.of(8, 1)))), 0)
    assert commands == [FirstToken(1), Finished(1), Finished(0)]
    assert a.holding() == []


def test_running_requests_sit_out_where_prompts_leave_no_page():
    """The first request is expected to end soon, and takes a page in each step until a single one is left."""
    a = instance(num_pages=37, conservativeness=0.001)
    arrive(a, 0, 4, 20)
    chosen(a)
    arrive(a, 1, 29, 1)
    assert [chosen(a) for _ in range(5)] == [([(1, 7)], [0])] * 4 + [([(1, 1)], [])]


def test_a_prompt_that_begins_needs_room_for_whole_pages_and_goes_on_without():
    a = instance(page_size=4)
    arrive(a, 0, 4)
    chosen(a)
    arrive(a, 1, 7)
    assert chosen(a) == ([(1, 4)], [0])  # 7 tokens are left, and its pages hold 8
    assert chosen(a) == ([(1, 3)], [0])


def test_a_mixed_step_does_not_lower_the_ratio():
    ratio = NewTokenRatio(1.0)
    ratio.on_mixed_step()
    assert [ratio.at(1), ratio.at(2)] == [NewTokenRatio(1.0).at(0), NewTokenRatio(1.0).at(1)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chunked_prefill_tokens": -1}, "needs chunked_prefill_tokens"),
        ({"speculative_draft_tokens": 3, "speculative_accept_length": 2}, "does not model mixed steps with drafts"),
    ],
)
def test_what_sglang_or_pdsim_does_not_mix_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        small_aggregated(
            **{f"aggregated__{name}": value for name, value in changes.items()}, aggregated__mixed_chunk=True
        )


@given(aggregated_scenarios())
@examples(40)
def test_a_mixed_step_keeps_to_the_chunk(scenario: Scenario):
    for entry in run(scenario).journal:
        step = entry.returned[0] if entry.call == "next_step" else None
        if isinstance(step, MixedStep):
            assert scenario.aggregated is not None
            assert scenario.aggregated.mixed_chunk
            assert step.prefill.num_decode_tokens == step.decode.num_requests
            assert step.prefill.num_tokens <= scenario.aggregated.chunked_prefill_tokens
