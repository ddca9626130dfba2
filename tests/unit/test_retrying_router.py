"""A router whose instances come and go, message by message."""

import pytest

from pdsim.core.invariants import check_all_idle
from pdsim.core.messages import (
    Arrival,
    CachedTokens,
    Cancel,
    Failed,
    Finished,
    FirstToken,
    KvSent,
    NewRequest,
    PeerDown,
    PeerUp,
    PrefillDone,
    Send,
    WakeAt,
    Woken,
)
from pdsim.core.routing.role_router import MemorySize, RoleRouter
from pdsim.core.routing.router import RetryLimits, Router, attempt_id, num_retries, request_of
from pdsim.core.sequence import Spans
from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.routing import CacheAware, RoundRobin

MS = 1_000_000


def router(num_prefill=2, num_decode=2, policy=RoundRobin, **limits) -> Router:
    def role(name, count):
        ids = [f"{name}-{i}" for i in range(count)]
        return RoleRouter(ids, policy())

    retries = RetryLimits(**{"backoff_jitter": 0, **limits})
    return Router(prefill=role("prefill", num_prefill), decode=role("decode", num_decode), limits=retries)


def arrive(r, i=0, now=0):
    return r.on_message(Arrival(i, Spans.of(i, 100), 10), now)


def routed(commands) -> list[tuple[int, str, str]]:
    new = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, NewRequest)]
    return sorted({(m.request_id, m.prefill_id, m.decode_id) for m in new})


def test_a_retry_counts_no_tokens_that_a_restarted_instance_had_before():
    ids = ["p-0", "p-1", "p-2"]
    policy = DynamoKv(kv_events=True)
    prefill = RoleRouter(ids, policy, "prefill", MemorySize(4))
    r = Router(prefill=prefill, decode=RoleRouter(["d-0"], RoundRobin()), limits=RetryLimits(backoff_jitter=0))
    prompt = Spans.of(0, 100)
    cached = (CachedTokens("p-0", 96, 0), CachedTokens("p-1", 80, 0), CachedTokens("p-2", 40, 0))
    assert routed(r.on_message(Arrival(0, prompt, 10, cached=cached), 0)) == [(0, "p-0", "d-0")]
    r.on_message(PeerDown("p-1", has_restarted=True), 0)
    *_, alarm = r.on_message(Failed(0, "no transfer in time", retryable=True), 0)
    assert routed(r.on_message(Woken(), alarm.time_ns)) == [(attempt_id(0, 1), "p-2", "d-0")]
    assert [prefill.tier_tokens(name) for name in ids] == [(96, 0), (0, 0), (40, 0)]


class First:
    def pick(self, prompt, view) -> str:
        return view.instances[0].instance_id


@pytest.mark.parametrize("num_instances", [1, 2, 3])
def test_a_retry_goes_to_others_if_there_are_others(num_instances):
    """Whatever the policy likes best."""
    r = router(num_instances, num_instances, policy=First, initial_backoff_ns=10 * MS)
    (first,) = routed(arrive(r))
    *_, alarm = r.on_message(Failed(0, "no transfer in time", retryable=True), 0)
    (second,) = routed(r.on_message(Woken(), alarm.time_ns))
    for before, after in zip(first[1:], second[1:], strict=True):
        assert (after != before) == (num_instances > 1)


def cancels(attempt, prefill_id, decode_id, reason):
    cancel = Cancel(attempt, reason)
    return [Send(decode_id, cancel), Send(prefill_id, cancel)]


def test_attempts_tell_their_request():
    assert attempt_id(17, 0) == 17
    assert [request_of(attempt_id(17, n)) for n in range(3)] == [17] * 3
    assert num_retries(attempt_id(17, 2)) == 2


def test_a_request_that_goes_well_is_left_to_its_client():
    r = router()
    assert routed(arrive(r)) == [(0, "prefill-0", "decode-0")]
    for message in (FirstToken(0), Finished(0), PrefillDone(0)):
        assert r.client_of(0) == 0
        assert r.on_message(message, 1) == []
    assert r.client_of(0) is None
    check_all_idle([r])


def test_a_failed_attempt_is_tried_again_on_another_pair():
    r = router()
    arrive(r)
    told = cancels(0, "prefill-0", "decode-0", "it broke")
    assert r.on_message(Failed(0, "it broke", retryable=True), 10) == [*told, WakeAt("router", 10 + 50 * MS)]
    assert r.client_of(0) is None
    again = r.on_message(Woken(), 10 + 50 * MS)
    assert routed(again) == [(attempt_id(0, 1), "prefill-1", "decode-1")]
    assert r.client_of(attempt_id(0, 1)) == 0


def test_the_same_pair_serves_again_if_there_is_no_other():
    r = router(1, 1)
    arrive(r)
    r.on_message(Failed(0, "it broke", retryable=True), 0)
    assert routed(r.on_message(Woken(), 50 * MS)) == [(attempt_id(0, 1), "prefill-0", "decode-0")]


def test_backoff_grows_to_its_cap_and_retries_end():
    r = router(max_retries=4, max_backoff_ns=100 * MS)
    arrive(r)
    now, waits = 0, []
    for n in range(4):
        *_, wake = r.on_message(Failed(attempt_id(0, n), "again", retryable=True), now)
        waits.append((wake.time_ns - now) / MS)
        now = wake.time_ns
        r.on_message(Woken(), now)
    assert waits == [50, 75, 100, 100]
    assert r.on_message(Failed(attempt_id(0, 4), "again", retryable=True), now)[-1] == Failed(0, "again")
    check_all_idle([r])


def test_jitter_is_drawn_within_its_bounds_and_from_the_seed():
    def waits(seed):
        r = router(backoff_jitter=0.2, seed=seed)
        found = []
        for i in range(30):
            arrive(r, i)
            *_, wake = r.on_message(Failed(i, "again", retryable=True), 0)
            found.append(wake.time_ns / MS)
        return found

    assert waits(1) == waits(1) != waits(2)
    assert all(40 <= wait <= 60 for wait in waits(1))
    assert max(waits(1)) - min(waits(1)) > 10


def test_what_another_attempt_cannot_help_fails_at_once():
    r = router()
    arrive(r)
    assert r.on_message(Failed(0, "does not fit"), 0) == [Failed(0, "does not fit")]


def test_a_request_with_a_streamed_token_is_not_tried_again():
    r = router()
    arrive(r)
    r.on_message(FirstToken(0), 0)
    commands = r.on_message(PeerDown("decode-0"), 0)
    assert Failed(0, "decode-0 was lost") in commands
    assert not r.live


def test_what_a_decode_instance_held_is_tried_again_and_its_prefill_is_told():
    r = router()
    arrive(r)
    told = cancels(0, "prefill-0", "decode-0", "decode-0 was lost")
    assert r.on_message(PeerDown("decode-0"), 0) == [*told, WakeAt("router", 50 * MS)]
    assert [load.num_requests for role in r.roles.values() for load in role.loads] == [0] * 4


def test_a_lost_prefill_instance_is_decodes_to_tell():
    r = router()
    arrive(r)
    assert r.on_message(PeerDown("prefill-0"), 0) == [PrefillDone(0)]  # its connection breaks
    assert r.client_of(0) == 0  # its KV had come: decode goes on
    assert r.on_message(Finished(0), 2) == []
    check_all_idle([r])


def test_those_that_are_down_are_not_offered():
    r = router(3, 1)
    r.on_message(PeerDown("prefill-1"), 0)
    assert {routed(arrive(r, i))[0][1] for i in range(6)} == {"prefill-0", "prefill-2"}
    r.on_message(PeerUp("prefill-1"), 0)
    assert {routed(arrive(r, i))[0][1] for i in range(6, 12)} == {"prefill-0", "prefill-1", "prefill-2"}


def test_a_restarted_instance_is_offered_at_once_but_its_cache_is_forgotten():
    r = router(2, 1, policy=CacheAware)
    ((_, picked, _),) = routed(arrive(r))
    r.on_message(PrefillDone(0), 0)
    assert r.roles["prefill"].num_cached_tokens(Spans.of(0, 100), picked) == 64
    r.on_message(PeerDown(picked, has_restarted=True), 0)
    assert r.roles["prefill"].num_cached_tokens(Spans.of(0, 100), picked) == 0
    assert {routed(arrive(r, i))[0][1] for i in (1, 2)} == {"prefill-0", "prefill-1"}


def test_without_a_healthy_instance_a_request_waits_and_then_fails():
    r = router(1, 1, max_retries=1)
    r.on_message(PeerDown("decode-0"), 0)
    assert arrive(r) == [WakeAt("router", 50 * MS)]
    assert r.on_message(Woken(), 50 * MS) == [Failed(0, "no decode instance is up")]
    assert arrive(r, 1, 60 * MS) == [WakeAt("router", 110 * MS)]
    r.on_message(PeerUp("decode-0"), 100 * MS)
    assert routed(r.on_message(Woken(), 110 * MS)) == [(attempt_id(1, 1), "prefill-0", "decode-0")]


def test_a_cancelled_request_is_cancelled_on_both_sides():
    r = router()
    arrive(r)
    cancel = Cancel(0, "enough")
    assert r.on_message(cancel, 0) == [Send("decode-0", cancel), Send("prefill-0", cancel), Failed(0, "enough")]
    assert r.on_message(Finished(0), 0) == []  # too late
    assert r.on_message(cancel, 0) == []
    check_all_idle([r])


def test_a_request_that_backs_off_can_be_cancelled():
    r = router()
    arrive(r)
    r.on_message(Failed(0, "again", retryable=True), 0)
    assert r.on_message(Cancel(0, "enough"), 1) == [Failed(0, "enough")]
    assert r.on_message(Woken(), 50 * MS) == []
    check_all_idle([r])


def test_what_comes_of_an_old_attempt_is_ignored():
    r = router()
    arrive(r)
    r.on_message(Failed(0, "again", retryable=True), 0)
    r.on_message(Woken(), 50 * MS)
    for late in (PrefillDone(0), FirstToken(0), Finished(0), Failed(0, "late", retryable=True)):
        assert r.client_of(0) is None
        assert r.on_message(late, 50 * MS) == []
    assert r.client_of(attempt_id(0, 1)) == 0


def test_it_takes_nothing_else():
    with pytest.raises(TypeError, match="does not take"):
        router().on_message(KvSent(1), 0)
