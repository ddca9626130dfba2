"""SGLang's new_token_ratio, in closed form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.decode.new_token_ratio import NewTokenRatio
from pdsim.core.decode.running_batch import RunningRequest
from pdsim.core.sequence import Spans


def running(outputs: int, max_output: int) -> RunningRequest:
    return RunningRequest(1, 0, Spans.of(1, 5), 5, max_output_tokens=max_output, num_output_tokens=outputs)


def test_it_falls_from_seven_tenths_to_a_seventh_of_that_in_600_steps():
    ratio = NewTokenRatio(1.0)
    assert ratio.at(0) == 0.7
    assert ratio.at(300) == pytest.approx(0.7 * (1 + 0.14) / 2)
    assert ratio.at(600) == ratio.at(10_000) == pytest.approx(0.098)


def test_conservativeness_is_a_factor_up_to_one():
    assert NewTokenRatio(0.5).at(0) == 0.35
    assert NewTokenRatio(2.0).at(0) == 1.0


def test_a_retraction_sets_it_to_what_is_left_to_the_others():
    ratio = NewTokenRatio(1.0)
    ratio.on_retraction(50, [running(30, 200), running(10, 99)])
    assert ratio.at(51) == (30 + 10 + 2 * 20) / (200 + 99 + 1)
    assert ratio.at(52) < ratio.at(51)
    ratio.on_retraction(60, [running(30, 40)])
    assert ratio.at(61) == 1.0


def test_it_starts_again_when_the_instance_idles():
    ratio = NewTokenRatio(1.0)
    ratio.on_idle(500)
    assert ratio.at(500) == 0.7


@given(st.integers(0, 2000), st.floats(0.1, 2))
def test_it_is_what_subtracting_in_every_step_gives(num_steps, conservativeness):
    ratio, stepped = NewTokenRatio(conservativeness), NewTokenRatio(conservativeness).at(0)
    least, decay = 0.14 * stepped, 0.86 * stepped / 600
    for _ in range(num_steps):
        stepped = max(stepped - decay, least)
    assert ratio.at(num_steps) == pytest.approx(stepped, abs=1e-9)
