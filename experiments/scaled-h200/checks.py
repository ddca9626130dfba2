"""Derived coefficients beside those that were fitted to the same GPU: python experiments/scaled-h200/checks.py

Both as the time of one GPU that holds the whole model, so that layouts compare.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pdsim.calibration.fit.scaling import ENDS, GpuScaling
from pdsim.cost.settings import Affine, Roofline
from pdsim.scenario.loading import load_cost
from pdsim.scenario.sections.cost import CostChoice
from pdsim.system.catalog import load_gpu, load_model
from pdsim.system.model import DTYPE_BYTES

EXPERIMENTS = Path(__file__).parent.parent


def derived(profile: str, model: str, gpu: str) -> list[Affine]:
    """Low, best, high; prefill and decode in one."""
    scaling = GpuScaling.between(load_gpu("h200"), load_gpu(gpu), load_model(model))
    ends = [CostChoice.model_validate(scaling.cost(load_cost(EXPERIMENTS / profile), end)) for end in ENDS]
    return [Affine(**{**given(end.decode), **given(end.prefill)}) for end in ends]


def given(model: object) -> dict[str, Any]:
    """What is not as by default."""
    assert isinstance(model, Affine)
    return {name: value for name, value in asdict(model).items() if value != getattr(Affine(), name)}


def main() -> None:
    for name, found, fitted in checks():
        low, best, high = found
        print(f"{name}: derived {best:.3g} ({low:.3g} to {high:.3g}), fitted {fitted:.3g}: {best / fitted - 1:+.0%}")


def checks() -> Iterator[tuple[str, list[float], float]]:
    model, gpu = load_model("qwen3-32b"), load_gpu("b200")
    fitted = load_cost(EXPERIMENTS / "decode-radix-b200/profile.yaml").prefill
    assert isinstance(fitted, Roofline)
    ends = derived("sglang-h200/profile-32b.yaml", model.name, gpu.name)
    token_ns = 1e9 * model.flops_per_token / (gpu.flops["bf16"] * fitted.matrix_efficiency)
    pair_ns = 1e9 * model.attention.flops_per_pair / (gpu.flops["bf16"] * fitted.attention_efficiency)
    kv_token_ns = 1e9 * model.attention.num_kv_elements(1) / (gpu.memory_bandwidth * fitted.fp8_kv_bandwidth)
    yield "decode-radix-b200, prefill, ns per token", [end.prefill_per_token_ns for end in ends], token_ns
    yield "decode-radix-b200, prefill, ns per pair", [end.prefill_per_pair_ns for end in ends], pair_ns
    yield "decode-radix-b200, decode, ns per KV token (derived: bf16)", [kv_ns(end) for end in ends], kv_token_ns

    fitted = load_cost(EXPERIMENTS / "incremental-h20/profile.yaml").decode
    assert isinstance(fitted, Roofline)
    kv_bytes = DTYPE_BYTES["bf16"] * load_model("qwen3-8b").attention.num_kv_elements(1)
    read_ns = 1e9 * kv_bytes / load_gpu("h20").memory_bandwidth
    ends = derived("sglang-h200/profile.yaml", "qwen3-8b", "h20")
    times = [kv_ns(end) / read_ns for end in ends]
    yield "incremental-h20, decode, time over that of nominal bandwidth", times, 1 / fitted.kv_bandwidth


def kv_ns(end: Affine) -> float:
    """Of a KV token that one request reads."""
    return end.decode_per_context_token_ns + end.decode_per_distinct_token_ns


if __name__ == "__main__":
    main()
