"""Writes data/, rows.csv.gz and measured.yaml from what measure.sh left: python experiments/sglang-h100/prepare.py RAW

RAW holds res/NAME.jsonl, what the client saw, and log-LIFE/fpm_SIDE.jsonl, the forward passes that servers reported.
Passes of the light loads become rows; the other loads become arms.
"""

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from loads import Request, loads

from pdsim.calibration.fit.rows import write_rows

HERE = Path(__file__).parent
DATA = HERE / "data"
ARMS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("poisson8", "poisson19", "bursts", "long", "mixed", "code", "conversation"), ()),
    "page1_c96": ("client={use: closed_loop, concurrency: 96, warm_up_requests: 0}", "page_size=1"),
    "page1_wide": ("client={use: closed_loop, concurrency: 16, warm_up_requests: 0}", "page_size=1"),
    **dict.fromkeys(("page1_poisson8", "page1_poisson19", "page1_code"), ("page_size=1",)),
    "shared": ("decode.radix_cache=true",),
    "retract": (
        "client={use: closed_loop, concurrency: 48, warm_up_requests: 0}",
        "decode.pool_tokens=40000",
        "decode.admission={use: reserve_decode_tokens, reserved_tokens: 128}",
    ),
}
"""Loads, and what their servers had. Nothing is fitted on them."""
PROVENANCE = {
    "device": "h100",
    "model": "qwen3-8b",
    "software": "SGLang 0.5.12.post1, sglang-kernel 0.4.2.post2, torch 2.11.0+cu130",
    "command": "measure.sh plain",
    "date": "2026-11-25",
}
HEADER = """\
# Made by prepare.py from what measure.sh left.
scenario: scenario.yaml
source: measured on two H100s, see README.md
client: sglang
engine: SGLang 0.5.12
front_end: sglang_gateway
seeds: [0]
arms:
"""
STEP = ("end_unix_s", "gpu_s", "num_prefill", "prefill_tokens", "prefill_kv_tokens", "num_decode", "decode_kv_tokens")
REQUEST = (
    "arrival_s", "in_tokens", "out_tokens", "prefix_id", "prefix_tokens", "cached_tokens",
    "send_s", "first_token_s", "last_token_s", "end_s",
)  # fmt: skip

Record = Mapping[str, Any]
Row = tuple[Any, ...]


def main(raw: Path) -> None:
    DATA.mkdir(exist_ok=True)
    runs = {name: read_run(raw / "res" / f"{name}.jsonl") for name in ARMS}
    sent = loads()
    for name, (_, records) in runs.items():
        write_table(f"requests_{name}", REQUEST, map(request_row, records, sent.get(name, [{}] * len(records))))
    write_table("steps_retract", STEP, steps(raw / "log-retract" / "fpm_d0.jsonl"))
    write_rows(HERE / "rows.csv.gz", fitted_rows(raw / "log-plain", before_s=runs["poisson8"][0]), PROVENANCE)
    arms = (arm(name, records, ARMS[name]) for name, (_, records) in runs.items())
    (HERE / "measured.yaml").write_text(HEADER + "".join(arms), encoding="utf-8")


def read_run(path: Path) -> tuple[float, list[Record]]:
    """When it began, in s since 1970, and its requests."""
    head, *records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    if wrong := [record["err"] for record in records if record["err"] or not record["ev"]]:
        raise SystemExit(f"{path}: {len(wrong)} requests failed, the first with {wrong[0]}")
    return head["wall0"], records


def request_row(record: Record, sent: Request) -> Row:
    times = (record["sent"], record["ev"][0][0], record["ev"][-1][0], record["end"])
    lengths = record["n_in"], record["n_out"], sent.get("pre"), sent.get("pre_len"), record["cached"]
    return record["t"], *lengths, *(round(time, 6) for time in times)


def steps(log: Path) -> Iterator[Row]:
    _, *rows = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return ((row[0], *row[2:8]) for row in rows)


def fitted_rows(logs: Path, before_s: float) -> Iterator[dict[str, object]]:
    """The passes of the light loads, as `pdsim calibrate` reads them."""
    columns = ("kind", "new_tokens", "context_tokens", "prompts", "batch", "time_us")
    for side in ("p0", "d0"):
        for end_s, gpu_s, prompts, rounded, reached, batch, kv_tokens in steps(logs / f"fpm_{side}.jsonl"):
            if end_s >= before_s or bool(prompts) == bool(batch):
                continue
            new = min(rounded, reached)  # a server counts new tokens in whole pages
            row = ("prefill", new, reached - new, prompts, "") if prompts else ("decode", "", kv_tokens, "", batch)
            yield dict(zip(columns, (*row, f"{1e6 * gpu_s:.1f}"), strict=True))


def arm(name: str, records: Sequence[Record], changes: Sequence[str]) -> str:
    changes = [f'"{change}"' for change in (f"workload.path=data/requests_{name}.csv.gz", *changes)]
    run = ", ".join(f"{metric}: {value:.5g}" for metric, value in metrics(records).items())
    return f"  {name}:\n    set: [{', '.join(changes)}]\n    runs: [{{id: {name}, {run}}}]\n"


def metrics(records: Sequence[Record]) -> dict[str, float]:
    """By the definitions of SGLang's client."""
    sent, first, end = np.array([(one["sent"], one["ev"][0][0], one["end"]) for one in records]).T
    ttft, latency = 1e3 * (first - sent), 1e3 * (end - sent)
    tpot = (latency - ttft) / (np.array([one["n_out"] for one in records]) - 1)
    return {
        "request_throughput": len(records) / float(end.max() - sent.min()),
        "mean_ttft_ms": float(ttft.mean()),
        "median_ttft_ms": float(np.median(ttft)),
        "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "mean_tpot_ms": float(tpot.mean()),
        "p99_tpot_ms": float(np.percentile(tpot, 99)),
        "mean_e2e_latency_ms": float(latency.mean()),
        "p99_e2e_latency_ms": float(np.percentile(latency, 99)),
    }


def write_table(name: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    (DATA / f"{name}.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
