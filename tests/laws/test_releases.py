"""Requests that decode fails: whose pages it may lend again, and what it remembers of them."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.decode.decode_instance import DecodeInstance, DecodeLimits
from pdsim.core.invariants import check
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool
from pdsim.core.messages import Abort, Cancel, Failed, KvLost, NewRequest, PeerDown, PromptComputed, Send
from pdsim.core.sequence import Spans
from pdsim.policy.pages import FewestOutputsFirst, FreePages
from tests.support import examples

WRITERS = ("prefill-0", "prefill-1", "prefill-2")
NUM_PAGES = 100


def decode(**limits) -> DecodeInstance:
    return DecodeInstance(
        "decode-0",
        cache=KvCache(PagePool(NUM_PAGES), 4, None),
        limits=DecodeLimits(max_running_requests=20, **limits),
        admission_policy=FreePages(),
        preemption_policy=FewestOutputsFirst(),
    )


def new(i: int, num_tokens: int, prefill_id: str = WRITERS[0]) -> NewRequest:
    return NewRequest(i, 0, Spans.of(i, num_tokens), 5, prefill_id, "decode-0")


requests = st.tuples(st.sampled_from(WRITERS), st.integers(1, 30), st.sampled_from([None, Cancel, KvLost]))


@given(st.lists(requests, min_size=1, max_size=8), st.permutations(WRITERS))
@examples(100)
def test_pages_are_lent_again_when_their_own_writer_is_dead(requests, dying):
    d = decode()
    for i, (writer, num_tokens, _) in enumerate(requests):
        d.on_message(new(i, num_tokens, writer), 0)
    d.next_step(0)
    for i, (_, _, given_up) in enumerate(requests):
        if given_up is not None:
            d.on_message(given_up(i, "given up"), 0)
    living = set(WRITERS)
    for writer in dying:
        d.on_message(PeerDown(writer), 0)
        living.remove(writer)
        held = {i: -(-num_tokens // 4) for i, (owner, num_tokens, _) in enumerate(requests) if owner in living}
        assert {request.request_id for request in d.holding()} == held.keys()
        assert d.num_available_pages == NUM_PAGES - sum(held.values())
        check(d)


later = st.sampled_from([new(7, 5000), PromptComputed(7), Abort(7, "aborted"), Cancel(7, "cancelled")])


@given(st.booleans(), st.lists(later, max_size=6))
@examples(60)
def test_prefill_hears_once_that_decode_refuses_a_prompt(grants_computed_only, messages):
    d = decode(grants_computed_only=grants_computed_only)
    commands = [d.on_message(message, 0) for message in [new(7, 5000), *messages]]
    said = [command for answer in commands for command in answer]
    assert sum(isinstance(command, Send) for command in said) == 1
    assert sum(isinstance(command, Failed) for command in said) == 1 + messages.count(new(7, 5000))
    assert d.requests() == []
