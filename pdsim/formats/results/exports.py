"""Writes a run as result files of load generators. Numbers follow each tool's own definitions; reading.py reads the
files.

tool         file                              how its numbers differ from those of a summary
SGLang       JSON lines of bench_serving       not at all: a summary has the same fields
vLLM         JSON of `vllm bench serve`        ITL is between chunks; left out with drafts unless stream_interval is set
AIPerf       profile_export_aiperf.json        inter_token_latency is TPOT over requests; other statistics
InferenceX   agg_*.json                        times in s; output tokens per decode GPU, input tokens per prefill GPU
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.files import write_whole
from pdsim.metrics.distribution import Samples
from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary import STATISTICS, e2e_ms, tpot_ms, ttft_ms
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import ServerSettings
from pdsim.system.catalog import load_model

_ARGUMENTS = ("sharegpt_output_len", "random_input_len", "random_output_len", "random_range_ratio", "server_info")
"""Arguments that bench_serving writes before its results and that a simulation does not have."""
_AIPERF_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_AIPERF_TOTALS = {
    "request_throughput": ("request_throughput", "requests/sec"),
    "output_token_throughput": ("output_throughput", "tokens/sec"),
    "total_token_throughput": ("total_throughput", "tokens/sec"),
    "request_count": ("completed", "requests"),
    "total_isl": ("total_input_tokens", "tokens"),
    "total_osl": ("total_output_tokens", "tokens"),
    "benchmark_duration": ("duration", "sec"),
}


_LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e_latency"}
"""Names of latencies in summaries, by their names in results of vLLM and InferenceX."""


class Run(NamedTuple):
    summary: Mapping[str, Any]
    """The summary of the run: values by field, as in summary.json."""
    requests: Sequence[RequestRecord]
    """Records of the requests that count, without warm-up requests."""
    scenario: Scenario
    """The scenario of the run. Fields that pdsim fills in by itself may still be None."""


def write_result(path: Path, tool: str, run: Run) -> None:
    """Writes a run as a result file of another tool. tool: one of TOOLS."""
    result = TOOLS[tool](run)
    text = json.dumps(result, allow_nan=False, indent=None if tool == "sglang" else 2)
    write_whole(path, text + "\n")


def _sglang(run: Run) -> dict[str, Any]:
    own = ("pdsim", "max_itl_ms")
    fields = {name: value for name, value in run.summary.items() if name not in own}
    return {**dict.fromkeys(_ARGUMENTS), **fields, **_times_ms(run.summary)}


def _vllm(run: Run) -> dict[str, Any]:
    """The result that vLLM writes with --percentile-metrics ttft,tpot,itl,e2el and --metric-percentiles 90,95,99."""
    summary, times_ms = run.summary, _times_ms(run.summary)
    chunks = {f"{s}_itl_ms": summary["pdsim"].get(f"{s}_inter_chunk_latency_ms") for s in STATISTICS}
    if any(chunks.values()):
        times_ms |= {name: value or 0.0 for name, value in chunks.items()}
    has_itl = summary["accept_length"] is None or any(chunks.values())
    names = {theirs: ours for theirs, ours in _LATENCIES.items() if has_itl or ours != "itl"}
    same = ("duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput")
    peaks = ("output_throughput", "max_output_tokens_per_s", "max_concurrent_requests")
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": summary["backend"],
        "backend": summary["backend"],
        "label": summary["tag"],
        "model_id": run.scenario.model,
        "tokenizer_id": run.scenario.model,
        "num_prompts": len(run.requests),
        "request_rate": summary["request_rate"],
        "burstiness": 1.0,
        "max_concurrency": summary["max_concurrency"],
        "failed": sum(request.outcome == "failed" for request in run.requests),
        **{name: summary[name] for name in same},
        "request_goodput": None,
        **{name: summary[name] for name in peaks},
        "total_token_throughput": summary["total_throughput"],
        **{f"{s}_{theirs}_ms": times_ms[f"{s}_{ours}_ms"] for theirs, ours in names.items() for s in STATISTICS},
    }


def _times_ms(summary: Mapping[str, Any]) -> dict[str, float]:
    """The latencies of a summary in ms. A latency that no request has is 0, as load generators write it."""
    names = [f"{statistic}_{name}_ms" for name in _LATENCIES.values() for statistic in STATISTICS]
    return {name: summary[name] or 0.0 for name in names}


def _aiperf(run: Run) -> dict[str, Any]:
    done = [request for request in run.requests if request.outcome == "finished"]
    tpots_ms = [tpot_ms(request) for request in done if request.num_output_tokens > 1]
    totals = {
        theirs: {"unit": unit, "avg": float(run.summary[ours])} for theirs, (ours, unit) in _AIPERF_TOTALS.items()
    }
    return {
        "schema_version": "1.4",
        "aiperf_version": None,
        "benchmark_id": run.summary["tag"],
        **totals,
        "request_latency": _metric("ms", map(e2e_ms, done)),
        "time_to_first_token": _metric("ms", map(ttft_ms, done)),
        "inter_token_latency": _metric("ms", tpots_ms),
        "output_token_throughput_per_user": _metric("tokens/sec/user", (1e3 / each for each in tpots_ms if each)),
        "input_sequence_length": _metric("tokens", (one.num_prompt_tokens for one in done)),
        "output_sequence_length": _metric("tokens", (one.num_output_tokens for one in done)),
        "was_cancelled": bool(run.summary["pdsim"].get("interrupted")),
    }


def _metric(unit: str, values: Iterable[float]) -> dict[str, Any]:
    found = list(values)
    samples = Samples(found)
    return {
        "unit": unit,
        "avg": samples.mean(),
        **{f"p{percent}": samples.percentile(percent) for percent in _AIPERF_PERCENTILES},
        "min": min(found, default=0.0),
        "max": max(found, default=0.0),
        "std": samples.std(),
        "count": len(found),
        "sum": sum(found),
    }


def _inferencex(run: Run) -> dict[str, Any]:
    summary, scenario = run.summary, run.scenario
    times_ms = _times_ms(summary)
    times = {
        f"{s}_{theirs}": times_ms[f"{s}_{ours}_ms"] / 1e3 for theirs, ours in _LATENCIES.items() for s in STATISTICS
    }
    speeds = {f"{s}_intvty": 1 / time_s for s in STATISTICS if s != "std" and (time_s := times[f"{s}_tpot"])}
    completed = summary["completed"] or 1
    return {
        "conc": summary["max_concurrency"],
        "model": scenario.model,
        "infmax_model_prefix": summary["tag"],
        "framework": summary["backend"],
        "precision": scenario.weight_dtype or load_model(scenario.model).weight_dtype,
        "spec_decoding": "none" if summary["accept_length"] is None else "mtp",
        "isl": round(summary["total_input_tokens"] / completed),
        "osl": round(summary["total_output_tokens"] / completed),
        **_inferencex_cluster(summary, scenario),
        **times,
        **speeds,
    }


def _inferencex_cluster(summary: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """The fields of an InferenceX result that describe the cluster. Its rates are per GPU: output tokens per decode
    GPU, and input tokens per prefill GPU.
    """
    if scenario.aggregated is not None:
        gpus = scenario.aggregated.num_gpus
        head = {"hw": scenario.aggregated.gpu, "disagg": False, "tp": gpus, "dp_attention": scenario.aggregated.dp > 1}
        return {**head, **_per_gpu(summary, gpus, gpus, gpus)}
    prefill, decode = scenario.pair
    sizes = prefill.num_gpus, decode.num_gpus
    return {
        "hw": decode.gpu,
        "disagg": True,
        "prefill_hw": prefill.gpu,
        "decode_hw": decode.gpu,
        "num_prefill_gpu": sizes[0],
        "num_decode_gpu": sizes[1],
        "kv_p2p_transfer": scenario.network.transport,
        **_role("prefill", prefill),
        **_role("decode", decode),
        **_per_gpu(summary, sum(sizes), *sizes),
    }


def _role(name: str, role: ServerSettings) -> dict[str, Any]:
    has = {"tp": role.tp, "pp": role.split.pp, "dp_attention": role.dp > 1, "num_workers": role.instances}
    return {f"{name}_{field}": value for field, value in has.items()}


def _per_gpu(summary: Mapping[str, Any], all_gpus: int, prefill_gpus: int, decode_gpus: int) -> dict[str, float]:
    return {
        "tput_per_gpu": summary["total_throughput"] / all_gpus,
        "output_tput_per_gpu": summary["output_throughput"] / decode_gpus,
        "input_tput_per_gpu": summary["input_throughput"] / prefill_gpus,
    }


TOOLS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "aiperf": _aiperf,
    "inferencex": _inferencex,
}
