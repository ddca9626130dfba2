"""Forwards take longer beside transfers, by a share of the time in which both are under way."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from pdsim.cost.step_times import KvReads

NUMBERS = st.integers(0, 50)
FORWARDS = st.lists(st.tuples(NUMBERS, st.integers(1, 50)), min_size=1, max_size=12)
"""Each waits for so long, and takes so long."""
TRANSFERS = st.lists(st.tuples(NUMBERS, st.integers(0, 100)), max_size=12)
"""Each ends so long after the one before, and began so long before that, but behind the one before."""
SHARES = st.sampled_from((0.16, 0.25, 1.0))


def run(share, forwards, transfers):
    """(start, end) of forwards that follow each other, (begin, end) of transfers, and what forwards took longer."""
    reads, now_ns, begun, prolonged_ns = KvReads(share), 0, [], 0
    ends, begin_ns, end_ns = [], 0, 0
    for gap_ns, took_ns in transfers:
        end_ns += gap_ns
        begin_ns = max(begin_ns, end_ns - took_ns)
        ends.append((begin_ns, end_ns))
    waiting = list(ends)
    for idle_ns, own_ns in forwards:
        now_ns += idle_ns
        while waiting and waiting[0][1] <= now_ns:
            reads.ended(*waiting.pop(0))
        duration_ns = reads.prolonged_ns(now_ns, own_ns)
        assert duration_ns >= own_ns
        prolonged_ns += duration_ns - own_ns
        begun.append((now_ns, now_ns + duration_ns))
        now_ns += duration_ns
    return begun, ends, prolonged_ns


def instants(spans):
    return {instant for begin, end in spans for instant in range(begin, end)}


@given(SHARES, FORWARDS, TRANSFERS)
def test_forwards_pay_at_most_for_the_time_that_both_were_under_way(share, forwards, transfers):
    begun, ends, prolonged_ns = run(share, forwards, transfers)
    assert prolonged_ns <= ceil(share * len(instants(begun) & instants(ends)))


@given(SHARES, st.lists(st.integers(1, 50), min_size=2, max_size=12), TRANSFERS)
def test_on_a_gpu_that_never_rests_they_pay_for_all_of_it(share, durations_ns, transfers):
    """All that ended before the last forward began; transfers that overlap count once."""
    begun, ends, prolonged_ns = run(share, [(0, own_ns) for own_ns in durations_ns], transfers)
    last_ns = begun[-1][0]
    beside = instants(begun) & instants(span for span in ends if span[1] <= last_ns)
    assert prolonged_ns == int(share * len(beside) + 1e-6)


@given(FORWARDS)
def test_without_transfers_nothing_is_longer(forwards):
    assert run(1.0, forwards, [])[2] == 0
