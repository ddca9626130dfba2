"""Saturated or not, against the queue with a known capacity: prefill of 1 ms a token."""

from itertools import takewhile
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary import is_saturated
from pdsim.workload.client import Bursts, Gamma, Poisson, Profile
from tests.support import request, run, small

SECOND = 10**9


@pytest.mark.parametrize(("gap_ns", "saturated"), [(80_000_000, False), (60_000_000, False), (30_000_000, True)])
def test_more_than_one_server_can_take_is_saturated(gap_ns, saturated):
    """Prompts of 50 tokens take 50 ms each."""
    specs = [request(i, 50, 2, arrival_ns=i * gap_ns) for i in range(200)]
    assert is_saturated(run(small(*specs)).records.requests) is saturated


def test_what_arrives_at_once_is_no_load():
    assert not is_saturated([RequestRecord(i, 1, 1, arrival_ns=5) for i in range(100)])
    assert not is_saturated([])


def test_what_never_ends_counts():
    assert is_saturated([RequestRecord(i, 1, 1, arrival_ns=i) for i in range(100)])


@given(st.integers(20, 200), st.floats(1, 10))
def test_a_run_that_is_over_before_requests_are_is_too_short_to_tell(count, times):
    """Each takes as long as arrivals go on, or longer: that counts as saturated."""
    latency_ns = round(times * count * SECOND)
    assert is_saturated([RequestRecord(i, 1, 2, i * SECOND, end_ns=i * SECOND + latency_ns) for i in range(count)])


def queued(arrivals, seed, *, seconds, decode_s):
    """One server that takes 50 ms for each request, and decode as long for all."""
    free_ns, requests = 0, []
    times_ns = arrivals.times_ns(Random(seed))
    for i, at_ns in enumerate(takewhile(lambda at_ns: at_ns < seconds * SECOND, times_ns)):
        free_ns = max(free_ns, at_ns) + SECOND // 20
        requests.append(RequestRecord(i, 1, 2, arrival_ns=at_ns, end_ns=free_ns + decode_s * SECOND))
    return requests


SERVED = {
    "rises": (Profile((2, 5, 8, 11, 15), 20 * SECOND), 0),
    "rises, few ends": (Profile((2, 5, 8, 11, 15), 6 * SECOND), 5),
    "a burst at the end": (Profile((10, 50), (90 * SECOND, 10 * SECOND)), 0),
    "a day": (Profile((2, 10, 18, 8), 8 * SECOND, smooth=True), 5),
    "gamma": (Gamma(16, 0.25), 0),
    "bursts": (Bursts(16, 4, 0.2), 0),
}


@pytest.mark.parametrize(("arrivals", "decode_s"), SERVED.values(), ids=SERVED)
def test_loads_that_vary_are_not_saturated(arrivals, decode_s):
    seconds = 30 if decode_s else 100
    for seed in range(20):
        assert not is_saturated(queued(arrivals, seed, seconds=seconds, decode_s=decode_s)), seed


@pytest.mark.parametrize("decode_s", [0, 10])
@pytest.mark.parametrize("arrivals", [Poisson(26), Profile((26, 28, 30), 34 * SECOND)], ids=["steady", "rising"])
def test_more_than_a_server_can_take_is_saturated_whatever_else_takes_time(arrivals, decode_s):
    for seed in range(20):
        assert is_saturated(queued(arrivals, seed, seconds=100, decode_s=decode_s)), seed
