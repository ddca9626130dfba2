"""What a simulated request costs does not grow with the cluster and the load, or little: bytecodes, counted."""

import sys
from types import FrameType
from typing import Any

import pytest

from pdsim import is_compiled, load_scenario
from pdsim.scenario.building.cluster import build
from pdsim.sim.simulation import Simulation

SCENARIO = """
name: growth
model: llama-3.1-8b
page_size: 16
prefill: {gpu: h100}
decode: {gpu: h100}
cost: roofline
workload: {use: random_lengths, num_requests: 96, input_tokens: {use: uniform, low: 500, high: 900}, output_tokens: 30}
client: {use: open_loop, arrivals: {use: poisson, rate: 4/s}}
"""


def instances(n: int, router: str) -> list[str]:
    return [
        f"prefill.instances={n}",
        f"decode.instances={n}",
        f"client.arrivals.rate={4 * n}/s",
        f"router={router}",
    ]


def concurrency(n: int) -> list[str]:
    return [f"client={{use: closed_loop, concurrency: {n}}}", f"workload.num_requests={4 * n}"]


def shedding(n: int) -> list[str]:
    """As many wait as may, with others that decode."""
    limit = f"router.shedding={{use: queue_limit, max_queued_requests: {n}}}"
    return [limit, "client.arrivals.rate=1000/s", f"workload.num_requests={3 * n}"]


def prefixes(n: int) -> list[str]:
    pool = f"{{use: prefix_pool, num_requests: 200, num_prefixes: {n}, prefix_tokens: 512, "
    return [f"workload={pool}input_tokens: 200, output_tokens: 30}}", "decode.radix_cache=true", "router=cache_aware"]


def bytecodes_a_request(path: Any, changes: list[str]) -> float:
    """Of running, without the set-up."""
    cluster = build(load_scenario(path, changes))
    simulation, count = Simulation(cluster), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        simulation.run()
    finally:
        sys.settrace(before)
    return count / len(cluster.requests)


@pytest.mark.skipif(is_compiled(), reason="compiled code has no bytecodes")
@pytest.mark.parametrize(
    ("small", "large", "most"),
    [
        (instances(2, "cache_aware"), instances(32, "cache_aware"), 1.3),
        (instances(2, "least_loaded"), instances(32, "least_loaded"), 1.2),
        (concurrency(16), concurrency(128), 1.2),
        (shedding(20), shedding(160), 1.2),
        (prefixes(5), prefixes(100), 1.3),
    ],
    ids=["instances, cache_aware", "instances, least_loaded", "concurrency", "shedding", "prefixes"],
)
def test_the_cost_of_a_request_hardly_grows(tmp_path, small, large, most):
    path = tmp_path / "growth.yaml"
    path.write_text(SCENARIO)
    few, many = (bytecodes_a_request(path, changes) for changes in (small, large))
    assert many / few < most
