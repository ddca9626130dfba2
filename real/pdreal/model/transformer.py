"""The decoder of the Llama family, as one rank computes it. Attention is a parameter: this module does not know where
keys and values are kept.

embedding -> layers: [norm, QKV, rotate, attend, output] + [norm, gate and up, SiLU, down] -> norm -> logits -> token

In a layer with experts, a router chooses experts for each token. Each expert has gate, up, SiLU and down of its own.
With latent attention the cache has one latent for each token in place of keys and values.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm

from pdreal.control.requests import Draw, Logprobs
from pdreal.model import operations
from pdreal.model.delta import DeltaWeights, Recurrence, gated_norm
from pdreal.model.exchange import tokens_of
from pdreal.model.parallel import TensorParallel
from pdreal.model.sampling import choose
from pdreal.model.weights import (
    ExpertWeights,
    GroupedWeights,
    LatentHeads,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    WeightSource,
    load_weights,
)
from pdreal.settings.model import MOST_VERIFIED_TOKENS, ModelConfig

_BF16_STEP = 2.0**-7
"""Largest distance of neighbouring numbers in bf16, relative to the numbers."""
_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents. config.json's epsilon applies to the other norms only."""


class Attend(Protocol):
    """Attention of a forward, for the heads of this rank. Each call computes one layer: new tokens attend to their
    sequence's context, and each new token to itself and to the new tokens before it.
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Returns the attention outputs of new tokens, in the query's shape. layer: index of the layer in the cache.
        query, key, value: [tokens, heads, head_dim], queries and keys already rotated. window: number of last tokens
        that each token sees, the token itself included; 0: all.
        """
        ...

    def latent(self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        """Returns the attention outputs of the rank's heads, [tokens, heads, width of a value]. layer: index of the
        layer in the cache. query: [tokens, heads, part without rotation | rotated part]. latent: latents of the new
        tokens, [tokens, 1, latent rank | rotated key]. heads: projections of the rank's heads.
        """
        ...

    @property
    def delta(self) -> Recurrence:
        """The function that computes the recurrence (gated delta rule) of linear-attention layers."""
        ...


class Transformer:
    def __init__(self, config: ModelConfig, weights: ModelWeights, tp: TensorParallel, *, first_layer: int = 0) -> None:
        """first_layer: place of this transformer's first layer in the KV cache, whose first layers are the target
        model's. 0: this is the target model. For a draft head: the number of the target model's layers.
        """
        self.config = config
        self.tp = tp
        self._tokens = tokens_of(tp, has_experts=config.experts is not None)
        self.num_query_heads = config.num_query_heads // tp.size
        kv_heads = tp.kv_heads(config.num_kv_heads)
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.choices: list[Tensor] | None = None
        """List to which each forward appends the experts that tokens chose, [tokens, active], for each layer with
        experts. None: nothing is kept."""
        self.weights = weights
        self._first_layer = first_layer
        self._eps = config.llama.rms_norm_eps
        self._places = [first_layer + place for place in config.places]
        """Index of each layer in the KV cache; of a layer with linear attention, in the pool of states."""
        num_positions = config.max_context_tokens + MOST_VERIFIED_TOKENS
        self._angles = operations.rotary_angles(config.llama, config.num_rotated, num_positions, self.device)

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
        """Loads a model with its weights. tp: the rank and the number of ranks that divide the model; None: one rank.
        Raises ModelError if the model does not divide into this number of ranks, or the checkpoint belongs to another
        model.
        """
        tp = tp or TensorParallel()
        return cls(config, load_weights(config, source, tp, dtype, device), tp)

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Returns logits in fp32 of the token after each row, [rows, the rank's part of the vocabulary]. tokens,
        positions: [tokens], of any number of sequences one after another, with each token's position in its own
        sequence. attend: computes the attention. rows: indices of the tokens whose successors are scored; None: all.
        """
        return self.logits_of(self.hidden(tokens, positions, attend, rows))

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Returns the hidden states from which logits are made, [rows, hidden]. Arguments are those of `logits`."""
        return self.hidden_behind(embedding(tokens, self.weights.embedding), positions, attend, rows)

    def hidden_behind(self, residual: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Computes all layers and the final norm. Returns the hidden states, [rows, hidden]. residual: input of the
        first layer, [tokens, hidden], which is overwritten. positions: index of each token in its sequence, [tokens].
        attend: computes the attention. rows: tokens whose hidden states are returned; None: all.
        """
        num_tokens = len(residual)
        residual = self._tokens.own(residual)
        x = torch.zeros_like(residual)
        for index, layer in enumerate(self.weights.layers, self._first_layer):
            x, residual = operations.add_rms_norm_(x, residual, layer.input_norm, self._eps)
            x = self._attention(index, layer, self._tokens.all(x, num_tokens), positions, attend)
            x, residual = operations.add_rms_norm_(x, residual, layer.mlp_norm, self._eps)
            x = self._mlp(layer.mlp, x, num_tokens)
        x, residual = (self._tokens.all(part, num_tokens) for part in (x, residual))
        hidden = x + residual if rows is None else x[rows] + residual[rows]
        norm = self.weights.norm
        return rms_norm(hidden, norm.shape, norm, self._eps)

    def logits_of(self, hidden: Tensor) -> Tensor:
        return operations.logits(hidden, self.weights.head)

    def choose(self, hidden: Tensor, draws: Sequence[Draw | None]) -> tuple[list[int], list[Logprobs | None]]:
        """Returns the next token of each row, chosen by the rule of its request, and the row's log probabilities (None:
        the request asks for none). All ranks return the same tokens. draws: rule of each row; None: the likeliest
        token.
        """
        return choose(self.tp.whole_vocabulary(self.logits_of(hidden)), draws)

    def best_tokens(self, logits: Tensor) -> Tensor:
        """Returns the likeliest token of each row, [rows], over all ranks' parts of the vocabulary. All ranks get the
        same tokens. logits: of this rank's part, [rows, part of the vocabulary].
        """
        scores, tokens = logits.max(dim=-1)
        return self.tp.best(scores, tokens + self.tp.part(self.config.vocab_size).start)

    def are_near(self, logits: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
        """Returns for each row whether the score of the other token is at most one step of bf16 below the score of the
        chosen token, [rows]. chosen, others: token ids, [rows]. logits: of this rank's part of the vocabulary.
        """
        first, size = self.tp.part(self.config.vocab_size).start, logits.shape[1]

        def scores(tokens: Tensor) -> Tensor:
            place = tokens.long() - first
            found = logits.gather(1, place.clamp(0, size - 1)[:, None])[:, 0]
            return found.where((place >= 0) & (place < size), 0.0)

        best, other = self.tp.sum_(torch.stack((scores(chosen), scores(others)))).unbind()
        return best - other <= best.abs() * _BF16_STEP

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if isinstance(layer.attention, DeltaWeights):
            attended = self._delta(index, layer.attention, x, attend)
        elif isinstance(layer.attention, LatentWeights):
            attended = self._latent_attention(index, layer.attention, x, positions, attend)
        else:
            attended = self._grouped_attention(index, layer.attention, x, positions, attend)
        return self._tokens.summed(operations.linear(attended.flatten(1), layer.output))

    def _grouped_attention(
        self, index: int, weights: GroupedWeights, x: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        num_query, num_kv = self.num_query_heads, self.num_kv_heads
        heads = operations.linear(x, weights.qkv).view(len(x), -1, self.config.head_dim)
        rotated, value, gate = heads.tensor_split((num_query + num_kv, num_query + 2 * num_kv), dim=1)
        rotated = operations.norm_rotate_(rotated, num_query, weights.head_norms, self._eps, self._angles, positions)
        query, key = rotated.split((num_query, num_kv), dim=1)
        attended = attend(self._place(index), query, key, value, self.config.window_of(index))
        return attended * gate.sigmoid() if gate.shape[1] else attended

    def _delta(self, index: int, weights: DeltaWeights, x: Tensor, attend: Attend) -> Tensor:
        mixed, gates, beta, decay = operations.linear(x, weights.into).split(weights.widths, dim=1)
        heads = attend.delta(self._place(index), mixed, beta, decay, weights)
        return gated_norm(heads, gates.unflatten(1, heads.shape[1:]), weights.norm, self._eps)

    def _place(self, index: int) -> int:
        return self._places[index - self._first_layer]

    def _latent_attention(
        self, index: int, weights: LatentWeights, x: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        low, rotated = weights.heads.rank, self._angles.shape[1]
        into = operations.linear(x, weights.into)
        query, latent = into.tensor_split((into.shape[1] - low - rotated,), dim=1)
        if weights.query is not None and (norm := weights.query_norm) is not None:
            query = operations.linear(rms_norm(query, norm.shape, norm, _LATENT_EPS), weights.query)
        query = self._rotate(query.unflatten(1, (self.num_query_heads, -1)), positions)
        norm = weights.latent_norm
        latent = torch.cat((rms_norm(latent[:, :low], norm.shape, norm, _LATENT_EPS), latent[:, low:]), dim=1)
        return attend.latent(index, query, self._rotate(latent[:, None], positions), weights.heads)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Returns heads, [tokens, heads, width], with RoPE applied to the last rope_dim dimensions of each head. The
        first dimensions keep their values.
        """
        num_plain = heads.shape[-1] - self._angles.shape[1]
        rotated = heads[..., num_plain:]
        rotated = operations.norm_rotate_(rotated, heads.shape[1], None, self._eps, self._angles, positions)
        return torch.cat((heads[..., :num_plain], rotated), dim=-1)

    def _mlp(self, mlp: MlpWeights | ExpertWeights, x: Tensor, num_tokens: int) -> Tensor:
        if not isinstance(mlp, ExpertWeights):
            return self._tokens.summed(self._gated(mlp, self._tokens.all(x, num_tokens)))
        mixed, chosen = self._tokens.mixed(x, mlp, None if mlp.shared is None else self._gated(mlp.shared, x))
        if self.choices is not None:
            self.choices.append(self._tokens.all(chosen, num_tokens))
        return mixed

    def _gated(self, mlp: MlpWeights, x: Tensor) -> Tensor:
        return operations.linear(operations.silu_and_multiply(operations.linear(x, mlp.gate_up)), mlp.down)
