"""Writes measured.yaml, and the small request tables it uses, from data/: python experiments/sglang-h200/prepare.py

Values are those of the client's own summary. Where requests are left out, because they met cold servers or a cached
prefix, the same metrics are computed from the rows of the others.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rows import DATA, HERE, columns

METRICS = ("request_throughput", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "mean_e2e_latency_ms")
LATENCY_ONLY = ("mean_ttft_ms", "mean_e2e_latency_ms")
ASKED = {"request_throughput": "5 %", "mean_ttft_ms": "12 %", "mean_tpot_ms": "10 %"}
COLD_START = "{1: 232 ms, 2: 52 ms, 8: 48 ms, 130: 51 ms}"
"""One rule for the decode servers that were cold, as cold_start.py finds it."""
TWO_GPUS = ("prefill.tp=2", "decode.tp=2", f'"cost={{profile: profile-tp2.yaml, cold_start: {COLD_START}}}"')
TWO_TO_ONE = ("prefill.tp=2", '"cost={profile: profile-tp2to1.yaml}"')
STAGING = ('"network.staging={ring: 4 GiB, prefill_buffer: 1 GiB}"',)
ONE_TO_TWO = (
    "decode.tp=2",
    f'"cost={{profile: profile-tp1to2.yaml, cold_start: {COLD_START}}}"',
    *STAGING,
)
WARM_ONE_TO_TWO = ("decode.tp=2", '"cost={profile: profile-tp1to2.yaml}"', *STAGING)
THIRTY_TWO = ("model=qwen3-32b", '"cost={profile: profile-32b.yaml}"')
HEADER = """\
# Made by prepare.py from data/.
scenario: scenario.yaml
source: measured on two to four H200s, see data/README.md
client: sglang
engine: SGLang 0.5.12
front_end: sglang_gateway
seeds: [0]
arms:
"""
AGGREGATED = (
    "prefill=null",
    "decode=null",
    '"aggregated={gpu: h200, mem_fraction: 0.907, chunked_prefill_tokens: 8192, max_prefill_tokens: 16384}"',
    "front_end.waits_for_prefill=false",
    "front_end.stall=0 ms",
)
"""One server on one GPU, and no gateway between it and the client."""


@dataclass(frozen=True)
class Arm:
    run: str
    concurrency: int | None
    """None: at the times of the table."""
    changes: Sequence[str] = ()
    fitted: bool = False
    skip: int = 0
    """Requests at the start that met cold servers: left out of both sides."""
    metrics: Sequence[str] = METRICS
    note: str = ""
    uncached: bool = False
    """Only requests that found nothing in prefill's cache, from a table of their own."""
    repeats: Sequence[str] = ()
    """Runs of the same load on the same servers, in place of `run`."""


COLD = "without its first request, which met cold transfers"
SINGLE = "the requests that found nothing cached; TPOT says nothing, for the stall covers all of decode"
SINGLES = tuple(
    Arm(f"s{n}", 1, fitted=True, metrics=LATENCY_ONLY, note=SINGLE, uncached=True)
    for n in (128, 512, 1024, 2048, 4096, 8192, 16384)
)
ARMS = (
    Arm("c1", 1, fitted=True),
    Arm("c8", 8, fitted=True),
    *(Arm(f"c{n}", n) for n in (32, 64, 128, 256)),
    Arm("q4", None, fitted=True),
    Arm("q16", None),
    Arm("q32", None),
    Arm("shared_base", 64, ("decode.pool_tokens=200000", f'"cost.cold_start={COLD_START}"')),
    *SINGLES,
    Arm("tp2to2_c1", 1, TWO_GPUS, fitted=True, skip=1, note="without its first request, which met cold servers"),
    Arm(
        "tp2to2_c16",
        16,
        TWO_GPUS,
        fitted=True,
        skip=16,
        note="without the first wave, in which one decode step took 235 ms; one of 54 ms is left",
    ),
    Arm("tp2to1_slice_c1", 1, TWO_TO_ONE, fitted=True, skip=1, note=COLD),
    Arm("tp2to1_staging1g_c1", 1, (*TWO_TO_ONE, *STAGING), fitted=True, skip=1, note=COLD),
    Arm("b32_c1", 1, THIRTY_TWO),
    *(Arm(f"b32_s{n}", 1, THIRTY_TWO) for n in (1024, 4096, 16384)),
    Arm("agg_q16", None, AGGREGATED),
    Arm("agg_c32", 32, AGGREGATED),
    Arm("shared_radix", 64, ("decode.pool_tokens=200000", "decode.radix_cache=true")),
    Arm("tp2to1_slice_c16", 16, TWO_TO_ONE, fitted=True),
    Arm(
        "tp1to2_staging1g_c16",
        16,
        ONE_TO_TWO,
        skip=16,
        note="without the first wave, in which one decode step took 287 ms, as in tp2to2_c16",
    ),
    Arm("tp1to2_warm", 16, WARM_ONE_TO_TWO, repeats=("tp1to2_warm_a", "tp1to2_warm_b", "tp1to2_warm_c")),
    Arm("tp1to2_long", 16, WARM_ONE_TO_TWO, repeats=("tp1to2_long",)),
)


def main() -> None:
    summary = json.loads((DATA / "summary.json").read_text(encoding="utf-8"))
    text = HEADER + "".join(arm_text(arm, summary) for arm in ARMS)
    (HERE / "measured.yaml").write_text(text, encoding="utf-8")


def arm_text(arm: Arm, summary: Mapping[str, Mapping[str, float]]) -> str:
    first = arm.repeats[0] if arm.repeats else arm.run
    chosen = np.arange(len(columns(f"requests_{first}")["k"])) >= arm.skip
    path = f"data/requests_{first}.csv.gz"
    if arm.uncached:
        chosen = columns(f"requests_{arm.run}")["cached_tokens"] == 0
        path = write_table(arm.run, chosen)
    changes = [f"workload.path={path}"]
    changes += ["client=open_loop" if arm.concurrency is None else f"client.concurrency={arm.concurrency}"]
    within = ", ".join(f"{name}: {most}" for name, most in ASKED.items() if name in arm.metrics)
    if arm.repeats:
        values = {run: metrics_of(run, chosen) for run in arm.repeats}
    else:
        values = {arm.run: summary[arm.run] if chosen.all() else metrics_of(arm.run, chosen)}
    runs = ", ".join(run_text(arm, run, found) for run, found in values.items())
    return (
        f"  {arm.run}:\n"
        + ("    front_end: engine\n" if arm.changes is AGGREGATED else "")
        + f"    set: [{', '.join([*changes, *arm.changes])}]\n"
        + ("    fitted: true\n" if arm.fitted else "")
        + (f"    skip: {arm.skip}\n" if arm.skip else "")
        + f"    within: {{{within}}}\n"
        + f"    runs: [{runs}]\n"
    )


def run_text(arm: Arm, name: str, values: Mapping[str, float]) -> str:
    run = {"id": name, **{metric: round(values[metric], 4) for metric in arm.metrics}}
    if arm.note:
        run["note"] = f'"{arm.note}"'
    return f"{{{', '.join(f'{key}: {value}' for key, value in run.items())}}}"


def metrics_of(run: str, chosen: np.ndarray) -> dict[str, float]:
    """By the definitions of SGLang's client, of these requests."""
    table = {key: column[chosen] for key, column in columns(f"requests_{run}").items()}
    ttft = 1e3 * (table["first_token_s"] - table["send_s"])
    latency = 1e3 * (table["end_s"] - table["send_s"])
    return {
        "request_throughput": len(ttft) / float(table["end_s"].max() - table["send_s"].min()),
        "mean_ttft_ms": float(ttft.mean()),
        "median_ttft_ms": float(np.median(ttft)),
        "mean_tpot_ms": float(((latency - ttft) / (table["out_tokens"] - 1)).mean()),
        "mean_e2e_latency_ms": float(latency.mean()),
    }


def write_table(run: str, chosen: np.ndarray) -> str:
    table = columns(f"requests_{run}")
    path = DATA / f"uncached_{run}.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("arrival_s", "in_tokens", "out_tokens"))
        out.writerows((0, int(table["in_tokens"][i]), int(table["out_tokens"][i])) for i in np.flatnonzero(chosen))
    return f"data/{path.name}"


if __name__ == "__main__":
    main()
