"""A closed loop's warm-up is left out of what is judged, and of nothing else; equal requests leave lock-step."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim import simulate
from pdsim.scenario.loading import parse_scenario
from pdsim.study.verdict.outcome import outcome_of_run
from pdsim.study.verdict.slo import Slo


def scenario(*, concurrency: int, requests: int, warm_up: int, tokens: int = 1024):
    data = {
        "model": "llama-3.1-8b",
        "prefill": {"gpu": "h100"},
        "decode": {"gpu": "h100"},
        "front_end": {},
        "workload": {"use": "random_lengths", "num_requests": requests, "input_tokens": tokens, "output_tokens": 128},
        "client": {"use": "closed_loop", "concurrency": concurrency, "warm_up_requests": warm_up},
    }
    return parse_scenario(data, base=Path(), where="test")


@given(concurrency=st.integers(1, 12), rounds=st.integers(2, 3), share=st.floats(0, 1))
@settings(max_examples=10)
def test_the_first_requests_are_judged_by_nothing(concurrency, rounds, share):
    warm_up, requests = round(share * concurrency), concurrency * rounds  # no more than half of them
    found = simulate(scenario(concurrency=concurrency, requests=requests, warm_up=warm_up, tokens=256))
    everything = simulate(scenario(concurrency=concurrency, requests=requests, warm_up=0, tokens=256))
    assert found.records.requests == everything.records.requests
    assert found.summary()["completed"] == requests - warm_up
    assert found.summary()["pdsim"].get("warm_up_requests", 0) == warm_up
    first = sorted(everything.records.requests, key=lambda one: (one.arrival_ns, one.request_id))[warm_up:]
    slo = Slo.parse("ttft p99 < 1 s")
    judged = outcome_of_run(found.judged.requests, found.scenario.client, slo)
    assert judged.to_json() == outcome_of_run(first, found.scenario.client, slo).to_json()


@pytest.mark.parametrize("concurrency", [32, 64])
def test_equal_requests_are_not_sent_together_for_long(concurrency):
    """A real SGLang pair had groups of 1 to 8 requests from its second round on; at first all were sent at once."""
    found = simulate(scenario(concurrency=concurrency, requests=6 * concurrency, warm_up=0))
    arrivals = sorted(request.arrival_ns for request in found.records.requests)[concurrency:]
    groups, size = [], 1
    for earlier, later in pairwise(arrivals):
        if later - earlier < 4_000_000:
            size += 1
        else:
            groups.append(size)
            size = 1
    assert max(groups) <= 8
