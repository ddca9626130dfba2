"""Lists and ranges of values."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.study.sweeping.sweep_file import parse_values, pick
from tests.support import examples

RANGES = [
    ({"from": 1, "to": 4}, [1, 2, 3, 4]),
    ({"from": 1, "to": 8, "step": 3}, [1, 4, 7]),
    ({"from": 0.0, "to": 1.0, "count": 3}, [0.0, 0.5, 1.0]),
    ({"from": 1, "to": 9, "count": 3}, [1, 5, 9]),
    ({"from": 1, "to": 2, "count": 5}, [1, 2]),
    ({"from": 1, "to": 100, "count": 3, "scale": "log"}, [1, 10, 100]),
    ({"from": "64 MiB", "to": "256 MiB", "count": 3, "scale": "log"}, ["64 MiB", "128 MiB", "256 MiB"]),
    ({"from": "10 ms", "to": "1 s", "count": 3, "scale": "log"}, ["10 ms", "100 ms", "1 s"]),
    ({"from": "1/s", "to": "2/s", "step": "0.5/s"}, ["1/s", "1.5/s", "2/s"]),
    ({"from": "10 GB/s", "to": "30 GB/s", "step": "10 GB/s"}, ["10 GB/s", "20 GB/s", "30 GB/s"]),
]


@pytest.mark.parametrize(("written", "values"), RANGES)
def test_a_range_in_a_grid(written, values):
    assert parse_values(written).values() == values


WRONG = [
    ([], "an empty list"),
    (3, "expected values such as"),
    ({"from": 1}, "a range needs to"),
    ({"from": 1, "to": 2, "cuont": 3}, "a range has no 'cuont' (did you mean 'count'?)"),
    ({"from": 1, "to": "2 MiB"}, "the two are of different kinds"),
    ({"from": "1 ms", "to": "2 MiB"}, "the two are of different kinds"),
    ({"from": "1 parsec", "to": "2 parsec"}, "expected a number, or a quantity such as '64 MiB', found '1 parsec'"),
    ({"from": 2, "to": 1}, "the first must be less than the second"),
    ({"from": 0, "to": 1, "scale": "log"}, "a log range begins above 0"),
    ({"from": 1, "to": 2, "scale": "cubic"}, "scale is linear or log, found 'cubic'"),
    ({"from": 1, "to": 2, "count": 1}, "count 1: expected a whole number from 2 on"),
    ({"from": 1, "to": 2, "count": 3, "step": 1}, "count or step, not both"),
    ({"from": 1, "to": 2, "step": 0}, "step 0: expected a value above 0"),
]


@pytest.mark.parametrize(("written", "message"), WRONG)
def test_what_is_no_range_says_what_would_be(written, message):
    with pytest.raises(ValueError) as wrong:
        parse_values(written)
    assert message in str(wrong.value)


@examples(100)
@given(
    first=st.integers(1, 1000), span=st.integers(1, 1000), share=st.floats(0, 1, exclude_max=True), log=st.booleans()
)
def test_every_place_in_a_range_is_within_it(first, span, share, log):
    scale = "log" if log else "linear"
    value = pick(parse_values({"from": first, "to": first + span, "scale": scale}), share)
    assert isinstance(value, int)
    assert first <= value <= first + span


def test_whole_numbers_of_a_range_are_equally_likely():
    among = parse_values({"from": 1, "to": 4})
    drawn = [pick(among, i / 1000) for i in range(1000)]
    assert [drawn.count(value) for value in (1, 2, 3, 4)] == [250] * 4


def test_a_log_range_has_equal_ratios():
    values = parse_values({"from": 0.5, "to": 8.0, "count": 5, "scale": "log"}).values()
    assert all(math.isclose(b / a, 2) for a, b in pairwise(values))
