"""The range that stands beside a number reaches from the least to the most of a run and of its ends."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.metrics.summary_rows import RANGED, ranges

summaries = st.fixed_dictionaries({}, optional={row.field: st.none() | st.floats(0, 1e9) for row in RANGED[:3]})


@given(st.lists(summaries, min_size=1, max_size=5))
def test_a_range_reaches_from_the_least_to_the_most(summaries):
    found = ranges(summaries)
    for row in RANGED:
        values = [summary.get(row.field) for summary in summaries]
        assert found.get(row.field) == (None if None in values else [min(values), max(values)])
