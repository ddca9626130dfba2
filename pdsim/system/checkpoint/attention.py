"""Makes the sections `attention` and `state` of a catalog entry. These sections determine how much memory a request
needs.
"""

from collections import Counter
from typing import Any

from pdsim.system.catalog import EntryError
from pdsim.system.checkpoint.config import Config, delta_attention
from pdsim.system.checkpoint.layers import Layer, window_of
from pdsim.system.checkpoint.modules import OVERLAPPING_RATIO, grouped_sizes, mamba_sizes

_WITH_WINDOW_POOL = ("gpt_oss", "llama4", "gemma4", "mimo", "step3p", "laguna", "mellum", "granite")
"""Model families whose layers with a sliding window have a separate pool in SGLang 0.5.23
(configs/model_config.py:2651)."""


def attention_of(config: Config, layers: list[Layer]) -> dict[str, Any]:
    """Makes the section `attention` of a catalog entry, for the layers that have KV. Raises EntryError if the model has
    no such layers.
    """
    mixers = Counter(layer.mixer for layer in layers)
    if mixers["compressed"]:
        return _compressed(config, layers)
    num_layers = mixers["full"] + mixers["window"]
    if not num_layers:
        raise EntryError("no layer has attention: a model without KV has nothing to send from prefill to decode")
    if config.get("kv_lora_rank"):
        return _latent(config, layers, num_layers)
    kv_heads, dim, value_dim = grouped_sizes(config, "full")
    section = {
        "kind": "grouped-query",
        "num_layers": num_layers,
        "num_query_heads": config.heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        **({"value_dim": value_dim} if value_dim != dim else {}),
    }
    if mixers["window"]:
        section |= {"num_window_layers": mixers["window"], "window_tokens": window_of(config)}
        if not config.family.startswith(_WITH_WINDOW_POOL):
            section["has_window_pool"] = False
        heads, window_dim, window_value = grouped_sizes(config, "window")
        if heads != kv_heads:
            section["num_window_kv_heads"] = heads
        if (window_dim, window_value) != (dim, value_dim):
            section |= {"window_head_dim": window_dim, "window_value_dim": window_value}
    return section


def _latent(config: Config, layers: list[Layer], num_layers: int) -> dict[str, Any]:
    return {
        "kind": "latent",
        "num_layers": num_layers,
        "num_query_heads": config.heads,
        "kv_lora_rank": config.count("kv_lora_rank"),
        "rope_dim": config.count("qk_rope_head_dim"),
        "nope_dim": config.count("qk_nope_head_dim"),
        "value_dim": config.count("v_head_dim"),
        **(_indexer(config, layers) if config.count("index_n_heads", default=0) else {}),
    }


def _indexer(config: Config, layers: list[Layer]) -> dict[str, Any]:
    """Makes the fields of sparse attention in the section `attention`. Layers that reuse an earlier layer's choice of
    tokens have no indexer keys.
    """
    num_indexers = sum(layer.mixer == "full" and layer.has_indexer for layer in layers)
    return {"sparse_tokens": config.count("index_topk"), "index_token_bytes": num_indexers * index_bytes(config)}


def index_bytes(config: Config) -> int:
    """Bytes per token of an indexer's key: fp8, with a scale of 4 bytes per 128 elements."""
    dim = config.count("index_head_dim")
    return dim + dim // 128 * 4


def _compressed(config: Config, layers: list[Layer]) -> dict[str, Any]:
    """Makes the section `attention` for layers that store one latent for several tokens (DeepSeek V4). A latent has
    head_dim elements, and is both key and value. Layer.ratio gives the number of tokens per latent.
    """
    rope = config.count("qk_rope_head_dim")
    ratios = Counter(layer.ratio for layer in layers if layer.ratio)
    return {
        "kind": "latent",
        "num_layers": sum(ratios.values()),
        "num_query_heads": config.heads,
        "kv_lora_rank": config.head_dim - rope,
        "rope_dim": rope,
        "nope_dim": config.head_dim - rope,
        "value_dim": config.head_dim,
        "compress_ratios": dict(sorted(ratios.items())),
        "num_window_layers": len(layers),
        "kept_window_tokens": window_of(config),
        "index_token_bytes": ratios[OVERLAPPING_RATIO] * index_bytes(config) // OVERLAPPING_RATIO,
    }


def state_of(config: Config, layers: list[Layer]) -> dict[str, Any]:
    """Makes the section `state`, for layers with a state of fixed size per request. Empty: the model has no such
    layers.
    """
    if not (num_layers := sum(layer.mixer == "state" for layer in layers)):
        return {}
    if config.get("linear_num_value_heads") is not None:
        keys = config.count("linear_num_key_heads") * config.count("linear_key_head_dim")
        values = config.count("linear_num_value_heads") * config.count("linear_value_head_dim")
        convolved, kernel = 2 * keys + values, config.count("linear_conv_kernel_dim")
        elements = values * config.count("linear_key_head_dim")
    elif (delta := delta_attention(config)) is not None:
        num_heads, dim, kernel, _ = delta
        convolved, elements = 3 * num_heads * dim, num_heads * dim * dim
    else:
        heads, dim, groups, state, kernel = mamba_sizes(config)
        convolved, elements = heads * dim + 2 * groups * state, heads * dim * state
    found = {"num_layers": num_layers, "conv_bytes": 2 * convolved * max(0, kernel - 1), "ssm_elements": elements}
    return found if (chunk := _state_chunk(config)) is None else {**found, "chunk_tokens": chunk}


def _state_chunk(config: Config) -> int | None:
    """Number of tokens in a chunk of a linear-attention kernel, which writes the request's state at the end of each
    chunk. None: the config does not say. The field mamba_chunk_size has this number. Without it, Nemotron-H's field
    chunk_size does; SGLang reads chunk_size for no other model (0.5.23, configs/nemotron_h.py:224).
    """
    names = ["mamba_chunk_size", *(["chunk_size"] if config.family == "nemotron_h" else [])]
    found = [name for name in names if config.get(name) is not None]
    return config.count(*found) if found else None
