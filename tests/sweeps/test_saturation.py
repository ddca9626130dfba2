"""Saturated or not, against the queue with a known capacity: prefill of 1 ms a token."""

import pytest

from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary import is_saturated
from tests.support import request, run, small


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
