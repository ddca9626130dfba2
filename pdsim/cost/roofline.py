"""Times from first principles: bytes over bandwidth, operations over rate, and how much of either is reached."""

from dataclasses import dataclass, fields
from typing import ClassVar

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine, Terms
from pdsim.cost.work import attended_pairs
from pdsim.system.memory import Layout


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
    """What a layer takes beyond its bytes and operations, launched as a graph."""
    step_overhead_ns: float = 300_000
    prompt_overhead_ns: float = 4_200_000
    """Of each prompt that a prefill forward begins or goes on with: host work that nothing hides."""
    all_reduce_ns: float = 7_000
    expert_exchange_ns: float = 25_000
    """With data-parallel attention: tokens to the GPUs of their experts, or back, once a layer. An assumption."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_time = getattr(self, field.name), field.name.endswith("_ns")
            if value < 0 or (value == 0 and not is_time):
                raise ValueError(f"Roofline needs {field.name} {'>=' if is_time else '>'} 0, found {value:g}")

    def model(self, layout: Layout) -> CostModel:
        return RooflineModel(self, layout)


class RooflineModel:
    """The roofline of one layout."""

    def __init__(self, settings: Roofline, layout: Layout) -> None:
        spec, gpu, tp = layout.model, layout.gpu, layout.tp
        self._settings = settings
        self._spec = spec
        self._flops_per_token = spec.flops_per_token
        self._shared_bytes_read = spec.shared_bytes_read
        self._matrix_flops = tp * gpu.flops_for(spec.weight_dtype) * settings.matrix_efficiency
        self._attention_flops = tp * gpu.flops_for("bf16") * settings.attention_efficiency
        self._memory_bandwidth = tp * gpu.memory_bandwidth * settings.memory_efficiency
        kv = settings.fp8_kv_bandwidth if layout.kv_dtype == "fp8" else settings.kv_bandwidth
        token_ns = 1e9 * layout.kv_token_bytes / gpu.memory_bandwidth
        self._distinct_token_ns = token_ns / max(kv, settings.memory_efficiency)
        self._context_token_ns = token_ns / kv - self._distinct_token_ns
        self._reduce_ns_per_token = self._all_reduce_bytes_ns(layout)
        self._num_reductions = 2 * spec.num_layers if tp > 1 else 0
        self._dp = layout.dp
        self._state_ns = 2e9 * layout.state_bytes / (gpu.memory_bandwidth * settings.memory_efficiency)
        exchanges = 2 * spec.experts.num_layers if layout.dp > 1 and spec.experts is not None else 0
        self._exchange_ns = exchanges * settings.expert_exchange_ns
        self._launch_ns = settings.prefill_layer_ns * spec.num_layers

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        num_tokens = sum([chunk.num_tokens for chunk in step.chunks])
        work_ns = self._matrices_ns(num_tokens) + self._attention_ns(step) + self._reductions_ns(num_tokens)
        return round(max(work_ns, self._launch_ns) + self._overhead_ns(step))

    def prefill_terms(self, step: PrefillStep) -> Terms:
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
        work = {
            "matrices": self._matrices_ns(num_tokens),
            "attention": self._attention_ns(step),
            "all-reduce": self._reductions_ns(num_tokens),
        }
        beyond_ns = max(0.0, self._launch_ns - sum(work.values()))
        return {**work, "launches beyond that": beyond_ns, "overhead": self._overhead_ns(step)}

    def _attention_ns(self, step: PrefillStep) -> float:
        pairs = sum(map(attended_pairs, step.chunks))
        return 1e9 * self._spec.attention.flops_per_pair * pairs / self._attention_flops

    def _overhead_ns(self, step: PrefillStep) -> float:
        return self._settings.step_overhead_ns + self._settings.prompt_overhead_ns * len(step.chunks)

    def decode_line(self, num_requests: int) -> DecodeLine:
        matrices, reductions, state, layers, overhead = self.decode_terms(num_requests).values()
        base_ns = matrices + reductions + state + layers + overhead
        return DecodeLine.of_ns(base_ns, self._context_token_ns, self._distinct_token_ns)

    def decode_terms(self, num_requests: int) -> Terms:
        return {
            "matrices": self._matrices_ns(num_requests),
            "all-reduce": self._reductions_ns(num_requests),
            "state": num_requests * self._state_ns,
            "layers": self._settings.decode_layer_ns * self._spec.num_layers,
            "overhead": self._settings.step_overhead_ns,
        }

    def _matrices_ns(self, num_tokens: int) -> float:
        compute = self._flops_per_token * num_tokens / self._matrix_flops
        expert_bytes = self._spec.expert_bytes_read(num_tokens * self._dp) / self._dp
        read = (self._shared_bytes_read + expert_bytes) / self._memory_bandwidth
        return 1e9 * max(compute, read) + self._exchange_ns

    def _reductions_ns(self, num_tokens: int) -> float:
        return self._num_reductions * (self._settings.all_reduce_ns + num_tokens * self._reduce_ns_per_token)

    def _all_reduce_bytes_ns(self, layout: Layout) -> float:
        """One token's bf16 activations through a ring all-reduce."""
        hops = 2 * (layout.tp - 1) / layout.tp
        rate = layout.gpu.nvlink_bandwidth * self._settings.link_efficiency
        return 1e9 * hops * 2 * layout.model.hidden_size / rate
