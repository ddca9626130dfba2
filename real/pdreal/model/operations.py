"""Operations of a forward: products with weights, and operations between them. Products are torch's, except those with
fp8 matrices (fused_fp8.py). add_rms_norm_, norm_rotate_ and silu_and_multiply are plain torch on CPUs, and Triton
kernels on GPUs (fused.py).

These three operations take bf16 or fp32, and compute in fp32. Operations whose name ends in _ may write into their
arguments.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import rms_norm, silu

from pdreal.model.block_scaled import BlockScaled, Matrix
from pdsim.system.llama import LlamaArchitecture, RopeScaling, YarnScaling
from pdsim.system.model import LatentAttention


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    """Returns the product of x, [tokens, inputs], with a weight matrix, [outputs, inputs]: [tokens, outputs]. Triton
    kernels compute products with fp8 matrices.
    """
    if not isinstance(matrix, BlockScaled):
        return functional.linear(x, matrix)
    from pdreal.model import fused_fp8  # noqa: PLC0415  Triton is needed on GPUs only

    return fused_fp8.linear(x, matrix)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream [tokens, hidden]. Returns the normalised sum, and the sum itself. weight: of the
    norm, [hidden]. eps: added to the mean square.
    """
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
    """Returns the heads, rotated, and normalised before that if norms are given. May overwrite heads. heads: query
    heads, then key heads, [tokens, heads, head_dim]. num_query_heads: number of the query heads. eps: added to the mean
    square in the norm. norms: weights [head_dim] of query and key heads. angles: cosines and sines from rotary_angles.
    If angles cover fewer dimensions than a head has, only the first dimensions are rotated. positions: [tokens], index
    of each token in its sequence.
    """
    if (rotated := angles.shape[1]) < heads.shape[2]:
        if norms is not None:
            heads = _normed(heads, num_query_heads, norms, eps)
        turned = norm_rotate_(heads[..., :rotated], num_query_heads, None, eps, angles, positions)
        return torch.cat((turned, heads[..., rotated:]), dim=-1)
    if heads.is_cuda:
        from pdreal.model import fused  # noqa: PLC0415

        return fused.norm_rotate_(heads, num_query_heads, norms, eps, angles, positions)
    if norms is not None:
        heads = _normed(heads, num_query_heads, norms, eps)
    cos, sin = angles[positions][:, None].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def _normed(heads: Tensor, num_query_heads: int, norms: tuple[Tensor, Tensor], eps: float) -> Tensor:
    parts = heads[:, :num_query_heads], heads[:, num_query_heads:]
    return torch.cat([rms_norm(part, norm.shape, norm, eps) for part, norm in zip(parts, norms, strict=True)], 1)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up. gate_up: [tokens, gate | up]."""
    if gate_up.is_cuda:
        from pdreal.model import fused  # noqa: PLC0415

        return fused.silu_and_multiply(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Returns logits in fp32. In bf16 the two best tokens would often have equal logits; on a CPU, however, logits
    of a bf16 model are rounded to bf16. hidden: [rows, hidden]. head: output projection, [vocabulary, hidden].
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    return functional.linear(hidden, head).float()


def rotary_angles(llama: LlamaArchitecture, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """Returns cosines, then sines, of RoPE's angles at positions 0 to num_positions - 1, fp32
    [num_positions, head_dim / 2 | head_dim / 2]. With YaRN the values are multiplied by YaRN's attention factor.
    head_dim: number of dimensions of a head that are rotated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / llama.rope_theta**exponents
    if llama.rope_scaling is not None:
        frequencies = _stretch(frequencies, llama.rope_scaling)
    length = 1.0
    if (yarn := llama.yarn) is not None:
        frequencies = _stretch_by_yarn(frequencies, llama.rope_theta, yarn)
        length = _yarn_length(yarn.factor, yarn.mscale or 1.0)
        if yarn.mscale and yarn.mscale_all_dim:
            length /= _yarn_length(yarn.factor, yarn.mscale_all_dim)
    turns = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat((turns.cos(), turns.sin()), dim=-1) * length


def attention_scale(llama: LlamaArchitecture, latent: LatentAttention) -> float:
    """Returns the factor on scores of latent attention: 1 / sqrt(width of a query head), which YaRN increases if its
    mscale_all_dim is set.
    """
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if llama.yarn is not None and llama.yarn.mscale_all_dim:
        scale *= _yarn_length(llama.yarn.factor, llama.yarn.mscale_all_dim) ** 2
    return float(scale)


def _yarn_length(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _stretch_by_yarn(frequencies: Tensor, theta: float, yarn: YarnScaling) -> Tensor:
    """Returns frequencies as YaRN changes them: low frequencies divided by YaRN's factor, high frequencies unchanged,
    those between in part divided.
    """
    last = 2 * len(frequencies) - 1

    def place(num_turns: float) -> float:
        """Returns the index of the frequency that makes num_turns turns within the original context length."""
        turned = yarn.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return len(frequencies) * math.log(turned) / math.log(theta)

    low, high = max(math.floor(place(yarn.beta_fast)), 0), min(math.ceil(place(yarn.beta_slow)), last)
    width = (high - low) or 0.001
    places = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    stretched = ((places - low) / width).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / yarn.factor)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scales rotary frequencies as Llama 3 does: divides low frequencies by scaling.factor, keeps high frequencies, and
    blends the two results for frequencies in between.
    """
    turns_in_context = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns_in_context - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
