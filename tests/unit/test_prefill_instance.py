"""A prefill instance, call by call."""

from dataclasses import dataclass

import pytest

from pdsim.core.instance import PolicyError
from pdsim.core.invariants import check, check_idle
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import (
    Abort,
    Cancel,
    KvGranted,
    KvSent,
    NewRequest,
    PeerDown,
    PeerUp,
    PrefillDone,
    PrefillStep,
    PromptComputed,
    Send,
    StepResult,
    StopSending,
    Tell,
    TransferUnit,
    Wait,
    WakeAt,
    Woken,
)
from pdsim.core.prefill.prefill_instance import PrefillInstance
from pdsim.core.prefill.prefill_limits import PrefillLimits
from pdsim.core.sequence import Spans
from pdsim.core.transfer.send_planner import RankPairLayout, SendPlanner
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.prefill import EveryChunk, FirstComeFirstServed, WholePrompt
from pdsim.policy.protocols import HoldUntil, Pick


def instance(num_pages=100, page=4, policy=None, transfer=None, layer_groups=0, **limits) -> PrefillInstance:
    pool = PagePool(num_pages)
    given = {"max_running_requests": 8, "chunked_prefill_tokens": 16, "max_prefill_tokens": 1000, "overlap": False}
    return PrefillInstance(
        "prefill-0",
        cache=KvCache(pool, page, RadixCache(pool, page, LeastRecentlyUsed()), keeps_replaced=layer_groups > 0),
        limits=PrefillLimits(**{**given, **limits}),
        policy=policy or FirstComeFirstServed(),
        planner=SendPlanner(
            "prefill-0",
            RankPairLayout(page_size=page, page_bytes=100, num_planes=2),
            transfer or EveryChunk(),
            layer_groups=layer_groups,
        ),
    )


def arrive(p: PrefillInstance, i: int, prompt: int | Spans, cached: int = 0, grant: bool = True):
    prompt = Spans.of(i, prompt) if isinstance(prompt, int) else prompt
    commands = p.on_message(NewRequest(i, i, prompt, 10, "prefill-0", "decode-0"), 0)
    if grant:
        pages = tuple(range(1000, 1000 + -(-len(prompt) // p.page_size) - cached // p.page_size))
        commands += p.on_message(KvGranted(i, cached, pages), 0)
    return commands


def chunks(step) -> list[tuple[int, int, int]]:
    assert isinstance(step, PrefillStep)
    return [(c.request_id, c.num_context_tokens, c.num_tokens) for c in step.chunks]


def forward(p: PrefillInstance, ended=()):
    """Choose a step, run it, and return its chunks and the units it sends."""
    step, before = p.next_step(0)
    if isinstance(step, Wait):
        return step, before
    after = p.on_step_done(step, StepResult(ended=ended), 0)
    return chunks(step), [c for c in after if isinstance(c, TransferUnit)]


def test_nothing_is_computed_before_decode_grants():
    p = instance()
    arrive(p, 1, 10, grant=False)
    assert p.next_step(0) == (Wait(), [])
    p.on_message(KvGranted(1, 0, (1, 2, 3)), 0)
    assert forward(p)[0] == [(1, 0, 10)]


def test_a_grant_may_come_before_its_request():
    p = instance()
    p.on_message(KvGranted(1, 0, (1, 2, 3)), 0)
    arrive(p, 1, 10, grant=False)
    assert forward(p)[0] == [(1, 0, 10)]


def test_one_prompt_at_a_time_is_partly_computed():
    p = instance()
    for i, n in ((1, 10), (2, 30), (3, 5)):
        arrive(p, i, n)
    assert forward(p)[0] == [(1, 0, 10), (2, 0, 4)]
    assert forward(p)[0] == [(2, 4, 16)]
    assert forward(p)[0] == [(2, 20, 10), (3, 0, 4)]  # whole pages of the budget: 12 for ten tokens
    assert forward(p)[0] == [(3, 4, 1)]
    assert isinstance(forward(p)[0], Wait)


def test_pages_of_layers_are_not_free_before_they_are_sent():
    """Of two equal prompts in one forward the prefix cache keeps one, and units name the pages of both."""
    p = instance(layer_groups=2, chunked_prefill_tokens=64)
    for i in (1, 2):
        arrive(p, i, Spans.of(7, 16))
    step, units = p.next_step(0)
    p.on_step_done(step, StepResult(), 0)
    for i in (2, 1):
        under_way = {
            page for u in units if isinstance(u, TransferUnit) and u.request_id <= i for page in u.source_pages
        }
        assert len(under_way) == 4 * i
        assert not under_way & set(p.cache.pool.free_pages())
        check(p)
        p.on_message(KvSent(i), 0)
        p.next_step(0)
    assert p.num_available_pages == 100
    check_idle(p)


def test_the_page_table_of_a_prompt_is_known_until_it_is_sent():
    p = instance(chunked_prefill_tokens=8)
    arrive(p, 1, 10)
    with pytest.raises(KeyError):
        p.lease(1)
    lengths = []
    for _ in range(2):
        _, units = forward(p)
        lengths.append(len(p.lease(1).table))
    assert lengths == [2, 3]
    assert p.lease(1).table[2:] == [*units[-1].source_pages]


def test_max_prefill_tokens_stops_all_but_the_first_prompt():
    p = instance(chunked_prefill_tokens=None, max_prefill_tokens=20)
    for i in (1, 2, 3):
        arrive(p, i, 30 if i == 1 else 9)
    assert forward(p)[0] == [(1, 0, 30)]
    assert forward(p)[0] == [(2, 0, 9)]


def test_pages_and_slot_are_held_until_the_end_of_the_transfer_is_seen():
    p = instance(max_running_requests=1)
    arrive(p, 1, 8)
    arrive(p, 2, 8)
    forward(p)
    assert isinstance(p.next_step(0)[0], Wait)
    assert p.levels().blocked_by == "slots"
    p.on_message(KvSent(1), 0)
    assert p.cache.levels()[0] == 2
    step, commands = p.next_step(0)
    assert commands == [PrefillDone(1)]
    assert chunks(step) == [(2, 0, 8)]


def test_every_chunk_is_sent_when_computed_and_a_partial_page_rides_with_the_next():
    p = instance(chunked_prefill_tokens=8)
    arrive(p, 1, 19)
    sent = [forward(p)[1] for _ in range(3)]
    assert [[(len(u.target_pages), u.num_bytes, u.is_last) for u in units] for units in sent] == [
        [(2, 200, False)],
        [(2, 200, False)],
        [(1, 100, True)],
    ]
    assert [page for units in sent for u in units for page in u.target_pages] == [1000, 1001, 1002, 1003, 1004]


def test_chunks_that_decode_has_are_not_sent():
    p = instance(chunked_prefill_tokens=8)
    arrive(p, 1, 22, cached=12)
    assert [[(len(u.source_pages), u.is_last) for u in forward(p)[1]] for _ in range(3)] == [
        [],
        [(1, False)],
        [(2, True)],
    ]


def test_a_full_hit_on_decode_still_sends_the_first_token():
    p = instance()
    arrive(p, 1, 16, cached=16)
    _, (unit,) = forward(p)
    assert (unit.num_bytes, unit.target_pages, unit.is_last) == (0, (), True)


def test_whole_prompt_sends_once():
    p = instance(chunked_prefill_tokens=8, transfer=WholePrompt())
    arrive(p, 1, 20)
    assert [len(forward(p)[1]) for _ in range(3)] == [0, 0, 1]


def test_a_later_prompt_computes_only_what_is_not_cached_and_always_one_token():
    p = instance(chunked_prefill_tokens=64)
    shared = (7, 0, 16)
    arrive(p, 1, Spans([shared, (1, 0, 5)]))
    forward(p)
    arrive(p, 2, Spans([shared, (2, 0, 5)]))
    arrive(p, 3, Spans([shared]))
    assert forward(p)[0] == [(2, 16, 5), (3, 12, 4)]


def test_prompts_of_one_batch_do_not_share():
    p = instance(chunked_prefill_tokens=64)
    for i in (1, 2):
        arrive(p, i, Spans([(7, 0, 16), (i, 0, 4)]))
    assert forward(p)[0] == [(1, 0, 20), (2, 0, 20)]
    assert p.cache.levels()[0] == 6


def test_overlap_chooses_the_next_forward_before_it_sees_the_last():
    p = instance(chunked_prefill_tokens=8, overlap=True)
    arrive(p, 1, 20)
    first, _ = p.next_step(0)
    second, _ = p.next_step(0)
    assert (chunks(first), chunks(second)) == ([(1, 0, 8)], [(1, 8, 8)])
    assert len(p.on_step_done(first, StepResult(), 0)) == 1
    third, _ = p.next_step(0)
    assert chunks(third) == [(1, 16, 4)]
    p.on_step_done(second, StepResult(), 0)
    (last,) = p.on_step_done(third, StepResult(), 0)
    assert last.is_last


def test_first_token_slots_bound_what_is_taken_in():
    p = instance(max_running_requests=1)
    for i in range(4):
        arrive(p, i, 4)
    p.next_step(0)
    assert len(p.granted) == 2
    assert p.levels().num_queued == 3


def test_a_prompt_larger_than_the_pool_is_refused():
    p = instance(num_pages=4)
    (command,) = arrive(p, 1, 16, grant=False)
    assert isinstance(command, Send)
    assert command.to == "decode-0"
    assert "16 tokens does not fit the 16 tokens of prefill-0" in command.message.reason
    assert p.on_message(Abort(1, "gone"), 0) == []
    assert p.on_message(KvGranted(1, 0, (1, 2, 3, 4)), 0) == []
    assert p.next_step(0) == (Wait(), [])


def test_a_request_that_decode_refused_before_it_came_is_dropped():
    p = instance()
    assert p.on_message(Abort(1, "too long"), 0) == []
    assert arrive(p, 1, 8, grant=False) == []
    assert p.waiting_for() == []


def test_the_first_token_may_end_a_sequence():
    p = instance()
    arrive(p, 1, 4)
    _, (unit,) = forward(p, ended=((1, Spans.of(9, 1)),))
    assert unit.first_token_ends


@dataclass
class Proposes:
    answer: object

    def select(self, view):
        return self.answer


def test_a_policy_may_hold_back():
    p = instance(policy=Proposes(HoldUntil(77)))
    arrive(p, 1, 4)
    assert p.next_step(0) == (Wait(77), [])


@pytest.mark.parametrize(
    ("picks", "complaint"),
    [
        ([Pick(9)], "request 9, which does not wait"),
        ([Pick(1), Pick(1)], "request 1"),
        ([Pick(1, 0)], "computes nothing"),
    ],
)
def test_impossible_picks_are_refused(picks, complaint):
    p = instance(policy=Proposes(picks))
    arrive(p, 1, 4)
    with pytest.raises(PolicyError, match=complaint):
        p.next_step(0)


def test_a_policy_may_cut_a_prompt_short():
    p = instance(policy=Proposes([Pick(1, 9)]))
    arrive(p, 1, 14)
    assert forward(p)[0] == [(1, 0, 8)]
    assert forward(p)[0] == [(1, 8, 6)]


def test_a_message_it_does_not_know_is_a_bug():
    with pytest.raises(TypeError, match="does not take"):
        instance().on_message(PrefillDone(1), 0)


@pytest.mark.parametrize(("transfer", "early"), [(EveryChunk(), 2), (EveryChunk(cached_prefix_first=False), 0)])
def test_a_cached_prefix_may_go_before_the_forward(transfer, early):
    p = instance(transfer=transfer)
    arrive(p, 0, Spans.of(7, 8))
    forward(p)
    p.on_message(KvSent(0), 0)
    arrive(p, 1, Spans(((7, 0, 8), (8, 0, 4))))
    step, commands = p.next_step(0)
    units = [c for c in commands if isinstance(c, TransferUnit)]
    assert sum(len(unit.source_pages) for unit in units) == early
    assert not any(unit.is_last for unit in units)
    (last,) = p.on_step_done(step, StepResult(), 0)
    assert (len(last.source_pages), last.is_last) == (3 - early, True)


# Giving up.


def stop(i: int, decode_id: str = "decode-0") -> Tell:
    return Tell("prefill-0.sender", StopSending(i, decode_id))


@pytest.mark.parametrize("grant", [False, True])
def test_a_request_that_was_not_begun_goes_at_once(grant):
    p = instance()
    arrive(p, 1, 10, grant=grant)
    assert p.on_message(Cancel(1, "enough"), 0) == [stop(1)]
    assert p.requests() == []
    assert p.next_step(0) == (Wait(), [])


def test_a_request_that_waits_for_its_turn_goes_at_once():
    p = instance(policy=Proposes(HoldUntil(77)))
    arrive(p, 1, 10)
    p.next_step(0)
    assert p.on_message(Cancel(1, "enough"), 0) == [stop(1)]
    assert p.requests() == []


def test_a_grant_that_comes_after_the_end_is_ignored():
    p = instance()
    arrive(p, 1, 10, grant=False)
    p.on_message(Cancel(1, "enough"), 0)
    assert p.on_message(KvGranted(1, 0, (1, 2, 3)), 0) == []
    assert p.requests() == []


def test_with_overlap_a_chunk_is_cached_when_the_next_forward_is_chosen_and_sent_when_it_is_computed():
    p = instance(chunked_prefill_tokens=12, overlap=True)
    arrive(p, 1, Spans([(7, 0, 12), (1, 0, 4)]))
    arrive(p, 2, Spans([(7, 0, 12), (2, 0, 4)]))
    first, _ = p.next_step(0)
    step, commands = p.next_step(0)  # the first forward is under way
    assert chunks(step) == [(1, 12, 4), (2, 12, 4)]
    assert [unit.request_id for unit in commands if isinstance(unit, TransferUnit)] == []
    sent = p.on_step_done(first, StepResult(), 0)
    assert [unit.request_id for unit in sent if isinstance(unit, TransferUnit)] == [2, 1]


def test_a_request_in_a_forward_is_computed_no_further_and_what_the_next_one_followed_stays_cached():
    p = instance(chunked_prefill_tokens=8, overlap=True)
    arrive(p, 1, 40)
    first, _ = p.next_step(0)
    second, _ = p.next_step(0)
    assert p.on_message(Cancel(1, "enough"), 0) == []
    assert p.next_step(0) == (Wait(), [])  # two forwards are under way
    assert p.on_step_done(first, StepResult(), 0) == []
    assert p.on_step_done(second, StepResult(), 0) == [stop(1)]
    assert p.cache.levels()[0] == 4
    p.on_message(KvSent(1), 0)
    assert p.next_step(0)[1] == [PrefillDone(1)]
    assert p.requests() == []
    assert p.cache.num_cached_tokens(Spans.of(1, 40)) == 8


def test_a_request_whose_transfer_is_under_way_keeps_its_pages_until_the_sender_says_so():
    p = instance()
    arrive(p, 1, 8)
    forward(p)
    assert p.on_message(Cancel(1, "enough"), 0) == [stop(1)]
    assert p.on_message(Cancel(1, "twice"), 0) == [stop(1)]
    assert p.cache.levels()[0] == 2
    p.on_message(KvSent(1), 0)
    p.on_message(KvSent(1), 0)  # its last unit, and the answer
    assert p.next_step(0)[1] == [PrefillDone(1)]
    assert p.cache.levels()[0] == 0


def test_a_failed_transfer_ends_the_computation():
    p = instance(chunked_prefill_tokens=8)
    arrive(p, 1, 40)
    forward(p)
    assert p.on_message(Abort(1, "no transfer in time", retryable=True), 0) == [stop(1)]
    assert p.next_step(0)[0] == Wait()


def test_an_unknown_request_is_stopped_in_the_sender_too():
    p = instance()
    assert p.on_message(Cancel(1, "enough"), 0) == [stop(1, "")]
    assert arrive(p, 1, 8) == []


def test_a_lost_decode_instance_takes_its_requests_along():
    p = instance(chunked_prefill_tokens=8)
    for i in (1, 2):
        arrive(p, i, 8)
    arrive(p, 3, 8, grant=False)
    forward(p)
    assert p.on_message(PeerDown("decode-1"), 0) == []
    assert p.on_message(PeerDown("decode-0"), 0) == [stop(3), stop(2), stop(1)]
    assert p.requests() == [1]
    assert arrive(p, 4, 8, grant=False) == []
    p.on_message(PeerUp("decode-0"), 0)
    arrive(p, 5, 8, grant=False)
    assert p.requests() == [5, 1]


def test_decode_must_grant_pages_in_time():
    p = instance(bootstrap_timeout_ns=100)
    late = NewRequest(1, 0, Spans.of(1, 8), 10, "prefill-0", "decode-0")
    assert p.on_message(late, 50) == [WakeAt("prefill-0", 150)]
    p.on_message(Woken(), 150)
    step, (told,) = p.next_step(150)
    assert step == Wait()
    assert told == Send(
        "decode-0", Abort(1, "decode-0 granted no pages within bootstrap_timeout 1e-07 s", retryable=True)
    )
    assert p.requests() == []


def test_a_grant_whose_request_never_comes_is_forgotten():
    p = instance(bootstrap_timeout_ns=100)
    assert p.on_message(KvGranted(1, 0, (1,)), 0) == [WakeAt("prefill-0", 100)]
    assert p.requests() == [1]
    assert p.next_step(100) == (Wait(), [])
    assert p.requests() == []


def test_a_grant_whose_request_is_refused_is_forgotten():
    p = instance(num_pages=2)
    p.on_message(KvGranted(1, 0, (1, 2)), 0)
    (told,) = arrive(p, 1, 8, grant=False)
    assert told == Send("decode-0", Abort(1, "a prompt of 8 tokens does not fit the 8 tokens of prefill-0"))
    assert p.requests() == []


def optimistic(attempts=1, **limits) -> PrefillInstance:
    return instance(optimistic_attempts=attempts, **limits)


def grant(p: PrefillInstance, i: int, num_pages: int):
    return p.on_message(KvGranted(i, 0, tuple(range(100, 100 + num_pages))), 0)


def test_an_optimistic_prompt_is_parked_and_sent_when_it_is_granted():
    p = optimistic()
    arrive(p, 1, 8, grant=False)
    step, commands = p.next_step(0)
    assert (chunks(step), commands) == ([(1, 0, 8)], [])
    assert p.on_step_done(step, StepResult(ended=((1, Spans.of(2, 1)),)), 0) == [Send("decode-0", PromptComputed(1))]
    assert p.cache.levels()[0] == 2
    (unit,) = grant(p, 1, 2)
    assert (len(unit.source_pages), unit.is_last, unit.first_token_ends) == (2, True, True)
    p.on_message(KvSent(1), 0)
    assert p.next_step(0)[1] == [PrefillDone(1)]
    assert p.requests() == []


def test_what_was_computed_before_the_grant_goes_with_the_next_chunk():
    p = optimistic()
    arrive(p, 1, 30, grant=False)
    assert forward(p) == ([(1, 0, 16)], [])
    grant(p, 1, 8)
    (unit,) = forward(p)[1]
    assert (len(unit.source_pages), unit.is_last) == (8, True)


def test_a_partly_computed_optimistic_prompt_gives_way_to_a_granted_one():
    p = optimistic(attempts=1, chunked_prefill_tokens=16)
    arrive(p, 1, 40, grant=False)
    assert forward(p)[0] == [(1, 0, 16)]
    arrive(p, 2, 8)
    assert forward(p)[0] == [(2, 0, 8)]
    assert isinstance(forward(p)[0], Wait)  # its attempts are used up
    grant(p, 1, 10)
    assert forward(p)[0] == [(1, 16, 16)]


def test_a_chunk_under_way_stays_cached_when_its_prompt_gives_way():
    p = optimistic(attempts=1, chunked_prefill_tokens=16)
    arrive(p, 1, 40, grant=False)
    first, _ = p.next_step(0)
    arrive(p, 2, 8)
    second, _ = p.next_step(0)
    assert [chunks(first), chunks(second)] == [[(1, 0, 16)], [(2, 0, 8)]]
    for step in (first, second):
        p.on_step_done(step, StepResult(), 0)
    grant(p, 1, 10)
    assert forward(p)[0] == [(1, 16, 16)]


def test_an_optimistic_prompt_with_attempts_left_is_begun_again():
    p = optimistic(attempts=2, chunked_prefill_tokens=16)
    arrive(p, 1, 40, grant=False)
    forward(p)
    arrive(p, 2, 8)
    assert forward(p)[0] == [(1, 16, 16)]


def test_parked_prompts_give_way_when_nothing_else_moves():
    """The only slot is held by a prompt whose pages on decode may be those that the other was granted."""
    p = optimistic(max_running_requests=1)
    arrive(p, 1, 8, grant=False)
    forward(p)
    assert isinstance(forward(p)[0], Wait)
    arrive(p, 2, 8)
    assert forward(p)[0] == [(2, 0, 8)]
    p.on_message(KvSent(2), 0)
    grant(p, 1, 2)
    assert forward(p)[0] == [(1, 4, 4)]


def test_an_optimistic_prompt_that_is_never_granted_fails_in_time():
    p = optimistic(bootstrap_timeout_ns=10)
    arrive(p, 1, 8, grant=False)
    forward(p)
    abort = Send("decode-0", Abort(1, "decode-0 granted no pages within bootstrap_timeout 1e-08 s", retryable=True))
    stop = Tell("prefill-0.sender", StopSending(1, "decode-0"))
    assert p.next_step(10) == (Wait(), [abort, stop])
    p.on_message(KvSent(1), 10)
    p.next_step(10)
    assert p.requests() == []
    assert grant(p, 1, 2) == []
