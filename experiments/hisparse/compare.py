"""Decode with KV on the GPU, and with KV in host memory.

python experiments/hisparse/compare.py       fills the tables of README.md
"""

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from pdsim import load_scenario, simulate
from pdsim.core.messages import HiSparseStep
from pdsim.cost.swaps import SwapCosts
from pdsim.scenario.building.sizing import layout_of
from pdsim.sim.result import RunResult

HERE = Path(__file__).parent
README = HERE / "README.md"
BUFFER, TOP_K, BF16_BYTES = 4096, 2048, 1152
SHOWN = {"batch": ("1", "8", "64"), "missed_tokens": ("0", "20", "205", "2048")}
HOST_BANDWIDTH = 0.74 * 64e9
"""Rate in bytes per second of copies to an H200, as simulated."""
ARMS = {
    "KV on the GPU": (),
    "2 tokens in host memory for each on the GPU, 5 % missed": ("decode.hisparse={miss_rate: 0.05}",),
    "5 tokens, 5 % missed": ("decode.hisparse={miss_rate: 0.05, host_to_device_ratio: 5}",),
    **{
        f"10 tokens, {percent} % missed": (f"decode.hisparse={{miss_rate: {percent / 100}, host_to_device_ratio: 10}}",)
        for percent in (0, 5, 10, 30)
    },
}


def row(name: str, result: RunResult) -> str:
    """One line of the table of clusters."""
    decode, layout = result.scenario.pair.decode, layout_of(result.scenario, "decode")
    host_bytes = 0
    if decode.hisparse is not None:
        host_bytes = decode.capacity_tokens * layout.read_token_bytes * decode.tp
    steps = [step for step in result.records.steps if step.kind == "decode"]
    most = decode.dp * max(step.num_requests for step in steps)
    summary = result.summary()
    rate, tpot_ms = summary["output_throughput"], summary["mean_tpot_ms"]
    sizes = f"{decode.pool_tokens:,} | {decode.capacity_tokens:,} | {host_bytes / 1e12:.2f}"
    return f"| {name} | {sizes} | {most} | {tpot_ms:.1f} | {rate:,.0f} |"


def simulated_us(row: Mapping[str, str]) -> float:
    """Time of one layer's kernel, as simulated."""
    batch, size = int(row["batch"]), int(row["token_bytes"])
    has_index, fits = row["kernel"] == "swap_in", int(row["context_tokens"]) <= BUFFER
    costs = SwapCosts(
        num_layers=1,
        num_index_layers=int(has_index),
        token_bytes=size,
        buffer_tokens=BUFFER,
        chosen_tokens=TOP_K,
        miss_rate=int(row["missed_tokens"]) / TOP_K,
        load_bandwidth=HOST_BANDWIDTH,
        save_bandwidth=HOST_BANDWIDTH,
    )
    return costs.step_ns(HiSparseStep(0, (), (), batch, 0, 0, 1, 0, 0, 0 if fits else batch, 0), 0) / 1e3


def kernel_rows() -> Iterable[str]:
    """Lines of the table of the kernels: times as measured and as simulated."""
    errors: dict[str, list[float]] = {"swap_in": [], "copy": []}
    for row in csv.DictReader((HERE / "swap_in.csv").read_text().splitlines()):
        measured, simulated = float(row["layer_us"]), simulated_us(row)
        error = simulated / measured - 1
        errors[row["kernel"]].append(abs(error))
        is_shown = row["batch"] in SHOWN["batch"] and row["missed_tokens"] in SHOWN["missed_tokens"]
        if is_shown and int(row["token_bytes"]) == BF16_BYTES and int(row["context_tokens"]) > BUFFER:
            shown = f"{row['kernel']} | {row['batch']} | {row['missed_tokens']}"
            yield f"| {shown} | {measured:,.1f} | {simulated:,.1f} | {error:+.0%} |"
    for kernel, found in errors.items():
        yield f"| {kernel}, all {len(found)} rows | | | | | median {median(found):.1%}, at most {max(found):.0%} |"


def filled(text: str, name: str, rows: Iterable[str]) -> str:
    """The text with these rows below the head of the table between two markers."""
    pattern = rf"(<!-- {name} -->\n[^\n]*\n[^\n]*\n).*?(<!-- {name} ends -->)"
    return re.sub(
        pattern, lambda found: found[1] + "".join(f"{line}\n" for line in rows) + found[2], text, flags=re.DOTALL
    )


def main() -> None:
    text = filled(README.read_text(encoding="utf-8"), "kernel", kernel_rows())
    arms = []
    for name, changes in ARMS.items():
        arms.append(row(name, simulate(load_scenario(HERE / "scenario.yaml", changes))))
        print(arms[-1], flush=True)
    README.write_text(filled(text, "clusters", arms), encoding="utf-8")


if __name__ == "__main__":
    main()
