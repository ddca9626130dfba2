"""The metrics of data/, as bench_serving defines them: python experiments/vllm-rtx/measured.py"""

import csv
from pathlib import Path
from statistics import mean

import numpy as np

DATA = Path(__file__).parent / "data"


def metrics(name: str) -> dict[str, float]:
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    duration_s = max(row["end_s"] for row in rows) - min(row["arrival_s"] for row in rows)
    ttft = [1e3 * (row["first_token_s"] - row["arrival_s"]) for row in rows]
    e2e = [1e3 * (row["end_s"] - row["arrival_s"]) for row in rows]
    tpot = [
        1e3 * (row["end_s"] - row["first_token_s"]) / (row["out_tokens"] - 1) for row in rows if row["out_tokens"] > 1
    ]
    return {
        "request_throughput": len(rows) / duration_s,
        "output_throughput": sum(row["out_tokens"] for row in rows) / duration_s,
        **{f"mean_{what}_ms": mean(values) for what, values in (("ttft", ttft), ("tpot", tpot), ("e2e_latency", e2e))},
        **{f"median_{what}_ms": float(np.median(values)) for what, values in (("ttft", ttft), ("tpot", tpot))},
        **{f"p99_{what}_ms": float(np.percentile(values, 99)) for what, values in (("ttft", ttft), ("tpot", tpot))},
    }


def main() -> None:
    for path in sorted(DATA.glob("*.csv")):
        print(path.stem, {key: round(value, 4) for key, value in metrics(path.stem).items()})


if __name__ == "__main__":
    main()
