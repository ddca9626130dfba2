"""The shape of one model, from the catalog or a checkpoint's config.json, and the parameters that follow from it."""

import json
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from pdreal.options import Options
from pdsim.system.catalog import load_model
from pdsim.system.model import Experts, GroupedQueryAttention, LlamaArchitecture, RopeScaling

ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True, "Qwen3MoeForCausalLM": True}
"""Those that can be run, by config.json's name, and whether they normalise query and key heads."""

_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Fields of config.json that can have one value here."""

_SHAPE = (
    *("vocab_size", "hidden_size", "num_layers", "num_query_heads", "num_kv_heads", "head_dim", "tied_embeddings"),
    *("llama.intermediate_size", "llama.qk_norm", "experts"),
)


class ModelError(ValueError):
    """A model that cannot be run here, or not with so many ranks."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    tied_embeddings: bool
    llama: LlamaArchitecture
    experts: Experts | None = None
    """In place of every layer's MLP."""
    end_tokens: tuple[int, ...] = ()
    """A sequence ends with any of these, unless a request ignores them."""

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes as a checkpoint has them, matrices as [outputs, inputs]."""
        hidden = self.hidden_size
        query, kv = self.num_query_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "post_attention_layernorm": (hidden,),
            **self._mlp,
        }
        if self.llama.qk_norm:
            layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @property
    def inner_size(self) -> int:
        """Of the MLP, or of each expert."""
        return self.llama.intermediate_size if self.experts is None else self.experts.intermediate_size

    @property
    def _mlp(self) -> dict[str, tuple[int, ...]]:
        if self.experts is None:
            return self._gated("mlp")
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (self.experts.num_experts, self.hidden_size)}
        for index in range(self.experts.num_experts):
            shapes |= self._gated(f"mlp.experts.{index}")
        return shapes

    def _gated(self, at: str) -> dict[str, tuple[int, ...]]:
        into, out = (self.inner_size, self.hidden_size), (self.hidden_size, self.inner_size)
        return {f"{at}.gate_proj": into, f"{at}.up_proj": into, f"{at}.down_proj": out}

    @property
    def num_params(self) -> int:
        return sum(map(prod, self.parameters.values()))


def from_catalog(name: str) -> ModelConfig:
    """Raises CatalogError, or ModelError if the catalog knows too little of the model to run it."""
    spec = load_model(name)
    if spec.llama is None or not isinstance(spec.attention, GroupedQueryAttention):
        raise ModelError(f"model {name!r} cannot be run for real: its catalog entry has no section `llama`")
    if spec.experts is not None and spec.experts.num_layers != spec.num_layers:
        raise ModelError(f"model {name!r} cannot be run for real: some of its layers have no experts")
    return ModelConfig(
        name=name,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_query_heads=spec.attention.num_query_heads,
        num_kv_heads=spec.attention.num_kv_heads,
        head_dim=spec.attention.head_dim,
        max_context_tokens=spec.max_context_tokens,
        tied_embeddings=spec.tied_embeddings,
        llama=spec.llama,
        experts=spec.experts,
    )


def check_same_shape(checkpoint: ModelConfig, catalog: ModelConfig) -> None:
    """Raises ModelError: pages and step times are counted by the catalog's shape, and computed in the checkpoint's."""
    for name in _SHAPE:
        found, expected = (attrgetter(name)(config) for config in (checkpoint, catalog))
        if found != expected:
            raise ModelError(
                f"checkpoint {checkpoint.name}: {name.rpartition('.')[2]} is {found!r}, and {expected!r} "
                f"of {catalog.name}: the scenario must name the checkpoint's model"
            )


def from_checkpoint(folder: Path) -> ModelConfig:
    """The model of config.json, with the end tokens of generation_config.json. Raises ModelError."""
    data = _read(folder / "config.json")
    architecture = str(next(iter(data.get("architectures") or ()), "none"))
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{folder}/config.json: architecture {architecture} is none of {', '.join(ARCHITECTURES)}")
    for field, only in _ONLY.items():
        if (found := data.get(field, only)) != only:
            raise ModelError(f"{folder}/config.json: {field} is {found!r}, and only {only!r} can be run")
    if data.get("use_sliding_window") or data.get("quantization_config"):
        raise ModelError(f"{folder}/config.json: sliding windows and quantised weights cannot be run")
    generation = folder / "generation_config.json"
    ends = (_read(generation) if generation.is_file() else data).get("eos_token_id", data.get("eos_token_id"))
    try:
        return _config(folder, data, ends, qk_norm=ARCHITECTURES[architecture])
    except ModelError:
        raise
    except KeyError as missing:
        raise ModelError(f"{folder}/config.json: {missing.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as wrong:
        raise ModelError(f"{folder}/config.json: a field has a wrong value: {wrong}") from None


def _config(folder: Path, data: dict[str, Any], ends: Any, *, qk_norm: bool) -> ModelConfig:
    heads = data["num_attention_heads"]
    return ModelConfig(
        name=folder.name,
        vocab_size=data["vocab_size"],
        hidden_size=data["hidden_size"],
        num_layers=data["num_hidden_layers"],
        num_query_heads=heads,
        num_kv_heads=data.get("num_key_value_heads", heads),
        head_dim=data.get("head_dim") or data["hidden_size"] // heads,
        max_context_tokens=int(data["max_position_embeddings"]),
        tied_embeddings=data.get("tie_word_embeddings", False),
        llama=LlamaArchitecture(
            intermediate_size=data["intermediate_size"],
            rms_norm_eps=float(data["rms_norm_eps"]),
            rope_theta=float(_rope(data).get("rope_theta", 10_000.0)),
            rope_scaling=_rope_scaling(_rope(data), folder),
            qk_norm=qk_norm,
        ),
        experts=_experts(data),
        end_tokens=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
    )


def _experts(data: dict[str, Any]) -> Experts | None:
    if "num_experts" not in data:
        return None
    return Experts(
        num_layers=data["num_hidden_layers"],
        num_experts=data["num_experts"],
        num_active=data["num_experts_per_tok"],
        intermediate_size=data["moe_intermediate_size"],
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path} does not exist: a checkpoint is a folder with config.json and *.safetensors")
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as wrong:
        raise ModelError(f"{path} cannot be read: {wrong}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} is no JSON object")
    return data


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints of transformers 5 keep under rope_parameters what earlier ones have in two places."""
    return data.get("rope_parameters") or {**data, **(data.get("rope_scaling") or {})}


def _rope_scaling(rope: dict[str, Any], folder: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{folder}/config.json: rope type {kind!r} is none of default, llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RopeScaling(**{name: rope[name] for name in names})


def model_config(options: Options, name: str) -> ModelConfig:
    """Needs no torch. Raises ModelError."""
    catalog = from_catalog(name)
    if options.weights.startswith("seed:"):
        return catalog
    checkpoint = from_checkpoint(Path(options.weights))
    check_same_shape(checkpoint, catalog)
    return checkpoint
