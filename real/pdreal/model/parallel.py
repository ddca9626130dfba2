"""Tensor and expert parallelism: which part of each weight a rank holds, and how ranks communicate in a forward.

Expert parallelism is SGLang's --ep-size. Without an all-to-all backend every rank has all tokens and computes those of
its own experts; the all-reduce of tensor parallelism adds up the ranks' results (0.5.23:
layers/moe/fused_moe_triton/layer.py:412 and 1743, token_dispatcher/standard.py:235). With an all-to-all backend ranks
send tokens to the ranks of their experts (exchange.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pdreal.settings.model import ModelConfig, ModelError

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch's all-gather of one tensor. The function has another name before torch 2.13."""
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch's reduce-scatter of one tensor. The function has another name before torch 2.13."""
_JOIN_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a group of `size` ranks. All ranks of the group execute the same forwards in the same order."""

    rank: int = 0
    size: int = 1
    has_whole_experts: bool = False
    """True if each rank holds whole experts instead of a part of every expert."""
    sends_to_experts: bool = False
    """True if, outside of attention, each rank has only a share of a forward's tokens, and ranks send tokens to the
    ranks that hold the tokens' experts. Needs has_whole_experts. Changes nothing for models without experts."""

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        rendezvous: str,
        device: torch.device,
        *,
        has_whole_experts: bool = False,
        sends_to_experts: bool = False,
    ) -> "TensorParallel":
        """Connects to the other ranks, once per process. size: number of ranks. rendezvous: address at which the ranks
        meet, such as tcp://127.0.0.1:29500. device: the rank's device. CPUs use gloo, GPUs use NCCL. The other
        arguments are fields of this class.
        """
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size, timeout=_JOIN_TIMEOUT)
        return cls(rank, size, has_whole_experts, sends_to_experts)

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    # What a rank holds.

    def check(self, config: ModelConfig) -> None:
        """Raises ModelError if the ranks cannot divide the model's heads, vocabulary, intermediate sizes or experts
        evenly, or if ranks hold whole experts and the model has none. KV heads may be fewer than ranks.
        """
        sizes = [("query heads", config.num_query_heads), ("vocabulary", config.vocab_size)]
        sizes += [("intermediate size", size) for size in config.mlp_sizes]
        if (delta := config.llama.delta) is not None:
            sizes += [("key heads of linear attention", delta.num_key_heads)]
            sizes += [("value heads of linear attention", delta.num_value_heads)]
        if (experts := config.experts) is not None:
            whole = "number of experts", experts.num_experts
            sizes.append(whole if self.has_whole_experts else ("intermediate size", experts.intermediate_size))
        elif self.has_whole_experts:
            raise ModelError(f"{config.name} has no experts")
        for name, size in sizes:
            if size % self.size:
                raise ModelError(f"{config.name}: tp {self.size} does not divide its {name} of {size}")
        if config.num_kv_heads % self.size and self.size % config.num_kv_heads:
            raise ModelError(f"{config.name}: {config.num_kv_heads} KV heads do not divide among {self.size} ranks")

    def part(self, size: int) -> slice:
        """Returns the indices of this rank's part of a dimension. size: length of the dimension, a multiple of
        the number of ranks.
        """
        return slice(size * self.rank // self.size, size * (self.rank + 1) // self.size)

    def experts(self, num_experts: int) -> slice:
        """Returns the indices of a layer's experts that this rank holds, whole or in part."""
        return self.part(num_experts) if self.has_whole_experts else slice(0, num_experts)

    def inner_of_expert(self, size: int) -> slice:
        """Returns the part of each expert's inner dimension that this rank holds. size: the inner dimension."""
        return slice(0, size) if self.has_whole_experts else self.part(size)

    def inner_of_shared(self, size: int) -> slice:
        """Returns the part of the shared experts' inner dimension that this rank holds. size: length of the whole
        dimension. Ranks that send tokens to experts by an all-to-all hold the whole dimension, and compute the shared
        experts for their own tokens only (SGLang 0.5.23, models/deepseek_v2.py:874).
        """
        return slice(0, size) if self.sends_to_experts else self.part(size)

    def kv_heads(self, num_heads: int) -> slice:
        """Returns the indices of this rank's KV heads. With more ranks than heads, several ranks hold the same head."""
        first = num_heads * self.rank // self.size
        return slice(first, first + max(1, num_heads // self.size))

    # What ranks tell each other.

    def sum_(self, x: Tensor) -> Tensor:
        """Adds up the tensor over all ranks, in place, and returns the tensor."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def sum_scatter(self, x: Tensor) -> Tensor:
        """Adds up x, [rows, columns], over all ranks, and divides the rows of the sum equally among the ranks. Returns
        this rank's rows.
        """
        part = x.new_empty(len(x) // self.size, *x.shape[1:])
        _reduce_scatter(part, x.contiguous())
        return part

    def gather(self, x: Tensor) -> Tensor:
        """Returns the rows of all ranks, one rank after another. Each rank has the same number of rows."""
        rows = x.new_empty(self.size * len(x), *x.shape[1:])
        _all_gather(rows, x.contiguous())
        return rows

    def exchange(self, x: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None) -> Tensor:
        """Sends the rows of x to the ranks: the first rows to rank 0, the next rows to rank 1, and so on. Returns the
        rows that this rank received, in the order of their senders. sent, received: number of rows to and from each
        rank, this rank included; None: x is divided equally.
        """
        rows = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), received, sent)
        return rows

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Returns logits [rows, vocabulary], joined from all ranks' parts of the vocabulary."""
        if self.size == 1:
            return logits
        everyone = logits.new_empty(self.size * len(logits), logits.shape[1])
        _all_gather(everyone, logits.contiguous())
        return everyone.view(self.size, *logits.shape).transpose(0, 1).flatten(1)

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Returns for each of n rows the token id with the highest score over all ranks, [n]. Among equal scores the
        lowest id wins. scores, tokens: score and id of this rank's best token of each row, [n] each.
        """
        if self.size == 1:
            return tokens
        mine = torch.stack((scores, tokens.to(scores.dtype)))  # float32 holds token ids below 2**24 exactly
        everyone = mine.new_empty(self.size * 2, len(tokens))
        _all_gather(everyone, mine)
        all_scores, all_tokens = everyone.view(self.size, 2, -1).unbind(1)
        return all_tokens.gather(0, all_scores.argmax(0, keepdim=True))[0].to(tokens.dtype)
