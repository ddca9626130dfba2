"""Tensor-parallel ranks that agree on what has arrived."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.agreement import RankAgreement
from pdsim.core.messages import KvArrived, KvSent, RankObserved
from tests.support import MILLISECOND, request, run, small

SIGHTINGS = [(rank, i) for rank in range(4) for i in range(3)]
TWICE = [rank for rank in range(4) for _ in range(2)]


@given(st.permutations(SIGHTINGS))
def test_a_transfer_counts_when_the_slowest_rank_has_seen_it(order):
    agreement = RankAgreement()
    for at, (rank, i) in enumerate(order):
        agreed = agreement.see(RankObserved(rank, 4, KvArrived(i, first_token_ends=False)))
        is_last = all(seen in order[: at + 1] for seen in SIGHTINGS if seen[1] == i)
        assert agreed == (KvArrived(i, first_token_ends=False) if is_last else None)
    assert agreement.held == []


@given(st.permutations(TWICE))
def test_what_is_said_twice_counts_twice(order):
    agreement = RankAgreement()
    agreed = [agreement.see(RankObserved(rank, 4, KvSent(7))) for rank in order]
    assert agreed.count(KvSent(7)) == 2
    assert agreement.held == []


def test_a_rank_that_says_it_twice_is_one_rank():
    agreement = RankAgreement()
    saw = RankObserved(0, 2, KvArrived(1, first_token_ends=False))
    assert [agreement.see(saw), agreement.see(saw)] == [None, None]
    assert agreement.held == [1]


def one(tp, **ranks):
    scenario = small(request(0, 40, 2), prefill__tp=tp, decode__tp=tp, network__ranks=ranks or None)
    return run(scenario, checked=True).records.requests[0]


def test_an_agreement_delays_what_decode_sees_and_no_more():
    alone = one(4)
    assert one(4, agreement="3 ms").streamed_ns == alone.streamed_ns + 3 * MILLISECOND
    assert one(4, agreement="3 ms").transfer_end_ns == alone.transfer_end_ns
    assert one(1, agreement="3 ms") == one(1)


def test_more_ranks_wait_longer_for_the_slowest():
    waits = [one(tp, agreement=0, skew="100 ms").streamed_ns - one(tp).streamed_ns for tp in (2, 8)]
    assert 0 < waits[0] < waits[1] < 100 * MILLISECOND


def test_each_decode_step_agrees_while_kv_is_on_its_way():
    """The second prompt is computed for 500 ms meanwhile: steps of 10 ms take 12."""

    def gaps(**changes):
        load = request(0, 4, 400), request(1, 500, 2, arrival_ns=100 * MILLISECOND)
        steps = run(small(*load, prefill__tp=2, decode__tp=2, **changes)).records.steps
        return {step.first_ns for step in steps if step.kind == "decode"}

    assert gaps() == {10 * MILLISECOND}
    assert gaps(network__ranks={"agreement": "2 ms"}) == {10 * MILLISECOND, 12 * MILLISECOND}
