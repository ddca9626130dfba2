"""What is exported says what the run says: read back, numbers are equal; replayed, a trace is the same load."""

import json

import pytest

from pdsim.formats.results.exports import TOOLS
from tests.cli.test_commands import SCENARIO, exit_code, output, output_json

AGGREGATED = SCENARIO.replace("prefill:", "aggregated:").replace(
    "decode: {gpu: h100, pool_tokens: 4096, radix_cache: true}\n", ""
)
DRAFTS = "speculative_draft_tokens: 4, speculative_accept_length: 2.5"
SPECULATIVE = SCENARIO.replace("radix_cache: true", DRAFTS)
MIXED = SCENARIO.replace("prefill: {", "prefill: {instances: 2, ").replace("decode: {", "decode: {tp: 2, ")
WAYS = {"disaggregated": SCENARIO, "aggregated": AGGREGATED, "speculative": SPECULATIVE, "unequal sides": MIXED}


@pytest.fixture(scope="module", params=WAYS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    (path / "little.yaml").write_text(WAYS[request.param])
    assert exit_code("run", path / "little.yaml", "--out", path / "run") == 0
    return path / "run"


@pytest.mark.parametrize("tool", TOOLS)
def test_read_back_a_result_has_the_numbers_of_the_run(capsys, folder, tmp_path, tool):
    file = tmp_path / f"{tool}.json"
    output(capsys, "export", folder, "--to", tool, "-o", file)
    ours, theirs = output_json(capsys, "compare", folder, file)
    assert theirs.pop("run").endswith({"sglang": "(SGLang)", "vllm": "(vLLM)", "aiperf": "(AIPerf)"}.get(tool, ")"))
    theirs.pop("differences", None)
    assert theirs == pytest.approx({name: ours[name] for name in theirs})
    latencies = {name for name in ours if name.endswith("_ms")} - {"max_itl_ms"}
    without_itl = tool == "aiperf" or (tool == "vllm" and ours["accept_length"] is not None)
    assert latencies - theirs.keys() == ({name for name in latencies if "_itl_" in name} if without_itl else set())
    assert {"total_throughput", "output_throughput"} <= theirs.keys()


def test_files_have_the_fields_of_their_tools(capsys, folder, tmp_path):
    def exported(tool):
        output(capsys, "export", folder, "--to", tool, "-o", tmp_path / tool)
        return json.loads((tmp_path / tool).read_text())

    sglang, vllm, aiperf = (exported(tool) for tool in ("sglang", "vllm", "aiperf"))
    assert {"backend", "random_range_ratio", "total_output_tokens_retokenized", "p90_itl_ms"} <= sglang.keys()
    assert not {"pdsim", "max_itl_ms"} & sglang.keys()
    assert {"endpoint_type", "num_prompts", "failed", "total_token_throughput", "p99_e2el_ms"} <= vllm.keys()
    latency = aiperf["request_latency"]
    assert latency["count"] == aiperf["request_count"]["avg"] == vllm["completed"] == 24
    assert latency["min"] <= latency["p1"] <= latency["p50"] <= latency["p99"] <= latency["max"]
    assert latency["sum"] == pytest.approx(24 * latency["avg"])


def test_a_row_of_inferencex_is_per_gpu_of_its_role(capsys, tmp_path):
    (tmp_path / "little.yaml").write_text(MIXED)
    summary = output_json(capsys, "run", tmp_path / "little.yaml")
    output(capsys, "export", tmp_path / "little.yaml", "--to", "inferencex", "-o", tmp_path / "agg.json")
    row = json.loads((tmp_path / "agg.json").read_text())
    assert (row["num_prefill_gpu"], row["num_decode_gpu"], row["decode_tp"]) == (2, 2, 2)
    assert row["tput_per_gpu"] == pytest.approx(summary["total_throughput"] / 4)
    assert row["output_tput_per_gpu"] == pytest.approx(summary["output_throughput"] / 2)
    assert row["mean_intvty"] == pytest.approx(1e3 / summary["mean_tpot_ms"])


POOL = """\
workload:
  use: prefix_pool
  num_requests: 60
  num_prefixes: 3
  prefix_tokens: 64
  input_tokens: 40
  output_tokens: {use: uniform, low: 2, high: 20}
"""
REPLAYED = "workload={use: mooncake_trace, path: trace.jsonl, block_tokens: 16}"
TOLD = ("tag", "dataset_name", "request_rate", "max_concurrency")


@pytest.mark.parametrize(
    "client",
    [
        "{use: open_loop, arrivals: {use: poisson, rate: 50/s}}",
        "{use: closed_loop, concurrency: 5, warm_up_requests: 0}",
    ],
)
def test_a_trace_replays_the_run(capsys, tmp_path, client):
    """Prompts share whole blocks here, so that nothing is lost. A closed loop's times are those at which it sent."""
    path = tmp_path / "pool.yaml"
    path.write_text(SCENARIO.split("workload:")[0] + POOL + f"client: {client}\n")
    output(capsys, "export", path, "--to", "mooncake", "--block-tokens", 16, "-o", tmp_path / "trace.jsonl")
    sent = output_json(capsys, "run", path)
    replayed = output_json(capsys, "run", path, "--set", REPLAYED, "--set", "client=open_loop")
    assert sent["pdsim"]["prefill_cache_hit_rate"] > 0.3
    for summary in (sent, replayed):
        del summary["pdsim"]["events"]  # a client's timer is one
        del summary["pdsim"]["interval"]  # at its ends a closed loop sends at other times
        for name in TOLD:
            del summary[name]
    assert replayed == sent


AGENT = """\
{"request_id": "a", "timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [0, 1, 2]}
{"request_id": "b", "wait_for": ["a"], "delay": 5, "input_length": 32, "output_length": 9, "hash_ids": [0, 1]}
{"request_id": "c", "wait_for": ["a"], "delay": 9, "input_length": 16, "output_length": 4, "hash_ids": [3]}
{"request_id": "d", "wait_for": ["c", "b"], "delay": 70, "input_length": 48, "output_length": 2, "hash_ids": [0, 1, 4]}
"""


def test_a_trace_of_an_agent_replays_the_run_and_is_no_plain_trace(capsys, tmp_path):
    (tmp_path / "agent.jsonl").write_text(AGENT)
    path = tmp_path / "agent.yaml"
    workload = "workload: {use: agentic_mooncake_trace, block_tokens: 16, path: agent.jsonl}\n"
    path.write_text(SCENARIO.split("workload:")[0] + workload)
    assert exit_code("export", path, "--to", "mooncake", "-o", tmp_path / "x.jsonl") == 2
    assert f"{path}: request 0 is followed by several" in (told := capsys.readouterr().err)
    assert "--to agentic_mooncake" in told
    assert not (tmp_path / "x.jsonl").exists()
    options = ("--to", "agentic_mooncake", "--block-tokens", 16, "-o", tmp_path / "again.jsonl")
    output(capsys, "export", path, *options)
    first = output_json(capsys, "run", path)
    assert output_json(capsys, "run", path, "--set", "workload.path=again.jsonl") == first


def test_only_runs_are_exported(capsys, folder, tmp_path):
    output(capsys, "export", folder, "--to", "vllm", "-o", tmp_path / "vllm.json")
    assert exit_code("export", tmp_path / "vllm.json", "--to", "sglang", "-o", tmp_path / "x.json") == 2
    assert "is a result of another tool; expected a run folder or a scenario file" in capsys.readouterr().err
    assert exit_code("export", folder, "--to", "guidellm", "-o", tmp_path / "x.json") == 2
    assert "guidellm" in capsys.readouterr().err
    assert exit_code("export", folder, "--to", "mooncake", "--block-tokens", 0, "-o", tmp_path / "x.json") == 2
    assert "for --block-tokens. Must be >= 1" in capsys.readouterr().err
    assert exit_code("export", tmp_path, "--to", "vllm", "-o", tmp_path / "x.json") == 2
    assert "is no run folder" in capsys.readouterr().err


def test_a_run_whose_trace_is_gone_is_told_so(capsys, tmp_path):
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [0]}\n')
    workload = f"{{use: mooncake_trace, path: {tmp_path / 'trace.jsonl'}}}"
    (tmp_path / "traced.yaml").write_text(SCENARIO.split("workload:")[0] + f"workload: {workload}\n")
    output(capsys, "run", tmp_path / "traced.yaml", "--out", tmp_path / "run")
    (tmp_path / "trace.jsonl").unlink()
    assert exit_code("export", tmp_path / "run", "--to", "mooncake", "-o", tmp_path / "x.jsonl") == 2
    assert f"pdsim: workload: no trace file {tmp_path / 'trace.jsonl'}" in capsys.readouterr().err


def test_with_a_stream_interval_vllm_counts_the_time_between_groups(capsys, tmp_path):
    (tmp_path / "little.yaml").write_text(SCENARIO.replace("radix_cache: true", "stream_interval: 4"))
    output(capsys, "export", tmp_path / "little.yaml", "--to", "vllm", "-o", tmp_path / "vllm.json")
    summary, result = (
        output_json(capsys, "run", tmp_path / "little.yaml"),
        json.loads((tmp_path / "vllm.json").read_text()),
    )
    assert result["mean_itl_ms"] == summary["pdsim"]["mean_inter_chunk_latency_ms"] > 2 * summary["mean_itl_ms"]
