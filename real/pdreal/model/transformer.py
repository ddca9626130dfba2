"""The decoder of the Llama family: how a token passes through one rank. Where its keys and values lie is not seen here.

embedding -> layers: [norm, QKV, rotate, attend, output] + [norm, gate and up, SiLU, down] -> norm -> logits -> token

In a model of experts a router picks, token by token, which of them take the place of the layer's second half.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm

from pdreal.model import operations
from pdreal.model.config import ModelConfig
from pdreal.model.experts import run_experts
from pdreal.model.parallel import TensorParallel
from pdreal.model.weights import ExpertWeights, LayerWeights, MlpWeights, ModelWeights, WeightSource, load_weights


class Attend(Protocol):
    """Attention of one layer over whatever context the tokens have. Heads are the rank's."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; [tokens, heads, head_dim], keys rotated, in the shape of the query."""
        ...


class Transformer:
    def __init__(self, config: ModelConfig, weights: ModelWeights, tp: TensorParallel) -> None:
        self.config = config
        self.tp = tp
        self.num_query_heads = config.num_query_heads // tp.size
        kv_heads = tp.kv_heads(config.num_kv_heads)
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._weights = weights
        self._eps = config.llama.rms_norm_eps
        self._angles = operations.rotary_angles(config.llama, config.head_dim, config.max_context_tokens, self.device)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel | None = None,
    ) -> "Transformer":
        """Raises ModelError, as load_weights does."""
        tp = tp or TensorParallel()
        return cls(config, load_weights(config, source, tp, dtype, device), tp)

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Scores of what may follow, in fp32: [rows, the rank's part of the vocabulary].

        tokens [tokens] are of any number of sequences one after another, positions [tokens] say where each stands in
        its own, and rows which of them are asked for their successors: all if None.
        """
        residual = embedding(tokens, self._weights.embedding)
        x = torch.zeros_like(residual)
        for index, layer in enumerate(self._weights.layers):
            x, residual = operations.add_rms_norm_(x, residual, layer.input_norm, self._eps)
            x = self._attention(index, layer, x, positions, attend)
            x, residual = operations.add_rms_norm_(x, residual, layer.mlp_norm, self._eps)
            x = self._mlp(layer.mlp, x)
        hidden = x + residual if rows is None else x[rows] + residual[rows]
        norm = self._weights.norm
        return operations.logits(rms_norm(hidden, norm.shape, norm, self._eps), self._weights.head)

    def best_tokens(self, logits: Tensor) -> Tensor:
        """Greedy choice among the logits of all ranks, [rows], the same on each."""
        scores, tokens = logits.max(dim=-1)
        return self.tp.best(scores, tokens + self.tp.part(self.config.vocab_size).start)

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        num_query, num_kv = self.num_query_heads, self.num_kv_heads
        heads = linear(x, layer.qkv).view(len(x), -1, self.config.head_dim)
        rotated, value = heads.split((num_query + num_kv, num_kv), dim=1)
        rotated = operations.norm_rotate_(rotated, num_query, layer.head_norms, self._eps, self._angles, positions)
        query, key = rotated.split((num_query, num_kv), dim=1)
        attended = attend(index, query, key, value)
        return self.tp.sum_(linear(attended.flatten(1), layer.output))

    def _mlp(self, mlp: MlpWeights | ExpertWeights, x: Tensor) -> Tensor:
        if isinstance(mlp, ExpertWeights):
            return self.tp.sum_(run_experts(x, mlp))
        return self.tp.sum_(linear(operations.silu_and_multiply(linear(x, mlp.gate_up)), mlp.down))
