"""Metrics as a given load generator defines them: equal names do not mean equal things.

sglang   bench_serving: ITL is every gap between two tokens
aiperf   ITL is one number per request: (latency - TTFT) / (tokens - 1), which SGLang calls TPOT
"""

from collections.abc import Mapping
from typing import Any, Literal

Client = Literal["sglang", "aiperf"]

STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")


def by_client(summary: Mapping[str, Any], client: Client) -> dict[str, Any]:
    """A summary whose fields mean what that client's fields of the same name mean."""
    fields = dict(summary)
    if client == "aiperf":
        for statistic in STATISTICS:
            fields[f"{statistic}_itl_ms"] = fields[f"{statistic}_tpot_ms"]
    return fields
