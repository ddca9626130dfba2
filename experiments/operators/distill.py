"""Reduces measured operator tables to the few numbers that the roofline ships: python distill.py FOLDER

FOLDER is aiconfigurator_core/systems/data of the wheel aiconfigurator_core 0.12.0 (Apache-2.0). Each operator's time is
taken as a fixed time and its operations and bytes over nominal rates, of which it reaches a fraction; the fractions
with the least median error of the logarithm are kept. Writes pdsim/cost/kernels.csv.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyarrow import parquet

from pdsim.cost.roofline import expert_activation_bytes
from pdsim.system.catalog import GpuSpec, load_gpu
from pdsim.system.model import Dtype

OUT = Path(__file__).parents[2] / "pdsim" / "cost" / "kernels.csv"
HEAD = """\
# Fractions of nominal rates that kernels reach, and the median error of their times: written by
# experiments/operators/distill.py from the operator tables of ai-dynamo/aiconfigurator 0.12.0 (Apache-2.0).
gpu,operator,kind,compute,memory,fixed_us,token_us,error
"""
STATED = (
    ("gemm", "fp8", 0.92, 0.8),
    ("gemm", "bf16", 0.92, 0.8),
    ("prefill_attention", "bf16", 0.82, 1),
    ("decode_attention", "bf16", 1, 0.73),
    ("experts", "bf16", 0.85, 0.8),
)
"""H20: as experiments/infersim-h20 has it from pdsim/calibration/fit/operators.csv.

The 0.8 is the roofline's; bf16 is taken to reach what fp8 does. TTFT of experiments/mooncake-h20 with
2,048, 8,192 and 32,768 tokens chose what experts compute.
"""
GPUS = {
    "a100": "a100_sxm",
    "l40s": "l40s",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
WEIGHTS: dict[Dtype, tuple[tuple[str, ...], float]] = {
    "bf16": (("bfloat16",), 2.0),
    "fp8": (("fp8_block", "fp8"), 1.0),
    "fp4": (("nvfp4",), 0.5625),
    "int4": (("int4_wo",), 0.52),
}
"""Names in the tables, of which the first is taken that there is, and bytes of a weight, with its scales."""
KV = {"bf16": ("bfloat16", 2.0), "fp8": ("fp8", 1.0)}
EXPERT_KERNELS = (
    "sglang_flashinfer_trtllm_moe",
    "sglang_fused_moe_triton",
    "sglang_flashinfer_cutlass_moe",
    "sglang_marlin_moe",
)
"""The first that a GPU has."""
ATTENTION_KERNELS = ("trtllm_mha", "fa3", "flashinfer", "flash_attention", "triton")
SLOW_LATENT_FP8 = ("h100", "h200")
"""Their fp8 kernel in these tables takes four to eight times as long as bf16's: servers do not run it."""
FRACTIONS = np.arange(0.05, 1.001, 0.05)
MAX_TOKENS = 16_384
MAX_ROWS = 3_000

Floats = NDArray[np.float64]


class Fit(NamedTuple):
    """The best fractions of nominal rates."""

    compute: float
    memory: float
    fixed_us: float
    token_us: float
    """Time of a token of the server that its GPUs do not divide."""
    error: float
    """Median of the relative error."""
    error_p80: float


class Table:
    """Columns of one table, or of some of its rows. Times in seconds."""

    def __init__(self, columns: dict[str, NDArray[Any]]) -> None:
        self._columns = columns

    @classmethod
    def newest(cls, folder: Path, operator: str, name: str, engine: str = "sglang") -> "Table | None":
        paths = sorted(folder.glob(f"{operator}/{engine}/*/{name}_perf.parquet"))
        if not paths:
            return None
        return cls({column: np.array(values) for column, values in parquet.read_table(paths[-1]).to_pydict().items()})

    def __getitem__(self, column: str) -> Floats:
        values: Floats = self._columns[column].astype(float)
        return values

    def __contains__(self, column: str) -> bool:
        return column in self._columns

    def __len__(self) -> int:
        return len(self._columns["latency"])

    @property
    def seconds(self) -> Floats:
        return self["latency"] * 1e-3

    def where(self, rows: NDArray[np.bool_]) -> "Table":
        return Table({name: values[rows] for name, values in self._columns.items()})

    def equal(self, column: str, value: str) -> "Table":
        """Rows with a text in a column; all, where there is no such column."""
        return self.where(self._columns[column] == value) if column in self else self

    def other_than(self, column: str, value: str) -> "Table":
        """Rows without a text in a column."""
        return self.where(self._columns[column] != value)

    def first_of(self, column: str, values: Sequence[str]) -> "Table":
        """Rows with the first of these texts that there is."""
        found = set(self._columns[column])
        return self.equal(column, next((value for value in values if value in found), values[0]))

    def sampled(self) -> "Table":
        rows = np.random.default_rng(0).permutation(len(self))[:MAX_ROWS]
        return Table({name: values[rows] for name, values in self._columns.items()})


def fitted(
    seconds: Floats,
    compute_s: Floats,
    memory_s: Floats,
    *,
    fixed_us: Sequence[float],
    power: float,
    few: bool = False,
    undivided: tuple[Floats | float, Sequence[float]] = (0.0, (0.0,)),
) -> Fit | None:
    """Times at full rates are given; power says how the two overlap: 1 not at all, infinity wholly.

    undivided: tokens of all GPUs together, and times in us to try for one of them.
    few: the mean error chooses, not the median, which leaves out too much of less than ten times and of long forwards.
    """
    if len(seconds) < (5 if few else 10):
        return None
    none = (1.0,)
    best, least = None, inf
    computes = FRACTIONS if compute_s.any() else none
    tokens, token_us = undivided
    for compute, memory, fixed, each in product(computes, FRACTIONS if memory_s.any() else none, fixed_us, token_us):
        work = ((compute_s / compute) ** power + (memory_s / memory) ** power) ** (1 / power)
        off = np.abs(np.log(((fixed + each * tokens) * 1e-6 + work) / seconds))
        error = float(np.mean(off) if few else np.median(off))
        if error < least:
            least = error
            best = Fit(compute, memory, fixed, each, float(np.median(off)), float(np.quantile(off, 0.8)))
    return best


def by_weights(table: Table, column: str, gpu: GpuSpec) -> Iterator[tuple[Dtype, float, Table]]:
    """Each type of weights that the GPU computes in and the table has, its bytes, and its rows."""
    for dtype, (names, num_bytes) in WEIGHTS.items():
        rows = table.first_of(column, names)
        if (dtype in gpu.flops or dtype == "int4") and len(rows):
            yield dtype, num_bytes, rows


def gemm(folder: Path, gpu: GpuSpec) -> Iterator[tuple[str, Fit | None]]:
    """Matrices of 1,024 to 30,000 rows and columns, which layers of common models have.

    Those with weights of int4 are TensorRT-LLM's, on A100, launched one by one: SGLang's tables have none.
    """
    table, other = Table.newest(folder, "gemm", "gemm"), Table.newest(folder, "gemm", "gemm", "trtllm")
    assert table is not None
    typed_rows = list(by_weights(table, "gemm_dtype", gpu))
    if other is not None:
        typed_rows += [found for found in by_weights(other, "gemm_dtype", gpu) if found[0] == "int4"]
    for dtype, num_bytes, typed in typed_rows:
        n, k, m = typed["n"], typed["k"], typed["m"]
        rows = typed.where((np.minimum(n, k) >= 1024) & (np.maximum(n, k) <= 30_000) & (m <= MAX_TOKENS)).sampled()  # noqa: PLR2004
        n, k, m = rows["n"], rows["k"], rows["m"]
        moved = num_bytes * n * k + 2 * m * (n + k)
        compute_s, memory_s = 2 * m * n * k / gpu.flops_for(dtype), moved / gpu.memory_bandwidth
        fixed_us = (0, 6, 10, 15, 20) if dtype == "int4" else (0, 2, 4, 6)
        yield dtype, fitted(rows.seconds, compute_s, memory_s, fixed_us=fixed_us, power=8)


def experts(folder: Path, gpu: GpuSpec) -> Iterator[tuple[str, Fit | None]]:
    """Models of at least 32 experts on up to 8 GPUs, loads balanced and skewed alike."""
    table = Table.newest(folder, "moe", "moe")
    assert table is not None
    for dtype, num_bytes, typed in by_weights(table, "moe_dtype", gpu):
        measured = typed.first_of("kernel_source", EXPERT_KERNELS)
        ranks = measured["moe_tp_size"] * measured["moe_ep_size"]
        chosen = (measured["num_experts"] >= 32) & (measured["num_tokens"] <= MAX_TOKENS) & (ranks <= 8)  # noqa: PLR2004
        rows = measured.where(chosen).sampled()
        yield dtype, _experts_fit(rows, gpu.flops_for(dtype), num_bytes, gpu, (0, 10, 20, 30, 50, 80))


def _experts_fit(
    rows: Table,
    flops: float,
    num_bytes: float,
    gpu: GpuSpec,
    fixed_us: Sequence[float],
    token_us: Sequence[float] = (),
) -> Fit | None:
    tokens, active, num = rows["num_tokens"], rows["topk"], rows["num_experts"]
    tp, ep = rows["moe_tp_size"], rows["moe_ep_size"]
    params = 3 * rows["hidden_size"] * rows["inter_size"] / tp
    read = num / ep * (1 - (1 - active / num) ** tokens)
    compute_s = 2 * params * active * tokens / ep / flops
    moved = expert_activation_bytes(rows["hidden_size"], rows["inter_size"] / tp)
    memory_s = (read * params * num_bytes + moved * active * tokens / ep) / gpu.memory_bandwidth
    undivided = (tokens, token_us or (0.0,))
    return fitted(
        rows.seconds, compute_s, memory_s, fixed_us=fixed_us, power=1, few=bool(token_us), undivided=undivided
    )


def prefill_attention(folder: Path, gpu: GpuSpec) -> Iterator[tuple[str, Fit | None]]:
    """Prompts of 512 tokens and more, heads of 128, computed in bf16."""
    table = Table.newest(folder, "attention", "context_attention")
    assert table is not None
    typed = table.equal("kv_cache_dtype", "bfloat16").equal("attn_dtype", "bfloat16")
    for prefix, rows in attention_kernels(typed):
        yield f"{prefix}bf16", _prefill_fit(rows, gpu)


def _prefill_fit(rows: Table, gpu: GpuSpec) -> Fit | None:
    length, batch = rows["isl"], rows["batch_size"]
    chosen = (rows["head_dim"] == 128) & (rows["num_heads"] >= 4) & (length >= 512) & (batch * length <= 32_768)  # noqa: PLR2004
    if "window_size" in rows:
        chosen &= rows["window_size"] == 0
    rows = rows.where(chosen)
    flops = 4 * rows["batch_size"] * rows["isl"] ** 2 / 2 * rows["num_heads"] * 128
    return fitted(rows.seconds, flops / gpu.flops["bf16"], 0 * flops, fixed_us=(0, 5, 10, 15, 25), power=1)


def attention_kernels(table: Table) -> Iterator[tuple[str, Table]]:
    """Rows of the kernel that SGLang chooses, and of FlashInfer's, where that is another one and was measured."""
    chosen = table.first_of("kernel_source", ATTENTION_KERNELS)
    yield "", chosen
    other = table.equal("kernel_source", "flashinfer")
    if len(other) and not len(chosen.equal("kernel_source", "flashinfer")):
        yield "flashinfer ", other


def decode_attention(folder: Path, gpu: GpuSpec) -> Iterator[tuple[str, Fit | None]]:
    """Batches with 4,096 tokens of context and more, at least 4 query heads for each KV head."""
    table = Table.newest(folder, "attention", "generation_attention")
    assert table is not None
    for dtype, (name, num_bytes) in KV.items():
        typed = table.equal("kv_cache_dtype", name)
        for prefix, rows in attention_kernels(typed) if len(typed) else ():
            yield f"{prefix}{dtype}", _decode_fit(rows, num_bytes, gpu)


def _decode_fit(rows: Table, num_bytes: float, gpu: GpuSpec) -> Fit | None:
    context = rows["batch_size"] * rows["step"]
    groups = rows["num_heads"] / rows["num_key_value_heads"]
    chosen = (rows["head_dim"] == 128) & (context >= 4096) & (groups >= 4)  # noqa: PLR2004
    if "window_size" in rows:
        chosen &= rows["window_size"] == 0
    rows = rows.where(chosen)
    moved = 2 * rows["batch_size"] * (rows["step"] + 1) * rows["num_key_value_heads"] * 128 * num_bytes
    memory_s = moved / gpu.memory_bandwidth
    return fitted(rows.seconds, 0 * memory_s, memory_s, fixed_us=(0, 5, 10, 15, 25), power=1)


def whole_experts(folder: Path, gpu: GpuSpec) -> Iterator[tuple[str, Fit | None]]:
    """DeepSeek's and Kimi's experts, each whole on one of 8 to 32 GPUs: the busiest of these, where loads are skewed.

    Balanced loads are left out. Two GPUs take as long as one there, because a token's experts are picked from the first
    groups of experts, which the measured GPU has.
    """
    table = Table.newest(folder, "moe", "moe")
    assert table is not None
    for dtype, num_bytes, typed in by_weights(table, "moe_dtype", gpu):
        if dtype == "bf16":  # of which A100 alone has rows
            continue
        measured = typed.first_of("kernel_source", EXPERT_KERNELS)
        tokens, ep = measured["num_tokens"], measured["moe_ep_size"]
        rows = measured.where(
            (measured["hidden_size"] == 7168)  # noqa: PLR2004
            & (measured["num_experts"] >= 256)  # noqa: PLR2004
            & (measured["moe_tp_size"] == 1)
            & (ep >= 8)  # noqa: PLR2004
            & (ep <= 32)  # noqa: PLR2004
            & (tokens <= MAX_TOKENS)
        ).other_than("distribution", "balanced")
        fixed_us, token_us = (20, 30, 40, 50, 60, 70, 80), (0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
        yield f"whole {dtype}", _experts_fit(rows, gpu.flops_for(dtype), num_bytes, gpu, fixed_us, token_us)


def latent_decode_attention(folder: Path, gpu: GpuSpec) -> Iterator[tuple[str, Fit | None]]:
    """Latents of 576 elements, batches with 4,096 tokens of context and more.

    By 8 to 32 heads on a GPU, or 64 to 128, as with data-parallel attention: operations take longer than bytes there.
    """
    table = Table.newest(folder, "mla", "generation_mla")
    if table is None:
        return
    for dtype, (name, num_bytes) in KV.items():
        if dtype == "fp8" and gpu.name in SLOW_LATENT_FP8:
            continue
        typed = table.equal("kv_cache_dtype", name)
        heads, context = typed["num_heads"], typed["batch_size"] * typed["step"]
        for kind, (least, most) in {"latent": (8, 32), "latent wide": (64, 128)}.items():
            rows = typed.where((heads >= least) & (heads <= most) & (context >= 4096))  # noqa: PLR2004
            memory_s = rows["batch_size"] * (rows["step"] + 1) * 576 * num_bytes / gpu.memory_bandwidth
            fit = fitted(rows.seconds, 0 * memory_s, memory_s, fixed_us=(0, 5, 10, 15, 25, 40), power=1)
            yield f"{kind} {dtype}", fit


def all_reduce(folder: Path, gpu: GpuSpec) -> Iterator[tuple[int, Fit | None]]:
    """Messages of 4 Ki to 4 Mi numbers, captured in a graph where that was measured, by the GPUs that take part."""
    return _all_reduce(folder, gpu, 4096, 4 << 20, (2, 4, 6, 8, 10, 15, 20, 30))


def large_all_reduce(folder: Path, gpu: GpuSpec) -> Iterator[tuple[int, Fit | None]]:
    """Messages of 8 Mi numbers and more, which NCCL reduces."""
    return _all_reduce(folder, gpu, 8 << 20, 512 << 20, range(0, 160, 10))


def _all_reduce(
    folder: Path, gpu: GpuSpec, least: int, most: int, fixed_us: Sequence[float]
) -> Iterator[tuple[int, Fit | None]]:
    paths = sorted(folder.glob("comm/sglang/*/custom_allreduce_perf.parquet"))
    if not paths:
        return
    table = Table({name: np.array(values) for name, values in parquet.read_table(paths[-1]).to_pydict().items()})
    for num_gpus in (2, 4, 8):
        rows = table.equal("backend", "sglang_graph")
        size = rows["message_size"]
        rows = rows.where((rows["num_gpus"] == num_gpus) & (size >= least) & (size <= most))
        if not len(rows):
            continue
        memory_s = 2 * rows["message_size"] * 2 * (num_gpus - 1) / num_gpus / gpu.nvlink_bandwidth
        yield num_gpus, fitted(rows.seconds, 0 * memory_s, memory_s, fixed_us=fixed_us, power=1, few=True)


def gather(folder: Path, gpu: GpuSpec) -> Iterator[tuple[int, Fit | None]]:
    """NCCL's all-gathers and reduce-scatters of 64 Ki to 256 Mi bf16 numbers, by the GPUs that take part."""
    paths = sorted(folder.glob("comm/nccl/*/nccl_perf.parquet"))
    if not paths:
        return
    table = Table({name: np.array(values) for name, values in parquet.read_table(paths[-1]).to_pydict().items()})
    for num_gpus in (2, 4, 8):
        rows = table.equal("nccl_dtype", "half").other_than("op_name", "all_reduce").other_than("op_name", "alltoall")
        rows = rows.where((rows["num_gpus"] == num_gpus) & (rows["message_size"] >= 64 << 10))
        if not len(rows):
            continue
        memory_s = 2 * rows["message_size"] * (num_gpus - 1) / num_gpus / gpu.nvlink_bandwidth
        yield num_gpus, fitted(rows.seconds, 0 * memory_s, memory_s, fixed_us=range(0, 60, 2), power=1, few=True)


def expert_exchange(folder: Path, gpu: GpuSpec) -> Iterator[tuple[str, Fit | None]]:
    """DeepEP's low-latency kernels among the GPUs of one host: a token goes to the GPUs of its experts, and back."""
    paths = sorted(folder.glob("comm/sglang/0.5.12/wideep_deepep_ll_perf.parquet"))
    if not paths:
        return
    rows = Table({name: np.array(values) for name, values in parquet.read_table(paths[-1]).to_pydict().items()})
    num_gpus = gpu.gpus_per_host or gpu.gpus_per_server
    copies = (num_gpus - 1) * (1 - (1 - 1 / num_gpus) ** rows["num_topk"])
    moved = 3 * rows["hidden_size"] * rows["num_token"] * copies  # fp8 there, bf16 back
    memory_s = moved / gpu.nvlink_bandwidth / 2
    seconds = (rows["dispatch_avg_t_us"] + rows["combine_avg_t_us"]) * 1e-6 / 2
    yield "deepep", fitted(seconds, 0 * memory_s, memory_s, fixed_us=range(5, 30), power=1)


def distilled(folder: Path, gpu: GpuSpec) -> Iterator[tuple[str, str, Fit | None]]:
    for operator, fits in (
        ("gemm", gemm),
        ("experts", experts),
        ("experts", whole_experts),
        ("prefill_attention", prefill_attention),
        ("decode_attention", decode_attention),
        ("decode_attention", latent_decode_attention),
        ("all_reduce", all_reduce),
        ("large_all_reduce", large_all_reduce),
        ("gather", gather),
        ("expert_exchange", expert_exchange),
    ):
        for kind, fit in fits(folder, gpu):
            yield operator, str(kind), fit


def main() -> None:
    tables = Path(sys.argv[1])
    stated = product(("h20", "h20-3e"), STATED)
    lines = [f"{gpu},{operator},{kind},{compute},{memory},,,\n" for gpu, (operator, kind, compute, memory) in stated]
    for name, folder in GPUS.items():
        for operator, kind, fit in distilled(tables / folder, load_gpu(name)):
            if fit is not None:
                print(f"{name:14} {operator:24} {kind:5} {fit.error:5.0%} {fit.error_p80:5.0%}", flush=True)
                told = f"{fit.compute:.2f},{fit.memory:.2f},{fit.fixed_us:.0f},{fit.token_us or ''},{fit.error:.2f}"
                lines.append(f"{name},{operator},{kind},{told}\n")
    OUT.write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main()
