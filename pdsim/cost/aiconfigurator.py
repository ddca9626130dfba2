"""Durations from the operator tables of NVIDIA's aiconfigurator, an optional package, measured on H100, H200, B200,
GB200 and RTX PRO 6000.

The tables cover batches of equal prompts. A forward of unequal prompts takes the time of the same number of prompts of
their mean length. Decode steps are read from the tables at two context lengths; other context lengths are interpolated
or extrapolated linearly.
"""

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import FRACTION_BITS, DecodeLine, Terms
from pdsim.system.memory import Layout

if TYPE_CHECKING:
    from pdsim.cost.settings import AiConfigurator

SYSTEMS = {
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
MODELS = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
}
"""Names on Hugging Face of the models that pdsim times with aiconfigurator, by their names in pdsim's catalog."""
WEIGHTS = {"bf16": "bfloat16", "fp8": "fp8_block", "fp4": "nvfp4"}
KV = {"bf16": "bfloat16", "fp8": "fp8"}
CONTEXTS = (1024, 8192)
"""Context lengths in tokens per request for which AIConfigurator is asked for decode times. Other contexts lie on the
line through these two times.
"""


class NoOperatorTablesError(ValueError):
    """Raised if aiconfigurator is not installed, or has no operator tables for a layout. The message names what is
    missing.
    """


class AiConfiguratorModel:
    """Cost model that reads aiconfigurator's operator tables for one layout of a server (GPU, data types and parallel
    sizes).
    """

    def __init__(self, settings: "AiConfigurator", engine: Any) -> None:
        self._settings = settings
        self._prefill_ms = cache(engine.predict_prefill_latency)
        self._decode_ms = engine.predict_decode_latency
        self._lines: dict[int, DecodeLine] = {}

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        return max(1, round(sum(self.prefill_terms(step).values())))

    def prefill_terms(self, step: PrefillStep) -> Terms:
        num_prompts = len(step.chunks)
        context = sum(chunk.num_context_tokens for chunk in step.chunks) // num_prompts
        new = max(1, step.num_tokens // num_prompts)
        overhead_ns = self._settings.step_overhead_ns + self._settings.prompt_overhead_ns * num_prompts
        return {"tables": 1e6 * self._prefill_ms(num_prompts, context + new, context), "overhead": overhead_ns}

    def decode_line(self, num_requests: int) -> DecodeLine:
        if num_requests not in self._lines:
            short, long = CONTEXTS
            short_ns, long_ns = (1e6 * self._decode_ms(num_requests, context) for context in CONTEXTS)
            per_token_ns = max(0.0, (long_ns - short_ns) / (long - short) / num_requests)
            base_ns = max(1.0, short_ns - per_token_ns * short * num_requests)
            self._lines[num_requests] = DecodeLine.of_ns(base_ns + self._settings.step_overhead_ns, per_token_ns, 0)
        return self._lines[num_requests]

    def decode_terms(self, num_requests: int) -> Terms:
        overhead_ns = self._settings.step_overhead_ns
        base_ns = self.decode_line(num_requests).base / (1 << FRACTION_BITS)
        return {"tables": base_ns - overhead_ns, "overhead": overhead_ns}


def compiled_engine(backend: str, version: str | None, layout: Layout) -> Any:
    """Loads the operator tables of a layout, and returns aiconfigurator's handle to them. backend: engine by
    aiconfigurator's name. version: the engine's version; None: the newest. Raises NoOperatorTablesError if
    aiconfigurator is not installed, or has no tables for the layout's model, GPU or data types.
    """
    spec, gpu = layout.model, layout.gpu
    asked = (
        (spec.name, MODELS, "model"),
        (gpu.name, SYSTEMS, "GPU"),
        *((dtype, WEIGHTS, "weights in") for dtype in spec.weight_dtypes),
        (layout.kv_dtype, KV, "KV in"),
    )
    for name, known, what in asked:
        if name not in known:
            raise NoOperatorTablesError(f"it has no {what} {name}; it has {', '.join(known)}")
    options: dict[str, Any] = {
        "backend_version": version,
        "tp_size": layout.tp,
        "attention_dp_size": layout.dp,
        "gemm_quant_mode": WEIGHTS[spec.weight_dtype],
        "kvcache_quant_mode": KV[layout.kv_dtype],
        "fmha_quant_mode": "bfloat16",  # prefill attention, whatever KV is kept in
    }
    if spec.experts is not None:
        ranks = layout.tp * layout.dp
        split = {"moe_tp_size": 1, "moe_ep_size": ranks} if layout.has_whole_experts else {"moe_tp_size": ranks}
        options |= {"moe_quant_mode": WEIGHTS[spec.weight_dtypes[-1]], **split}
    return _compiled(MODELS[spec.name], SYSTEMS[gpu.name], backend, tuple(options.items()))


@cache
def _compiled(model: str, system: str, backend: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """Loads operator tables. Cached for all instances of a role, because loading takes seconds. model, system, backend:
    aiconfigurator's names of model, GPU and engine. options: further arguments of its EngineHandle.compile, by name.
    Raises NoOperatorTablesError if aiconfigurator or a table is missing.
    """
    try:
        module = importlib.import_module("aiconfigurator_core.sdk.engine")
    except ModuleNotFoundError:
        raise NoOperatorTablesError("it is not installed: pip install aiconfigurator") from None
    try:
        engine = module.EngineHandle.compile(model, system, backend, **dict(options))
        engine.predict_prefill_latency(1, CONTEXTS[0], 0)  # what a table lacks shows only when it is asked
        engine.predict_decode_latency(1, CONTEXTS[0])
    except Exception as wrong:  # of many kinds: its versions, tables and layouts
        raise NoOperatorTablesError(f"it has no tables for {model} on {system}: {wrong}") from wrong
    return engine
