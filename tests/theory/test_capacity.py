"""What fits and what runs: figures that follow from a published study, whatever its steps cost.

SGLang pull request 19746: Qwen3-32B on B200, 128 clients, prompts of 4,500 tokens after one of 20 prefixes of 50,000,
355 output tokens. Its log: about 37 running without decode radix cache, at a token usage of 0.99; 104 to 126 with it,
at 0.75; 59 on average where 64 may run.
"""

from pathlib import Path

import pytest

from pdsim.calibration.validate.case import load_case
from pdsim.metrics.summary import by_client
from pdsim.scenario.building.sizing import resolve
from pdsim.sim.simulation import Observation, simulate

CASE = load_case(Path("experiments/decode-radix-b200"))
ARMS = {arm.name: arm for arm in CASE.arms}


@pytest.fixture(scope="module")
def results():
    return {arm.name: simulate(CASE.scenario(arm, seed=1), Observation(levels=True)) for arm in CASE.arms}


def pool_tokens(arm):
    return resolve(CASE.scenario(ARMS[arm], seed=1)).decode.pool_tokens


def decode_levels(result):
    """Past the cold start, before the tail."""
    end = max(request.end_ns for request in result.records.requests)
    rows = [row for row in result.records.levels if row.instance_id == "decode-0"]
    return [row.levels for row in rows if 0.3 * end < row.time_ns < 0.8 * end]


def running_per_step(result):
    end = max(request.end_ns for request in result.records.requests)
    steps = [s for s in result.records.steps if s.kind == "decode" and 0.3 * end < s.start_ns < 0.8 * end]
    return sum(s.num_steps * s.num_requests for s in steps) / sum(s.num_steps for s in steps)


def usage(levels):
    return levels.num_used_pages / (levels.num_used_pages + levels.num_evictable_pages + levels.num_free_pages)


def test_without_sharing_the_pool_admits_38(results):
    """2.12 M tokens over a prompt, half of its output and the reserve of 400: 38.5."""
    tokens = pool_tokens("baseline")
    assert tokens == pytest.approx(2.12e6, rel=0.005)
    assert tokens / (54_500 + 355 / 2 + 400) == pytest.approx(38.5, abs=0.1)
    levels = decode_levels(results["baseline"])
    assert max(now.num_running for now in levels) == 38
    assert {now.blocked_by for now in levels} == {"pages"}
    assert min(map(usage, levels)) > 0.95


def test_with_sharing_the_clients_are_the_limit(results):
    """20 prefixes and the rest of 115 requests with half of their outputs: 1.54 M tokens, 0.73 of the pool."""
    resident = 20 * 50_000 + 115 * (4500 + 180)
    assert resident == pytest.approx(1.54e6, rel=0.005)
    assert resident / pool_tokens("radix") == pytest.approx(0.73, abs=0.01)
    levels = [now for now in decode_levels(results["radix"]) if 104 <= now.num_running <= 126]
    assert len(levels) > 100
    for now in levels:
        assert usage(now) == pytest.approx(0.75, abs=0.03)
        assert not now.blocked_by


@pytest.mark.parametrize(
    ("arm", "requests_per_s", "itl_ms"),
    [("baseline", 1.2433, 65.17), ("radix", 1.6075, 134.63), ("radix-64", 1.5485, 79.04)],
)
def test_decoding_requests_by_littles_law(results, arm, requests_per_s, itl_ms):
    """Throughput * ITL * (output tokens - 1) is the run's mean number decoding, and 28.7, 76.7 and 43.4 as measured."""
    summary = by_client(results[arm].summary(), CASE.client)
    decoding = summary["pdsim"]["mean_running_requests"]
    gaps = summary["total_output_tokens"] / summary["completed"] - 1
    assert decoding == pytest.approx(summary["request_throughput"] * summary["mean_itl_ms"] / 1e3 * gaps, rel=0.005)
    assert decoding == pytest.approx(requests_per_s * itl_ms / 1e3 * (355.4 - 1), rel=0.1)


@pytest.mark.parametrize(("arm", "logged"), [("baseline", 37), ("radix", 115), ("radix-64", 59)])
def test_the_running_batch_is_what_the_log_shows(results, arm, logged):
    """Counted once per decode step, as the log does."""
    assert running_per_step(results[arm]) == pytest.approx(logged, rel=0.12)
