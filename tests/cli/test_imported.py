"""Results of other tools beside a simulation: equal definitions under equal names, and nothing invented."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.formats.results.reading import is_result, read_results
from pdsim.scenario.yaml_file import ConfigError
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


def status(mean, **others):
    """A distribution of GuideLLM's, of successful requests."""
    percentiles = {"p50": mean, "p90": 1.5 * mean, "p95": 1.75 * mean, "p99": 2 * mean}
    successful = {"mean": mean, "median": mean, "std_dev": mean / 4, "total_sum": 24 * mean, "percentiles": percentiles}
    return {"successful": {**successful, **others}, "errored": {"mean": 0.0}}


GUIDELLM_METRICS = {
    "request_totals": {"successful": 24, "errored": 1, "incomplete": 0, "total": 25},
    "requests_per_second": status(12.0),
    "request_concurrency": status(3.5),
    "request_latency": status(0.09),
    "prompt_token_count": status(100.0),
    "output_token_count": status(10.0, min=10.0, max=10.0),
    "time_to_first_token_ms": status(30.0),
    "time_per_output_token_ms": status(8.0),
    "inter_token_latency_ms": status(5.0),
    "prompt_tokens_per_second": status(1200.0),
    "output_tokens_per_second": status(120.0),
    "tokens_per_second": status(1320.0),
}
GUIDELLM_BENCHMARK = {
    "type_": "generative_benchmark",
    "config": {"strategy": {"type_": "concurrent", "streams": 4}},
    "scheduler_metrics": {"strategy_type": "concurrent"},
    "metrics": GUIDELLM_METRICS,
    "requests": {"successful": [], "errored": [], "incomplete": [], "total": None},
    "duration": 2.0,
}
GENAI_STATISTICS = {
    "min": 0.1,
    "mean": 0.2,
    "stddev": 0.05,
    "sum": 4.8,
    "p25": 0.1,
    "p50": 0.15,
    "p90": 0.4,
    "p99": 0.8,
}
GENAI_BENCH = {
    "aggregated_metrics": {
        "scenario": "D(100,10)",
        "num_concurrency": 4,
        "iteration_type": "num_concurrency",
        "run_duration": 2.0,
        "mean_output_throughput_tokens_per_s": 120.0,
        "mean_input_throughput_tokens_per_s": 1200.0,
        "mean_total_tokens_throughput_tokens_per_s": 1320.0,
        "requests_per_second": 12.0,
        "error_rate": 0.0,
        "num_completed_requests": 24,
        "total_arrivals": None,
        "stats": {
            "ttft": {**GENAI_STATISTICS, "p95": None},
            "tpot": {"mean": 0.005, "p50": 0.004},
            "e2e_latency": {"mean": 0.25},
            "output_latency": {"mean": 0.22},
            "num_input_tokens": {"mean": 100.0, "sum": 2400},
            "num_output_tokens": {"mean": 10.0, "sum": 240},
        },
    },
    "individual_request_metrics": [],
}
DYNOSIM = {
    "num_requests": 25,
    "completed_requests": 24,
    "total_input_tokens": 2400,
    "total_output_tokens": 240,
    "duration_ms": 2000.0,
    "wall_time_ms": 3.5,
    "request_throughput_rps": 12.0,
    "output_throughput_tok_s": 120.0,
    "prefix_cache_reused_ratio": 0.25,
    "mean_ttft_ms": 30.0,
    "p75_ttft_ms": 33.0,
    "mean_ttst_ms": 5.0,
    "mean_tpot_ms": 5.0,
    "mean_itl_ms": 5.5,
    "p99_itl_ms": 9.0,
    "mean_e2e_latency_ms": 90.0,
}


def guidellm(**changed):
    benchmark = {**GUIDELLM_BENCHMARK, "metrics": {**GUIDELLM_METRICS, **changed}}
    return {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "config": {}, "benchmarks": [benchmark]}


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
            "request_throughput": 12.0,
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


def test_guidellm_times_per_output_token_hold_the_first_one_and_are_left_out(tmp_path):
    tool, found = summary(tmp_path, guidellm())
    assert tool == "GuideLLM"
    times = {"mean": 1, "median": 1, "std": 0.25, "p90": 1.5, "p95": 1.75, "p99": 2}
    means_ms = {"e2e_latency": 90.0, "ttft": 30.0, "tpot": 5.0}
    assert found == pytest.approx(
        {
            "duration": 2.0,
            "completed": 24,
            "max_concurrency": 4,
            "concurrency": 3.5,
            "total_input_tokens": 2400.0,
            "total_output_tokens": 240.0,
            "request_throughput": 12.0,
            "input_throughput": 1200.0,
            "output_throughput": 120.0,
            "total_throughput": 1320.0,
            "mean_itl_ms": 5.0,
            **{f"{s}_{name}_ms": share * mean for name, mean in means_ms.items() for s, share in times.items()},
        }
    )


def test_guidellm_weighs_gaps_by_tokens_so_that_tpot_is_of_the_requests_one_by_one(tmp_path):
    """Two requests, of 3 and of 21 tokens, with 8 and 4 ms between tokens: ITL is 4.36 in the mean and TPOT 6."""
    itl_ms = (2 * 8 + 20 * 4) / 22
    report = guidellm(
        request_totals={"successful": 2},
        output_token_count=status(12.0, min=3.0, max=21.0),
        inter_token_latency_ms=status(itl_ms),
    )
    assert "mean_tpot_ms" not in summary(tmp_path, report)[1]
    each = [{"inter_token_latency_ms": 8.0}, {"inter_token_latency_ms": 4.0}]
    report["benchmarks"][0]["requests"] = {"successful": each}
    found = summary(tmp_path, report)[1]
    assert (found["mean_itl_ms"], found["mean_tpot_ms"], found["std_tpot_ms"]) == (itl_ms, 6.0, 2.0)
    assert "p99_itl_ms" not in found
    del report["benchmarks"][0]["metrics"]["output_token_count"]
    assert summary(tmp_path, report)[1]["mean_tpot_ms"] == 6.0
    del report["benchmarks"][0]["requests"]
    assert "mean_tpot_ms" not in summary(tmp_path, report)[1], "the lengths are not known, so they may differ"


def test_what_was_not_streamed_has_no_times_of_tokens(tmp_path):
    report = guidellm(time_to_first_token_ms=status(0.0), inter_token_latency_ms=status(0.0))
    dynosim = {**DYNOSIM, "mean_tpot_ms": 0.0, "mean_itl_ms": 0.0, "p99_itl_ms": 0.0}
    for row in (report, dynosim):
        assert not {"mean_tpot_ms", "mean_itl_ms", "p99_itl_ms"} & summary(tmp_path, row)[1].keys()
    assert "mean_ttft_ms" not in summary(tmp_path, report)[1]


def test_every_benchmark_of_guidellm_is_a_result(tmp_path):
    report = guidellm()
    report["benchmarks"] += [
        {**GUIDELLM_BENCHMARK, "config": {"strategy": strategy}}
        for strategy in ({"type_": "constant", "rate": 2.5}, {"type_": "synchronous"})
    ]
    names = [one.name for one in read_results(written(tmp_path, report))]
    assert names == ["concurrent@4", "constant@2.5 #2", "synchronous #3"]


def test_genai_bench_is_in_seconds_unless_it_says_otherwise(tmp_path):
    tool, found = summary(tmp_path, GENAI_BENCH)
    assert tool == "genai-bench"
    assert found == pytest.approx(
        {
            "duration": 2.0,
            "completed": 24,
            "max_concurrency": 4,
            "total_input_tokens": 2400,
            "total_output_tokens": 240,
            "request_throughput": 12.0,
            "input_throughput": 1200.0,
            "output_throughput": 120.0,
            "total_throughput": 1320.0,
            "mean_ttft_ms": 200.0,
            "median_ttft_ms": 150.0,
            "std_ttft_ms": 50.0,
            "p90_ttft_ms": 400.0,
            "p99_ttft_ms": 800.0,
            "mean_tpot_ms": 5.0,
            "median_tpot_ms": 4.0,
            "mean_e2e_latency_ms": 250.0,
        }
    )
    assert summary(tmp_path, {**GENAI_BENCH, "_time_unit": "ms"})[1]["mean_ttft_ms"] == 0.2


def test_genai_bench_with_warm_up_has_no_rates_of_tokens(tmp_path):
    """It divides the tokens of some requests by the time of all."""
    metrics = GENAI_BENCH["aggregated_metrics"]
    some = {**metrics["stats"], "num_input_tokens": {"mean": 100.0, "sum": 2000}}
    row = {"aggregated_metrics": {**metrics, "stats": some, "total_arrivals": 30}}
    found = summary(tmp_path, row)[1]
    assert not {"output_throughput", "total_output_tokens", "max_concurrency"} & found.keys()
    assert found["request_throughput"] == 12


def test_dynosim_has_names_like_ours(tmp_path):
    tool, found = summary(tmp_path, DYNOSIM)
    assert tool == "DynoSim"
    same = ("total_input_tokens", "total_output_tokens", "mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "p99_itl_ms")
    assert found == {
        "duration": 2.0,
        "completed": 24,
        "request_throughput": 12.0,
        "output_throughput": 120.0,
        "mean_e2e_latency_ms": 90.0,
        **{name: DYNOSIM[name] for name in same},
    }
    whole = {"summary": DYNOSIM, "per_request": None, "coverage": {}, "planner": None}
    assert summary(tmp_path, whole) == (tool, found)


def test_where_dynosim_tells_token_gaps_they_are_itl(tmp_path):
    gaps = {**DYNOSIM, "mean_itl_ms": 5.0, "mean_token_gap_ms": 5.5, "p99_token_gap_ms": 9.0}
    assert summary(tmp_path, gaps) == summary(tmp_path, DYNOSIM)


def test_a_result_that_begins_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "marked.json"
    path.write_text(json.dumps(SGLANG), encoding="utf-8-sig")
    assert [one.name for one in read_results(path)] == ["real"]


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
    assert (tmp_path / "both" / "compare.png").is_file()
    rows = output_json(capsys, "compare", tmp_path / "run", bench)
    assert rows[1]["run"] == "real (SGLang)"
    assert "p99_ttft_ms" not in rows[1]


def test_what_a_tool_does_not_report_is_blank_and_not_zero(capsys, tmp_path):
    bench, other = written(tmp_path, SGLANG), written(tmp_path, AIPERF, name="profile_export_aiperf.json")
    lines = output(capsys, "compare", bench, other, "--details").splitlines()
    (itl,) = [line for line in lines if "ITL mean" in line]
    assert itl.split() == ["ITL", "mean,", "ms", "5.50"]
    (hits,) = [line for line in lines if "prefill cache hits" in line]
    assert hits.split() == ["prefill", "cache", "hits"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has no results"),
        ("[1]", "result 1: expected an object, found int"),
        (
            '{"a": 1}',
            "is no result of AIPerf, InferenceX, inference-perf, llm-d's benchmark reports, GuideLLM, genai-",
        ),
        ('{"a": ', "line 1: not JSON"),
        ('{"aiperf_version": "1", "request_latency": {"unit": "h", "avg": 1}}', "request_latency: no unit 'h'"),
        ('{"tput_per_gpu": 1}', "result 1: InferenceX's row has no tp"),
        ('{"tput_per_gpu": 1, "tp": "all"}', "result 1: tp: expected a whole number, found 'all'"),
        ('{"mean_ttft_ms": "fast"}', "result 1: mean_ttft_ms: expected a finite number, found 'fast'"),
        ('{"mean_ttft_ms": NaN}', "result 1: mean_ttft_ms: expected a finite number, found nan"),
        (
            '{"metadata": {"version": 3}, "benchmarks": []}',
            "metadata.version: pdsim reads versions 1 and 2 of GuideLLM's reports, found 3",
        ),
        ('{"metadata": {"version": 2}, "benchmarks": []}', "has no results"),
        ('{"metadata": {"version": 2}, "benchmarks": 1}', "benchmarks: expected an array, found int"),
        (
            json.dumps(guidellm(request_latency={})),
            "metrics.request_latency.successful: expected an object, found nothing",
        ),
        (
            json.dumps(guidellm(request_latency={"successful": {"mean": "0"}})),
            "request_latency.successful.mean: expected a finite number",
        ),
        ('{"aggregated_metrics": {"stats": []}}', "result 1: aggregated_metrics.stats: expected an object, found list"),
        (json.dumps({**GENAI_BENCH, "_time_unit": "min"}), "result 1: no unit 'min'; there are s, ms"),
        ('{"summary": 1, "coverage": {}}', "result 1: summary: expected an object, found int"),
    ],
)
def test_what_no_tool_writes_is_one_message(capsys, tmp_path, text, message):
    (tmp_path / "little.yaml").write_text(SCENARIO)
    (tmp_path / "bench.json").write_text(text)
    assert exit_code("compare", tmp_path / "bench.json", tmp_path / "little.yaml") == 2
    assert message in capsys.readouterr().err


LIFECYCLE = {
    "load_summary": {"count": 40, "requested_rate": 4.0, "achieved_rate": 3.9},
    "successes": {
        "count": 40,
        "latency": {
            "request_latency": {"mean": 2.1, "median": 2.0, "p99": 3.0},
            "time_to_first_token": {"mean": 0.21, "median": 0.2, "p90": 0.3},
            "normalized_time_per_output_token": {"mean": 0.05},
            "time_per_output_token": {"mean": 0.011},
            "inter_token_latency": {"mean": 0.012, "p99": 0.02},
        },
        "throughput": {"output_tokens_per_sec": 700.0, "requests_per_sec": 3.9},
        "prompt_len": {"mean": 1000},
        "output_len": {"mean": 180},
    },
    "failures": {"count": 0},
}


def test_inference_perf_is_in_seconds(tmp_path):
    tool, found = summary(tmp_path, LIFECYCLE)
    assert tool == "inference-perf"
    assert found == pytest.approx(
        {
            "completed": 40,
            "request_throughput": 3.9,
            "output_throughput": 700.0,
            "total_input_tokens": 40_000,
            "total_output_tokens": 7200,
            "mean_e2e_latency_ms": 2100.0,
            "median_e2e_latency_ms": 2000.0,
            "p99_e2e_latency_ms": 3000.0,
            "mean_ttft_ms": 210.0,
            "median_ttft_ms": 200.0,
            "p90_ttft_ms": 300.0,
            "mean_tpot_ms": 11.0,
            "mean_itl_ms": 12.0,
            "p99_itl_ms": 20.0,
        }
    )


AGGREGATE = {
    "requests": {"total": 500, "failures": 4, "input_length": {"mean": 1000, "units": "count"}},
    "latency": {
        "time_to_first_token": {"units": "s", "mean": 0.2, "p50": 0.19, "p99": 0.5},
        "time_per_output_token": {"units": "ms/token", "mean": 11},
    },
}
REPORTS = {
    "0.1": {
        "version": "0.1",
        "scenario": {"model": {"name": "m"}},
        "metrics": {**AGGREGATE, "time": {"duration": 90.0}, "throughput": {"requests_per_sec": 3.9}},
    },
    "0.2": {
        "version": "0.2",
        "run": {"time": {"duration": "PT1M30S"}},
        "results": {
            "request_performance": {
                "aggregate": {**AGGREGATE, "throughput": {"request_rate": {"units": "queries/s", "mean": 3.9}}}
            }
        },
    },
}


@pytest.mark.parametrize("version", REPORTS)
def test_reports_of_llm_d_say_their_units(tmp_path, version, capsys):
    path = tmp_path / "report.yaml"
    path.write_text(json.dumps(REPORTS[version]))
    (found,) = read_results(path)
    assert found.tool == "llm-d's benchmark reports"
    assert found.summary == pytest.approx(
        {
            "completed": 496,
            "duration": 90.0,
            "total_input_tokens": 496_000,
            "request_throughput": 3.9,
            "mean_ttft_ms": 200.0,
            "median_ttft_ms": 190.0,
            "p99_ttft_ms": 500.0,
            "mean_tpot_ms": 11.0,
        }
    )
    (alone,) = output_json(capsys, "compare", path)
    assert alone["mean_ttft_ms"] == 200.0
    assert exit_code("run", path) == 2
    assert "is a result of another tool: pdsim compare shows it" in capsys.readouterr().err


def test_records_of_aiperf_are_one_result(tmp_path):
    def record(begin_ns, phase="profiling", error=None):
        times = {"request_latency": {"value": 300.0, "unit": "ms"}, "time_to_first_token": {"value": 0.2, "unit": "s"}}
        lengths = {"input_sequence_length": {"value": 500}, "output_sequence_length": {"value": 20}}
        metadata = {"benchmark_phase": phase, "request_start_ns": begin_ns, "request_end_ns": begin_ns + 300_000_000}
        return {"metadata": metadata, "metrics": {**times, **lengths}, "error": error}

    rows = [record(0, "warmup"), record(10**9), record(2 * 10**9, error={"code": 1}), record(10**9 + 700_000_000)]
    (found,) = read_results(written(tmp_path, *rows))
    assert found.tool == "AIPerf's records"
    assert found.summary["completed"] == 2
    assert found.summary["duration"] == 1.0
    assert (found.summary["mean_ttft_ms"], found.summary["output_throughput"]) == (200.0, 40.0)
    lacks = record(2 * 10**9)
    lacks["metrics"]["time_to_first_token"]["value"] = lacks["metrics"]["output_sequence_length"]["value"] = None
    lacks["metadata"]["request_start_ns"] = None
    (found,) = read_results(written(tmp_path, *rows, lacks))
    assert (found.summary["completed"], found.summary["total_input_tokens"]) == (3, 1500)
    assert found.summary["mean_ttft_ms"] == 200.0, "of those that have one"
    assert not found.summary.keys() & {"duration", "total_output_tokens", "output_throughput"}


def test_results_of_earlier_releases(tmp_path):
    early = {"records": {name: value for name, value in AIPERF.items() if isinstance(value, dict)}, "input_config": {}}
    assert summary(tmp_path, early) == summary(tmp_path, AIPERF)
    old = {name: value for name, value in GUIDELLM_BENCHMARK.items() if name not in ("config", "scheduler_metrics")}
    metrics = dict(GUIDELLM_METRICS)
    totals = metrics.pop("request_totals")
    old |= {"args": {"strategy": {"type_": "concurrent", "streams": 4}}, "metrics": metrics, "request_totals": totals}
    assert summary(tmp_path, {"benchmarks": [old]}) == summary(tmp_path, guidellm())


PRINTED = """
============ Serving Benchmark Result ============
Successful requests:                     100
Maximum request concurrency:             8
Benchmark duration (s):                  25.00
Total input tokens:                      102400
Total generated tokens:                  12800
Total Token throughput (tok/s):          4,608.00
---------------Time to First Token----------------
Mean TTFT (ms):                          210.10
P99 TTFT (ms):                           400.10
==================================================
"""


def test_a_printed_report_is_a_result(tmp_path):
    """Each of a log's; rates that it lacks are of its totals."""
    path = tmp_path / "bench.log"
    path.write_text(f"qps 1:\n{PRINTED}(client pid=3) {PRINTED.replace('210.10', '310.10')}")
    first, second = read_results(path)
    assert is_result(path)
    assert first.tool == "vLLM"
    assert (first.summary["mean_ttft_ms"], second.summary["mean_ttft_ms"]) == (210.1, 310.1)
    assert {name: first.summary[name] for name in ("completed", "max_concurrency", "total_throughput")} == {
        "completed": 100,
        "max_concurrency": 8,
        "total_throughput": 4608,
    }
    assert first.summary["request_throughput"] == 4


TABLE = """Metric,avg,min,p99,p50
Time To First Token (ms),"1,146.31",249.48,"3,457.97",640.07
Inter Token Latency (ms),30.35,27.59,35.60,30.13
Input Sequence Length,"3,000.05",1,1,1

Metric,Value
Request Throughput (per sec),1.50
Request Count (count),40.00
"""


def test_a_table_of_aiperf_is_a_result(tmp_path):
    path = tmp_path / "profile_export_genai_perf.csv"
    path.write_text(TABLE)
    (found,) = read_results(path)
    assert found.summary == {
        "completed": 40,
        "request_throughput": 1.5,
        "total_input_tokens": 120002,
        "mean_ttft_ms": 1146.31,
        "p99_ttft_ms": 3457.97,
        "median_ttft_ms": 640.07,
        "mean_tpot_ms": 30.35,
        "p99_tpot_ms": 35.6,
        "median_tpot_ms": 30.13,
    }


def test_a_table_of_others_is_no_result(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no table of AIPerf or GenAI-Perf, which begins with Metric,avg"):
        read_results(tmp_path / "t.csv")


def test_guidellm_may_count_requests_in_its_run_stats(tmp_path):
    mean = {"successful": {"mean": 4.0}}
    row = {"args": {"strategy": {"type_": "constant", "rate": 4}}, "run_stats": {"requests_made": {"successful": 9}}}
    _, found = summary(tmp_path, {**row, "metrics": {"requests_per_second": mean}})
    assert found == {"completed": 9, "request_throughput": 4.0}


def _names(found):
    if isinstance(found, dict):
        return set(found).union(*map(_names, found.values()))
    return set().union(*map(_names, found)) if isinstance(found, list) else set()


NAMES = _names([SGLANG, VLLM, AIPERF, INFERENCEX, guidellm(), GENAI_BENCH, DYNOSIM, LIFECYCLE, *REPORTS.values()])
FIELDS = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(st.sampled_from(sorted(NAMES)), inside, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(row=st.dictionaries(st.sampled_from(sorted(NAMES)), FIELDS, max_size=6))
def test_any_known_fields_are_read_or_refused_in_one_line(tmp_path_factory, row):
    path = tmp_path_factory.mktemp("r") / "r.json"
    path.write_text(json.dumps(row))
    try:
        found = read_results(path)
    except ConfigError as wrong:
        said = str(wrong)
    else:
        assert all(isinstance(value, int | float) for one in found for value in one.summary.values())
        return
    assert said.startswith(str(path))
    assert "\n" not in said
