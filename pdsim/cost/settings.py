"""Cost models that a scenario can name, with their settings. They give durations of prefill forwards and decode
steps.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from math import exp, hypot, log
from typing import Any, ClassVar

from pdsim.cost.affine import AffineModel, TableModel
from pdsim.cost.aiconfigurator import AiConfiguratorModel, compiled_engine
from pdsim.cost.collectives import Collective, Nccl
from pdsim.cost.kernels import RING, beyond_tables, kinds, products, reached, spread, tile_tokens
from pdsim.cost.model import CostModel
from pdsim.cost.roofline import RooflineModel
from pdsim.dataclass import dataclass
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Times are bytes divided by bandwidth, operations divided by rate, and fixed times. No default was measured in a
    serving run of this project.

    Decode attention reads each distinct KV token from memory once per step, at memory_efficiency: requests that share a
    prefix read it together, and the L2 cache serves all requests but the first. In addition, each request takes time of
    the SMs for its own KV, so that unshared KV is read at the rate kv_bandwidth.
    """

    HOST_FIELDS: ClassVar = (
        "prefill_layer_ns",
        "step_overhead_ns",
        "prompt_overhead_ns",
        "further_prompt_overhead_ns",
    )
    """Names of the fields with host times, which `host.slowdown` scales."""

    matrix_efficiency: float = 0.7
    """Share of nominal FLOP/s that matrix products reach. aiconfigurator's GEMM tables at 8192 tokens: 0.78 to 0.80 on
    H100 and H200, 0.71 on B200 (bf16)."""
    matrix_tile_tokens: int = 1
    """Number of tokens in a tile of matrix products. The matrix products of more than four tiles take as long as if the
    last tile were full."""
    activation_efficiency: float | None = None
    """Share of memory bandwidth that the kernels between matrix products reach in a prefill forward. These kernels
    normalise, rotate, activate and quantise. None: they take no time."""
    attention_efficiency: float = 0.5
    """Share of nominal bf16 FLOP/s that prefill attention reaches. aiconfigurator's context attention at 4k tokens:
    0.52 to 0.55 on H100 and H200, 0.40 on B200, 0.91 on H20."""
    memory_efficiency: float = 0.8
    """Share of memory bandwidth that reading weights and shared KV reaches: aiconfigurator's mem_eff."""
    kv_bandwidth: float = 0.85
    """Share of memory bandwidth that decode attention with bf16 KV reaches. aiconfigurator at batch 64: 0.90 on H100,
    0.89 on H200, 0.85 on B200."""
    fp8_kv_bandwidth: float = 0.45
    """Share of memory bandwidth that decode attention with fp8 KV reaches: 2.0 to 2.3 of 4.8 TB/s on Hopper."""
    link_efficiency: float = 0.8
    """Share of NVLink bandwidth that all-reduces reach (assumed)."""
    prefill_layer_ns: float = 310_000
    """Minimum time of one layer in a prefill forward, for launching its kernels. Qwen3-8B on H200 under SGLang 0.5.12:
    prefill of up to 256 tokens takes 11.3 ms for 36 layers."""
    decode_layer_ns: float = 32_000
    """Fixed time of one layer in a decode step with a CUDA graph. Qwen3-8B (36 layers) on H200 under SGLang 0.5.12 at
    batch 1: a step takes 5.08 ms on the GPU. Reading the weights takes 3.94 ms of it, and the rest is 32 us per layer.
    """
    step_overhead_ns: float = 300_000
    """Host time of each prefill forward or decode step. Qwen3-8B on H200 under SGLang 0.5.12: a decode step takes 5.39
    ms, and the GPU works for 5.08 ms of it.
    """
    prompt_overhead_ns: float = 4_200_000
    """Host time of a forward's first prompt chunk. The GPU is idle during this time. Qwen3-8B on H200 under SGLang
    0.5.12: one short prompt takes 16.5 ms, and the GPU works for 12 ms of it.
    """
    further_prompt_overhead_ns: float = 4_200_000
    """Host time of each further prompt chunk of a forward."""
    all_reduce_ns: float = 7_000
    """Fixed time of one all-reduce. With tensor parallelism each layer has two. Measured: a graph-captured all-reduce
    of 128 bytes over two GB200."""
    expert_efficiency: float | None = None
    """Share of the GPU's FLOP/s that the matrix multiplications of routed experts reach. None: they count like all
    other matrix multiplications."""
    expert_memory_efficiency: float = 1.0
    """Share of memory bandwidth that reading experts' weights reaches. Used only with expert_efficiency."""
    expert_layer_ns: float = 0
    """Fixed time of one layer's experts: routing, sorting and gathering tokens. Used only with expert_efficiency."""
    expert_token_ns: float = 0
    """Time of one layer's experts for each token of a server. More GPUs do not shorten this time. Used only with
    expert_efficiency."""
    expert_prefill_layer_ns: float = 0
    """Addition to prefill_layer for each layer that has experts."""
    expert_exchange_ns: float = 25_000
    """If each GPU holds whole experts and a library such as DeepEP sends tokens to them: fixed time per layer of
    sending tokens to the GPUs of their experts, and again of sending the results back (assumed)."""
    expert_exchange_efficiency: float | None = None
    """Share of NVLink bandwidth that is reached when tokens are sent to the GPUs of their experts, and results back.
    None: only the fixed time expert_exchange counts.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_time = getattr(self, field.name), field.name.endswith("_ns")
            if value is None:
                continue
            if value < 0 or (value == 0 and not is_time):
                raise ValueError(f"Roofline needs {field.name} {'>=' if is_time else '>'} 0, found {value:g}")

    def model(self, layout: Layout) -> CostModel:
        return RooflineModel(self, layout)


KERNELS_SPREAD = 1.25
"""Factor by which a server's step times may be longer or shorter than the modelled times: the smallest multiple of
0.05 whose ranges hold 80 % of the measured numbers of each metric, by the rule of docs/widths.py."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A roofline whose shares of nominal rates come from measured kernels, by operator. Host times are settings, as in
    the roofline, with defaults of their own.

    kernels.csv has the shares by GPU and data type of weights or KV: see experiments/operators. For a GPU that was not
    measured, medians of the measured GPUs are used.
    """

    HOST_FIELDS: ClassVar = (
        "prefill_layer_ns",
        "expert_prefill_layer_ns",
        "latent_expert_prefill_layer_ns",
        "step_overhead_ns",
        "prompt_overhead_ns",
        "further_prompt_overhead_ns",
    )

    prefill_layer_ns: float = 310_000
    """Minimum time of one layer in a prefill forward."""
    expert_prefill_layer_ns: float = 1_000_000
    """Addition to the minimum time prefill_layer, for each layer with experts. Chosen on half of the points of
    experiments/default-cost.
    """
    latent_expert_prefill_layer_ns: float = 2_200_000
    """Replaces expert_prefill_layer if the model has latent attention and experts in fp8 or fp4. Measured: DeepSeek-V3
    in fp8 under SGLang 0.5.12 on an H200 (experiments/default-cost/launches.csv).
    """
    decode_layer_ns: float = 44_000
    """Fixed time of one layer in a decode step. Qwen3-8B on H200 under SGLang 0.5.12 at batch 1: a step takes 5.08 ms
    on the GPU, including 3.5 ms for reading weights as this cost model times it."""
    step_overhead_ns: float = 300_000
    """Host time of each prefill forward or decode step."""
    prompt_overhead_ns: float = 4_200_000
    """Host time of a forward's first prompt chunk."""
    further_prompt_overhead_ns: float = 1_000_000
    """Host time of each prompt chunk after the first in a forward, mainly for handing the chunk's KV to a transfer.
    Measured: SGLang 0.5.12 on H200 (experiments/sglang-h200).
    """
    factor: float = 1
    """Factor by which the times of forwards and steps are multiplied."""
    slowness: float = 0
    """Position of times within their ranges: -1 is the fastest end, 1 the slowest."""

    @property
    def ends(self) -> "tuple[Kernels, Kernels]":
        """Returns the cost models at the fast and at the slow end of the range of times (slowness -1 and 1)."""
        return replace(self, slowness=-1), replace(self, slowness=1)

    def model(self, layout: Layout) -> CostModel:
        return RooflineModel(self.roofline(layout), layout, self._nccl(layout), hosts_slower=self._factor())

    def _nccl(self, layout: Layout) -> Nccl:
        gpu, kind = layout.gpu.name, kinds(layout)["all_reduce"]

        def collective(operator: str, kind: str = kind) -> Collective:
            found, within = reached(gpu, operator, kind), spread(gpu, operator, kind)
            return Collective(
                fixed_ns=1e3 * found.fixed_us * self._factor(within.fixed_us),
                link_efficiency=found.memory / self._factor(within.memory),
            )

        large = collective("large_all_reduce")
        if not layout.switches_reduce and int(kind) > RING:
            ring = collective("large_all_reduce", str(RING))
            large = replace(large, link_efficiency=min(large.link_efficiency, ring.link_efficiency))
        return Nccl(large, collective("gather"))

    def roofline(self, layout: Layout) -> Roofline:
        """Returns a roofline with the measured rates of a layout's kernels."""
        operators = kinds(layout)
        found = {operator: reached(layout.gpu.name, operator, kind) for operator, kind in operators.items()}
        within = {operator: spread(layout.gpu.name, operator, kind) for operator, kind in operators.items()}
        experts, link, exchange = (found[name] for name in ("experts", "all_reduce", "expert_exchange"))
        compute, memory = products(layout)
        host = self._factor()
        beyond = beyond_tables(layout)

        def share(reached: float, operator: str, column: str = "memory", *spreads: float) -> float:
            return reached / self._factor(getattr(within[operator], column), *spreads)

        def time_ns(operator: str, column: str = "fixed_us", *spreads: float) -> float:
            time_us: float = getattr(found[operator], column)
            return 1e3 * time_us * self._factor(getattr(within[operator], column), *spreads)

        reading = share(found["decode_attention"].memory, "decode_attention")
        return Roofline(
            matrix_efficiency=share(compute, "gemm", "compute"),
            matrix_tile_tokens=tile_tokens(layout),
            memory_efficiency=share(memory, "gemm"),
            activation_efficiency=share(memory, "gemm"),
            attention_efficiency=share(found["prefill_attention"].compute, "prefill_attention", "compute"),
            kv_bandwidth=reading,
            fp8_kv_bandwidth=reading,
            link_efficiency=share(link.memory, "all_reduce"),
            all_reduce_ns=time_ns("all_reduce"),
            expert_efficiency=share(experts.compute, "experts", "compute", beyond.spread) / beyond.slowness,
            expert_memory_efficiency=share(experts.memory, "experts"),
            expert_layer_ns=time_ns("experts"),
            expert_token_ns=time_ns("experts", "token_us", beyond.spread) * beyond.slowness * beyond.undivided,
            expert_exchange_ns=time_ns("expert_exchange"),
            expert_exchange_efficiency=share(exchange.memory, "expert_exchange"),
            prefill_layer_ns=self.prefill_layer_ns * host,
            expert_prefill_layer_ns=self._expert_prefill_layer_ns(layout) * host,
            decode_layer_ns=self.decode_layer_ns * host,
            step_overhead_ns=self.step_overhead_ns * host,
            prompt_overhead_ns=self.prompt_overhead_ns * host,
            further_prompt_overhead_ns=self.further_prompt_overhead_ns * host,
        )

    def _factor(self, *spreads: float) -> float:
        """Returns the factor on a time at the position `slowness` within the time's range. spreads: factors of
        uncertainty of the time's kernels, which are combined with KERNELS_SPREAD.
        """
        return self.factor * exp(self.slowness * hypot(log(KERNELS_SPREAD), *map(log, spreads)))

    def _expert_prefill_layer_ns(self, layout: Layout) -> float:
        is_latent = isinstance(layout.model.attention, LatentAttention)
        if is_latent and kinds(layout)["experts"].endswith(("fp8", "fp4")):
            return self.latent_expert_prefill_layer_ns
        return self.expert_prefill_layer_ns


_NO_TERMS = {
    "prefill_graph_sizes",
    "prefill_tile_tokens",
    "prefill_wave_tokens",
    "prefill_slowdown",
    "prefill_slowdown_memory_ns",
}
"""Fields of Affine that are not coefficients of a step's time."""


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Times that are linear in the work, with fitted coefficients, as in profiles.

    Terms of a prefill forward: base, tokens, attended pairs, prompts. Terms of a decode step: base, matrices, requests,
    KV.

    A chunk continues a prompt if the prompt has earlier tokens that are cached or that an earlier forward has computed.
    """

    HOST_FIELDS: ClassVar = ("prefill_least_ns", "prefill_least_per_prompt_ns", "prefill_least_per_continued_prompt_ns")
    """Names of the fields with host times, which `host.slowdown` scales."""

    prefill_base_ns: float = 0
    """Fixed time of a prefill forward."""
    prefill_per_token_ns: float = 0
    """Additional time of a prefill forward for each new prompt token."""
    prefill_per_pair_ns: float = 0
    """Time of a forward for each pair of a new token and a token that it attends to."""
    prefill_graph_sizes: tuple[int, ...] = ()
    """Token counts of captured CUDA graphs, ascending. A forward is padded to the smallest graph that holds its tokens.
    Larger forwards use no graph."""
    prefill_graph_per_pair_ns: float = 0
    """Time of a forward with a CUDA graph for each pair of a new token and a token that it attends to. It replaces
    prefill_per_pair there, because graphs use another attention kernel.
    """
    prefill_per_continued_pair_ns: float = 0
    """Addition to prefill_per_pair in chunks that continue a prompt, because they use another attention kernel."""
    prefill_per_context_token_ns: float = 0
    """Time of gathering one context token of a chunk that continues a prompt."""
    prefill_tile_tokens: int = 1
    """Number of tokens in a tile of matrix products. In a forward of more than four tiles and without a CUDA graph,
    prefill_per_token and a table of prefill times count new tokens as if the last tile were full."""
    prefill_wave_tokens: int = 1
    """Number of new tokens for which attention reads the context (earlier tokens of a prompt) at once. For a partly
    filled group of new tokens, attention to the context takes as long as for a full group.
    """
    prefill_per_prompt_ns: float = 0
    """Time of a forward for each prompt chunk."""
    prefill_least_ns: float = 0
    """Minimum time of a forward, for launching its kernels."""
    prefill_least_per_prompt_ns: float = 0
    """Addition to prefill_least for each prompt chunk, because its attention is launched separately."""
    prefill_least_per_continued_prompt_ns: float = 0
    """Addition to prefill_least for each chunk that continues a prompt."""
    prefill_slowdown: float = 0
    """Share by which forwards take longer on a GPU that computes without pause."""
    prefill_slowdown_memory_ns: float = 100_000_000
    """Time constant of the average utilisation on which prefill_slowdown depends."""
    decode_base_ns: float = 0
    """Fixed time of a decode step."""
    decode_weights_ns: float = 0
    """Time of a decode step for reading weights. Computing with the weights overlaps with reading them."""
    decode_matrices_per_request_ns: float = 0
    """Time that a decode step computes with the weights for each request of the batch. Reading the weights takes
    decode_weights at the same time, so only the longer counts: decode_weights, or the sum of this time over the batch.
    """
    decode_per_request_ns: float = 0
    """Further time of a decode step for each request, in addition to decode_matrices_per_request and reading KV."""
    decode_per_context_token_ns: float = 0
    """Time of a decode step for each KV token. A token that several requests read counts once for each of them."""
    decode_per_distinct_token_ns: float = 0
    """Time of a decode step for each distinct KV token. A token that several requests share counts once."""

    def __post_init__(self) -> None:
        sizes = self.prefill_graph_sizes
        if list(sizes) != sorted({size for size in sizes if size > 0}):
            raise ValueError(f"Affine needs ascending prefill_graph_sizes above 0, found {list(sizes)}")

    @property
    def has_terms(self) -> bool:
        """False if all coefficients are 0, so that every step takes no time."""
        return any(getattr(self, field.name) for field in fields(self) if field.name not in _NO_TERMS)

    def of_stage(self, share: float) -> "Affine":
        """Returns the costs of a pipeline stage. share: the stage's share of the layers."""
        times = [f.name for f in fields(self) if f.name.endswith("_ns")]
        times.remove("prefill_slowdown_memory_ns")
        return replace(self, **{name: _scaled(getattr(self, name), share) for name in times})

    def model(self, layout: Layout) -> CostModel:
        del layout
        return AffineModel(self)


def _scaled(times_ns: Any, share: float) -> Any:
    """Multiplies a time in ns, or each time of a table, by a share."""
    if isinstance(times_ns, Mapping):
        return {size: share * time_ns for size, time_ns in times_ns.items()}
    return None if times_ns is None else share * times_ns


@dataclass(frozen=True, kw_only=True)
class AffineTable(Affine):
    """Affine costs that also contain tables of measured times by size.

    Times must not fall as sizes grow. Between entries, times are interpolated. Above the last entry, the line through
    the last two entries continues. Below the first entry, the first time holds.
    """

    prefill_ns: Mapping[int, float] | None = None
    """Times of prefill forwards, by number of new tokens: {256: 11.8 ms, 8192: 162 ms}. None: no table."""
    decode_ns: Mapping[int, float] | None = None
    """Times of decode steps, by number of requests: {1: 5.2 ms, 64: 5.6 ms}. None: no table."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, entries in (("prefill", self.prefill_ns), ("decode", self.decode_ns)):
            times = [(entries or {})[size] for size in sorted(entries or {})]
            if times != sorted(times):
                raise ValueError(f"Table needs {name} times that do not fall as sizes grow, found {times} ns")

    def model(self, layout: Layout) -> CostModel:
        del layout
        return TableModel(self)


@dataclass(frozen=True, kw_only=True)
class AiConfigurator:
    """GPU times from aiconfigurator's operator tables (pip install aiconfigurator). Host times have the same defaults
    as in the cost model `roofline`.

    A forward of unequal prompts is timed as prompts of their mean length. KV that several requests share counts once
    for each of them.
    """

    HOST_FIELDS: ClassVar = ("step_overhead_ns", "prompt_overhead_ns")

    backend: str = "sglang"
    """Engine whose kernels aiconfigurator measured."""
    version: str | None = None
    """Version of the engine. None: the newest measured version."""
    step_overhead_ns: float = 300_000
    """Host time of each prefill forward or decode step."""
    prompt_overhead_ns: float = 4_200_000
    """Host time of each prompt of a forward."""

    def model(self, layout: Layout) -> CostModel:
        """Returns the cost model of a layout. Raises NoOperatorTablesError if aiconfigurator has no tables for the
        layout.
        """
        return AiConfiguratorModel(self, compiled_engine(self.backend, self.version, layout))
