"""Reads a checkpoint's config.json for details of a model that real mode needs. They become the section `llama` of the
model's file in the catalog.
"""

from collections.abc import Mapping
from typing import Any

from pdsim.system.checkpoint.config import Config
from pdsim.system.checkpoint.layers import Layer

_RUNNABLE = {
    "llama": False,
    "mistral": False,
    "qwen3": True,
    "qwen3_moe": True,
    "deepseek_v3": False,
    "kimi_k2": False,
}
"""Model families, by model_type, for which architecture_of makes the section `llama`. True: the family normalises query
and key heads.
"""
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def architecture_of(config: Config, layers: list[Layer], experts: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the section `llama` of a model's catalog entry. Empty: real mode cannot run the model, or config.json lacks
    a number that real mode needs. layers: the model's layers in order. experts: the section `experts` of the same
    entry; empty: the model has no experts.
    """
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    has_bias = config.get("attention_bias") or config.get("mlp_bias")
    is_latent = bool(config.get("kv_lora_rank"))
    stretched = {"yarn": ("yarn", _YARN)} if is_latent else {"llama3": ("rope_scaling", _LLAMA3)}
    scalings: dict[str, tuple[str, tuple[str, ...]]] = {"default": ("", ()), **stretched}
    if config.family not in _RUNNABLE or has_bias or kind not in scalings:
        return {}
    is_mixed = experts and experts["num_layers"] != len(layers) and not is_latent
    theta = rope.get("rope_theta", config.get("rope_theta"))
    is_untold = None in (config.get("rms_norm_eps"), theta) or (is_latent and config.get("n_group") is None)
    if is_mixed or is_untold or (experts and not config.get("norm_topk_prob")):
        return {}
    section, names = scalings[kind]
    windows = [i for i, layer in enumerate(layers) if layer.mixer == "window"]
    return {
        "intermediate_size": config.count("intermediate_size"),
        "rms_norm_eps": config.get("rms_norm_eps"),
        "rope_theta": theta,
        **({section: {name: rope[name] for name in names if rope.get(name) is not None}} if section else {}),
        **({"qk_norm": True} if _RUNNABLE[config.family] else {}),
        **(_deepseek(config) if is_latent else {}),
        **({"window_layers": windows} if windows else {}),
    }


def _deepseek(config: Config) -> dict[str, Any]:
    routing = {
        "num_groups": config.count("n_group"),
        "num_active_groups": config.count("topk_group"),
        "scale": config.get("routed_scaling_factor"),
        "num_shared": config.count("n_shared_experts"),
    }
    rank = config.count("q_lora_rank", default=0)
    return {**({"query_rank": rank} if rank else {}), "routing": routing}
