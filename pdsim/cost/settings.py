"""Cost settings that a scenario names: durations of prefill forwards and decode steps."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import exp, hypot, log
from typing import Any, ClassVar

from pdsim.cost.affine import AffineModel, TableModel
from pdsim.cost.aiconfigurator import AiConfiguratorModel, compiled_engine
from pdsim.cost.kernels import beyond_tables, kinds, products, reached, spread
from pdsim.cost.model import CostModel
from pdsim.cost.reductions import LargeMessages
from pdsim.cost.roofline import RooflineModel
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bytes over bandwidth, operations over rate, and fixed costs. No default was measured in a serving run of this
    project.

    Decode attention reads each distinct KV token from memory once a step, at memory_efficiency: requests that share a
    prefix read it together, and the L2 cache serves all but the first. The remaining time, up to the rate kv_bandwidth
    for unshared KV, is work on the SMs, which each request pays for itself.
    """

    HOST_FIELDS: ClassVar = ("prefill_layer_ns", "step_overhead_ns", "prompt_overhead_ns")
    """Fields with host work, which `host.slowdown` scales."""

    matrix_efficiency: float = 0.7
    """Share of nominal FLOP/s in matrix products. aiconfigurator's GEMM tables, 8192 tokens: 0.78 to 0.80 on H100 and
    H200, 0.71 on B200 (bf16)."""
    attention_efficiency: float = 0.5
    """Share of nominal bf16 FLOP/s in prefill attention. aiconfigurator's context attention at 4k tokens: 0.52 to 0.55
    on H100 and H200, 0.40 on B200; 0.91 on H20."""
    memory_efficiency: float = 0.8
    """Share of memory bandwidth for weights and shared KV: aiconfigurator's mem_eff."""
    kv_bandwidth: float = 0.85
    """Share of memory bandwidth in decode attention with bf16 KV. aiconfigurator at batch 64: 0.90 on H100, 0.89 on
    H200, 0.85 on B200."""
    fp8_kv_bandwidth: float = 0.45
    """Share of memory bandwidth in decode attention with fp8 KV: 2.0 to 2.3 of 4.8 TB/s on Hopper."""
    link_efficiency: float = 0.8
    """Share of NVLink bandwidth that all-reduces reach (assumed)."""
    prefill_layer_ns: float = 310_000
    """Minimum time of a layer in prefill, for launching its kernels. Qwen3-8B on H200 under SGLang 0.5.12: prefill of
    up to 256 tokens takes 11.3 ms for 36 layers.
    """
    decode_layer_ns: float = 32_000
    """Time per layer of a decode step in a CUDA graph, without bytes and operations. Qwen3-8B on H200 under SGLang
    0.5.12 at batch 1: 5.08 ms on the GPU, of which weights take 3.94 ms.
    """
    step_overhead_ns: float = 300_000
    """Host time of each prefill forward or decode step. Qwen3-8B on H200 under SGLang 0.5.12: 5.39 ms per token, of
    which the GPU takes 5.08 ms.
    """
    prompt_overhead_ns: float = 4_200_000
    """Host time per prompt chunk of a forward, during which the GPU is idle. Qwen3-8B on H200 under SGLang 0.5.12, one
    short prompt: 16.5 ms, of which the GPU takes 12 ms.
    """
    all_reduce_ns: float = 7_000
    """Time of an all-reduce without the time of its bytes. With tensor parallelism each layer has two. Measured: a
    graph-captured all-reduce of 128 bytes over two GB200.
    """
    expert_efficiency: float | None = None
    """Share of FLOP/s that products of routed experts reach. None: experts are computed as all other products."""
    expert_memory_efficiency: float = 1.0
    """Share of memory bandwidth for experts' weights. Used only if expert_efficiency is given."""
    expert_layer_ns: float = 0
    """Time of a layer's experts without bytes and operations: routing, sorting and gathering tokens. Used only if
    expert_efficiency is given.
    """
    expert_token_ns: float = 0
    """Time of a layer's experts for each token of a server, which its GPUs do not divide among them. Used only if
    expert_efficiency is given.
    """
    expert_prefill_layer_ns: float = 0
    """Addition to prefill_layer for each layer with experts."""
    expert_exchange_ns: float = 25_000
    """With data-parallel attention: time per layer for sending tokens to their experts' GPUs, and again for sending
    results back, without the time of bytes (assumed).
    """
    expert_exchange_efficiency: float | None = None
    """Share of link bandwidth that this exchange of tokens reaches. None: the exchange takes the same time for any
    number of tokens.
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


KERNELS_SPREAD = 1.3
"""Factor within which step times of most servers lie, chosen on half of the points of experiments/default-cost."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Shares of a GPU's nominal rates that measured kernels reach, by operator. Host times are those of the roofline.

    The shares come from kernels.csv, by GPU and data type of weights or KV: see experiments/operators. A GPU that was
    not measured takes the medians of the measured GPUs.
    """

    HOST_FIELDS: ClassVar = (
        "prefill_layer_ns",
        "expert_prefill_layer_ns",
        "latent_expert_prefill_layer_ns",
        "step_overhead_ns",
        "prompt_overhead_ns",
    )

    prefill_layer_ns: float = 310_000
    """Minimum time of a layer in prefill."""
    expert_prefill_layer_ns: float = 1_000_000
    """Addition to prefill_layer for each layer with experts. Chosen on half of the points of
    experiments/default-cost.
    """
    latent_expert_prefill_layer_ns: float = 2_200_000
    """Addition to prefill_layer for each layer with experts, if the model has latent attention and experts of fp8 or
    fp4: DeepSeek-V3 in fp8 under SGLang 0.5.12 on an H200 (experiments/default-cost/launches.csv).
    """
    decode_layer_ns: float = 44_000
    """Time per layer of a decode step, without bytes and operations. Qwen3-8B on H200 under SGLang 0.5.12 at batch 1:
    5.08 ms on the GPU, of which weights explain 3.5 ms.
    """
    step_overhead_ns: float = 300_000
    """Host time of each prefill forward or decode step."""
    prompt_overhead_ns: float = 4_200_000
    """Host time of each prompt chunk of a forward."""
    factor: float = 1
    """Factor on all times."""
    slowness: float = 0
    """Position of all times in their ranges, from -1 (fastest) to 1 (slowest)."""

    @property
    def ends(self) -> "tuple[Kernels, Kernels]":
        """The cost models at the fast and at the slow end of the range."""
        return replace(self, slowness=-1), replace(self, slowness=1)

    def model(self, layout: Layout) -> CostModel:
        return RooflineModel(self.roofline(layout), layout, self._large_messages(layout))

    def _large_messages(self, layout: Layout) -> LargeMessages:
        gpu, operator, kind = layout.gpu.name, "large_all_reduce", kinds(layout)["all_reduce"]
        found, within = reached(gpu, operator, kind), spread(gpu, operator, kind)
        return LargeMessages(
            fixed_ns=1e3 * found.fixed_us * self._factor(within.fixed_us),
            link_efficiency=found.memory / self._factor(within.memory),
        )

    def roofline(self, layout: Layout) -> Roofline:
        """The roofline that the kernels of this layout reach."""
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
            memory_efficiency=share(memory, "gemm"),
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
        )

    def _factor(self, *spreads: float) -> float:
        """Factor on a time whose kernels have these spreads, combined with the spread of servers."""
        return self.factor * exp(self.slowness * hypot(log(KERNELS_SPREAD), *map(log, spreads)))

    def _expert_prefill_layer_ns(self, layout: Layout) -> float:
        is_latent = isinstance(layout.model.attention, LatentAttention)
        if is_latent and kinds(layout)["experts"].endswith(("fp8", "fp4")):
            return self.latent_expert_prefill_layer_ns
        return self.expert_prefill_layer_ns


_NO_TERMS = {"prefill_graph_sizes", "prefill_wave_tokens", "prefill_slowdown", "prefill_slowdown_memory_ns"}
"""Fields of Affine that are not durations of work."""


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Linear costs with fitted coefficients, as profiles hold them.

    Prefill forwards: base + tokens + attended pairs + prompts. Decode steps: base + matrices + requests + KV.

    A prompt is continued if some of its tokens are context: cached, or computed by an earlier forward.
    """

    HOST_FIELDS: ClassVar = ("prefill_least_ns", "prefill_least_per_prompt_ns", "prefill_least_per_continued_prompt_ns")
    """Fields with host work, which `host.slowdown` scales."""

    prefill_base_ns: float = 0
    """Time of each prefill forward."""
    prefill_per_token_ns: float = 0
    """Time of each computed prompt token."""
    prefill_per_pair_ns: float = 0
    """Time of each pair of a new token and an earlier token that the new token attends to."""
    prefill_graph_sizes: tuple[int, ...] = ()
    """Token counts of captured CUDA graphs, ascending. A forward is padded to the smallest graph that holds its tokens,
    if any.
    """
    prefill_graph_per_pair_ns: float = 0
    """Replaces prefill_per_pair in forwards with a CUDA graph, whose attention kernel is another one."""
    prefill_per_continued_pair_ns: float = 0
    """Addition for each pair in a continued prompt, whose attention kernel is another one."""
    prefill_per_context_token_ns: float = 0
    """Time of gathering each context token of a continued prompt."""
    prefill_wave_tokens: int = 1
    """New tokens per wave of attention. Each wave reads the context once, and a partial wave counts as a full one."""
    prefill_per_prompt_ns: float = 0
    """Time of each prompt chunk."""
    prefill_least_ns: float = 0
    """Minimum time of a forward, for launching its kernels."""
    prefill_least_per_prompt_ns: float = 0
    """Addition to the minimum time for each prompt chunk, whose attention is launched separately."""
    prefill_least_per_continued_prompt_ns: float = 0
    """Addition to the minimum time for each chunk that continues a prompt."""
    prefill_slowdown: float = 0
    """Fraction by which forwards take longer on a GPU that is always busy."""
    prefill_slowdown_memory_ns: float = 100_000_000
    """Time constant of the GPU's average utilisation, for prefill_slowdown."""
    decode_base_ns: float = 0
    """Time of each decode step."""
    decode_weights_ns: float = 0
    """Time of each decode step for reading weights. Computing with the weights overlaps with reading."""
    decode_matrices_per_request_ns: float = 0
    """Time of each request for computing with the weights. Only the part that exceeds the reading of weights counts."""
    decode_per_request_ns: float = 0
    """Other time of each request in a decode step."""
    decode_per_context_token_ns: float = 0
    """Time of each KV token, counted for each request that reads it."""
    decode_per_distinct_token_ns: float = 0
    """Time of each distinct KV token, counted once for all requests that share it."""

    def __post_init__(self) -> None:
        sizes = self.prefill_graph_sizes
        if list(sizes) != sorted({size for size in sizes if size > 0}):
            raise ValueError(f"Affine needs prefill_graph_sizes above 0 that rise, found {list(sizes)}")

    @property
    def has_terms(self) -> bool:
        """False if every step would take no time."""
        return any(getattr(self, field.name) for field in fields(self) if field.name not in _NO_TERMS)

    def of_stage(self, share: float) -> "Affine":
        """The costs of a pipeline stage that has this share of the layers."""
        times = [f.name for f in fields(self) if f.name.startswith("prefill") and f.name.endswith("_ns")]
        times.remove("prefill_slowdown_memory_ns")
        return replace(self, **{name: _scaled(getattr(self, name), share) for name in times})

    def model(self, layout: Layout) -> CostModel:
        del layout
        return AffineModel(self)


def _scaled(times_ns: Any, share: float) -> Any:
    """A share of a time in ns, or of each time in a table."""
    if isinstance(times_ns, Mapping):
        return {size: share * time_ns for size, time_ns in times_ns.items()}
    return None if times_ns is None else share * times_ns


@dataclass(frozen=True, kw_only=True)
class AffineTable(Affine):
    """Affine costs with tables of measured times by size, beside the base and the time per token or request.

    Times between entries are interpolated, and must not fall as sizes grow. Beyond the last entry its line continues;
    below the first entry the first time holds.
    """

    prefill_ns: Mapping[int, float] | None = None
    """Times of prefill forwards by number of new tokens: {256: 11.8 ms, 8192: 162 ms}."""
    decode_ns: Mapping[int, float] | None = None
    """Times of decode steps by number of requests: {1: 5.2 ms, 64: 5.6 ms}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, entries in (("prefill", self.prefill_ns), ("decode", self.decode_ns)):
            times = [(entries or {})[size] for size in sorted(entries or {})]
            if times != sorted(times):
                raise ValueError(f"Table needs {name} times that do not fall, found {times} ns")

    def model(self, layout: Layout) -> CostModel:
        del layout
        return TableModel(self)


@dataclass(frozen=True, kw_only=True)
class AiConfigurator:
    """GPU times from aiconfigurator's operator tables (pip install aiconfigurator). Host times are those of the
    roofline.

    Unequal prompts count as prompts of their mean length. Shared KV counts once for each reader.
    """

    HOST_FIELDS: ClassVar = ("step_overhead_ns", "prompt_overhead_ns")

    backend: str = "sglang"
    """Engine whose kernels were measured."""
    version: str | None = None
    """Version of the backend. None: the newest measured version."""
    step_overhead_ns: float = 300_000
    """Host time of each prefill forward or decode step."""
    prompt_overhead_ns: float = 4_200_000
    """Host time of each prompt of a forward."""

    def model(self, layout: Layout) -> CostModel:
        """The cost model of a layout. Raises NoOperatorTablesError if aiconfigurator has no tables for it."""
        return AiConfiguratorModel(self, compiled_engine(self.backend, self.version, layout))
