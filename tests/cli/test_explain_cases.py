"""`pdsim explain --tornado` names the resource that binds: more of that one helps, and more of another helps little."""

import json
import re
from typing import get_type_hints

import pytest

from pdsim.cli import main
from pdsim.metrics.explanation.relief import AGGREGATED_RELIEF
from pdsim.metrics.explanation.relief import RELIEF as RELIEF_FIELDS
from pdsim.scenario.sections.encoding import EncodeSettings
from pdsim.scenario.sections.network import NetworkSettings, StagingSettings
from pdsim.scenario.sections.servers import (
    AggregatedSettings,
    DecodeSettings,
    PrefillSettings,
    StorageSettings,
)

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
client: {use: closed_loop, concurrency: 40, warm_up_requests: 0}
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
    "decode KV": ["decode.pool_tokens=2000"],
}
"""The resource, and how it is made scarce."""

RELIEF = {
    "prefill compute": ["cost.prefill.prefill_per_token=0.25 ms"],
    "prefill slots": ["prefill.max_running_requests=4"],
    "link": ["network.bandwidth=800 MB/s"],
    "descriptor cost": ["network.descriptor_latency=12.5 us"],
    "descriptor cost of slices": ["network.staging={ring: 4 GB}"],
    "decode KV": ["decode.pool_tokens=8000"],
}
"""Four times as much of it, or staging instead of slices."""

MORE = {
    "prefill compute": ["cost.prefill.prefill_per_token=0.0125 ms"],
    "prefill slots": ["prefill.max_running_requests=256"],
    "link": ["network.bandwidth=400 GB/s"],
    "descriptor cost": ["network.descriptor_latency=250 ns"],
    "decode KV": ["decode.pool_tokens=800000"],
    "decode slots": ["decode.max_running_requests=1024"],
}
"""Four times as much of what there is plenty of."""


@pytest.fixture
def pdsim(tmp_path, capsys):
    path = tmp_path / "case.yaml"
    path.write_text(SCENARIO)

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main([words[0], str(path), "--json", *words[1:]])
        assert not stop.value.code
        return json.loads(capsys.readouterr().out)

    return call


def setting(*changes):
    return [word for change in changes for word in ("--set", change)]


def limits(pdsim, *changes):
    """By metric."""
    return {limit["metric"]: limit for limit in pdsim("explain", "--tornado", *setting(*changes))["limits"]}


@pytest.mark.parametrize("case", CASES)
def test_the_resource_is_named_and_more_of_it_helps(pdsim, case):
    limit = limits(pdsim, *CASES[case])["TTFT p99"]
    resource = case.removesuffix(" of slices")
    assert limit["resource"] == resource, limit
    assert limit["change"] < -0.05
    if resource == "descriptor cost":  # what was simulated and helps in this case
        assert limit["relief"].startswith("decode.tp: 2 (" if "slices" in case else "page_size: 64 (")
    else:
        assert limit["relief"] == RELIEF_FIELDS[resource]
    scarce = pdsim("run", *setting(*CASES[case]))["request_throughput"]
    relieved = pdsim("run", *setting(*CASES[case], *RELIEF[case]))["request_throughput"]
    assert relieved > 1.5 * scarce
    for other in MORE.keys() - {resource}:
        assert pdsim("run", *setting(*CASES[case], *MORE[other]))["request_throughput"] < 1.1 * scarce, other


def test_a_radix_cache_that_is_on_relieves_nothing(pdsim):
    """The hint names decode.radix_cache only while it is off."""
    slow = ["cost.decode.decode_base=50 ms"]
    for cache, is_named in (("false", True), ("true", False)):
        limit = limits(pdsim, *slow, f"decode.radix_cache={cache}")["TPOT mean"]
        assert limit["resource"] == "decode steps"
        assert ("radix_cache" in limit["relief"]) == is_named


BURSTS = [
    "client={use: open_loop, arrivals: {use: gamma, rate: 8/s, burstiness: 0.2}}",
    "workload={use: random_lengths, num_requests: 300, input_tokens: 400, output_tokens: 40}",
]


def test_what_limits_the_tail_under_bursts_is_not_the_stage_with_the_longest_mean(pdsim):
    """Two seconds of decoding, and slices that queue for their descriptors in bursts, with nothing full in the mean."""
    sliced = [*BURSTS, "prefill.tp=2", "network.transport=mooncake-rdma", "network.descriptor_latency=3 us"]
    report = pdsim("explain", *setting(*sliced))
    assert max(report["stages"], key=lambda stage: stage["mean_ms"])["stage"] == "decode_forward"
    assert all(use["lacks_pages"] == use["lacks_slots"] == 0 for use in report["instances"])
    slowest_ms = sum(s["slowest_ms"] for s in report["stages"] if s["stage"] != "decode_forward")
    assert slowest_ms >= pdsim("run", *setting(*sliced))["p99_ttft_ms"], "the mean of what lies above"
    found = limits(pdsim, *sliced)
    assert found["TTFT p99"]["resource"] == "descriptor cost"
    assert found["TPOT p99"]["resource"] == "decode steps"
    assert limits(pdsim, *BURSTS)["TTFT p99"]["resource"] != "descriptor cost"


SECTIONS = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "aggregated": AggregatedSettings,
    "network": NetworkSettings,
    "staging": StagingSettings,
    "storage": StorageSettings,
    "encode": EncodeSettings,
}


@pytest.mark.parametrize("relief", sorted({*RELIEF_FIELDS.values(), *AGGREGATED_RELIEF.values()}))
def test_relief_names_fields_that_a_scenario_has(relief):
    for section, field in re.findall(r"(\w+)\.(\w+)(?![.\w])", relief):
        assert field in get_type_hints(SECTIONS[section])


AGGREGATED = {
    "aggregated KV": ["aggregated.pool_tokens=2000"],
    "aggregated slots": ["aggregated.max_running_requests=8"],
    "prefill compute": ["cost.prefill.prefill_per_token=1 ms"],
}


@pytest.mark.parametrize("case", AGGREGATED)
def test_the_limit_of_an_aggregated_cluster_names_its_own_fields(pdsim, case):
    aggregated = "aggregated={gpu: h100, pool_tokens: 200000, max_running_requests: 256}"
    limit = limits(pdsim, "prefill=null", "decode=null", aggregated, *AGGREGATED[case])["TTFT mean"]
    assert limit["resource"] == case, limit
    assert set(re.findall(r"[a-z]+(?=\.)", limit["relief"])) == {"aggregated"}


def test_without_a_tornado_there_are_times_and_no_verdict(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(SCENARIO.replace("case", name))
    for words in (["compare", tmp_path / "a.yaml", tmp_path / "b.yaml"], ["run", tmp_path / "a.yaml"]):
        with pytest.raises(SystemExit):
            main([str(word) for word in (*words, "--details")])
        out = capsys.readouterr().out
        assert "slowest 1%" in out
        assert "limits T" not in out


def test_what_it_suggests_is_about_the_same_run(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(SCENARIO)
    with pytest.raises(SystemExit):
        main(["explain", str(path), "--set", "network.bandwidth=10 GB/s"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"what limits it: pdsim explain {path} --set 'network.bandwidth=10 GB/s' --tornado"
