"""Draft models of speculative decoding: layers, weights, and the output projection with which they propose tokens.

Sources are SGLang 0.5.23's (speculative/eagle_worker_v2.py, models/deepseek_nextn.py, llama_eagle.py, llama_eagle3.py).
"""

from dataclasses import replace

from pdsim.dataclass import dataclass
from pdsim.system.model import GroupedQueryAttention, ModelSpec

EAGLE3_VOCABULARY = 32_000
"""Number of tokens that published EAGLE3 heads can propose (draft_vocab_size)."""


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A draft model that runs on the same GPUs as its target model."""

    layers: ModelSpec
    """The draft's layers, without embeddings and output projection."""
    proposing: ModelSpec
    """The draft's layers, with the output projection."""
    own_bytes: float
    """Bytes of the weights that the draft does not share with the target, summed over all ranks. Routed experts are not
    included."""

    @property
    def expert_bytes(self) -> float:
        return self.layers.expert_bytes


def nextn_layers(model: ModelSpec, num_layers: int) -> DraftModel:
    """Makes a draft from layers of the model's own checkpoint that predict further tokens (MTP). A projection of
    embedding and hidden state precedes each layer. A layer has as many routed experts as a layer of the model, and the
    mean number of other parameters of the model's layers. Embeddings and output projection are the target's
    (set_embed_and_head).
    """
    experts = None if model.experts is None else replace(model.experts, num_layers=num_layers)
    share = num_layers / model.num_layers
    routed = 0 if experts is None else experts.num_params(model.hidden_size)
    active = 0.0 if experts is None else routed * experts.num_active / experts.num_experts
    shared = (model.num_params - model.num_expert_params - _embeddings(model)) * share
    shared += num_layers * _projection(model, 2)
    layers = replace(
        _bare(model, num_layers, shared),
        num_params=shared + routed,
        num_active_params=shared + active,
        experts=experts,
        num_params_wider_than_fp4=model.num_params_wider_than_fp4 * share,
        num_params_in_bf16=model.num_params_in_bf16 * share,
    )
    return DraftModel(layers=layers, proposing=_with_head(layers, model.vocab_size), own_bytes=layers.shared_bytes)


def eagle_head(model: ModelSpec, num_layers: int) -> DraftModel:
    """Makes an EAGLE draft model in bf16. Its first matrix projects a token's embedding and the target's hidden state
    to the hidden size. Its num_layers layers follow. Each layer has as many parameters as the target uses for one token
    in a layer on average, but no experts. Embeddings and output projection are those of the target.
    """
    layers = _bare(model.in_dtype("bf16"), num_layers, _active_layer_params(model) * num_layers + _projection(model, 2))
    return DraftModel(layers=layers, proposing=_with_head(layers, model.vocab_size), own_bytes=layers.shared_bytes)


def eagle3_head(model: ModelSpec, num_layers: int, vocabulary: int) -> DraftModel:
    """Makes an EAGLE3 head in bf16: an EAGLE head that projects three hidden states, attends to embedding and hidden
    state side by side, and has its own output projection.
    """
    attention, wider = model.attention, 0
    if isinstance(attention, GroupedQueryAttention):
        heads = attention.num_query_heads + 2 * attention.num_kv_heads
        wider = model.hidden_size * heads * attention.head_dim
    num_params = _active_layer_params(model) * num_layers + wider + _projection(model, 3)
    layers = _bare(model.in_dtype("bf16"), num_layers, num_params)
    proposing = _with_head(layers, min(vocabulary, model.vocab_size))
    return DraftModel(layers=layers, proposing=proposing, own_bytes=proposing.shared_bytes)


def standalone(draft: ModelSpec) -> DraftModel:
    """Makes a draft from a smaller model with the same vocabulary, which shares no weights with the target."""
    routed = draft.num_expert_params
    shared = draft.num_params - routed - _embeddings(draft)
    layers = replace(
        _bare(draft, draft.num_layers, shared),
        num_params=shared + routed,
        num_active_params=draft.num_active_params - _embeddings(draft),
        attention=draft.attention,
        experts=draft.experts,
        num_params_wider_than_fp4=draft.num_params_wider_than_fp4,
        num_params_in_bf16=draft.num_params_in_bf16,
    )
    return DraftModel(layers=layers, proposing=_with_head(layers, draft.vocab_size), own_bytes=draft.shared_bytes)


def _embeddings(model: ModelSpec) -> int:
    """Number of parameters of a model's embeddings and output projection. If a model ties the two, they count once."""
    return model.vocab_size * model.hidden_size * (2 - model.tied_embeddings)


def _active_layer_params(model: ModelSpec) -> float:
    """Mean number of parameters per layer that a token uses: of routed experts, only the active ones count."""
    return (model.num_active_params - _embeddings(model)) / model.num_layers


def _projection(model: ModelSpec, num_inputs: int) -> int:
    """Number of parameters of a matrix that maps num_inputs concatenated hidden states to one hidden state."""
    return num_inputs * model.hidden_size * model.hidden_size


def _bare(model: ModelSpec, num_layers: int, num_params: float) -> ModelSpec:
    """Returns num_layers layers with num_params parameters in all. They have the model's attention, but no experts,
    linear attention, embeddings or output projection. The attention has no sliding windows (grouped-query attention)
    and no compressed latents; sparse attention stays sparse.
    """
    attention = model.attention
    if isinstance(attention, GroupedQueryAttention):
        attention = replace(attention, num_layers=num_layers, num_window_layers=0)
    else:
        attention = replace(attention, num_layers=num_layers, compress_ratios=None)
    return replace(
        model,
        name=f"the draft of {model.name}",
        num_params=num_params,
        num_active_params=num_params,
        num_layers=num_layers,
        vocab_size=0,
        tied_embeddings=True,
        attention=attention,
        experts=None,
        state=None,
        llama=None,
        num_params_wider_than_fp4=0,
        num_params_in_bf16=0,
    )


def _with_head(layers: ModelSpec, vocabulary: int) -> ModelSpec:
    head = vocabulary * layers.hidden_size
    return replace(
        layers,
        vocab_size=vocabulary,
        num_params=layers.num_params + head,
        num_active_params=layers.num_active_params + head,
    )
