"""Slots of states beside a cache: what a chunk or step reads is the state of exactly the tokens before it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="real mode needs torch")

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from pdreal.memory.state_slots import StateSlots

from pdsim.core.memory.hybrid_cache import HybridKvCache, StateLimits
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.sequence import TokenIds
from pdsim.policy.pages import LeastRecentlyUsed
from tests.support import examples

NUM_SLOTS, INTERVAL, MOST_REQUESTS = 6, 8, 2
ALL_SLOTS = NUM_SLOTS + 2
LIMITS = StateLimits(num_slots=NUM_SLOTS, slots_per_request=3, chunk_tokens=4, interval_tokens=INTERVAL)


class Request(SimpleNamespace):
    """A request of an aggregated instance."""


class Slots(RuleBasedStateMachine):
    """The memory of a rank holds, in place of states, the tokens after which the states were left."""

    def __init__(self):
        super().__init__()
        pool = PagePool(60)
        self.cache = HybridKvCache(pool, 2, RadixCache(pool, 2, LeastRecentlyUsed()), LIMITS)
        self.requests: dict[int, Request] = {}
        self.slots = StateSlots(self, ALL_SLOTS)
        self.memory: dict[int, tuple[int, ...]] = {0: ()}
        self.num_requests = 0

    def lease(self, request_id):
        return self.requests[request_id].lease

    def holding(self):
        return list(self.requests.values())

    def some(self, number, *, is_whole):
        found = [request for request in self.requests.values() if (request.done >= request.prompt) is is_whole]
        return found[number % len(found)] if found else None

    @rule(ids=st.lists(st.integers(0, 1), min_size=2, max_size=24))
    @precondition(lambda self: len(self.requests) < MOST_REQUESTS)
    def admit(self, ids):
        if not self.cache.makes_room_for_states():
            return
        lease = self.cache.open(TokenIds(ids), len(ids) - 1)
        self.cache.grow(lease, -(-len(ids) // 2) - lease.num_shared)
        begin = 2 * lease.num_shared
        self.requests[self.num_requests] = Request(
            request_id=self.num_requests, lease=lease, ids=list(ids), prompt=len(ids), done=begin
        )
        self.num_requests += 1
        self.chunk(self.num_requests - 1, 24)

    @rule(number=st.integers(0, 9), size=st.integers(1, 12))
    def go_on(self, number, size):
        if request := self.some(number, is_whole=False):
            self.chunk(request.request_id, 2 * size)

    def chunk(self, request_id, size):
        request = self.requests[request_id]
        start, stop = request.done, min(request.prompt, request.done + size)
        use = self.slots.of_chunk(request_id, start, stop)
        assert self.memory[use.source] == tuple(request.ids[:start])
        self.memory[use.own] = tuple(request.ids[:stop])
        if use.tracked:
            self.memory[use.tracked] = tuple(request.ids[: start + use.tracked_tokens])
        assert use.own not in (0, use.tracked)
        request.done = stop
        self.cache.checkpoint(request.lease, TokenIds(request.ids), stop)

    @rule(number=st.integers(0, 9), token=st.integers(0, 1))
    def step(self, number, token):
        if (request := self.some(number, is_whole=True)) is None or len(request.ids) == 40:
            return
        request.ids.append(token)
        self.cache.grow(request.lease, -(-len(request.ids) // 2) - len(request.lease.table))
        own, tracked = self.slots.of_step(request.request_id, len(request.ids))
        assert self.memory[own] == tuple(request.ids[:-1])
        self.memory[own] = tuple(request.ids)
        if tracked:
            self.memory[tracked] = self.memory[own]
        request.done = len(request.ids)

    @rule(number=st.integers(0, 9), is_dropped=st.booleans())
    def end(self, number, is_dropped):
        if (request := self.some(number, is_whole=True)) is None:
            return
        del self.requests[request.request_id]
        if is_dropped:
            self.cache.drop(request.lease)
        else:
            self.cache.close(request.lease, TokenIds(request.ids), request.done)

    def evict(self):
        self.cache.states.make_free(NUM_SLOTS)

    def teardown(self):
        """When all requests have ended and the cache is empty, every slot can be given again."""
        for request in self.requests.values():
            self.cache.drop(request.lease)
        self.cache.flush()
        leases = [self.cache.open(TokenIds([0]), 0) for _ in range(ALL_SLOTS)]
        self.requests = {i: Request(lease=lease) for i, lease in enumerate(leases)}
        assert sorted(map(self.slots.own, self.requests)) == list(range(1, 1 + ALL_SLOTS))


Slots.TestCase.settings = examples(40)
TestSlots = Slots.TestCase


def test_a_request_has_two_slots_however_long_its_output_is():
    machine = Slots()
    machine.slots = StateSlots(machine, 2)
    machine.admit([0, 0])
    for _ in range(4 * INTERVAL):
        machine.step(0, 0)


def test_the_slot_of_a_state_that_the_cache_has_is_free():
    machine = Slots()
    for _ in range(MOST_REQUESTS):
        machine.admit([0, 0])
    for i in range(MOST_REQUESTS * INTERVAL):
        machine.step(i, 0)
    for _ in range(MOST_REQUESTS):
        machine.end(0, is_dropped=False)
    machine.teardown()


def test_the_slot_of_a_state_that_was_given_up_and_is_kept_again_is_free():
    machine = Slots()
    for ids in ([0] * 9, [0] * 17):
        machine.admit(ids)
        machine.end(0, is_dropped=True)
    machine.evict()  # the node of 8 tokens stays, because it has a child
    machine.admit([0] * 9)
    machine.teardown()
