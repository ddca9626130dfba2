"""Kinds of a model's layers: how a layer mixes tokens, and which MLP it has."""

from typing import Any, Literal

from pdsim.dataclass import dataclass
from pdsim.system.catalog import EntryError
from pdsim.system.checkpoint.config import Config

Mixer = Literal["full", "window", "shared", "state", "linear", "compressed", ""]
"""How a layer mixes tokens. full, window: attention. shared: attention over an earlier layer's KV. state: linear
attention or Mamba. linear: one matrix. compressed: attention over latents of several tokens each. Empty: the layer does
not mix tokens."""
Feed = Literal["dense", "experts", "both", ""]


@dataclass(frozen=True)
class Layer:
    mixer: Mixer
    feed: Feed
    ratio: int = 1
    """Number of tokens for which the layer stores one latent. 0: the layer compresses no tokens, and attends only to a
    window."""
    has_indexer: bool = True
    """False: the layer reuses the tokens that an earlier layer's indexer chose."""
    feed_factor: float | None = None
    """ffn_mult of the layer in config.json, for models from architecture search. The inner width of the layer's MLP is
    about 2/3 * feed_factor * hidden_size. None: the MLP has intermediate_size."""


def layers_of(config: Config) -> list[Layer]:
    """Returns the layers of the model that config.json describes, in order. Raises EntryError for unknown kinds of
    layers.
    """
    if (blocks := config.flags("block_configs")) is not None:
        return [_searched(block) for block in blocks]
    if alone := _single_blocks(config):
        return alone
    mixers, feeds = _with_shared_kv(config, _mixers(config)), _feeds(config)
    ratios = _ratios(config)
    indexers = [kind != "shared" for kind in config.flags("indexer_types") or [""] * config.num_layers]
    return [Layer(*parts) for parts in zip(mixers, feeds, ratios, indexers, strict=True)]


def _ratios(config: Config) -> list[int]:
    """Returns, for each layer, the number of tokens for which it stores one latent. 0: the layer compresses no tokens,
    and attends only to a window. 1: the model has no compressed attention.
    """
    if (ratios := config.flags("compress_ratios")) is not None:
        return ratios
    rates = config.get("compress_rates")
    if not isinstance(rates, dict):
        return [1] * config.num_layers
    return [rates.get(kind, 0) for kind in config.flags("layer_types") or ()]


def _with_shared_kv(config: Config, mixers: list[Mixer]) -> list[Mixer]:
    """Returns the kinds of the model's layers (`mixers`), of which the last num_kv_shared_layers become `shared`: these
    layers use the KV of earlier layers (Gemma's small models).
    """
    num_own = len(mixers) - config.count("num_kv_shared_layers", default=0)
    return ["shared" if layer >= num_own else mixer for layer, mixer in enumerate(mixers)]


_PATTERN: dict[str, Layer] = {
    "M": Layer("state", ""),
    "*": Layer("full", ""),
    "-": Layer("", "dense"),
    "E": Layer("", "experts"),
}
"""Layer for each letter of hybrid_override_pattern."""
_BLOCKS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
"""Letter of hybrid_override_pattern for each kind of layer in layers_block_type."""


def _single_blocks(config: Config) -> list[Layer]:
    """Returns the layers of a model like Nemotron-H, in which each layer either mixes tokens (attention or Mamba) or is
    an MLP. Empty for other models. Raises EntryError for unknown kinds of layers, or if their number is not num_layers.
    """
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        kinds = config.flags("layers_block_type")
        if kinds is None or not {"mlp", "moe"} & {str(kind) for kind in kinds}:
            return []
        pattern = "".join(_BLOCKS.get(str(kind), "?") for kind in kinds)
    pattern = str(pattern).replace("|", "")
    if foreign := {*pattern} - {*_PATTERN}:
        raise EntryError(f"hybrid_override_pattern: expected M, *, - and E, found {''.join(sorted(foreign))}")
    if len(pattern) != config.num_layers:
        raise EntryError(f"hybrid_override_pattern: expected {config.num_layers} layers, found {len(pattern)}")
    return [_PATTERN[block] for block in pattern]


def _searched(block: Any) -> Layer:
    """Returns one layer of a model from architecture search (Puzzle: Llama Nemotron Super and Ultra). block: the
    layer's entry in block_configs. Raises EntryError if an MLP is one matrix.
    """
    attention, feed = block["attention"], block["ffn"]
    mixer: Mixer = "" if attention.get("no_op") else "linear" if attention.get("replace_with_linear") else "full"
    if feed.get("no_op"):
        return Layer(mixer, "")
    if feed.get("replace_with_linear"):
        raise EntryError("block_configs: MLPs of one matrix are not modelled; write the entry by hand")
    return Layer(mixer, "dense", feed_factor=feed["ffn_mult"])


_MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(("full_attention", "attention", "global_attention", "full", "global", "minimax_m3_sparse"), "full"),
    **dict.fromkeys(("deepseek_sparse_attention", "sparse_attention", "indexed_attention"), "full"),
    **dict.fromkeys(("sliding_attention", "chunked_attention", "sliding_window", "local_attention"), "window"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "kda", "gated_delta_net"), "state"),
    **dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), "compressed"),
}
"""Mixer for each name that layer_types or layers_block_type may contain."""


def _mixers(config: Config) -> list[Mixer]:
    num_layers = config.num_layers
    if config.get("compress_ratios") is not None or config.get("compress_rates") is not None:
        return ["compressed"] * num_layers
    if isinstance(linear := config.get("linear_attn_config"), dict) and "kda_layers" in linear:
        states = {layer - 1 for layer in linear["kda_layers"]}  # counted from 1
        return ["state" if layer in states else "full" for layer in range(num_layers)]
    if any(kind == 0 for kind in config.flags("attn_type_list") or ()):
        raise EntryError("attn_type_list: the state of lightning attention is unknown; write the entry by hand")
    if (types := config.flags("layer_types") or config.flags("layers_block_type")) is not None:
        if foreign := {str(kind) for kind in types} - {*_MIXERS}:
            raise EntryError(
                f"layer_types: expected {' or '.join(sorted(_MIXERS))}, found {', '.join(sorted(foreign))}"
            )
        return _without_windows(config, _require_state(config, [_MIXERS[str(kind)] for kind in types]))
    if config.get("linear_num_value_heads") is not None:
        every = config.count("full_attention_interval")
        return ["state" if (layer + 1) % every else "full" for layer in range(num_layers)]
    if config.names(r"mamba|ssm_"):
        raise EntryError("layer_types is missing, which says which layers are Mamba's")
    return _without_windows(config, _attention_mixers(config, num_layers))


def _require_state(config: Config, mixers: list[Mixer]) -> list[Mixer]:
    """Returns `mixers` unchanged. Raises EntryError if a mixer is `state` and config.json does not give the size of the
    state.
    """
    known = "linear_num_value_heads", "linear_num_heads", "linear_attn_config", "mamba_num_heads", "mamba_n_heads"
    if "state" in mixers and all(config.get(name) is None for name in known):
        raise EntryError(f"layer_types: expected {' or '.join(known)} beside layers that keep a state, found none")
    return mixers


def _without_windows(config: Config, mixers: list[Mixer]) -> list[Mixer]:
    return mixers if window_of(config) else ["full" if mixer == "window" else mixer for mixer in mixers]


def _attention_mixers(config: Config, num_layers: int) -> list[Mixer]:
    """How each layer mixes tokens: by attention to all tokens ("full") or to a window. Used for models whose layers all
    have attention, and whose config has no layer_types.
    """
    if not window_of(config):
        return ["full"] * num_layers
    if (pattern := config.flags("hybrid_layer_pattern")) is not None:
        return ["window" if is_window else "full" for is_window in pattern]
    if every := config.count("sliding_window_pattern", "no_rope_layer_interval", default=0):
        return ["full" if (layer + 1) % every == 0 else "window" for layer in range(num_layers)]
    first = config.count("max_window_layers", default=0)
    return ["full" if layer < first else "window" for layer in range(num_layers)]


def window_of(config: Config) -> int:
    """Size of the sliding window in tokens. 0: no layer has a window."""
    if config.get("use_sliding_window") is False:
        return 0
    if config.get("no_rope_layer_interval") is not None:
        return config.count("attention_chunk_size", default=0)
    return config.count("sliding_window", default=0)


def _feeds(config: Config) -> list[Feed]:
    """Kind of MLP of each layer, for models in which every layer has an MLP."""
    num_layers = config.num_layers
    if not config.count("experts", default=0):
        return ["dense"] * num_layers
    if config.get("enable_moe_block"):
        return ["both"] * num_layers
    if (kinds := config.flags("mlp_layer_types")) is not None:
        return ["dense" if kind == "dense" else "experts" for kind in kinds]
    if (flags := config.flags("moe_layer_freq")) is not None:
        return ["experts" if flag else "dense" for flag in flags]
    return ["experts" if layer in _expert_layers(config, num_layers) else "dense" for layer in range(num_layers)]


def _expert_layers(config: Config, num_layers: int) -> set[int]:
    if isinstance(named := config.get("moe_layers_enum"), str):
        return {int(layer) for layer in named.split(",")}
    every = config.count("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    frequency = config.count("moe_layer_freq", default=1)
    first = config.count("first_dense", default=0)
    if not every or not frequency:
        raise EntryError(
            "decoder_sparse_step, interleave_moe_layer_step or moe_layer_freq: expected at least 1, found 0"
        )
    dense = {*(config.get("mlp_only_layers") or ())}
    return {layer for layer in range(first, num_layers) if not (layer + 1) % every and not layer % frequency} - dense
