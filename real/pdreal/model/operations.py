"""Operations between the matrix products: plain torch on CPUs, one Triton kernel each on GPUs (fused.py).

Each takes bf16 or fp32 and computes in fp32. Some write into what they are given.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from pdsim.system.model import LlamaArchitecture, RopeScaling


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream [tokens, hidden] with x added to it: normalised, and as it is."""
    if x.is_cuda:
        from pdreal.model import fused  # noqa: PLC0415  Triton is needed on GPUs only

        return fused.add_rms_norm_(x, residual, weight, eps)
    residual += x
    return rms_norm(residual, weight.shape, weight, eps), residual


def norm_rotate_(
    heads: Tensor,
    num_query_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: Tensor,
    positions: Tensor,
) -> Tensor:
    """Query heads and key heads behind them, [tokens, heads, head_dim], normalised if there are norms, and rotated.

    norms are the weights [head_dim] of query and key heads, angles those of rotary_angles, and positions [tokens] say
    where each token stands in its sequence.
    """
    if heads.is_cuda:
        from pdreal.model import fused  # noqa: PLC0415

        return fused.norm_rotate_(heads, num_query_heads, norms, eps, angles, positions)
    if norms is not None:
        parts = heads[:, :num_query_heads], heads[:, num_query_heads:]
        heads = torch.cat([rms_norm(part, norm.shape, norm, eps) for part, norm in zip(parts, norms, strict=True)], 1)
    cos, sin = angles[positions][:, None].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [tokens, gate | up]."""
    if gate_up.is_cuda:
        from pdreal.model import fused  # noqa: PLC0415

        return fused.silu_and_multiply(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Logits in fp32: in bf16 the two best tokens would often tie."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    return linear(hidden, head).float()


def rotary_angles(llama: LlamaArchitecture, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """Cosines and sines of every position's rotation, [positions, head_dim / 2 | head_dim / 2] in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / llama.rope_theta**exponents
    if llama.rope_scaling is not None:
        frequencies = _stretch(frequencies, llama.rope_scaling)
    turns = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow rotations are slowed down by the factor, fast ones are left, those between get something between."""
    turns_in_context = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns_in_context - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
