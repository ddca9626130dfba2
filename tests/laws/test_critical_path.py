"""The parts of a request's latency: they cover it all, and name what made it long."""

import pytest
from hypothesis import given, settings

from pdsim.metrics.explanation.explain import PARTS, CriticalPaths, mean_parts_ms, stage_times
from pdsim.metrics.explanation.stages import stage_shares
from pdsim.scenario.sections.cost import ColdKernels
from tests.strategies import any_scenarios
from tests.support import MILLISECOND, request, run, small


@settings(max_examples=60)
@given(any_scenarios())
def test_the_parts_of_a_request_are_its_latency(scenario):
    records = run(scenario, levels=True).records
    paths = CriticalPaths(records)
    for one in records.requests:
        if one.outcome == "finished":
            parts = paths.of(one)
            assert sum(parts.values()) == one.end_ns - one.arrival_ns
            assert parts.keys() <= PARTS.keys()
            assert min(parts.values()) > 0
    shares = stage_shares(one for one in records.requests if one.outcome == "finished")
    assert shares == pytest.approx({one.stage: one.share for one in stage_times(records) if shares})


def test_one_request_alone_waits_for_nobody():
    (one,) = (records := run(small(request(0, 100, 5)), levels=True).records).requests
    parts = CriticalPaths(records).of(one)
    assert parts["prefill compute"] == 100 * MILLISECOND
    assert parts["decode compute"] == 4 * 10 * MILLISECOND
    assert parts["handshake"] == 2 * MILLISECOND, "from the router to decode, and from there to prefill"
    assert parts.keys().isdisjoint({"admission wait", "prefill queue", "ring wait", "decode wait"})


def test_the_second_of_two_prompts_queues_while_the_first_is_computed():
    records = run(small(request(0, 100, 5), request(1, 50, 5)), levels=True).records
    parts = [CriticalPaths(records).of(one) for one in records.requests]
    assert parts[1]["prefill queue"] == 64 * MILLISECOND, "one chunk; the next forward has room for both"
    assert parts[1]["prefill compute"] == (100 + 50 - 64) * MILLISECOND


def test_both_prompts_wait_while_a_cold_server_compiles_a_kernel_for_each_forward():
    two = small(request(0, 100, 5), request(1, 50, 5))
    kernels = ColdKernels.model_construct(prefill=30 * MILLISECOND)
    cold = two.model_copy(update={"cost": two.cost.model_copy(update={"cold_kernels": kernels})})
    paths = [CriticalPaths(run(scenario, levels=True).records) for scenario in (two, cold)]
    warm_parts, parts = ([path.of(one) for one in run(two).records.requests] for path in paths)
    for before, after in zip(warm_parts, parts, strict=True):
        assert after == {**before, "compile": 2 * 30 * MILLISECOND}


def test_a_full_pool_makes_requests_wait_for_admission():
    crowd = [request(i, 100, 20) for i in range(4)]
    tight = run(small(*crowd, decode__pool_tokens=260), levels=True).records
    assert mean_parts_ms(tight)["admission wait"] > 100
    roomy = run(small(*crowd), levels=True).records
    assert "admission wait" not in mean_parts_ms(roomy)
