"""A decode instance, call by call."""

from dataclasses import dataclass, replace

import pytest

from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.instance import PolicyError
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import (
    Abort,
    Cancel,
    DecodeStep,
    Failed,
    Finished,
    FirstToken,
    KvArrived,
    KvGranted,
    KvLost,
    NewRequest,
    PeerDown,
    PeerUp,
    PrefillDone,
    PromptComputed,
    Retracted,
    Send,
    StepResult,
    Tell,
    Wait,
    WakeAt,
    Woken,
)
from pdsim.core.sequence import Spans
from pdsim.policy.pages import FewestOutputsFirst, LeastRecentlyUsed, ReserveDecodeTokens, ReserveMaxOutput
from pdsim.policy.protocols import Admitted


def instance(
    num_pages=100, page=4, radix=False, admission=None, preemption=None, staged=False, **limits
) -> DecodeInstance:
    pool = PagePool(num_pages)
    tree = RadixCache(pool, page, LeastRecentlyUsed()) if radix else None
    return DecodeInstance(
        "decode-0",
        cache=KvCache(pool, page, tree),
        limits=DecodeLimits(**{"max_running_requests": 8, **limits}),
        admission_policy=admission or ReserveDecodeTokens(reserved_tokens=0),
        preemption_policy=preemption or FewestOutputsFirst(),
        staged=staged,
    )


def arrive(d: DecodeInstance, i: int, prompt: int | Spans, max_output: int = 20):
    prompt = Spans.of(i, prompt) if isinstance(prompt, int) else prompt
    return d.on_message(NewRequest(i, i, prompt, max_output, "prefill-0", "decode-0"), 0)


def granted(commands) -> list[tuple[int, int, int]]:
    """Request, cached tokens, pages to be written."""
    messages = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, KvGranted)]
    return [(m.request_id, m.num_cached_tokens, len(m.pages)) for m in messages]


def start(d: DecodeInstance, *prompts, **changes) -> DecodeStep:
    """All admitted, arrived and merged, in this order."""
    for i, prompt in enumerate(prompts):
        arrive(d, i, prompt, **changes)
    d.next_step(0)
    for i in range(len(prompts)):
        d.on_message(KvArrived(i, first_token_ends=False), 0)
    step, _ = d.next_step(0)
    assert isinstance(step, DecodeStep)
    return step


def test_pages_are_granted_before_prefill_computes():
    d = instance()
    arrive(d, 1, 10)
    step, commands = d.next_step(0)
    assert step == Wait()
    assert granted(commands) == [(1, 0, 3)]
    assert d.cache.pool.num_free == 97


def test_the_first_token_is_streamed_at_the_merge():
    d = instance()
    arrive(d, 1, 10)
    d.next_step(0)
    d.on_message(KvArrived(1, first_token_ends=False), 0)
    step, commands = d.next_step(0)
    assert commands == [FirstToken(1)]
    assert step == DecodeStep(0, (1,), (), 1, 11, 11, step.max_steps)


def test_admission_is_first_come_first_served_and_stops_at_the_head():
    d = instance(num_pages=10)
    for i, n in enumerate((20, 30, 4)):
        arrive(d, i, n, max_output=1)
    assert granted(d.next_step(0)[1]) == [(0, 0, 5)]
    assert d.levels().blocked_by == "pages"


def test_slots_bound_what_is_in_flight():
    d = instance(max_running_requests=1, extra_slots=1)
    for i in range(3):
        arrive(d, i, 4)
    assert [i for i, _, _ in granted(d.next_step(0)[1])] == [0, 1]
    assert d.levels().blocked_by == "slots"


def test_every_active_request_keeps_its_reserve():
    d = instance(num_pages=20, page=1, admission=ReserveDecodeTokens(reserved_tokens=4))
    for i in range(3):
        arrive(d, i, 4, max_output=1)
    assert (
        len(granted(d.next_step(0)[1])) == 2
    )  # 20 - 4 - 4 pages are left, the third needs 4 + 4 beside 2 * 4 in reserve


def test_concurrent_requests_of_a_new_prefix_each_get_a_copy_until_the_first_merges():
    d = instance(radix=True)
    prompts = [Spans([(7, 0, 16), (100 + i, 0, 4)]) for i in range(3)]
    for i in range(2):
        arrive(d, i, prompts[i])
    assert granted(d.next_step(0)[1]) == [(0, 0, 5), (1, 0, 5)]
    for i in range(2):
        d.on_message(KvArrived(i, first_token_ends=False), 0)
    step, _ = d.next_step(0)
    in_use = d.cache.levels()[0]
    assert in_use == 4 + 1 + 1 + 2  # one copy of the prefix, two suffixes, and a page each for the next token
    arrive(d, 2, prompts[2])
    d.on_step_done(step, StepResult(), 0)
    assert granted(d.next_step(0)[1]) == [(2, 16, 1)]


def test_a_follow_up_hits_prompt_and_output():
    d = instance(radix=True)
    prompt, output = Spans.of(1, 8), Spans.of(2, 5)
    step = start(d, prompt)
    assert d.on_step_done(step, StepResult(4, ((0, output),)), 0) == [Finished(0)]
    arrive(d, 1, prompt.then(output).then(Spans.of(3, 7)))
    assert granted(d.next_step(0)[1]) == [(1, 12, 2)]  # 8 + 5 - 1 tokens have KV: three pages


def test_a_whole_prompt_may_be_cached():
    d = instance(radix=True)
    step = start(d, Spans.of(1, 8))
    d.on_step_done(step, StepResult(1, ((0, Spans.of(2, 2)),)), 0)
    arrive(d, 1, Spans.of(1, 8))
    assert granted(d.next_step(0)[1]) == [(1, 8, 0)]


def test_shared_tokens_are_counted_once_among_distinct_ones():
    d = instance(radix=True)
    step = start(d, *[Spans([(7, 0, 16), (100 + i, 0, 4)]) for i in range(3)])
    assert (step.num_context_tokens, step.num_distinct_tokens) == (63, 63 - 2 * 16)


def test_max_steps_lasts_as_long_as_the_pages():
    d = instance(num_pages=12, page=4)
    step = start(d, 8, 9)
    assert d.cache.pool.num_free == 6  # 2 + 3 pages, and one that the first opens at once
    assert step.max_steps == 1 + 4 * (6 // 2)


def test_a_deferred_head_does_not_stop_many_steps():
    d = instance(num_pages=12, page=4)
    step = start(d, 8)
    arrive(d, 1, 40)
    d.on_step_done(step, StepResult(), 0)
    step, _ = d.next_step(0)
    assert step.max_steps > 1


def test_the_fewest_outputs_are_retracted_and_resume_without_a_second_first_token():
    d = instance(num_pages=5, page=4, admission=ReserveDecodeTokens(reserved_tokens=1))
    step = start(d, 4, 4, max_output=8)
    d.on_step_done(step, StepResult(4), 0)
    step, commands = d.next_step(0)
    assert [command for command in commands if isinstance(command, Retracted)] == [Retracted(1)]
    assert (step.left, step.num_requests) == ((1,), 1)
    arrive(d, 2, 4)
    assert d.next_step(0)[1] == []  # nothing new while one is retracted
    d.on_step_done(step, StepResult(1, ((0, Spans.of(9, 6)),)), 0)
    step, commands = d.next_step(0)
    assert FirstToken(1) not in commands
    assert (step.joined, step.num_context_tokens) == ((1,), 4 + 4 + 1)
    assert len(d.lease(1).table) == 3


def test_a_retraction_evicts_what_those_that_run_need_for_twenty_steps():
    """Behind one page of each that lacks it, SGLang evicts 20 tokens for each request that still runs."""
    d = instance(num_pages=20, page=4, radix=True, admission=ReserveDecodeTokens(reserved_tokens=0))
    step = start(d, 32, 32, max_output=8)  # 18 pages at the first step, of which 16 are cached as well
    d.on_step_done(step, StepResult(8), 0)
    _, commands = d.next_step(0)
    assert Retracted(1) in commands
    assert d.cache.pool.num_free >= 20 // 4 - 1  # the step has taken one


def test_an_ended_request_keeps_its_place_until_the_next_step_is_chosen():
    d = instance(max_running_requests=2, extra_slots=1)
    step = start(d, 4, 4, 4)
    assert step.joined == (0, 1)
    d.on_step_done(step, StepResult(1, ((0, Spans.of(9, 2)),)), 0)
    step, _ = d.next_step(0)
    assert (step.joined, step.max_steps) == ((), 1)  # its place may be taken in the step after
    d.on_step_done(step, StepResult(), 0)
    step, _ = d.next_step(0)
    assert step.joined == (2,)


def test_page_tables_of_requests_in_every_state():
    d = instance(num_pages=8, page=4)
    d.limits = replace(d.limits, max_running_requests=1, extra_slots=1)
    arrive(d, 0, 4)
    arrive(d, 1, 5)
    _, commands = d.next_step(0)
    pages = {command.message.request_id: command.message.pages for command in commands}
    assert {i: tuple(d.lease(i).table) for i in (0, 1)} == pages
    for i in (0, 1):
        d.on_message(KvArrived(i, first_token_ends=False), 0)
    d.next_step(0)  # 0 runs, 1 is ready
    assert [len(d.lease(i).table) for i in (0, 1)] == [2, 2]
    with pytest.raises(KeyError):
        d.lease(2)


def test_ties_in_retraction_go_to_the_longest_prompt():
    d = instance(num_pages=6, page=4)
    step = start(d, 4, 8, max_output=8)
    d.on_step_done(step, StepResult(4), 0)
    assert d.next_step(0)[1] == [Retracted(1)]


def test_a_request_that_outgrows_the_pool_fails():
    d = instance(num_pages=2, page=4)
    step = start(d, 4, max_output=4)
    d.on_step_done(step, StepResult(4), 0)
    step, commands = d.next_step(0)
    assert step == Wait()
    assert commands == [Failed(0, "9 tokens do not fit the 8 tokens of decode-0")]


def test_a_prompt_larger_than_the_pool_is_refused_on_both_sides():
    d = instance(num_pages=2, page=4)
    failed, told = arrive(d, 1, 9)
    assert isinstance(failed, Failed)
    assert told == Send("prefill-0", Abort(1, failed.reason))
    assert d.on_message(Abort(1, "too long for prefill as well"), 0) == []


def test_a_request_that_prefill_refused_before_it_came_fails_as_it_comes():
    d = instance()
    assert d.on_message(Abort(1, "too long"), 0) == []
    assert arrive(d, 1, 8) == [Failed(1, "too long")]
    assert d.next_step(0) == (Wait(), [])


@pytest.mark.parametrize("admitted", [False, True])
def test_an_abort_by_prefill_frees_what_was_granted(admitted):
    d = instance()
    arrive(d, 1, 8)
    if admitted:
        d.next_step(0)
    assert d.on_message(Abort(1, "too long"), 0) == [Failed(1, "too long")]
    assert d.cache.pool.num_free == 100
    assert d.next_step(0) == (Wait(), [])


def test_an_end_at_the_merge_lets_the_next_one_in_at_once():
    d = instance(num_pages=2, page=4, admission=ReserveMaxOutput())
    arrive(d, 0, 8, max_output=1)
    arrive(d, 1, 8, max_output=1)
    d.next_step(0)
    d.on_message(KvArrived(0, first_token_ends=False), 0)
    step, commands = d.next_step(0)
    assert commands[:2] == [FirstToken(0), Finished(0)]
    assert granted(commands) == [(1, 0, 2)]
    assert step == Wait()


@dataclass
class Admits:
    def admit(self, candidate, view):
        return Admitted()


@dataclass
class Chooses:
    request_id: int

    def victim(self, view):
        return self.request_id


def test_admitting_without_pages_is_refused():
    d = instance(num_pages=3, admission=Admits())
    arrive(d, 0, 8)
    arrive(d, 1, 8)
    with pytest.raises(PolicyError, match="admitted request 1, which needs 2 pages; 1 are available"):
        d.next_step(0)


@pytest.mark.parametrize("arrived", [False, True])
def test_a_request_that_the_pool_could_hold_fails_for_what_others_hold(arrived):
    d = instance(num_pages=6, page=4, admission=Admits(), max_running_requests=1, extra_slots=1)
    step = start(d, 8)
    arrive(d, 1, 12)
    d.on_step_done(step, StepResult(), 0)
    step, commands = d.next_step(0)
    assert granted(commands) == [(1, 0, 3)]
    if arrived:
        d.on_message(KvArrived(1, first_token_ends=False), 0)
    d.on_step_done(step, StepResult(3), 0)
    step, commands = d.next_step(0)
    assert commands[0] == Failed(0, "13 tokens do not fit: requests that do not run hold 3 of 6 pages of decode-0")


def test_retracting_what_does_not_run_is_refused():
    d = instance(num_pages=5, page=4, preemption=Chooses(7))
    d.on_step_done(start(d, 4, 4, max_output=8), StepResult(4), 0)
    with pytest.raises(PolicyError, match="chose request 7, which does not run"):
        d.next_step(0)


def test_a_message_it_does_not_know_is_a_bug():
    with pytest.raises(TypeError, match="does not take"):
        instance().on_message(PrefillDone(1), 0)


# Giving up.

CANCEL = Cancel(0, "enough")


def transferring(**changes) -> DecodeInstance:
    """Request 0 has its pages, and its KV is on its way."""
    d = instance(**changes)
    arrive(d, 0, 8)
    d.next_step(0)
    return d


def pages_granted(commands) -> set[int]:
    messages = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, KvGranted)]
    return {page for message in messages for page in message.pages}


def pages_in_use(d: DecodeInstance) -> int:
    return d.cache.levels()[0]


def test_a_queued_request_goes_at_once():
    d = instance()
    arrive(d, 0, 8)
    assert d.on_message(CANCEL, 0) == []
    assert d.next_step(0) == (Wait(), [])
    assert d.requests() == []


@pytest.mark.parametrize("last", [Abort(0, "nothing is under way"), KvArrived(0, first_token_ends=False)])
def test_pages_are_kept_until_nobody_writes_into_them(last):
    d = transferring()
    d.on_message(CANCEL, 0)
    assert d.next_step(0) == (Wait(), [])
    assert pages_in_use(d) == 2
    assert d.on_message(last, 0) == []
    assert (pages_in_use(d), d.requests()) == (0, [])


def test_pages_come_back_after_a_while_if_nobody_answers():
    d = transferring(release_timeout_ns=30, waiting_timeout_ns=500)
    assert d.on_message(CANCEL, 10) == [WakeAt("decode-0", 40)]
    d.on_message(Woken(), 39)
    d.next_step(39)
    assert pages_in_use(d) == 2
    d.next_step(40)
    assert pages_in_use(d) == 0


@pytest.mark.parametrize("cancelled_first", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_pages_into_which_lost_bytes_may_land_are_granted_to_nobody_before_the_timeout(cancelled_first, staged):
    d = transferring(num_pages=8, staged=staged, release_timeout_ns=30, waiting_timeout_ns=500)
    page_table = set(d.lease(0).table)
    if cancelled_first:
        d.on_message(CANCEL, 10)
    told = d.on_message(KvLost(0, "lost"), 10)
    assert told == ([] if cancelled_first else [Failed(0, "lost", retryable=True), WakeAt("decode-0", 40)])
    assert d.on_message(KvLost(0, "lost"), 11) == []
    for i in range(1, 20):
        arrive(d, i, 8, max_output=1)
    assert not page_table & pages_granted(d.next_step(39)[1])
    assert 0 in d.requests()
    for command in d.next_step(40)[1]:
        if isinstance(command, Tell):
            d.on_message(command.message, 40)
    assert 0 not in d.requests()


def test_with_a_staging_ring_the_receiver_has_the_last_word():
    d = transferring(staged=True, release_timeout_ns=30, waiting_timeout_ns=500)
    d.on_message(CANCEL, 10)
    _, (told,) = d.next_step(40)
    assert (told.to, type(told.message)) == ("decode-0.receiver", Abort)
    assert pages_in_use(d) == 2
    d.on_message(told.message, 50)
    assert pages_in_use(d) == 0


def test_kv_must_come_in_time():
    d = instance(waiting_timeout_ns=100)
    arrive(d, 0, 8)
    assert d.next_step(0)[1][1:] == [WakeAt("decode-0", 100)]
    reason = "prefill-0 sent no KV within waiting_timeout 1e-07 s"
    expected = [Failed(0, reason, retryable=True), Send("prefill-0", Cancel(0, reason))]
    assert d.next_step(100) == (Wait(), expected)
    assert d.requests() == [0]  # its pages wait for the answer


def test_kv_that_has_come_is_in_time():
    d = instance(waiting_timeout_ns=100)
    arrive(d, 0, 8)
    d.next_step(0)
    d.on_message(KvArrived(0, first_token_ends=False), 99)
    assert d.next_step(100)[1] == [FirstToken(0)]


def test_a_request_that_is_ready_or_runs_or_is_retracted_can_be_cancelled():
    d = instance(max_running_requests=1, extra_slots=3)
    start(d, 8, 8)  # one runs, one is ready
    d.on_message(Cancel(1, "enough"), 0)
    d.on_message(CANCEL, 0)
    step, _ = d.next_step(0)
    assert (step.num_requests, step.max_steps) == (1, 1)  # its last
    assert d.on_step_done(step, StepResult(), 0) == []
    assert d.next_step(0) == (Wait(), [])
    assert (pages_in_use(d), d.requests()) == (0, [])
    d = instance(num_pages=5)
    d.on_step_done(start(d, 4, 4, max_output=8), StepResult(4), 0)
    assert Retracted(1) in d.next_step(0)[1]
    d.on_message(Cancel(1, "enough"), 0)
    assert d.requests() == [0]


def test_the_batch_forgets_who_left_before_it_ran():
    d = instance()
    step = start(d, 8, 8)
    d.on_step_done(step, StepResult(), 0)
    d.on_message(CANCEL, 0)
    step, _ = d.next_step(0)
    d.on_step_done(step, StepResult(), 0)
    step, _ = d.next_step(0)
    assert (step.left, step.num_requests) == ((0,), 1)


def test_kv_that_has_just_come_may_be_given_up():
    d = transferring()
    d.on_message(KvArrived(0, first_token_ends=False), 0)
    d.on_message(CANCEL, 0)
    assert d.next_step(0) == (Wait(), [])
    assert (pages_in_use(d), d.requests()) == (0, [])


def test_a_lost_prefill_instance_takes_along_what_it_has_not_sent():
    d = instance(max_running_requests=2)
    for i in range(3):
        arrive(d, i, 8)
    d.next_step(0)
    d.on_message(KvArrived(1, first_token_ends=False), 0)
    commands = d.on_message(PeerDown("prefill-0"), 0)
    assert [c.request_id for c in commands if isinstance(c, Failed)] == [2, 0]
    assert all(c.retryable for c in commands if isinstance(c, Failed))
    assert d.next_step(0)[1] == [FirstToken(1)]
    assert d.requests() == [1]
    assert arrive(d, 4, 8) == [Failed(4, "prefill-0 is down", retryable=True)]
    d.on_message(PeerUp("prefill-0"), 0)
    assert arrive(d, 5, 8) == []


def test_one_that_is_back_may_still_be_writing():
    d = transferring()
    d.on_message(PeerDown("prefill-0", has_restarted=True), 0)
    assert pages_in_use(d) == 2
    d.on_message(Abort(0, "nothing is under way"), 0)
    assert pages_in_use(d) == 0
    assert arrive(d, 1, 8) == []


def test_with_a_staging_ring_a_lost_prefill_instance_leaves_scatters_to_wait_for():
    d = transferring(staged=True)
    commands = d.on_message(PeerDown("prefill-0"), 0)
    assert isinstance(commands[-1], Tell)
    assert pages_in_use(d) == 2


def test_what_comes_late_is_ignored():
    d = instance()
    for late in (KvArrived(7, first_token_ends=False), Abort(8, "late"), Cancel(9, "late")):
        assert d.on_message(late, 0) == []
    assert d.next_step(0) == (Wait(), [])


def test_an_old_answer_does_not_stop_what_runs():
    d = transferring()
    d.on_message(KvArrived(0, first_token_ends=False), 0)
    assert d.on_message(Abort(0, "late"), 0) == []
    assert isinstance(d.next_step(0)[0], DecodeStep)


def test_pages_are_granted_to_computed_prompts_only_and_in_that_order():
    d = instance(grants_computed_only=True)
    arrive(d, 1, 8)
    arrive(d, 2, 8)
    assert granted(d.next_step(0)[1]) == []
    assert d.waiting_for() == [f"decode-0: request {i} waits for prefill to compute it" for i in (1, 2)]
    d.on_message(PromptComputed(2), 0)
    assert granted(d.next_step(0)[1]) == [(2, 0, 2)]
    d.on_message(PromptComputed(1), 0)
    assert granted(d.next_step(0)[1]) == [(1, 0, 2)]


def test_a_prompt_may_be_computed_before_its_request_comes():
    d = instance(grants_computed_only=True)
    d.on_message(PromptComputed(1), 0)
    arrive(d, 1, 8)
    assert granted(d.next_step(0)[1]) == [(1, 0, 2)]


def test_where_pages_are_granted_early_it_means_nothing_that_a_prompt_is_computed():
    d = instance()
    arrive(d, 1, 8)
    d.on_message(PromptComputed(1), 0)
    assert granted(d.next_step(0)[1]) == [(1, 0, 2)]


def test_a_prompt_that_is_not_computed_is_given_up():
    for message in (Abort(1, "no"), Cancel(1, "no"), PeerDown("prefill-0")):
        d = instance(grants_computed_only=True)
        arrive(d, 1, 8)
        d.on_message(message, 0)
        assert d.requests() == []
