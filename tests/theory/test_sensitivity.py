"""10 % more of what is scarce gives what arithmetic says; 10 % more of what is not gives nothing."""

import re

import pytest

from pdsim.core.sequence import Spans
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.sim.uncertainty.sensitivity import Sensitivity, limits, num_runs, sensitivities
from tests.support import request, small, small_aggregated

LOAD = {"use": "random_lengths", "num_requests": 60, "input_tokens": 200, "output_tokens": 2}
BUSY = {"use": "closed_loop", "concurrency": 12}


def effects(scenario):
    return {one.resource: one.changes for one in sensitivities(scenario)}


def test_prefill_that_is_all_the_work_gives_all_of_its_gain():
    found = effects(small(workload=LOAD, client=BUSY))
    assert next(iter(found)) == "prefill compute", "largest first"
    assert found["prefill compute"]["request_throughput"] == pytest.approx(0.1, abs=0.005)
    for metric in ("mean_ttft_ms", "p99_ttft_ms"):
        assert found["prefill compute"][metric] == pytest.approx(1 / 1.1 - 1, abs=0.005)
    for resource in ("prefill KV", "prefill slots", "decode slots"):
        assert set(found[resource].values()) == {0.0}


def test_one_request_at_a_time_gains_what_its_steps_take_less():
    """10 ms a token, 39 of them after the first."""
    load = LOAD | {"output_tokens": 40}
    found = effects(small(workload=load, client={"use": "closed_loop", "concurrency": 1}))
    assert found["decode steps"]["mean_tpot_ms"] == pytest.approx(1 / 1.1 - 1, abs=1e-3)
    assert found["decode steps"]["mean_ttft_ms"] == pytest.approx(0, abs=1e-6)


def test_a_metric_that_nothing_improves_has_no_limit():
    moves = {"request_throughput": 0.0, "p99_ttft_ms": 0.02}
    first, second = limits([Sensitivity("link", moves, "network.bandwidth"), Sensitivity("prefill KV", moves, "")])
    assert (first.resource, second.resource) == ("", ""), "a longer TTFT is no gain"


def test_a_slow_link_gives_its_gain_to_ttft():
    alone = {"use": "closed_loop", "concurrency": 1}
    found = effects(small(workload=LOAD, client=alone, network__bandwidth="10 MB/s"))
    assert next(iter(found)) == "link"
    assert -0.1 < found["link"]["mean_ttft_ms"] < -0.08


def test_host_memory_and_its_link_are_resources_where_there_are_any():
    """Four prompts take turns: a tenth more memory holds all of them, and a tenth more bandwidth loads them sooner."""
    specs = [request(i, Spans.of(i % 4, 400), 2, arrival_ns=i * 2_000_000_000) for i in range(40)]
    host = f"{1500 * 114_688} B"
    found = effects(
        small(*specs, prefill__pool_tokens=600, prefill__chunked_prefill_tokens=0, prefill__host_cache=host)
    )
    assert next(iter(found)) == "prefill host memory"
    assert found["prefill host memory"]["mean_ttft_ms"] < -0.5
    assert "decode host memory" not in found
    assert found["host link"]["mean_ttft_ms"] <= 0


def test_each_resource_is_one_run_and_the_base_and_its_repetitions_are_others():
    staged = small(workload=LOAD, client=BUSY, prefill__tp=2, network__staging={"ring": "1 GB"})
    aggregated = small_aggregated(workload=LOAD, client=BUSY)
    for scenario in (staged, aggregated):
        calls = []
        found = sensitivities(scenario, progress=lambda calls=calls: calls.append(1))
        assert len(calls) == num_runs(scenario) == len(found) + 1 + len(JITTERS)
    assert "staging ring" in {one.resource for one in sensitivities(staged)}
    assert {one.resource for one in found} == {
        "prefill compute",
        "decode steps",
        "messages",
        "aggregated KV",
        "aggregated slots",
    }


DESCRIPTORS = {"network__descriptor_latency": "100 us", "network__transfer_latency": 0}
ALONE = {"use": "closed_loop", "concurrency": 1}


def relief_of_descriptors(**changes):
    scenario = small(workload=LOAD, client=ALONE, **DESCRIPTORS, **changes)
    (found,) = [one for one in sensitivities(scenario) if one.resource == "descriptor cost"]
    assert any(limit.resource == "descriptor cost" for limit in limits([found]))
    return found.relief


def test_slices_of_unequal_tensor_parallel_sizes_are_relieved_by_equal_ones_and_not_by_larger_pages():
    """Each token's slice has a descriptor of its own, whatever the page size."""
    relief = relief_of_descriptors(prefill__tp=2)
    assert re.match(r"network\.staging: {} \(throughput \+[\d.]+%\), decode\.tp: 2 \(throughput \+[\d.]+%\)$", relief)


def test_pages_of_equal_sizes_are_relieved_by_larger_ones():
    relief = relief_of_descriptors(page_size=1, network__transport="nixl-cma")
    assert re.match(r"page_size: 64 \(throughput \+[\d.]+%\)$", relief)


def test_a_faster_host_link_shortens_the_steps_that_copy_kv_from_host_memory():
    """16 requests, and every chosen token missed: copies of 2,048 tokens of 70,272 bytes for each at 47 GB/s."""
    specs = [request(i, 5000, 30) for i in range(16)]
    sizes = {"page_size": 64, "prefill__pool_tokens": 40_000, "prefill__chunked_prefill_tokens": 16_384}
    found = effects(
        small(
            *specs,
            model="deepseek-v3.2",
            decode__pool_tokens=200_000,
            decode__hisparse={"miss_rate": 1},
            cost__prefill_per_token="1 us",
            **sizes,
        )
    )
    copied_ms = 1e3 * 16 * 2048 * 70_272 / (0.74 * 64e9)
    share = copied_ms / (copied_ms + 10 + 61 * 0.0112)
    assert found["host link"]["mean_tpot_ms"] == pytest.approx(share * (1 / 1.1 - 1), abs=0.01)
