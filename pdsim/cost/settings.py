"""Cost settings that a scenario names: how long forwards and steps take, and by which rule."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import exp, hypot, log
from typing import Any, ClassVar

from pdsim.cost.affine import AffineModel, TableModel
from pdsim.cost.aiconfigurator import AiConfiguratorModel, compiled_engine
from pdsim.cost.kernels import kinds, products, reached, spread
from pdsim.cost.model import CostModel
from pdsim.cost.roofline import RooflineModel
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bytes over bandwidth, operations over rate, and fixed costs. Defaults are measured, none of a serving run.

    Decode attention reads each distinct KV token from memory once a step, at memory_efficiency: requests that share a
    prefix walk through it together, and the L2 cache serves all but the first. What it takes beyond that to reach
    kv_bandwidth, when nothing is shared, is work on the SMs, which each request pays for itself.
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
    """Minimum time of a layer, for launching its kernels. Qwen3-8B on H200 under SGLang 0.5.12: prefill of up to 256
    tokens takes 11.3 ms for 36 layers."""
    decode_layer_ns: float = 32_000
    """Time per layer of a decode step beyond its bytes and operations, in a CUDA graph. Qwen3-8B on H200 under SGLang
    0.5.12 at batch 1: 5.08 ms on the GPU, of which weights take 3.94 ms."""
    step_overhead_ns: float = 300_000
    """Host time of each forward or step. Qwen3-8B on H200 under SGLang 0.5.12: 5.39 ms per token, of which the GPU
    takes 5.08 ms."""
    prompt_overhead_ns: float = 4_200_000
    """Host time of each chunk of a forward, beside which the GPU is idle. Qwen3-8B on H200 under SGLang 0.5.12, one
    short prompt: 16.5 ms, of which the GPU takes 12 ms."""
    all_reduce_ns: float = 7_000
    """Time of an all-reduce beyond its bytes; with TP each layer has two. Measured: a graph-captured all-reduce of 128
    bytes over two GB200."""
    expert_efficiency: float | None = None
    """Share of FLOP/s that products of routed experts reach. None: they count with all other products."""
    expert_memory_efficiency: float = 1.0
    """Share of memory bandwidth for experts' weights; used where expert_efficiency is given, as expert_layer."""
    expert_layer_ns: float = 0
    """Time of a layer's experts beyond their bytes and operations: routing, sorting and gathering tokens."""
    expert_prefill_layer_ns: float = 0
    """Time added to prefill_layer in layers with experts."""
    expert_exchange_ns: float = 25_000
    """With data-parallel attention: time per layer of sending tokens to their experts' GPUs, or back (assumed)."""
    expert_exchange_efficiency: float | None = None
    """Share of the links' bandwidth that such an exchange reaches. None: its time does not depend on its tokens."""

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
    """Shares that measured kernels reach of a GPU's nominal rates, by operator; host times are the roofline's.

    Fractions come from kernels.csv, by GPU and type of weights or KV: see experiments/operators. A GPU that was not
    measured takes the medians of those that were.
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
    """Time added for a layer with experts. Chosen on half of the points of experiments/default-cost."""
    latent_expert_prefill_layer_ns: float = 2_200_000
    """Additional time of a layer with experts, latent attention and quantized inputs: DeepSeek-V3 in fp8 under SGLang
    0.5.12 on an H200 (experiments/default-cost/launches.csv)."""
    decode_layer_ns: float = 44_000
    """Time added per layer of a decode step. Qwen3-8B on H200 under SGLang 0.5.12 at batch 1: 5.08 ms on the GPU, of
    which weights explain 3.5 ms."""
    step_overhead_ns: float = 300_000
    """Host time of each forward or step."""
    prompt_overhead_ns: float = 4_200_000
    """Host time of each chunk of a forward."""
    factor: float = 1
    """Factor on all times."""
    slowness: float = 0
    """Position of all times in their ranges, from -1 (fastest) to 1 (slowest)."""

    @property
    def ends(self) -> "tuple[Kernels, Kernels]":
        """The cost models at the fast and at the slow end of the range."""
        return replace(self, slowness=-1), replace(self, slowness=1)

    def model(self, layout: Layout) -> CostModel:
        return RooflineModel(self.roofline(layout), layout)

    def roofline(self, layout: Layout) -> Roofline:
        """The roofline that kernels of this layout reach."""
        operators = kinds(layout)
        found = {operator: reached(layout.gpu.name, operator, kind) for operator, kind in operators.items()}
        within = {operator: spread(layout.gpu.name, operator, kind) for operator, kind in operators.items()}
        experts, link, exchange = (found[name] for name in ("experts", "all_reduce", "expert_exchange"))
        compute, memory = products(layout)
        host = self._factor()

        def share(reached: float, operator: str, column: str = "memory") -> float:
            return reached / self._factor(getattr(within[operator], column))

        def fixed_ns(operator: str) -> float:
            return 1e3 * found[operator].fixed_us * self._factor(within[operator].fixed_us)

        reading = share(found["decode_attention"].memory, "decode_attention")
        return Roofline(
            matrix_efficiency=share(compute, "gemm", "compute"),
            memory_efficiency=share(memory, "gemm"),
            attention_efficiency=share(found["prefill_attention"].compute, "prefill_attention", "compute"),
            kv_bandwidth=reading,
            fp8_kv_bandwidth=reading,
            link_efficiency=share(link.memory, "all_reduce"),
            all_reduce_ns=fixed_ns("all_reduce"),
            expert_efficiency=share(experts.compute, "experts", "compute"),
            expert_memory_efficiency=share(experts.memory, "experts"),
            expert_layer_ns=fixed_ns("experts"),
            expert_exchange_ns=fixed_ns("expert_exchange"),
            expert_exchange_efficiency=share(exchange.memory, "expert_exchange"),
            prefill_layer_ns=self.prefill_layer_ns * host,
            expert_prefill_layer_ns=self._expert_prefill_layer_ns(layout) * host,
            decode_layer_ns=self.decode_layer_ns * host,
            step_overhead_ns=self.step_overhead_ns * host,
            prompt_overhead_ns=self.prompt_overhead_ns * host,
        )

    def _factor(self, spread: float = 1) -> float:
        """The factor of a time that kernels leave within this spread, beside that of servers."""
        return self.factor * exp(self.slowness * hypot(log(KERNELS_SPREAD), log(spread)))

    def _expert_prefill_layer_ns(self, layout: Layout) -> float:
        is_latent = isinstance(layout.model.attention, LatentAttention)
        if is_latent and kinds(layout)["experts"].endswith(("fp8", "fp4")):
            return self.latent_expert_prefill_layer_ns
        return self.expert_prefill_layer_ns


_NO_TERMS = {"prefill_graph_sizes", "prefill_wave_tokens", "prefill_slowdown", "prefill_slowdown_memory_ns"}
"""Fields of Affine that are no times of work."""


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Straight lines, as they are fitted to measurements. Profiles hold their coefficients.

    Prefill forwards: base + tokens + attended pairs + prompts. Decode steps: base + matrices + requests + KV.

    A prompt is continued if some of it is context: cached, or computed before.
    """

    HOST_FIELDS: ClassVar = ("prefill_least_ns", "prefill_least_per_prompt_ns", "prefill_least_per_continued_prompt_ns")
    """Fields with host work, which `host.slowdown` scales."""

    prefill_base_ns: float = 0
    """Time of each forward."""
    prefill_per_token_ns: float = 0
    """Time of each token computed."""
    prefill_per_pair_ns: float = 0
    """Time of each pair of a new token and an earlier token that it attends to."""
    prefill_graph_sizes: tuple[int, ...] = ()
    """Tokens of captured CUDA graphs, ascending: a forward is padded to the smallest that holds it, if one does."""
    prefill_graph_per_pair_ns: float = 0
    """prefill_per_pair of forwards in these graphs, whose attention is another kernel."""
    prefill_per_continued_pair_ns: float = 0
    """Time added for each pair in a continued prompt, whose attention is another kernel."""
    prefill_per_context_token_ns: float = 0
    """Time of gathering each context token."""
    prefill_wave_tokens: int = 1
    """New tokens of a wave: context is read once for each, and the last counts as full."""
    prefill_per_prompt_ns: float = 0
    """Time of each chunk."""
    prefill_least_ns: float = 0
    """Minimum time of a forward, for launching its kernels."""
    prefill_least_per_prompt_ns: float = 0
    """Additional minimum time for each chunk, whose attention is launched separately."""
    prefill_least_per_continued_prompt_ns: float = 0
    """Additional minimum time for each chunk that continues a prompt."""
    prefill_slowdown: float = 0
    """Fraction by which forwards take longer on a GPU that is always busy."""
    prefill_slowdown_memory_ns: float = 100_000_000
    """Time constant of that GPU's average utilisation."""
    decode_base_ns: float = 0
    """Time of each step."""
    decode_weights_ns: float = 0
    """Time of each step for reading weights; computing with them overlaps."""
    decode_matrices_per_request_ns: float = 0
    """Time of each request for computing with the weights. Only the part that exceeds the reading counts."""
    decode_per_request_ns: float = 0
    """Other time of each request."""
    decode_per_context_token_ns: float = 0
    """Time of each KV token, for each request that reads it."""
    decode_per_distinct_token_ns: float = 0
    """Time of each distinct KV token, once for all requests that share it."""

    def __post_init__(self) -> None:
        sizes = self.prefill_graph_sizes
        if list(sizes) != sorted({size for size in sizes if size > 0}):
            raise ValueError(f"Affine needs prefill_graph_sizes above 0 that rise, found {list(sizes)}")

    @property
    def has_terms(self) -> bool:
        """False if every step would take no time."""
        return any(getattr(self, field.name) for field in fields(self) if field.name not in _NO_TERMS)

    def of_stage(self, share: float) -> "Affine":
        """The lines of a pipeline stage that has this share of the layers."""
        times = [f.name for f in fields(self) if f.name.startswith("prefill") and f.name.endswith("_ns")]
        times.remove("prefill_slowdown_memory_ns")
        return replace(self, **{name: _scaled(getattr(self, name), share) for name in times})

    def model(self, layout: Layout) -> CostModel:
        del layout
        return AffineModel(self)


def _scaled(times_ns: Any, share: float) -> Any:
    """A time, or a table of them."""
    if isinstance(times_ns, Mapping):
        return {size: share * time_ns for size, time_ns in times_ns.items()}
    return None if times_ns is None else share * times_ns


@dataclass(frozen=True, kw_only=True)
class AffineTable(Affine):
    """Affine costs with tables of measured times by size, instead of base and time per token or request.

    Times between entries are interpolated, and must not fall as sizes grow. Beyond the last entry the line continues;
    below the first entry its time holds.
    """

    prefill_ns: Mapping[int, float] | None = None
    """Times of forwards by new tokens: {256: 11.8 ms, 8192: 162 ms}."""
    decode_ns: Mapping[int, float] | None = None
    """Times of steps by requests: {1: 5.2 ms, 64: 5.6 ms}."""

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
    """GPU time by aiconfigurator's operator tables (pip install aiconfigurator); host time as in the roofline.

    Unequal prompts count as equal mean prompts, and shared KV for each reader.
    """

    HOST_FIELDS: ClassVar = ("step_overhead_ns", "prompt_overhead_ns")

    backend: str = "sglang"
    """Engine whose kernels were measured."""
    version: str | None = None
    """Version of the backend; None: the newest measured."""
    step_overhead_ns: float = 300_000
    """Host time of each step."""
    prompt_overhead_ns: float = 4_200_000
    """Host time of each prompt of a forward."""

    def model(self, layout: Layout) -> CostModel:
        """The operator tables of a model and GPU. Raises NoOperatorTablesError."""
        return AiConfiguratorModel(self, compiled_engine(self.backend, self.version, layout))
