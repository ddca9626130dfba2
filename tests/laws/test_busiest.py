"""The busiest minutes of a run lie within the run, and show what it has there."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdsim.metrics.records import RequestRecord
from pdsim.study.planning.busiest import busiest

SECOND = 1_000_000_000
TIMES = st.tuples(st.integers(0, 2000), st.integers(1, 200), st.integers(0, 200))


@given(st.lists(TIMES, min_size=1, max_size=12))
@example([(0, 1, 0), (990, 9, 0), (991, 9, 0)])
@example([(0, 9, 0), (1, 9, 0), (990, 9, 0)])
def test_the_window_is_five_minutes_of_the_run(times_s):
    """times_s: of each request its arrival, and how long it waits and decodes."""
    requests = [
        RequestRecord(i, 10, 2, at * SECOND, first_token_ns=(at + wait) * SECOND, end_ns=(at + wait + rest) * SECOND)
        for i, (at, wait, rest) in enumerate(times_s)
    ]
    begin_s, end_s = min(at for at, _, _ in times_s), max(map(sum, times_s))
    found = busiest(requests)
    first_s, last_s = found["times_s"][0], found["times_s"][-1]
    assert begin_s - 1e-6 <= first_s
    assert last_s <= end_s + 1e-6
    assert last_s - first_s == pytest.approx(min(300, end_s - begin_s))
    for time_s, waiting, decoding in zip(found["times_s"], found["waiting"], found["decoding"], strict=True):
        if min(abs(time_s - one) for at, wait, rest in times_s for one in (at, at + wait, at + wait + rest)) > 1e-6:
            assert waiting == sum(at < time_s < at + wait for at, wait, _ in times_s)
            assert decoding == sum(at + wait < time_s < at + wait + rest for at, wait, rest in times_s)


def test_a_request_without_an_end_decodes_from_its_first_token_on():
    unended = RequestRecord(0, 10, 2, 0, first_token_ns=2 * SECOND)
    ended = RequestRecord(1, 10, 2, 0, first_token_ns=5 * SECOND, end_ns=10 * SECOND)
    found = busiest([unended, ended])
    counts = dict(zip(found["times_s"], found["decoding"], strict=True))
    assert {count for time_s, count in counts.items() if 2 < time_s < 5} == {1}
    assert {count for time_s, count in counts.items() if 5.1 < time_s < 9.9} == {2}
