"""Shares of nominal rates that measured kernels reach, from kernels.csv, which experiments/operators/distill.py
writes.
"""

import csv
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from math import exp, isnan, log, nan
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pdsim.system.catalog import load_gpu
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention

_GENERATIONS = {
    **dict.fromkeys(("h100", "h200"), "hopper"),
    **dict.fromkeys(("h20", "h20-3e"), "h20"),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), "blackwell"),
}
"""Generation of each GPU. On GPUs of one generation, kernels reach similar shares of the nominal rates. Each GPU that
is not listed is a generation of its own.
"""
_KEEP_CLOCK = frozenset({"h20", "h20-3e", "rtx-4090", "rtx-5090"})
"""GPUs with less than 0.5 nominal TFLOP/s in bf16 per watt of board power. Their clock stays high under matrix
products. Matrix products therefore reach a larger share of nominal FLOP/s than on other GPUs."""
_SAME_RATE = frozenset({"fp8", "whole fp8"})
"""Kinds of experts whose operations per second are similar on all measured GPUs: 0.7 to 1.3 PFLOP/s (whole experts on
GB200: 3.0). Their shares of the GPUs' nominal rates differ: 0.15 to 1 (experiments/operators).
"""
_COVERED = 0.5
"""An unmeasured GPU gets a range of values around the median of the measured GPUs. The range has the smallest width
that contains this share of the measured GPUs' values, when each measured GPU in turn is treated as unmeasured.
Differences between servers (KERNELS_SPREAD) widen the range further.
"""
MOST_REDUCED = 8
"""Largest number of GPUs whose all-reduces were measured."""
RING = 4
"""If NVSwitches do not add up messages, large all-reduces among more GPUs reach at most the share of NVLink bandwidth
that was measured with this number of GPUs. 4 and 8 A100s, whose switches cannot add, reach the same 0.75."""
WIDE_HEADS = 64
"""From this number of query heads per GPU, decode attention over latent KV is limited by operations, and no longer by
bytes."""
_FILE = Path(__file__).with_name("kernels.csv")
_IF_EMPTY = {"compute": 1.0, "memory": 1.0, "fixed_us": nan, "token_us": 0.0, "error": 1.0}
"""Value of each field of Kernel that a row of the file leaves empty."""


class Kernel(NamedTuple):
    """Measured rates of one operator on one GPU, for one kind of its kernel, such as a data type or a number of
    GPUs.
    """

    compute: float
    """Share of the GPU's nominal operations per second that the kernel reaches."""
    memory: float
    """Share of memory bandwidth that the kernel reaches. Collectives and exchanges: share of NVLink bandwidth."""
    fixed_us: float
    """Fixed time in us of one call, independent of bytes and operations. NaN: not measured, as on H20."""
    token_us: float
    """Additional time in us for each token that a server computes. More GPUs do not shorten this time."""
    error: float
    """Median relative error of the times that this kernel's fields give, against the measured times. 1: not known."""


_UNMEASURED = Kernel(nan, nan, nan, nan, nan)


@contextmanager
def leaving_out(gpus: Collection[str]) -> Iterator[None]:
    """Context manager: within it, these GPUs and all GPUs of their generation count as unmeasured. gpus: names in the
    catalog.

    If a kind of an operator was measured on these generations only, further GPUs of these generations keep their
    measurements of this kind.
    """
    alike = {_GENERATIONS.get(gpu, gpu) for gpu in gpus}
    everything = _kernels()
    others = {name for name in everything if _GENERATIONS.get(name[0], name[0]) not in alike}
    elsewhere = {tuple(kind) for _, *kind in others}
    others |= {name for name in everything if name[0] not in gpus and name[1:] not in elsewhere}
    hidden = {name: everything.pop(name) for name in [*everything] if name not in others}
    try:
        _forget()
        yield
    finally:
        everything.update(hidden)
        _forget()


def _forget() -> None:
    for remembering in (reached, spread, _covering):
        remembering.cache_clear()


@cache
def _kernels() -> dict[tuple[str, str, str], Kernel]:
    with _FILE.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (row["gpu"], row["operator"], row["kind"]): Kernel(
                *(float(row[name] or _IF_EMPTY[name]) for name in Kernel._fields)
            )
            for row in rows
        }


@cache
def reached(gpu: str, operator: str, kind: str) -> Kernel:
    """Returns the rates that a kernel reaches on a GPU. Each field that was not measured on this GPU is the median of
    the numbers that _of_others returns for the field.

    kind: variant of the operator's kernel, such as a data type or a number of GPUs.
    """
    own = _kernels().get((gpu, operator, kind), _UNMEASURED)
    fields = zip(Kernel._fields, own, strict=True)
    return Kernel(*(median(_of_others(gpu, operator, kind, name)) if isnan(value) else value for name, value in fields))


def _of_others(gpu: str, operator: str, kind: str, column: str, *, left_out: str = "") -> list[float]:
    """Returns one number for each GPU on which this kind of an operator was measured, in no order. column: field of
    Kernel that has the number. left_out: generation of GPUs to leave out.

    There are two exceptions. Matrix products, column compute: if `gpu` is in _KEEP_CLOCK, only GPUs in _KEEP_CLOCK
    count; otherwise, only GPUs outside _KEEP_CLOCK. If no such GPU was measured, all GPUs count. Experts of a kind in
    _SAME_RATE, column compute: the number is the share of nominal FLOP/s at which `gpu` would be as fast as the
    measured GPU, at most 1.
    """
    all_found = {
        other: getattr(kernel, column)
        for (other, *name), kernel in _kernels().items()
        if name == [operator, kind] and _GENERATIONS.get(other, other) != left_out
    }
    found = {other: value for other, value in all_found.items() if not isnan(value)}
    if (operator, column) == ("experts", "compute") and kind in _SAME_RATE:
        own = load_gpu(gpu).flops_for("fp8")
        return [min(1.0, share * load_gpu(other).flops_for("fp8") / own) for other, share in found.items()]
    alike = [value for other, value in found.items() if (other in _KEEP_CLOCK) == (gpu in _KEEP_CLOCK)]
    return alike if alike and (operator, column) == ("gemm", "compute") else [*found.values()]


class Spread(NamedTuple):
    """Factors by which the true values of a kernel may lie above or below the given values. 1: the kernel was measured
    on this GPU.
    """

    compute: float = 1
    memory: float = 1
    fixed_us: float = 1
    token_us: float = 1


@cache
def spread(gpu: str, operator: str, kind: str) -> Spread:
    """Returns the factors by which a kernel's rates may be wrong. Factors of measured rates are 1. The other rates are
    medians of other GPUs. If each measured GPU is estimated from GPUs of other generations, the share
    _COVERED of the estimates is wrong by at most these factors. kind: variant of the operator's kernel.

    The errors are taken over all data types of an operator, because each data type has too few measured GPUs.
    """
    own = _kernels().get((gpu, operator, kind), _UNMEASURED)
    return Spread(
        *(_covering(operator, is_whole(kind), name) if isnan(getattr(own, name)) else 1.0 for name in Spread._fields)
    )


class Beyond(NamedTuple):
    """Factors by which experts take longer on servers than the operator tables say."""

    slowness: float = 1
    """Factor on the time of the experts' operations and on their time per token (Kernel.compute, Kernel.token_us). The
    time of reading weights and the fixed time are not multiplied. 1: servers are as slow as the tables say."""
    spread: float = 1
    """Uncertainty of `slowness`: the true factor may be this many times as large or as small."""
    undivided: float = 1
    """Further factor on the experts' time per token that does not get shorter with more GPUs (Kernel.token_us)."""


_WHOLE_FP8 = Beyond(slowness=2.5, spread=1.6)
"""Factors for DeepSeek's experts in fp8, if one GPU holds each expert whole. Why servers compute such experts more
slowly than the operator tables say is not known. The factors were chosen with two measurements of B200 under load, and
tested with the other measurements of experiments/inferencex-tp.
"""


def beyond_tables(layout: Layout) -> Beyond:
    """Returns the factors by which a layout's experts take longer than the tables say. If tokens are sent only to the
    GPUs of their experts, Beyond.undivided is 0, because no GPU handles all tokens.
    """
    if layout.sends_to_experts:
        return Beyond(undivided=0)
    return _WHOLE_FP8 if kinds(layout)["experts"] == "whole fp8" else Beyond()


def is_whole(kind: str) -> bool:
    """True if a kernel of this kind computes experts that one GPU holds completely."""
    return kind.startswith("whole")


def is_measured(gpu: str, operator: str, kind: str) -> bool:
    return (gpu, operator, kind) in _kernels()


@cache
def _covering(operator: str, whole: bool, column: str) -> float:
    """Returns a factor for the error of an estimate that takes the median over GPUs of other generations as a GPU's
    value. For the share _COVERED of the measured kernels, value and median differ by at most this factor.

    operator: name of the operator. whole: True: counts kernels of experts that one GPU holds completely; False: all
    other kernels. column: the field of Kernel that has the value.
    """
    found = []
    for (gpu, name, kind), kernel in _kernels().items():
        if is_whole(kind) != whole:
            continue
        others = _of_others(gpu, operator, kind, column, left_out=_GENERATIONS.get(gpu, gpu))
        own = getattr(kernel, column)
        if name == operator and others and own > 0 and median(others):
            found.append(abs(log(own / median(others))))
    found.sort()
    return exp(found[int(_COVERED * (len(found) - 1))]) if found else 1.0


def kinds(layout: Layout) -> dict[str, str]:
    """Returns for each operator of a layout the kind of its kernel in the table of measurements, such as "bf16" (the
    data type) for matrix products, or the number of GPUs for all-reduces.

    Models with latent attention have their own kernels for decode attention and for experts that one GPU holds whole.
    """
    spec, gpu = layout.model, layout.gpu
    measured = {*gpu.flops, "int4"}
    weights, expert_weights = (
        dtype if dtype in measured else "bf16" for dtype in (spec.weight_dtype, spec.weight_dtypes[-1])
    )
    return {
        "gemm": weights,
        "experts": _expert_kind(layout, expert_weights),
        "prefill_attention": "flashinfer bf16" if _has_flashinfer(layout) else "bf16",
        "decode_attention": _decode_kind(layout),
        "all_reduce": _all_reduce_kind(layout),
        "expert_exchange": "deepep",
    }


def _all_reduce_kind(layout: Layout) -> str:
    """Returns the kind of an all-reduce in the kernels' table: the number of GPUs whose data the all-reduce sums,
    rounded up to a power of two, at least 2 and at most MOST_REDUCED, as text. These are the GPUs of an instance or, if
    each GPU gets the tokens of all data-parallel ranks, the GPUs of the server.
    """
    sums_all = layout.dp > 1 and not layout.sends_to_experts
    num_gpus = layout.tp * (layout.dp if sums_all else layout.cp)
    return str(min(max(2, 1 << (num_gpus - 1).bit_length()), MOST_REDUCED))


def _expert_kind(layout: Layout, weights: str) -> str:
    is_latent = isinstance(layout.model.attention, LatentAttention)
    return f"whole {weights}" if layout.has_whole_experts and is_latent and weights != "bf16" else weights


def _has_flashinfer(layout: Layout) -> bool:
    """True if a setting chooses FlashInfer's attention on Blackwell, for a model without latent attention. SGLang's
    default there is trtllm_mha (0.5.12, server_args.py:2620).

    With FlashInfer, new tokens of a prompt attend to cached tokens by FA2 (0.5.12,
    layers/attention/flashinfer_backend.py:126 and 870). The operator tables have FA2's times for decode only, so
    prompts with cached tokens take longer in reality than in the simulation.
    """
    is_latent = isinstance(layout.model.attention, LatentAttention)
    is_other = is_blackwell(layout.gpu.name) and not is_latent
    return layout.attention_backend == "flashinfer" and is_other


def _decode_kind(layout: Layout) -> str:
    kv, attention = "fp8" if layout.kv_dtype == "fp8" else "bf16", layout.model.attention
    if not isinstance(attention, LatentAttention):
        return f"flashinfer {kv}" if _has_flashinfer(layout) else kv
    num_heads = attention.num_query_heads * layout.dcp // layout.tp
    return f"latent wide {kv}" if num_heads >= WIDE_HEADS else f"latent {kv}"


def products(layout: Layout) -> tuple[float, float]:
    """Returns the shares of nominal operations and of memory bandwidth that matrix products reach. Experts are not
    included.

    If some weights are bf16 and others narrower, the shares combine both kernels.
    """
    spec, gpu = layout.model, layout.gpu
    narrow, wide = reached(gpu.name, "gemm", kinds(layout)["gemm"]), reached(gpu.name, "gemm", "bf16")
    if not spec.wide_bytes_read:
        return narrow.compute, narrow.memory
    flops, wide_flops = spec.flops_per_token - spec.expert_flops_per_token, spec.wide_flops_per_token
    rates = gpu.flops_for(spec.weight_dtype), gpu.flops_for("bf16")
    computed = (flops - wide_flops) / rates[0], wide_flops / rates[1]
    read = spec.shared_bytes_read - spec.wide_bytes_read, spec.wide_bytes_read
    return (
        sum(computed) / (computed[0] / narrow.compute + computed[1] / wide.compute),
        sum(read) / (read[0] / narrow.memory + read[1] / wide.memory),
    )


_CUTLASS_TILE = 256
"""Number of tokens in a tile of CUTLASS's fp8 products on Hopper (see pdsim.cost.model.tiled)."""


def tile_tokens(layout: Layout) -> int:
    """Returns the number of tokens in a tile of a layout's matrix products, see tile_of."""
    return tile_of(layout.gpu.name, kinds(layout)["gemm"], has_experts=layout.model.experts is not None)


def tile_of(gpu: str, weights: str, *, has_experts: bool) -> int:
    """Returns the number of tokens in a tile of matrix products by weights of a data type. 1: the time of a product
    does not depend on full tiles. gpu: name in the catalog. weights: data type. has_experts: the model has experts.

    On Hopper, fp8 products with a scale for each token and channel are CUTLASS kernels, which compute whole tiles
    (experiments/sglang-llama). All other products get 1: the times of cuBLAS's products, such as those in bf16, hardly
    jump at any number of tokens (experiments/operators), and models with experts have other fp8 kernels, for blocks of
    weights.
    """
    is_cutlass = weights == "fp8" and _GENERATIONS.get(gpu) == "hopper" and not has_experts
    return _CUTLASS_TILE if is_cutlass else 1


def origins(layout: Layout) -> dict[str, str]:
    """Returns text about the origin of the rates of each operator of a layout, by operator: measured on its GPU, or
    medians of other GPUs.
    """
    return {operator: _origin(layout.gpu.name, operator, kind) for operator, kind in _used(layout).items()}


def medians_of(layout: Layout) -> list[str]:
    """Operators of a layout that were not measured on its GPU, so that their rates are medians of other GPUs."""
    return [operator for operator, kind in _used(layout).items() if not is_measured(layout.gpu.name, operator, kind)]


def _used(layout: Layout) -> dict[str, str]:
    """Returns the operators that take time in a layout, each with the kind of its kernel (see `kinds`)."""
    operators = kinds(layout)
    if layout.model.experts is None:
        del operators["experts"]
    has_ranks = layout.dp > 1 and layout.model.experts is not None
    has_groups = layout.cp > 1 and layout.model.experts is not None  # whose experts' outputs are added up
    if layout.tp == 1 and not has_groups and not (has_ranks and not layout.sends_to_experts):
        del operators["all_reduce"]
    if not layout.sends_to_experts:
        del operators["expert_exchange"]
    return operators


def _origin(gpu: str, operator: str, kind: str) -> str:
    what = f"{kind} GPUs" if operator == "all_reduce" else kind
    own = _kernels().get((gpu, operator, kind))
    if own is None:
        num_others = len(_of_others(gpu, operator, kind, "compute"))
        return f"{what}, the median of {num_others} other GPUs"
    return f"{what}, measured on {gpu}" + (f", median error {own.error:.0%}" if own.error < 1 else "")


def is_blackwell(gpu: str) -> bool:
    """True for B200, B300, GB200 and GB300. gpu: name in the catalog."""
    return _GENERATIONS.get(gpu) == "blackwell"


def has_kernels(gpu: str) -> bool:
    """True if any kernel was measured on this GPU."""
    return any(name == gpu for name, _, _ in _kernels())
