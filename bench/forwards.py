"""Compares times of real mode's forwards with other times: python bench/forwards.py [--model qwen3-8b --measure]

A decode step of 32 requests with 1,100 tokens each is compared with the time in which the GPU reads weights and KV from
memory, and the forward of one prompt with SGLang's. Without --measure, which needs the GPU, times are those of
kernels/measured.
"""

import argparse
import csv
import sys
from dataclasses import replace
from pathlib import Path

from pdsim.cost.model import FRACTION_BITS
from pdsim.cost.settings import Roofline
from pdsim.system.catalog import load_gpu, load_model
from pdsim.system.memory import Layout

MEASURED = Path(__file__).parent.parent / "kernels" / "measured"
BATCH, CONTEXT_TOKENS = 32, 1100
BOUND = Roofline(
    matrix_efficiency=1,
    memory_efficiency=1,
    kv_bandwidth=1,
    prefill_layer_ns=0,
    decode_layer_ns=0,
    step_overhead_ns=0,
    prompt_overhead_ns=0,
)


def rows(name: str) -> list[dict[str, str]]:
    with (MEASURED / name).open() as file:
        return list(csv.DictReader(file))


def floor_ms(model: str, gpu: str) -> float:
    """Returns the time in ms in which the GPU reads weights and KV from memory once. For a model with experts, only the
    weights of experts that some token chooses count, if choices are evenly distributed.
    """
    layout = Layout(model=load_model(model), gpu=load_gpu(gpu), tp=1, kv_dtype="bf16")
    line = BOUND.model(layout).decode_line(BATCH)
    per_token = line.per_context_token + line.per_distinct_token
    return (line.base + BATCH * CONTEXT_TOKENS * per_token) / (1 << FRACTION_BITS) / 1e6


def recorded_decode_ms(model: str) -> float | None:
    """Returns the recorded time in ms of a decode step with weights and KV in bf16."""
    for row in rows("h200-decode.csv"):
        shape = row["kind"], row["model"], row["weights"], int(row["batch"]), int(row["context_tokens"])
        if shape == ("decode", model, "bf16", BATCH, BATCH * CONTEXT_TOKENS):
            return float(row["time_us"]) / 1e3
    return None


def prefills_ms(model: str) -> dict[str, dict[int, float]]:
    """Returns times of prefill forwards in ms, by engine and number of tokens."""
    found: dict[str, dict[int, float]] = {"pdreal": {}, "SGLang": {}}
    for row in rows("h200-forwards.csv"):
        if row["model"] == model:
            engine = "pdreal" if row["engine"] == "pdreal" else "SGLang"
            found[engine][int(row["tokens"])] = float(row["time_us"]) / 1e3
    return found


def measure(model: str, lengths: list[int]) -> tuple[float, dict[int, float]]:
    """Measures the decode step and the forwards on this machine's GPU."""
    from pdreal.measure.forwards import DecodeCase, PrefillCase  # noqa: PLC0415  needs torch
    from pdreal.measure.plan import FULL  # noqa: PLC0415
    from pdreal.measure.run import measurement  # noqa: PLC0415
    from pdreal.settings.options import Options  # noqa: PLC0415

    cases = {
        "prefill": tuple(PrefillCase(1, tokens) for tokens in lengths),
        "decode": (DecodeCase(BATCH, CONTEXT_TOKENS),),
    }
    plan = replace(FULL, sustained=(), **cases)
    made = measurement(model, Options(device="cuda", dtype="bfloat16"), 64, 1, "prefill,decode", plan, 1)
    found = list(made.rows(lambda reason: print(f"left out: {reason}", file=sys.stderr)))
    step_ms = next(row.time_us for row in found if row.kind == "decode") / 1e3
    return step_ms, {row.new_tokens or 0: row.time_us / 1e3 for row in found if row.kind == "prefill"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["qwen3-8b", "qwen3-30b-a3b"])
    parser.add_argument("--gpu", default="h200", help="whose memory bounds decode")
    parser.add_argument("--measure", action="store_true", help="time real mode on this machine's GPU")
    given = parser.parse_args()
    for model in given.model:
        engines = prefills_ms(model)
        step_ms, ours = recorded_decode_ms(model), engines["pdreal"]
        if given.measure:
            step_ms, ours = measure(model, sorted(engines["SGLang"]) or [1024, 2048, 4096, 8192])
        print(f"\n{model}, bf16\n\n| | real mode, ms | bound, ms | ratio |\n|---|---|---|---|")
        if step_ms is not None:
            line(f"decode, {BATCH} requests of {CONTEXT_TOKENS:,}, memory", step_ms, floor_ms(model, given.gpu))
        for tokens, ms in sorted(ours.items()):
            if tokens in engines["SGLang"]:
                line(f"prefill of {tokens:,}, SGLang", ms, engines["SGLang"][tokens])


def line(name: str, ms: float, bound_ms: float) -> None:
    print(f"| {name} | {ms:.2f} | {bound_ms:.2f} | {ms / bound_ms:.2f} |")


if __name__ == "__main__":
    main()
