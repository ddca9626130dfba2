"""An aggregated instance, call by call."""

from dataclasses import dataclass

import pytest

from pdsim.core.aggregated_instance import AggregatedInstance
from pdsim.core.aggregated_limits import AggregatedLimits
from pdsim.core.instance import PolicyError
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import (
    AskOutput,
    DecodeStep,
    Failed,
    Finished,
    FirstToken,
    KvSent,
    NewRequest,
    PrefillStep,
    Retracted,
    StepResult,
    Wait,
)
from pdsim.core.sequence import Spans
from pdsim.policy.pages import FewestOutputsFirst, LeastRecentlyUsed
from pdsim.policy.prefill import FirstComeFirstServed
from pdsim.policy.protocols import HoldUntil, Pick


def instance(num_pages=100, page=4, policy=None, preemption=None, radix=True, **limits) -> AggregatedInstance:
    pool = PagePool(num_pages)
    given = {"max_running_requests": 8, "chunked_prefill_tokens": 16, "max_prefill_tokens": 1000, "overlap": False}
    return AggregatedInstance(
        "aggregated-0",
        cache=KvCache(pool, page, RadixCache(pool, page, LeastRecentlyUsed()) if radix else None),
        limits=AggregatedLimits(**{**given, **limits}),
        policy=policy or FirstComeFirstServed(),
        preemption_policy=preemption or FewestOutputsFirst(),
    )


def arrive(a: AggregatedInstance, i: int, prompt: int | Spans, max_output: int = 10):
    prompt = Spans.of(i, prompt) if isinstance(prompt, int) else prompt
    return a.on_message(NewRequest(i, i, prompt, max_output, "aggregated-0", "aggregated-0"), 0)


def chunks(step) -> list[tuple[int, int, int]]:
    assert isinstance(step, PrefillStep)
    return [(c.request_id, c.num_context_tokens, c.num_tokens) for c in step.chunks]


def prefill(a: AggregatedInstance, ended=()):
    """Choose a prefill step and run it: its chunks, and the commands that follow."""
    step, before = a.next_step(0)
    assert before == []
    return chunks(step), a.on_step_done(step, StepResult(ended=ended), 0)


def decode(a: AggregatedInstance, num_steps=1, ended=()):
    """Choose a decode step and run it so many times: the step, and all commands."""
    step, before = a.next_step(0)
    assert isinstance(step, DecodeStep)
    return step, before + a.on_step_done(step, StepResult(num_steps, ended), 0)


def output(i: int, num_tokens: int) -> tuple[tuple[int, Spans]]:
    return ((i, Spans.of(100 + i, num_tokens)),)


def test_a_prompt_is_computed_then_decoded_and_nothing_is_left():
    a = instance()
    assert arrive(a, 1, 10) == []
    assert prefill(a) == ([(1, 0, 10)], [FirstToken(1)])
    assert len(a.lease(1).table) == 3
    step, commands = decode(a, 4, output(1, 5))
    assert step == DecodeStep(0, (1,), (), 1, 11, 11, step.max_steps)
    assert commands == [Finished(1)]
    assert a.next_step(0) == (Wait(), [])
    assert a.cache.levels() == (0, 3, 97)  # 10 + 5 - 1 tokens have KV: three whole pages stay cached


def test_prompts_come_before_decode_steps():
    a = instance(chunked_prefill_tokens=8)
    arrive(a, 1, 8)
    prefill(a)
    arrive(a, 2, 20)
    assert [prefill(a) for _ in range(3)] == [
        ([(2, 0, 8)], []),
        ([(2, 8, 8)], []),
        ([(2, 16, 4)], [FirstToken(2)]),
    ]
    step, _ = decode(a)
    assert (step.joined, step.num_requests) == ((1, 2), 2)


def test_with_overlap_who_comes_during_a_step_waits_for_the_next_one_too():
    a = instance(overlap=True)
    arrive(a, 1, 8)
    assert prefill(a)[0] == [(1, 0, 8)]  # it was idle: nothing had been chosen
    arrive(a, 2, 8)
    assert decode(a)[0].max_steps == 1
    assert prefill(a)[0] == [(2, 0, 8)]


def test_without_overlap_it_is_next():
    a = instance()
    arrive(a, 1, 8)
    prefill(a)
    arrive(a, 2, 8)
    assert prefill(a)[0] == [(2, 0, 8)]


def test_the_first_token_may_be_the_last():
    a = instance()
    arrive(a, 1, 10)
    assert prefill(a, output(1, 1)) == ([(1, 0, 10)], [FirstToken(1), Finished(1)])
    assert a.next_step(0) == (Wait(), [])


def test_a_follow_up_hits_prompt_and_output():
    a = instance()
    prompt, answer = Spans.of(1, 8), Spans.of(2, 5)
    arrive(a, 1, prompt)
    prefill(a)
    decode(a, 4, ((1, answer),))
    arrive(a, 2, prompt.then(answer).then(Spans.of(3, 7)))
    assert prefill(a)[0] == [(2, 12, 8)]


def test_a_cached_prompt_still_computes_a_token():
    a = instance()
    for i in (1, 2):
        arrive(a, i, Spans.of(7, 16))
    assert prefill(a)[0] == [(1, 0, 16)]
    assert prefill(a)[0] == [(2, 12, 4)]


@pytest.mark.parametrize(("max_output", "fits"), [(34, True), (35, False)])
def test_running_requests_are_expected_to_use_part_of_what_they_may(max_output, fits):
    """100 - 10 tokens are free, less 0.7 * 49 for the first; the second takes its prompt, its output and a page."""
    a = instance(num_pages=100, page=1, chunked_prefill_tokens=None)
    arrive(a, 1, 10, max_output=50)
    prefill(a)
    arrive(a, 2, 20, max_output=max_output)
    step, _ = a.next_step(0)
    assert isinstance(step, PrefillStep) == fits
    assert a.levels().blocked_by == ("" if fits else "pages")


@pytest.mark.parametrize(("max_output", "fits"), [(27, True), (28, False)])
def test_prompts_of_one_forward_are_expected_to_use_all(max_output, fits):
    """100 - 10 tokens are free, less 50 and a page for the first."""
    a = instance(num_pages=100, page=1, chunked_prefill_tokens=None)
    arrive(a, 1, 10, max_output=50)
    arrive(a, 2, 10, max_output=max_output)
    assert len(prefill(a)[0]) == (2 if fits else 1)


@dataclass
class Counts:
    """First come first served, and how often it was asked."""

    asked: int = 0

    def select(self, view):
        self.asked += 1
        return [Pick(request.request_id) for request in view.waiting]


def test_once_one_does_not_fit_none_is_tried_before_a_request_leaves():
    policy = Counts()
    a = instance(num_pages=100, page=1, chunked_prefill_tokens=None, policy=policy)
    arrive(a, 1, 10, max_output=50)
    prefill(a)
    arrive(a, 2, 60, max_output=20)
    assert decode(a, 2)[0].max_steps == 1 + 89
    arrive(a, 3, 1, max_output=1)
    assert decode(a)[0].max_steps > 1
    assert policy.asked == 2
    decode(a, 1, output(1, 5))
    assert prefill(a)[0] == [(2, 0, 60), (3, 0, 1)]


def test_slots_bound_what_runs():
    a = instance(max_running_requests=1)
    for i in (1, 2):
        arrive(a, i, 4)
    assert prefill(a)[0] == [(1, 0, 4)]
    assert decode(a)[0].num_requests == 1
    assert a.levels().blocked_by == "slots"
    decode(a, 1, output(1, 3))
    assert prefill(a)[0] == [(2, 0, 4)]


def retract(**changes) -> AggregatedInstance:
    """Of two requests with nine outputs each, the last of the batch gives its pages back."""
    a = instance(num_pages=6, schedule_conservativeness=0.1, **changes)
    arrive(a, 1, 4, max_output=12)
    prefill(a)
    arrive(a, 2, 4, max_output=10)
    prefill(a)
    decode(a, 8)
    step, commands = a.next_step(0)
    assert commands == [Retracted(2), *([AskOutput("aggregated-0", 2, 9)] if a.cache.prefix_cache else [])]
    assert (step.left, step.num_requests) == ((2,), 1)
    assert a.levels().num_retracted == 1
    assert a.on_step_done(step, StepResult(1, output(1, 10)), 0) == [Finished(1)]
    return a


def test_a_retracted_request_is_computed_again_with_its_outputs_and_its_next_token():
    a = retract()
    assert prefill(a) == ([(2, 0, 13)], [])  # its prompt was evicted: there was to be room for 20 steps
    step, commands = decode(a, 2, output(2, 12))
    assert (step.joined, step.num_context_tokens) == ((2,), 4 + 10)
    assert commands == [Finished(2)]


def test_without_a_cache_all_of_it_is_computed_again():
    a = retract(radix=False)
    assert prefill(a)[0] == [(2, 0, 13)]
    assert a.levels().num_retracted == 0


def test_the_token_of_a_prompt_computed_again_may_be_the_last():
    a = retract()
    assert prefill(a, output(2, 10))[1] == [Finished(2)]
    assert a.next_step(0) == (Wait(), [])
    assert a.num_available_pages == 6


def test_a_retracted_request_goes_to_the_end_of_the_queue():
    a = instance(num_pages=6, schedule_conservativeness=0.1)
    arrive(a, 1, 4, max_output=12)
    prefill(a)
    arrive(a, 2, 4, max_output=10)
    prefill(a)
    arrive(a, 3, 8, max_output=3)
    decode(a, 8)
    decode(a, 1, output(1, 10))
    assert prefill(a)[0] == [(3, 0, 8)]


def test_a_request_that_outgrows_the_pool_fails():
    a = instance(num_pages=4)
    arrive(a, 1, 8, max_output=100)  # counted with the three that fit
    prefill(a)
    decode(a, 8)
    step, commands = a.next_step(0)
    assert step == Wait()
    assert commands == [Failed(1, "17 tokens do not fit the 16 tokens of aggregated-0")]


def test_a_prompt_that_leaves_no_room_for_an_output_is_refused():
    (failed,) = arrive(instance(num_pages=4), 1, 9)
    assert failed == Failed(1, "a prompt of 9 tokens does not fit the 16 tokens of aggregated-0")


@dataclass
class Holds:
    def select(self, view):
        return HoldUntil(77)


def test_a_policy_may_hold_back_and_is_asked_again_after_each_step():
    a = instance(policy=Holds())
    arrive(a, 1, 4)
    assert a.next_step(0) == (Wait(77), [])
    a._builder._policy = FirstComeFirstServed()
    prefill(a)
    a._builder._policy = Holds()
    arrive(a, 2, 4)
    assert decode(a)[0].max_steps == 1


@dataclass
class Chooses:
    def victim(self, view):
        return 7


def test_retracting_what_does_not_run_is_refused():
    with pytest.raises(PolicyError, match="chose request 7, which does not run"):
        retract(preemption=Chooses())


def test_who_waits_says_so():
    a = instance(max_running_requests=1)
    for i in (1, 2):
        arrive(a, i, 4)
    prefill(a)
    assert a.waiting_for() == [
        "aggregated-0: request 2 (4 tokens) waits for its turn, 99 of 100 pages available",
    ]


def test_a_message_it_does_not_know_is_a_bug():
    with pytest.raises(TypeError, match="does not take"):
        instance().on_message(KvSent(1), 0)
