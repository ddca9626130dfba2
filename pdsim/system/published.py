"""Models as Hugging Face's config.json describes them: the fields of a catalog entry, and what these leave out."""

from collections.abc import Iterator, Mapping
from typing import Any

from pdsim.system.catalog import EntryError
from pdsim.system.quantization import Quantization, quantization_of

_UNTIED: Mapping[str, Any] = {"tie_word_embeddings": False}
_GEMMA: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_LINEAR: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "minimax_m2"), _UNTIED),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss"), _UNTIED),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), _LINEAR),
}
"""Defaults of transformers for fields that published files leave out, by model_type."""

_MOST_LAYERS = 10_000


class _Config:
    """The fields of a config.json, checked as they are read."""

    def __init__(self, fields: Any) -> None:
        if not isinstance(fields, Mapping):
            raise EntryError(f"expected a mapping of fields, found {fields!r}")
        nested = fields.get("text_config")
        given = {**fields, **nested} if isinstance(nested, Mapping) else fields
        family: Any = given.get("model_type")
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise EntryError(f"model_type: expected one of {known}, found {family!r}; write the entry by hand")
        self._fields = {**FAMILIES[family], **given}
        self.family: str = family

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of these that is there. Without a default one must be."""
        for name in names:
            value = self._fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise EntryError(f"{name}: expected a whole number from 0 on, found {value!r}")
            return value
        if default is None:
            raise EntryError(f"{' or '.join(names)} is missing")
        return default


def entry_of(fields: Any, source: str, beside: Any = None) -> dict[str, Any]:
    """The catalog entry of a model's config.json, and of the hf_quant_config.json beside it where there is one.

    source: where that comes from. Raises EntryError.
    """
    try:
        return _entry(_Config(fields), source, beside)
    except EntryError:
        raise
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as wrong:
        raise EntryError(f"a field has a wrong value: {wrong}") from None


def _entry(config: _Config, source: str, beside: Any) -> dict[str, Any]:
    quantized = quantization_of(config.get("quantization_config"), beside)
    hidden, vocab = config.count("hidden_size"), config.count("vocab_size")
    if (num_layers := config.count("num_hidden_layers")) > _MOST_LAYERS:
        raise EntryError(f"num_hidden_layers: expected at most {_MOST_LAYERS:,}, found {num_layers:,}")
    experts = _experts(config)
    attention, attention_params = _attention(config, hidden)
    num_experts = config.count("num_experts_per_tok", default=0)
    num_expert_layers = experts["num_layers"] if experts else 0
    state, state_params = _state(config, hidden)
    params = attention["num_layers"] * attention_params + state_params
    params += (num_layers - num_expert_layers) * 3 * hidden * config.count("intermediate_size")
    params += vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    active = params
    if experts:
        each = 3 * hidden * experts["intermediate_size"]
        shared = hidden * experts["num_experts"] + config.count("n_shared_experts", default=0) * each
        shared += 3 * hidden * config.count("shared_expert_intermediate_size", default=0)
        params += num_expert_layers * (shared + experts["num_experts"] * each)
        active += num_expert_layers * (shared + num_experts * each)
    dtype, expert_dtype, of_types = _dtypes(config, quantized, has_experts=bool(experts))
    if expert_dtype:
        experts["weight_dtype"] = expert_dtype
    wide, of_modules = (0, []) if quantized is None else _wide(config, quantized, experts, hidden, attention_params)
    if wide and not expert_dtype and dtype != "fp4":
        of_modules.append(f"{wide / 1e9:.2f} B parameters that it keeps in bf16 are counted in {dtype}")
    can_be_read = (not of_types or (quantized and quantized.in_blocks)) and "num_window_layers" not in attention
    llama = _llama(config, experts) if can_be_read else {}
    notes = [of_types, *of_modules, *_of_kv(quantized), *_left_out(config, attention)]
    return {
        "num_params": params,
        "num_active_params": active,
        "num_layers": num_layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "max_context_tokens": config.count("max_position_embeddings"),
        "weight_dtype": dtype,
        **({"num_params_wider_than_fp4": wide} if wide and dtype == "fp4" else {}),
        **({"kv_dtype": quantized.kv_dtype} if quantized is not None and quantized.kv_dtype else {}),
        **({"tied_embeddings": True} if config.get("tie_word_embeddings") else {}),
        "attention": attention,
        **({"state": state} if state else {}),
        **({"experts": experts} if experts else {}),
        **({"llama": llama} if llama else {}),
        "sources": {
            "num_params, num_active_params": "computed from config.json: attention, MLP or experts, embeddings; "
            "norms and biases left out",
            "everything else": source,
            **({"notes": "; ".join(filter(None, notes))} if any(notes) else {}),
        },
    }


def _attention(config: _Config, hidden: int) -> tuple[dict[str, Any], int]:
    """The section, and the parameters of one layer."""
    num_layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    if config.get("kv_lora_rank"):
        rank, query_rank = config.count("kv_lora_rank"), config.count("q_lora_rank", default=0)
        rope, nope = config.count("qk_rope_head_dim"), config.count("qk_nope_head_dim")
        value = config.count("v_head_dim")
        query = query_rank * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
        params = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        sizes = {"kv_lora_rank": rank, "rope_dim": rope, "nope_dim": nope, "value_dim": value}
        return {"kind": "latent", "num_layers": num_layers, "num_query_heads": heads, **sizes}, params
    kv_heads, dim = (
        config.count("num_key_value_heads", default=heads),
        config.count("head_dim", default=hidden // heads),
    )
    num_linear = _num_linear_layers(config)
    section = {
        "kind": "grouped-query",
        "num_layers": num_layers - num_linear,
        "num_query_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
    }
    if windows := _num_window_layers(config, num_layers):
        section |= {"num_window_layers": windows, "window_tokens": config.count("sliding_window")}
    gates = hidden * dim * heads if FAMILIES[config.family] is _LINEAR else 0
    return section, 2 * hidden * dim * (heads + kv_heads) + gates


def _modules(config: _Config, hidden: int, attention_params: int) -> Iterator[tuple[str, int]]:
    """Linear modules of the layers but their routed experts, as transformers names them, and their parameters."""
    sparse, linear = _expert_layers(config), _linear_layers(config)
    projections, shared = _projections(config, hidden, attention_params), config.count("n_shared_experts", default=0)
    width = config.count("moe_intermediate_size", "intermediate_size") * shared
    width += config.count("shared_expert_intermediate_size", default=0)
    for layer in range(config.count("num_hidden_layers")):
        of_layer = f"model.layers.{layer}"
        if layer in linear:
            yield f"{of_layer}.linear_attn", _state(config, hidden)[1] // len(linear)
        else:
            yield from ((f"{of_layer}.self_attn.{name}", params) for name, params in projections.items())
        if layer not in sparse:
            yield from ((f"{of_layer}.mlp.{name}", hidden * config.count("intermediate_size")) for name in _MLP)
            continue
        yield f"{of_layer}.mlp.gate", hidden * config.count(*_NUM_EXPERTS)
        for around in ("shared_experts", "shared_expert") if width else ():
            is_its_name = (around == "shared_experts") == bool(shared)
            yield from ((f"{of_layer}.mlp.{around}.{name}", hidden * width) for name in _MLP if is_its_name)


_MLP = ("gate_proj", "up_proj", "down_proj")
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def _projections(config: _Config, hidden: int, attention_params: int) -> dict[str, int]:
    """Parameters of one layer's attention by projection."""
    heads = config.count("num_attention_heads")
    if not config.get("kv_lora_rank"):
        output = heads * config.count("head_dim", default=hidden // heads) * hidden
        keys = output // heads * config.count("num_key_value_heads", default=heads)
        return {"q_proj": attention_params - output - 2 * keys, "k_proj": keys, "v_proj": keys, "o_proj": output}
    rank, value = config.count("kv_lora_rank"), config.count("v_head_dim")
    rope, nope = config.count("qk_rope_head_dim"), config.count("qk_nope_head_dim")
    others = {
        "kv_a_proj_with_mqa": hidden * (rank + rope),
        "kv_b_proj": rank * heads * (nope + value),
        "o_proj": heads * value * hidden,
    }
    query = config.count("q_lora_rank", default=0)
    if not query:
        return {"q_proj": hidden * heads * (nope + rope), **others}
    return {"q_a_proj": hidden * query, "q_b_proj": query * heads * (nope + rope), **others}


def _wide(
    config: _Config, quantized: Quantization, experts: Mapping[str, Any], hidden: int, attention_params: int
) -> tuple[int, list[str]]:
    """Parameters of layers that a quantised checkpoint keeps in bf16, and what it lists that is not known here."""
    modules = dict(_modules(config, hidden, attention_params))
    wide = sum(params for name, params in modules.items() if quantized.leaves(name))
    routed = ["model.layers.0.mlp.experts.0.gate_proj"] if experts else []
    others = quantized.not_understood([*modules, *routed, "lm_head", "model.embed_tokens", "model.norm"])
    return wide, [f"not known, and counted in {quantized.dtype}: {', '.join(others)}"] if others else []


def _num_linear_layers(config: _Config) -> int:
    return len(_linear_layers(config))


def _linear_layers(config: _Config) -> set[int]:
    """Layers that keep a state instead of KV."""
    if FAMILIES[config.family] is not _LINEAR:
        return set()
    num_layers, types = config.count("num_hidden_layers"), config.get("layer_types")
    if types is not None:
        return {layer for layer, kind in enumerate(types) if kind == "linear_attention"}
    return {layer for layer in range(num_layers) if (layer + 1) % config.count("full_attention_interval")}


def _state(config: _Config, hidden: int) -> tuple[dict[str, Any], int]:
    """The section of layers with gated linear attention, and the parameters of all of them."""
    if not (num_layers := _num_linear_layers(config)):
        return {}, 0
    value_heads, value_dim = config.count("linear_num_value_heads"), config.count("linear_value_head_dim")
    key_dim, kernel = config.count("linear_key_head_dim"), config.count("linear_conv_kernel_dim")
    keys, values = config.count("linear_num_key_heads") * key_dim, value_heads * value_dim
    convolved = 2 * keys + values
    params = hidden * (convolved + values + 2 * value_heads) + convolved * kernel + values * hidden
    section = {
        "num_layers": num_layers,
        "conv_bytes": 2 * convolved * max(0, kernel - 1),
        "ssm_elements": value_heads * value_dim * key_dim,
    }
    return section, num_layers * params


def _num_window_layers(config: _Config, num_layers: int) -> int:
    """Layers that attend to a sliding window only."""
    types = config.get("layer_types")
    known = {"full_attention", "linear_attention" if FAMILIES[config.family] is _LINEAR else "sliding_attention"}
    if types is not None and (others := {*types} - known):
        raise EntryError(f"layer_types: expected {' or '.join(sorted(known))}, found {', '.join(sorted(others))}")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if types is not None:
        return list(types).count("sliding_attention")
    if pattern := config.count("sliding_window_pattern", default=0):
        return num_layers - num_layers // pattern
    return num_layers - config.count("max_window_layers", default=0)


def _experts(config: _Config) -> dict[str, Any]:
    num_experts = config.count(*_NUM_EXPERTS, default=0)
    if not num_experts:
        return {}
    return {
        "num_layers": len(_expert_layers(config)),
        "num_experts": num_experts,
        "num_active": config.count("num_experts_per_tok"),
        "intermediate_size": config.count("moe_intermediate_size", "intermediate_size"),
    }


def _expert_layers(config: _Config) -> set[int]:
    """Layers that have experts; the others have one MLP."""
    if not config.count(*_NUM_EXPERTS, default=0):
        return set()
    if (every := config.count("moe_layer_freq", default=1)) != 1:
        raise EntryError(f"moe_layer_freq: expected 1, found {every}")
    num_layers, step = config.count("num_hidden_layers"), config.count("decoder_sparse_step", default=1)
    dense = {*(config.get("mlp_only_layers") or ())}
    first = config.count("first_k_dense_replace", default=0)
    return {layer for layer in range(first, num_layers) if not (layer + 1) % step} - dense


def _dtypes(config: _Config, quantized: Quantization | None, *, has_experts: bool) -> tuple[str, str | None, str]:
    """Types of all weights or all but the routed experts, of these if they differ, and what to know of it."""
    if quantized is None:
        given = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        return "bf16", None, "" if given == "bfloat16" else f"the checkpoint's {given} is counted as bf16"
    dtype, left = quantized.dtype, quantized.left
    attention = [name for name in left if "attn" in name]
    has_wide_latents = dtype == "fp4" and config.get("kv_lora_rank") and not any("shared" in name for name in left)
    if has_wide_latents and attention:
        return (
            dtype,
            None,
            f"what it keeps of attention, embeddings and output projection are counted in bf16, all else in {dtype}",
        )
    is_every_layer = len(attention) >= config.count("num_hidden_layers")
    if has_experts and (is_every_layer or any("*" in name or name.startswith("re:") for name in attention)):
        return "bf16", dtype, f"routed experts are in {dtype} and all else in bf16"
    return dtype, None, f"embeddings and output projection are counted in bf16, all else in {dtype}"


_RUNNABLE = {"llama": False, "qwen3": True, "qwen3_moe": True, "deepseek_v3": False, "kimi_k2": False}
"""Families that real mode runs, and whether they normalise query and key heads."""


def _llama(config: _Config, experts: Mapping[str, Any]) -> dict[str, Any]:
    """The section that real mode needs, if it can run the model."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    has_bias = config.get("attention_bias") or config.get("mlp_bias")
    is_latent = bool(config.get("kv_lora_rank"))
    stretched = {"yarn": ("yarn", _YARN)} if is_latent else {"llama3": ("rope_scaling", _LLAMA3)}
    scalings: dict[str, tuple[str, tuple[str, ...]]] = {"default": ("", ()), **stretched}
    if config.family not in _RUNNABLE or has_bias or kind not in scalings:
        return {}
    is_mixed = experts and experts["num_layers"] != config.count("num_hidden_layers") and not is_latent
    is_untold = is_latent and None in (config.get("n_group"), config.get("rms_norm_eps"))
    if is_mixed or is_untold or (experts and not config.get("norm_topk_prob")):
        return {}
    section, names = scalings[kind]
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return {
        "intermediate_size": config.count("intermediate_size"),
        "rms_norm_eps": config.get("rms_norm_eps"),
        "rope_theta": theta,
        **({section: {name: rope[name] for name in names if rope.get(name) is not None}} if section else {}),
        **({"qk_norm": True} if _RUNNABLE[config.family] else {}),
        **(_deepseek(config) if is_latent else {}),
    }


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _deepseek(config: _Config) -> dict[str, Any]:
    routing = {
        "num_groups": config.count("n_group"),
        "num_active_groups": config.count("topk_group"),
        "scale": config.get("routed_scaling_factor"),
        "num_shared": config.count("n_shared_experts"),
    }
    rank = config.count("q_lora_rank", default=0)
    return {**({"query_rank": rank} if rank else {}), "routing": routing}


def _of_kv(quantized: Quantization | None) -> list[str]:
    if quantized is None or quantized.kv is None:
        return []
    if quantized.kv_dtype:
        return [f"KV is in {quantized.kv_dtype}, unless a scenario gives kv_dtype"]
    return [f"its KV scheme {quantized.kv} is not known: a scenario's kv_dtype counts"]


def _left_out(config: _Config, attention: Mapping[str, Any]) -> list[str]:
    """Facts that config.json tells and the entry does not."""
    notes = []
    if config.count("num_nextn_predict_layers", "num_mtp_modules", default=0):
        notes.append("modules that predict further tokens (MTP) are left out")
    if config.get("vision_config"):
        notes.append("the image encoder is left out")
    if "num_window_layers" in attention:
        notes.append("KV of all layers is kept and sent whole: windows change the time of attention only")
    return notes
