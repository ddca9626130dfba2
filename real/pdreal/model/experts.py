"""A layer's experts. A router chooses experts for each token; these experts compute the token, and the weighted sum of
their outputs is the result.

On a CPU tokens are sorted by expert, so that two grouped products compute all experts. On a GPU Triton kernels do the
same work (fused_experts.py).
"""

import torch
from torch import Tensor
from torch.nn import functional

from pdreal.model.operations import logits, silu_and_multiply
from pdreal.model.weights import ExpertWeights
from pdsim.system.llama import GroupedRouting

_grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # noqa: SLF001
"""torch's grouped product. The function has another name before torch 2.10."""


def run_experts(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Returns the weighted sum of expert outputs for each token, [tokens, hidden], and the indices of the experts that
    each token chose, [tokens, experts per token]. The sum covers only the experts, or the parts of experts, that this
    rank holds. The sum over all ranks is the output of the layer without its shared experts. x: hidden states, [tokens,
    hidden].
    """
    if x.is_cuda:
        from pdreal.model import fused_experts  # noqa: PLC0415  Triton is needed on GPUs only

        return fused_experts.run_experts(x, weights)
    shares, experts = route(x, weights)
    return mix(x, shares, experts, weights), experts


def mix(x: Tensor, shares: Tensor, experts: Tensor, weights: ExpertWeights) -> Tensor:
    """Returns for each row of x (the hidden state of a token) the weighted sum of the outputs of those chosen experts
    that this rank holds, [tokens, hidden]. shares: weights of each token's experts, [tokens, active experts]. experts:
    their ids, [tokens, active experts].
    """
    if x.is_cuda:
        from pdreal.model import fused_experts  # noqa: PLC0415

        return fused_experts.mix(x, shares, experts, weights)
    assert isinstance(weights.gate_up, Tensor)
    assert isinstance(weights.down, Tensor)
    num_active, own = weights.num_active, weights.own
    by_expert, order = experts.flatten().sort(stable=True)
    begins = torch.searchsorted(by_expert, torch.arange(own.start, own.stop + 1), out_int32=True)
    rows, ends = order[begins[0] : begins[-1]], begins[1:] - begins[0]
    gate_up = _grouped_mm(x[rows // num_active], weights.gate_up.transpose(1, 2), offs=ends)
    by_token = x.new_zeros(len(order), x.shape[1])
    by_token[rows] = _grouped_mm(silu_and_multiply(gate_up), weights.down.transpose(1, 2), offs=ends)
    return (shares[:, None].to(x.dtype) @ by_token.view(len(x), num_active, -1))[:, 0]


def route(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Returns the weights and the indices of each token's experts, [tokens, experts per token] each."""
    if x.is_cuda:
        from pdreal.model import fused_experts  # noqa: PLC0415

        return fused_experts.route(x, weights)
    if weights.routing is not None and weights.bias is not None:
        return _route_in_groups(x, weights, weights.routing, weights.bias)
    scores = functional.linear(x, weights.router).softmax(dim=-1, dtype=torch.float32)
    shares, experts = scores.topk(weights.num_active, dim=-1)
    return (shares / shares.sum(dim=-1, keepdim=True)).to(x.dtype), experts


def _route_in_groups(x: Tensor, weights: ExpertWeights, routing: GroupedRouting, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits(x, weights.router).sigmoid()
    by_group = (scores + bias).unflatten(1, (routing.num_groups, -1))
    best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(routing.num_active_groups, dim=-1).indices
    shut = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
    chosen_from = by_group.masked_fill(shut[..., None], float("-inf")).flatten(1)
    experts = chosen_from.topk(weights.num_active, dim=-1).indices
    shares = scores.gather(1, experts)
    return (shares * (routing.scale / shares.sum(dim=-1, keepdim=True))).to(x.dtype), experts
