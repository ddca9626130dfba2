"""`pdsim explain` names the resource that binds: more of that one helps, and more of another helps little."""

import json
import re
from typing import get_type_hints

import pytest

from pdsim.cli import main
from pdsim.metrics.limits import AGGREGATED_RELIEF
from pdsim.metrics.limits import RELIEF as RELIEF_FIELDS
from pdsim.scenario.schema import (
    AggregatedSettings,
    DecodeSettings,
    NetworkSettings,
    PrefillSettings,
    StagingSettings,
)
from pdsim.workload.clients import ClosedLoop

SCENARIO = """\
name: case
model: qwen3-0.6b
page_size: 16
prefill: {gpu: h100, radix_cache: false, pool_tokens: 200000, max_running_requests: 64}
decode:
  gpu: h100
  pool_tokens: 200000
  max_running_requests: 256
  admission: {use: reserve_decode_tokens, reserved_tokens: 10}
router: round_robin
network: {transport: nixl-cuda-ipc, bandwidth: 100 GB/s, transfer_latency: 10 us, descriptor_latency: 1 us}
cost: {use: affine, prefill_per_token: 0.05 ms, decode_base: 50 ms}
workload: {use: random_lengths, num_requests: 160, input_tokens: 200, output_tokens: 10}
client: {use: closed_loop, concurrency: 40}
"""
"""Of everything there is plenty: 10 ms a prompt, 0.2 ms on the link, half a second of decoding."""

CASES = {
    "prefill compute": ["cost.prefill.prefill_per_token=1 ms"],
    "prefill slots": ["prefill.max_running_requests=1", "network.transfer_latency=200 ms"],
    "link": ["network.bandwidth=200 MB/s"],
    "descriptor cost": ["page_size=1", "network.descriptor_latency=50 us"],
    "descriptor cost of slices": [
        "prefill.tp=2",
        "network.transport=mooncake-rdma",
        "network.descriptor_latency=20 us",
    ],
    "staging ring": ["prefill.tp=2", "network.staging={ring: 32 MB}"],
    "decode KV": ["decode.pool_tokens=2000"],
    "decode batch cap": ["decode.max_running_requests=8", "decode.extra_slots=0"],
    "client concurrency": ["client.concurrency=2"],
}
"""The resource, and how it is made scarce."""

RELIEF = {
    "prefill compute": ["cost.prefill.prefill_per_token=0.25 ms"],
    "prefill slots": ["prefill.max_running_requests=4"],
    "link": ["network.bandwidth=800 MB/s"],
    "descriptor cost": ["network.descriptor_latency=12.5 us"],
    "descriptor cost of slices": ["network.staging={ring: 4 GB}"],
    "staging ring": ["network.staging={ring: 128 MB}"],
    "decode KV": ["decode.pool_tokens=8000"],
    "decode batch cap": ["decode.max_running_requests=32"],
    "client concurrency": ["client.concurrency=8"],
}
"""Four times as much of it, or staging instead of slices."""

MORE = {
    "prefill compute": ["cost.prefill.prefill_per_token=0.0125 ms"],
    "prefill slots": ["prefill.max_running_requests=256"],
    "link": ["network.bandwidth=400 GB/s"],
    "descriptor cost": ["network.descriptor_latency=250 ns"],
    "decode KV": ["decode.pool_tokens=800000"],
    "decode batch cap": ["decode.max_running_requests=1024"],
    "client concurrency": ["client.concurrency=160"],
}
"""Four times as much of what there is plenty of."""


@pytest.fixture
def pdsim(tmp_path, capsys):
    path = tmp_path / "case.yaml"
    path.write_text(SCENARIO)

    def call(command, *changes):
        with pytest.raises(SystemExit) as stop:
            main([command, str(path), "--json", *(word for change in changes for word in ("--set", change))])
        assert not stop.value.code
        return json.loads(capsys.readouterr().out)

    return call


@pytest.mark.parametrize("case", CASES)
def test_the_resource_is_named_and_more_of_it_helps(pdsim, case):
    limit = pdsim("explain", *CASES[case])["limit"]
    resource = case.removesuffix(" of slices")
    assert limit["resource"] == resource, limit
    assert limit["relief"]
    scarce = pdsim("run", *CASES[case])["request_throughput"]
    relieved = pdsim("run", *CASES[case], *RELIEF[case])["request_throughput"]
    assert relieved > 1.5 * scarce
    for other in MORE.keys() - {resource}:
        assert pdsim("run", *CASES[case], *MORE[other])["request_throughput"] < 1.1 * scarce, other


EVIDENCE = {
    "prefill compute": ("prefill-0", r"prefill-0 computes 9\d% of the time"),
    "prefill slots": (
        "prefill-0",
        r"prefill-0 has no slot for the next prompt (9\d|100)% of the time and computes only \d%",
    ),
    "link": ("prefill-0 -> decode-0", r"bytes move on prefill-0 -> decode-0 9\d% of the time"),
    "descriptor cost": ("prefill-0 -> decode-0", r"post descriptors 9\d% of the time, 11,200 of 2.05 KB a transfer"),
    "descriptor cost of slices": (
        "prefill-0 -> decode-0",
        r"post descriptors \d\d% of the time, .* of 1.02 KB a transfer",
    ),
    "staging ring": ("prefill-0 -> decode-0", r"cells wait [\d.]+ s each for room in the ring of decode-0"),
    "decode KV": ("decode-0", r"decode-0 has no page for the head of its queue (9\d|100)% of the time"),
    "decode batch cap": ("decode-0", r"decode-0 has no slot for the next request (9\d|100)% of the time"),
    "client concurrency": (
        "client",
        r"of 2 clients 2.0 wait for an answer, and nothing is full: prefill-0 computes \d%",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_evidence_has_place_and_numbers(pdsim, case):
    limit = pdsim("explain", *CASES[case])["limit"]
    where, evidence = EVIDENCE[case]
    assert limit["where"] == where
    assert re.search(evidence, limit["evidence"]), limit["evidence"]


def test_larger_batches_that_gain_nothing_are_the_limit_of_decode_steps(pdsim):
    """Each request adds to a step what it adds to the batch: pages are missing, and more of them would not help."""
    changes = ["cost={use: affine, prefill_per_token: 0.05 ms, decode_base: 1 ms, decode_per_request: 20 ms}"]
    changes += ["decode.max_running_requests=16", "workload.output_tokens={use: uniform, low: 2, high: 20}"]
    limit = pdsim("explain", *changes)["limit"]
    assert limit["resource"] == "decode steps"
    assert "twice the batch gives only" in limit["evidence"]
    scarce = pdsim("run", *changes)["request_throughput"]
    assert pdsim("run", *changes, "decode.max_running_requests=64")["request_throughput"] < 1.1 * scarce
    assert pdsim("run", *changes, "decode.instances=2")["request_throughput"] > 1.5 * scarce


def test_an_open_load_that_is_served_is_its_own_limit(pdsim):
    limit = pdsim("explain", "client={use: open_loop, arrivals: {use: poisson, rate: 20/s}}")["limit"]
    assert limit["resource"] == "load"
    assert limit["evidence"].startswith("nothing is full: decode-0 decodes")
    assert limit["relief"] == ""


def test_bursts_on_prefill_are_named(pdsim):
    changes = [
        "cost.prefill.prefill_per_token=0.4 ms",
        "client={use: open_loop, arrivals: {use: poisson, rate: 10.5/s}}",
    ]
    changes += ["workload.output_tokens=2", "prefill.chunked_prefill_tokens=208"]
    limit = pdsim("explain", *changes)["limit"]
    assert limit["resource"] == "load"
    assert re.search(r"nothing is full: prefill-0 computes \d\d% of the time in bursts", limit["evidence"]), limit


def test_a_scarce_resource_is_named_under_an_open_load_as_well(pdsim):
    for case in ("prefill compute", "link", "decode KV", "decode batch cap"):
        limit = pdsim("explain", *CASES[case], "client={use: open_loop, arrivals: {use: poisson, rate: 40/s}}")["limit"]
        assert limit["resource"] == case


SECTIONS = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "aggregated": AggregatedSettings,
    "network": NetworkSettings,
    "staging": StagingSettings,
    "client": ClosedLoop,
}


@pytest.mark.parametrize("relief", sorted({*RELIEF_FIELDS.values(), *AGGREGATED_RELIEF.values()}))
def test_relief_names_fields_that_a_scenario_has(relief):
    for section, field in re.findall(r"(\w+)\.(\w+)(?![.\w])", relief):
        assert field in get_type_hints(SECTIONS[section])


AGGREGATED = {
    "decode KV": ["aggregated.pool_tokens=2000"],
    "decode batch cap": ["aggregated.max_running_requests=8"],
    "prefill compute": ["cost.prefill.prefill_per_token=1 ms"],
    "client concurrency": ["client.concurrency=2"],
}


@pytest.mark.parametrize("case", AGGREGATED)
def test_the_limit_of_an_aggregated_cluster_names_its_own_fields(pdsim, case):
    aggregated = "aggregated={gpu: h100, pool_tokens: 200000, max_running_requests: 256}"
    limit = pdsim("explain", "prefill=null", "decode=null", aggregated, *AGGREGATED[case])["limit"]
    assert limit["resource"] == case, limit
    assert re.findall(r"[a-z]+(?=\.)", limit["relief"])
    assert set(re.findall(r"[a-z]+(?=\.)", limit["relief"])) <= {"aggregated", "client"}


def test_compare_names_the_limits_too(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(SCENARIO.replace("case", name))
    words = ["compare", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "--set", "client.concurrency=2"]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main([*words, *more])
        out = capsys.readouterr().out
        if more:
            assert [row["limit"]["resource"] for row in json.loads(out)] == ["client concurrency"] * 2
        else:
            assert "what limits b: client concurrency" in out
