"""The report of DynoSim (`python -m dynamo.replay --report-json`), a simulator: virtual times, counted from arrival."""

from pdsim.calibration.interop.tools.fields import Fields
from pdsim.metrics.summary import STATISTICS

_TOTALS = {
    "completed_requests": "completed",
    "total_input_tokens": "total_input_tokens",
    "total_output_tokens": "total_output_tokens",
    "request_throughput_rps": "request_throughput",
    "input_throughput_tok_s": "input_throughput",
    "output_throughput_tok_s": "output_throughput",
    "total_throughput_tok_s": "total_throughput",
}


def is_dynosim(result: Fields) -> bool:
    return "request_throughput_rps" in result or {"summary", "coverage"} <= set(result)


def dynosim(result: Fields) -> dict[str, float]:
    """A latency without samples is 0 there. Reports that tell token gaps mean by ITL what others call TPOT."""
    report = result.part("summary") if "summary" in result else result
    summary = report.numbers({"duration_ms": "duration"}, 1e-3) | report.numbers(_TOTALS)
    gaps = "token_gap" if "mean_token_gap_ms" in report else "itl"
    for theirs, ours in {"e2e_latency": "e2e_latency", "ttft": "ttft", "tpot": "tpot", gaps: "itl"}.items():
        if report.number(f"mean_{theirs}_ms"):
            summary |= report.numbers({f"{s}_{theirs}_ms": f"{s}_{ours}_ms" for s in STATISTICS})
    return summary
