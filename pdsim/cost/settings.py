"""Cost settings that a scenario names: how long forwards and steps take, and by which rule."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from pdsim.cost.affine import AffineModel, TableModel
from pdsim.cost.aiconfigurator import AiConfiguratorModel, compiled_engine
from pdsim.cost.kernels import kinds, reached
from pdsim.cost.model import CostModel
from pdsim.cost.roofline import RooflineModel
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Reached fractions of nominal rates, and fixed costs. The defaults are measured, none is of a serving result:

    matrix_efficiency     aiconfigurator's GEMM tables, 8192 tokens: 0.78 to 0.80 on H100 and H200, 0.71 on B200 (bf16)
    attention_efficiency  its context attention at 4k tokens: 0.52 to 0.55 on H100 and H200, 0.40 on B200; 0.91 on H20
    memory_efficiency     aiconfigurator's mem_eff, 0.8
    kv_bandwidth          its decode attention at batch 64: 0.90 on H100, 0.89 on H200, 0.85 on B200 (bf16)
    fp8_kv_bandwidth      the same with fp8 KV on Hopper: 2.0 to 2.3 of 4.8 TB/s
    prefill_layer_ns      Qwen3-8B on H200 under SGLang 0.5.12, prefill of up to 256 tokens: 11.3 ms over 36 layers
    decode_layer_ns       the same server, decode at batch 1: 5.08 ms on the GPU, of which weights explain 3.94 ms
    step_overhead_ns      the same: 5.39 ms per token for 5.08 ms on the GPU
    prompt_overhead_ns    the same, prefill of one short prompt: 16.5 ms around 12 ms on the GPU
    all_reduce_ns         graph-captured all-reduce of 128 bytes over two GB200: 7 us

    Decode attention reads each distinct KV token from memory once a step, at memory_efficiency: requests that share a
    prefix walk through it together, and the L2 cache serves all but the first. What it takes beyond that to reach
    kv_bandwidth, when nothing is shared, is work on the SMs, which each request pays for itself.
    """

    HOST_FIELDS: ClassVar = ("prefill_layer_ns", "step_overhead_ns", "prompt_overhead_ns")
    """Launches and other host work, which a slow host slows."""

    matrix_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    kv_bandwidth: float = 0.85
    fp8_kv_bandwidth: float = 0.45
    link_efficiency: float = 0.8
    prefill_layer_ns: float = 310_000
    """The least that a layer takes, however few its tokens: launching its kernels one by one."""
    decode_layer_ns: float = 32_000
    """Time of a layer beyond its bytes and operations, launched as a graph."""
    step_overhead_ns: float = 300_000
    prompt_overhead_ns: float = 4_200_000
    """Time of each prompt that a prefill forward begins or goes on with: host work that nothing hides."""
    all_reduce_ns: float = 7_000
    expert_efficiency: float | None = None
    """Share of the FLOP/s in products of routed experts; None: they are counted with all others."""
    expert_memory_efficiency: float = 1.0
    """Used where expert_efficiency is given, as expert_layer_ns."""
    expert_layer_ns: float = 0
    """Time of a layer's experts beyond their bytes and operations: routing, sorting and gathering tokens."""
    expert_prefill_layer_ns: float = 0
    """Added to prefill_layer_ns in layers with experts."""
    expert_exchange_ns: float = 25_000
    """Data-parallel attention: sending tokens to the GPUs of their experts, or back, once a layer. An assumption."""
    expert_exchange_efficiency: float | None = None
    """Share of the links' bandwidth that an exchange reaches; None: it takes as long, whatever its tokens."""

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
"""Factor within which step times of most servers lie: half of the points of experiments/default-cost chose it."""


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
    expert_prefill_layer_ns: float = 1_000_000
    """Chosen on half of the points of experiments/default-cost."""
    latent_expert_prefill_layer_ns: float = 2_200_000
    """The same of latent attention and quantized inputs: DeepSeek-V3 in fp8 under SGLang 0.5.12 on an H200
    (experiments/default-cost/launches.csv)."""
    decode_layer_ns: float = 44_000
    """Qwen3-8B on H200 under SGLang 0.5.12, decode at batch 1: 5.08 ms on the GPU, of which weights explain 3.5 ms."""
    step_overhead_ns: float = 300_000
    prompt_overhead_ns: float = 4_200_000
    factor: float = 1
    """Factor of all times."""

    @property
    def ends(self) -> "tuple[Kernels, Kernels]":
        """The fastest and the slowest that servers may be."""
        return replace(self, factor=self.factor / KERNELS_SPREAD), replace(self, factor=self.factor * KERNELS_SPREAD)

    def model(self, layout: Layout) -> CostModel:
        return RooflineModel(self.roofline(layout), layout)

    def roofline(self, layout: Layout) -> Roofline:
        """The roofline that kernels of this layout reach."""
        found = {operator: reached(layout.gpu.name, operator, kind) for operator, kind in kinds(layout).items()}
        gemm, experts, link, reading = (found[name] for name in ("gemm", "experts", "all_reduce", "decode_attention"))
        return Roofline(
            matrix_efficiency=gemm.compute / self.factor,
            memory_efficiency=gemm.memory / self.factor,
            attention_efficiency=found["prefill_attention"].compute / self.factor,
            kv_bandwidth=reading.memory / self.factor,
            fp8_kv_bandwidth=reading.memory / self.factor,
            link_efficiency=link.memory / self.factor,
            all_reduce_ns=1e3 * link.fixed_us * self.factor,
            expert_efficiency=experts.compute / self.factor,
            expert_memory_efficiency=experts.memory / self.factor,
            expert_layer_ns=1e3 * experts.fixed_us * self.factor,
            prefill_layer_ns=self.prefill_layer_ns * self.factor,
            expert_prefill_layer_ns=self._expert_prefill_layer_ns(layout) * self.factor,
            decode_layer_ns=self.decode_layer_ns * self.factor,
            step_overhead_ns=self.step_overhead_ns * self.factor,
            prompt_overhead_ns=self.prompt_overhead_ns * self.factor,
        )

    def _expert_prefill_layer_ns(self, layout: Layout) -> float:
        is_latent = isinstance(layout.model.attention, LatentAttention)
        if is_latent and kinds(layout)["experts"] in ("fp8", "fp4"):
            return self.latent_expert_prefill_layer_ns
        return self.expert_prefill_layer_ns


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Straight lines, as they are fitted to measurements. Profiles hold their coefficients.

    Prefill forwards: base + tokens + attended pairs + prompts. Decode steps: base + matrices + requests + KV.

    A prompt is continued if some of it is context: cached, or computed before.
    """

    HOST_FIELDS: ClassVar = (
        "prefill_least_ns",
        "prefill_least_per_prompt_ns",
        "prefill_least_per_continued_prompt_ns",
    )
    """Launches, which a slow host slows."""

    prefill_base_ns: float = 0
    prefill_per_token_ns: float = 0
    prefill_per_pair_ns: float = 0
    """Per pair of a new token and a token before it."""
    prefill_per_continued_pair_ns: float = 0
    """Added to it in prompts that are continued: their attention is another kernel."""
    prefill_per_context_token_ns: float = 0
    """Gathering the prompts' contexts."""
    prefill_wave_tokens: int = 1
    """Context is read by waves of so many new tokens, the last of them perhaps half empty."""
    prefill_per_prompt_ns: float = 0
    prefill_least_ns: float = 0
    """However few its tokens: the launch of its kernels."""
    prefill_least_per_prompt_ns: float = 0
    """Added to it for each prompt, whose attention is launched by itself."""
    prefill_least_per_continued_prompt_ns: float = 0
    """Added to it for each prompt that is continued."""
    prefill_slowdown: float = 0
    """Slowdown of a GPU that computes without pause (GpuClock)."""
    prefill_slowdown_memory_ns: float = 100_000_000
    decode_base_ns: float = 0
    decode_weights_ns: float = 0
    """Reading the weights: where told apart from the base, the matrices of a large batch may take longer."""
    decode_matrices_per_request_ns: float = 0
    """Computing them, of which only what is longer than the reading counts."""
    decode_per_request_ns: float = 0
    decode_per_context_token_ns: float = 0
    """Counted for each request that reads it."""
    decode_per_distinct_token_ns: float = 0
    """Counted once, however many requests share it."""

    def model(self, layout: Layout) -> CostModel:
        del layout
        return AffineModel(self)


@dataclass(frozen=True, kw_only=True)
class AffineTable(Affine):
    """Affine, with entries by the tokens of a forward and by the requests of a step on top of its lines.

    Between two entries times lie on a straight line; outside they are those of the nearest entry.
    """

    prefill_ns: Mapping[int, float] | None = None
    """Entries by new tokens; they must not fall."""
    decode_ns: Mapping[int, float] | None = None
    """Entries by requests; they must not fall."""

    def __post_init__(self) -> None:
        for name, entries in (("prefill", self.prefill_ns), ("decode", self.decode_ns)):
            times = [(entries or {})[size] for size in sorted(entries or {})]
            if times != sorted(times):
                raise ValueError(f"Table needs {name} times that do not fall, found {times} ns")

    def model(self, layout: Layout) -> CostModel:
        del layout
        return TableModel(self)


@dataclass(frozen=True, kw_only=True)
class AiConfigurator:
    """GPU time by aiconfigurator; host time as in the roofline, whose defaults are measured."""

    HOST_FIELDS: ClassVar = ("step_overhead_ns", "prompt_overhead_ns")

    backend: str = "sglang"
    version: str | None = None
    """Version of the backend whose kernels were measured; None: its newest."""
    step_overhead_ns: float = 300_000
    prompt_overhead_ns: float = 4_200_000

    def model(self, layout: Layout) -> CostModel:
        """Raises NoOperatorTablesError."""
        return AiConfiguratorModel(self, compiled_engine(self.backend, self.version, layout))
