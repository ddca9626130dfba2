"""An EAGLE head, which drafts tokens for a target model: one layer that continues the target's hidden states.

embedding of the next token | hidden state -> projection -> layer -> norm -> hidden state -> the target's logits

As in SGLang (0.5.23, models/llama_eagle.py) the head has the target's embeddings and output projection. Its weights are
always random, and a norm follows its layer as in layers of checkpoints that predict further tokens (MTP). The KV of a
position belongs to the token of that position and to the next token, and lies behind the KV of the target's layers.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from pdreal.model import operations
from pdreal.model.transformer import Attend, Transformer
from pdreal.model.weights import RandomWeights, WeightSource, load_draft_weights
from pdreal.settings.model import ModelConfig

_SEED = 1
"""Seed of the draft head's random weights. It differs from 0, the usual seed of the target model."""


class DraftHead:
    def __init__(self, target: Transformer, source: WeightSource | None = None) -> None:
        """target: the model for which the head drafts; the head shares the target's embedding and output projection.
        source: weights of the head's layer and projection. None: random weights.
        """
        self.target = target
        config, weights = target.config, target.weights
        source = source or RandomWeights(_SEED, target.device)
        self._projection, own = load_draft_weights(draft_config(config), source, target.tp, weights)
        self.layer = Transformer(draft_config(config), own, target.tp, first_layer=config.num_layers)

    def hidden(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the head's hidden states, [tokens, hidden]. hidden: hidden state at each position, [tokens, hidden],
        from the target or from the head itself. tokens: token after each position, [tokens]. positions: [tokens].
        """
        pairs = torch.cat((embedding(tokens, self.target.weights.embedding), hidden), dim=-1)
        return self.layer.hidden_behind(operations.linear(pairs, self._projection), positions, attend)

    def propose(self, hidden: Tensor) -> Tensor:
        """Returns the likeliest token two positions after the position of each hidden state, [rows]."""
        return self.target.best_tokens(self.target.logits_of(hidden))


def draft_config(target: ModelConfig) -> ModelConfig:
    """Returns the shape of a draft head: one layer without experts and windows. Its MLP is as large as the MLP of the
    target's last layer, or as those experts of this layer that one token uses (pdsim.system.draft.eagle_head).
    """
    inner, experts, routing = target.llama.intermediate_size, target.experts, target.llama.routing
    if experts is not None:
        num_used = experts.num_active + (0 if routing is None else routing.num_shared)
        inner = num_used * experts.intermediate_size
    llama = replace(target.llama, intermediate_size=inner, routing=None, window_layers=())
    return replace(target, name=f"{target.name}-draft", num_layers=1, llama=llama, experts=None, window_tokens=0)
