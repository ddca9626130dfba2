"""Results of other tools beside a simulation: equal definitions under equal names, and nothing invented."""

import json

import pytest

from pdsim.calibration.imported import read_results
from tests.cli.test_commands import SCENARIO, exit_code, output, output_json

SGLANG = {
    "tag": "real",
    "backend": "sglang",
    "request_rate": float("inf"),
    "duration": 2.0,
    "completed": 24,
    "request_throughput": 12.0,
    "mean_e2e_latency_ms": 90.0,
    "mean_ttft_ms": 30.0,
    "mean_tpot_ms": 5.0,
    "mean_itl_ms": 5.5,
    "p99_itl_ms": 9.0,
    "max_itl_ms": 12.0,
}
VLLM = {
    "date": "20261122",
    "label": None,
    "request_rate": "inf",
    "duration": 2.0,
    "completed": 24,
    "total_token_throughput": 700.0,
    "mean_ttft_ms": 30.0,
    "median_tpot_ms": 5.0,
    "p99_e2el_ms": 120.0,
}
AIPERF = {
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "request_count": {"unit": "requests", "avg": 24.0},
    "benchmark_duration": {"unit": "sec", "avg": 2.0},
    "request_latency": {"unit": "ms", "avg": 90.0, "p50": 85.0, "p99": 120.0, "std": 9.0},
    "time_to_first_token": {"unit": "s", "avg": 0.03, "p50": 0.02},
    "inter_token_latency": {"unit": "ms", "avg": 5.0, "p50": 4.5},
    "inter_chunk_latency": {"unit": "ms", "avg": 6.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 120.0},
}
INFERENCEX = {
    "hw": "h200",
    "conc": 64,
    "disagg": True,
    "num_prefill_gpu": 2,
    "num_decode_gpu": 4,
    "tput_per_gpu": 100.0,
    "output_tput_per_gpu": 30.0,
    "input_tput_per_gpu": 240.0,
    "mean_ttft": 0.03,
    "mean_tpot": 0.005,
    "mean_intvty": 200.0,
    "p99_e2el": 0.12,
}


def written(tmp_path, *rows, name="bench.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def summary(tmp_path, row):
    (found,) = read_results(written(tmp_path, row))
    return found.tool, found.summary


def test_sglang(tmp_path):
    tool, found = summary(tmp_path, SGLANG)
    assert tool == "SGLang"
    assert found == {
        name: value for name, value in SGLANG.items() if name not in {"tag", "backend", "request_rate", "max_itl_ms"}
    }


def test_vllm(tmp_path):
    assert summary(tmp_path, VLLM) == (
        "vLLM",
        {
            "duration": 2.0,
            "completed": 24,
            "total_throughput": 700.0,
            "mean_ttft_ms": 30.0,
            "median_tpot_ms": 5.0,
            "p99_e2e_latency_ms": 120.0,
        },
    )


def test_what_aiperf_calls_itl_is_tpot_and_its_chunks_are_no_itl(tmp_path):
    tool, found = summary(tmp_path, AIPERF)
    assert tool == "AIPerf"
    assert found == {
        "completed": 24.0,
        "duration": 2.0,
        "output_throughput": 120.0,
        "mean_e2e_latency_ms": 90.0,
        "median_e2e_latency_ms": 85.0,
        "p99_e2e_latency_ms": 120.0,
        "std_e2e_latency_ms": 9.0,
        "mean_ttft_ms": 30.0,
        "median_ttft_ms": 20.0,
        "mean_tpot_ms": 5.0,
        "median_tpot_ms": 4.5,
    }


def test_inferencex_counts_output_per_decode_gpu_and_input_per_prefill_gpu(tmp_path):
    tool, found = summary(tmp_path, INFERENCEX)
    assert tool == "InferenceX"
    assert found == pytest.approx(
        {
            "total_throughput": 600.0,
            "output_throughput": 120.0,
            "input_throughput": 480.0,
            "mean_ttft_ms": 30.0,
            "mean_tpot_ms": 5.0,
            "p99_e2e_latency_ms": 120.0,
            "max_concurrency": 64,
        }
    )
    alone = {**INFERENCEX, "disagg": False, "tp": 8}
    assert summary(tmp_path, alone)[1]["output_throughput"] == 240


def test_one_file_may_hold_several_results(tmp_path):
    array = tmp_path / "agg_bmk.json"
    array.write_text(json.dumps([INFERENCEX, INFERENCEX]))
    assert [one.name for one in read_results(array)] == ["agg_bmk", "agg_bmk #2"]
    assert [one.name for one in read_results(written(tmp_path, SGLANG, SGLANG))] == ["real", "real #2"]


def test_a_real_deployment_stands_beside_a_run(capsys, tmp_path):
    (tmp_path / "little.yaml").write_text(SCENARIO)
    output(capsys, "run", tmp_path / "little.yaml", "--out", tmp_path / "run")
    bench = written(tmp_path, SGLANG)
    table = output(capsys, "compare", tmp_path / "run", bench, "--out", tmp_path / "both")
    assert "real (SGLang)" in table
    assert "what limits little" in table
    assert "what limits real" not in table
    assert (tmp_path / "both" / "compare.png").is_file()
    rows = output_json(capsys, "compare", tmp_path / "run", bench)
    assert rows[1]["run"] == "real (SGLang)"
    assert rows[1]["limit"] is None
    assert "p99_ttft_ms" not in rows[1]


def test_what_a_tool_does_not_report_is_blank_and_not_zero(capsys, tmp_path):
    bench, other = written(tmp_path, SGLANG), written(tmp_path, AIPERF, name="profile_export_aiperf.json")
    lines = output(capsys, "compare", bench, other).splitlines()
    (itl,) = [line for line in lines if "ITL mean" in line]
    assert itl.split() == ["ITL", "mean,", "ms", "5.50"]
    (hits,) = [line for line in lines if "prefill cache hits" in line]
    assert hits.split() == ["prefill", "cache", "hits"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has no results"),
        ("[1]", "result 1: expected an object, found int"),
        ('{"a": 1}', "is no result of SGLang's bench_serving, vLLM's bench serve, AIPerf or InferenceX: it has a"),
        ('{"a": ', "line 1: not JSON"),
        ('{"aiperf_version": "1", "request_latency": {"unit": "h", "avg": 1}}', "request_latency: no unit 'h'"),
        ('{"tput_per_gpu": 1}', "result 1: InferenceX's row has no tp"),
    ],
)
def test_what_no_tool_writes_is_one_message(capsys, tmp_path, text, message):
    (tmp_path / "little.yaml").write_text(SCENARIO)
    (tmp_path / "bench.json").write_text(text)
    assert exit_code("compare", tmp_path / "bench.json", tmp_path / "little.yaml") == 2
    assert message in capsys.readouterr().err
