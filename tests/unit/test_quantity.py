"""Values with units, as files write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.scenario.sections.fields import BANDWIDTH, DIMENSIONS, DURATION, RATE, SIZE


@pytest.mark.parametrize(
    ("dimension", "text", "amount"),
    [
        (DURATION, "5 ms", 5_000_000),
        (DURATION, "5ms", 5_000_000),
        (DURATION, " 1.5 µs ", 1500),
        (DURATION, "2e-3 s", 2_000_000),
        (DURATION, "0.5 h", 1_800_000_000_000),
        (SIZE, "512 MiB", 512 * 2**20),
        (SIZE, "512 MB", 512e6),
        (SIZE, "1_000 kB", 1e6),
        (BANDWIDTH, "50 GB/s", 50e9),
        (BANDWIDTH, "400 Gbps", 50e9),
        (BANDWIDTH, "400 Gb/s", 50e9),
        (BANDWIDTH, "1 GiB/s", 2**30),
        (RATE, "4/s", 4),
        (RATE, "90 /min", 1.5),
        (SIZE, 0, 0),
        (DURATION, "0", 0),
    ],
)
def test_what_a_text_means(dimension, text, amount):
    assert dimension.parse(text) == pytest.approx(amount, rel=1e-15)


@pytest.mark.parametrize(
    ("dimension", "value", "says"),
    [
        (SIZE, 512, "bare number 512: write a size with its unit, such as '512 MiB'"),
        (SIZE, "512", "bare number 512"),
        (
            SIZE,
            "512 Mib",
            "'Mib' is no unit of a size; there are B, kB, MB, GB, TB, KiB, MiB, GiB; did you mean 'MiB'?",
        ),
        (SIZE, "1 GB/s", "'GB/s' is no unit of a size"),
        (DURATION, "-1 ms", "a duration cannot be negative, found '-1 ms'"),
        (DURATION, "soon", "expected a duration such as '5 ms', found 'soon'"),
        (DURATION, "1.2.3 s", "expected a duration"),
        (DURATION, True, "expected a duration such as '5 ms', found True"),
        (DURATION, None, "found None"),
        (RATE, "4 Hz", "'Hz' is no unit of a rate"),
    ],
)
def test_what_is_refused(dimension, value, says):
    with pytest.raises(ValueError) as refused:
        dimension.parse(value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("dimension", "amount", "text"),
    [
        (DURATION, 30_000, "30 us"),
        (DURATION, 90_000_000_000, "90 s"),
        (DURATION, 1_234_567, "1234567 ns"),
        (SIZE, 2**29, "512 MiB"),
        (SIZE, 3e9, "3 GB"),
        (BANDWIDTH, 12.5e9, "100 Gbps"),
        (RATE, 4.0, "4/s"),
        (RATE, 0.3, "0.3/s"),
        (SIZE, 0, "0 B"),
    ],
)
def test_what_is_shown(dimension, amount, text):
    assert dimension.show(amount) == text


@given(st.sampled_from(DIMENSIONS), st.integers(0, 2**53) | st.floats(0, 1e18))
def test_what_is_shown_reads_back_exactly(dimension, amount):
    if amount and not dimension.least <= amount <= dimension.most:
        with pytest.raises(ValueError, match="is 0 or from"):
            dimension.parse(dimension.show(amount))
    else:
        assert dimension.parse(dimension.show(amount)) == amount
