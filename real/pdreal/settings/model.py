"""The shape of one model, from the catalog or a checkpoint's config.json; and its parameters with their shapes."""

from dataclasses import MISSING, dataclass, fields, replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from pdreal.settings.options import Options
from pdsim.inputs import read_json
from pdsim.system.catalog import EntryError, load_model
from pdsim.system.checkpoint.config import Config
from pdsim.system.checkpoint.layers import layers_of
from pdsim.system.llama import GatedDelta, GroupedRouting, LlamaArchitecture, RopeScaling, YarnScaling
from pdsim.system.model import Experts, GroupedQueryAttention, LatentAttention

ARCHITECTURES = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen3ForCausalLM": True,
    "Qwen3MoeForCausalLM": True,
    "Qwen3_5ForCausalLM": True,
    "DeepseekV3ForCausalLM": False,
}
"""Architectures that real mode can run, by their name in config.json. True: query and key heads have norms."""

_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
}
"""Fields of config.json for which real mode supports one value only."""

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

_SHAPE = (
    *("vocab_size", "hidden_size", "num_layers", "num_query_heads", "num_kv_heads", "head_dim", "tied_embeddings"),
    *("llama.intermediate_size", "llama.qk_norm", "llama.query_rank", "llama.routing", "experts", "latent"),
    *("window_tokens", "llama.window_layers", "llama.delta"),
)


MOST_VERIFIED_TOKENS = 64
"""Largest number of tokens that a decode step verifies for one request. RoPE has this many positions more than the
model's context, because drafts may lie behind the end of the context.
"""


class ModelError(ValueError):
    """Raised if real mode cannot run a model, or cannot run it with this number of ranks."""


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
    """Experts, instead of the MLP in the last experts.num_layers layers. None: no layer has experts."""
    latent: LatentAttention | None = None
    """Latent attention: one latent per token, which all query heads share. None: the model has grouped-query
    attention."""
    window_tokens: int = 0
    """Sliding window in tokens of the layers llama.window_layers: a token itself and those before it. 0: none."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a sequence, unless a request ignores them."""

    @property
    def planes_per_layer(self) -> int:
        """Number of planes of a layer in the cache: two for keys and values, one for latents."""
        return 2 if self.latent is None else 1

    def has_attention(self, layer: int) -> bool:
        """True if a layer has attention with KV. False: it has linear attention with a state."""
        return self.llama.delta is None or self.llama.delta.has_attention(layer)

    @property
    def places(self) -> list[int]:
        """Index of each layer among the layers with attention, or among those with linear attention."""
        kinds = [self.has_attention(layer) for layer in range(self.num_layers)]
        return [kinds[:layer].count(kind) for layer, kind in enumerate(kinds)]

    @property
    def num_kv_layers(self) -> int:
        return sum(map(self.has_attention, range(self.num_layers)))

    @property
    def num_state_layers(self) -> int:
        return self.num_layers - self.num_kv_layers

    @property
    def num_rotated(self) -> int:
        """Number of dimensions of a query or key head that RoPE rotates."""
        if self.llama.delta is not None:
            return int(self.head_dim * self.llama.delta.rotated_share)
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def window_of(self, layer: int) -> int:
        """Returns the number of last tokens that a token sees in a layer; 0: all."""
        return self.window_tokens if layer in self.llama.window_layers else 0

    @property
    def windows(self) -> list[int]:
        """The different window lengths of the layers, in tokens. 0: layers without a window."""
        return sorted({self.window_of(layer) for layer in range(self.num_layers)})

    @property
    def output_inputs(self) -> int:
        """Total width of the outputs of all query heads."""
        return self.num_query_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def num_dense_layers(self) -> int:
        """Number of layers without experts, which come first."""
        return self.num_layers - (0 if self.experts is None else self.experts.num_layers)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters, as in a checkpoint. Matrices are [outputs, inputs]."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            layer = {
                "input_layernorm": (hidden,),
                **self._mixer(index),
                "post_attention_layernorm": (hidden,),
                **self._mlp(index),
            }
            at = f"model.layers.{index}"
            shapes |= {f"{at}.{name}.weight": shape for name, shape in layer.items()}
            if (delta := self.llama.delta) is not None and not delta.has_attention(index):
                shapes |= {f"{at}.linear_attn.{name}": (delta.num_value_heads,) for name in ("A_log", "dt_bias")}
            if self.experts is not None and self.has_routing(index):
                shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (self.experts.num_experts,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def has_routing(self, layer: int) -> bool:
        """True if a layer has experts that are chosen by llama.routing (DeepSeek-V3's routing, with shared experts)."""
        return self.llama.routing is not None and layer >= self.num_dense_layers

    @property
    def mlp_sizes(self) -> list[int]:
        """Inner sizes of MLPs that process every token: of dense layers, and of a layer's shared experts joined."""
        sizes = [self.llama.intermediate_size] if self.num_dense_layers else []
        if self.experts is not None and self.llama.routing is not None:
            sizes.append(self.llama.routing.num_shared * self.experts.intermediate_size)
        return sizes

    def _mixer(self, layer: int) -> dict[str, tuple[int, ...]]:
        if (delta := self.llama.delta) is not None and not delta.has_attention(layer):
            return delta.parameters(self.hidden_size)
        return self._grouped_attention if self.latent is None else self._latent_attention(self.latent)

    @property
    def _grouped_attention(self) -> dict[str, tuple[int, ...]]:
        hidden, dim = self.hidden_size, self.head_dim
        query, kv = self.num_query_heads * dim, self.num_kv_heads * dim
        has_gates = self.llama.delta is not None  # each head's gate follows its query
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (2 * query if has_gates else query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
        }
        return shapes | ({"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)} if self.llama.qk_norm else {})

    def _latent_attention(self, latent: LatentAttention) -> dict[str, tuple[int, ...]]:
        hidden, heads, rank = self.hidden_size, self.num_query_heads, self.llama.query_rank
        query = heads * (latent.nope_dim + latent.rope_dim)
        shapes: dict[str, tuple[int, ...]] = (
            {
                "self_attn.q_a_proj": (rank, hidden),
                "self_attn.q_a_layernorm": (rank,),
                "self_attn.q_b_proj": (query, rank),
            }
            if rank
            else {"self_attn.q_proj": (query, hidden)}
        )
        return shapes | {
            "self_attn.kv_a_proj_with_mqa": (latent.kv_lora_rank + latent.rope_dim, hidden),
            "self_attn.kv_a_layernorm": (latent.kv_lora_rank,),
            "self_attn.kv_b_proj": (heads * (latent.nope_dim + latent.value_dim), latent.kv_lora_rank),
            "self_attn.o_proj": (hidden, heads * latent.value_dim),
        }

    def _mlp(self, layer: int) -> dict[str, tuple[int, ...]]:
        if self.experts is None or layer < self.num_dense_layers:
            return self._gated("mlp", self.llama.intermediate_size)
        inner, routing = self.experts.intermediate_size, self.llama.routing
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (self.experts.num_experts, self.hidden_size)}
        for index in range(self.experts.num_experts):
            shapes |= self._gated(f"mlp.experts.{index}", inner)
        if routing is not None:
            shapes |= self._gated("mlp.shared_experts", routing.num_shared * inner)
        return shapes

    def _gated(self, at: str, inner: int) -> dict[str, tuple[int, ...]]:
        into, out = (inner, self.hidden_size), (self.hidden_size, inner)
        return {f"{at}.gate_proj": into, f"{at}.up_proj": into, f"{at}.down_proj": out}

    @property
    def num_params(self) -> int:
        return sum(map(prod, self.parameters.values()))


def from_catalog(name: str) -> ModelConfig:
    """Returns the model of a catalog entry. Raises CatalogError, or ModelError if the entry lacks fields that real mode
    needs.
    """
    spec = load_model(name)
    if spec.llama is None or (spec.state is not None and spec.llama.delta is None):
        raise ModelError(f"model {name!r} cannot be run for real: its catalog entry has no section `llama`")
    if spec.experts is not None and spec.llama.routing is None and spec.experts.num_layers != spec.num_layers:
        raise ModelError(f"model {name!r} cannot be run for real: some of its layers have no experts")
    attention = spec.attention
    if attention.num_window_layers != len(spec.llama.window_layers):
        raise ModelError(
            f"model {name!r} cannot be run for real: {attention.num_window_layers} of its layers have a window, and "
            f"llama.window_layers of its catalog entry names {len(spec.llama.window_layers)}"
        )
    num_kv_heads, head_dim = _kv_heads(attention)
    return ModelConfig(
        name=name,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_query_heads=attention.num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=spec.max_context_tokens,
        tied_embeddings=spec.tied_embeddings,
        llama=spec.llama,
        experts=None if spec.experts is None else replace(spec.experts, weight_dtype=None),
        latent=attention if isinstance(attention, LatentAttention) else None,
        window_tokens=attention.kept_window_tokens,
    )


def _kv_heads(attention: GroupedQueryAttention | LatentAttention) -> tuple[int, int]:
    """Returns the number of KV heads in the cache, and the size of each head in elements."""
    if isinstance(attention, LatentAttention):
        return 1, attention.kv_lora_rank + attention.rope_dim
    return attention.num_kv_heads, attention.head_dim


def check_same_shape(checkpoint: ModelConfig, catalog: ModelConfig) -> None:
    """Raises ModelError unless both models have the same shape. Pages and step times are computed from the catalog's
    model, and forwards run the checkpoint's.
    """
    for name in _SHAPE:
        found, expected = (attrgetter(name)(config) for config in (checkpoint, catalog))
        if found != expected:
            raise ModelError(
                f"checkpoint {checkpoint.name}: {name.rpartition('.')[2]} is {found!r}, and {expected!r} "
                f"of {catalog.name}: the scenario must name the checkpoint's model"
            )


def from_checkpoint(folder: Path) -> ModelConfig:
    """Reads config.json, and end tokens from generation_config.json. Raises ModelError if the model cannot be run."""
    data = _read(folder / "config.json")
    architecture = str(next(iter(data.get("architectures") or ()), "none"))
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{folder}/config.json: architecture {architecture} is none of {', '.join(ARCHITECTURES)}")
    for field, only in _ONLY.items():
        if (found := data.get(field, only)) != only:
            raise ModelError(f"{folder}/config.json: {field} is {found!r}, and only {only!r} can be run")
    quantized = data.get("quantization_config") or _FP8
    if {name: quantized.get(name) for name in _FP8} != _FP8:
        raise ModelError(f"{folder}/config.json: quantised weights can be run in fp8 with blocks of [128, 128] only")
    generation = folder / "generation_config.json"
    ends = (_read(generation) if generation.is_file() else data).get("eos_token_id", data.get("eos_token_id"))
    try:
        return _config(folder, data, ends, qk_norm=ARCHITECTURES[architecture])
    except ModelError:
        raise
    except KeyError as missing:
        raise ModelError(f"{folder}/config.json: {missing.args[0]} is missing") from None
    except EntryError as wrong:
        raise ModelError(f"{folder}/config.json: {wrong}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as wrong:
        raise ModelError(f"{folder}/config.json: a field has a wrong value: {wrong}") from None


def _config(folder: Path, data: dict[str, Any], ends: Any, *, qk_norm: bool) -> ModelConfig:
    latent = _latent(data)
    num_kv_heads, head_dim = _published_kv_heads(data) if latent is None else _kv_heads(latent)
    window_layers = _window_layers(data)
    return ModelConfig(
        name=folder.name,
        vocab_size=data["vocab_size"],
        hidden_size=data["hidden_size"],
        num_layers=data["num_hidden_layers"],
        num_query_heads=data["num_attention_heads"],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=int(data["max_position_embeddings"]),
        tied_embeddings=data.get("tie_word_embeddings", False),
        llama=LlamaArchitecture(
            intermediate_size=data["intermediate_size"],
            rms_norm_eps=float(data["rms_norm_eps"]),
            rope_theta=float(_rope(data).get("rope_theta", 10_000.0)),
            **_rope_scaling(_rope(data), folder, is_latent=latent is not None),
            qk_norm=qk_norm,
            query_rank=0 if latent is None else data["q_lora_rank"] or 0,
            delta=_delta(data, folder),
            routing=_routing(data),
            window_layers=window_layers,
        ),
        experts=_experts(data),
        latent=latent,
        window_tokens=data["sliding_window"] if window_layers else 0,
        end_tokens=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
    )


def _published_kv_heads(data: dict[str, Any]) -> tuple[int, int]:
    heads = data["num_attention_heads"]
    return data.get("num_key_value_heads", heads), data.get("head_dim") or data["hidden_size"] // heads


def _window_layers(data: dict[str, Any]) -> tuple[int, ...]:
    """Returns the indices of layers with a sliding window. data: content of config.json. Qwen3's layers have none
    unless use_sliding_window is true. Raises EntryError for unknown kinds of layers.
    """
    has_switch = str(data.get("model_type")).startswith("qwen3")
    if not data.get("sliding_window") or not data.get("use_sliding_window", not has_switch):
        return ()
    return tuple(i for i, layer in enumerate(layers_of(Config(data))) if layer.mixer == "window")


def _delta(data: dict[str, Any], folder: Path) -> GatedDelta | None:
    if "linear_num_value_heads" not in data:
        return None
    delta = GatedDelta(
        num_key_heads=data["linear_num_key_heads"],
        num_value_heads=data["linear_num_value_heads"],
        key_dim=data["linear_key_head_dim"],
        value_dim=data["linear_value_head_dim"],
        conv_tokens=data["linear_conv_kernel_dim"],
        attention_interval=data.get("full_attention_interval", GatedDelta.attention_interval),
        rotated_share=_rope(data).get("partial_rotary_factor", GatedDelta.rotated_share),
    )
    layers = range(data["num_hidden_layers"])
    kinds = ["full_attention" if delta.has_attention(layer) else "linear_attention" for layer in layers]
    if data.get("layer_types", kinds) != kinds:
        only = f"one of {delta.attention_interval} layers, the last, can have full attention"
        raise ModelError(f"{folder}/config.json: layer_types: {only}")
    return delta


def _latent(data: dict[str, Any]) -> LatentAttention | None:
    if "kv_lora_rank" not in data:
        return None
    return LatentAttention(
        num_layers=data["num_hidden_layers"],
        num_query_heads=data["num_attention_heads"],
        kv_lora_rank=data["kv_lora_rank"],
        rope_dim=data["qk_rope_head_dim"],
        nope_dim=data["qk_nope_head_dim"],
        value_dim=data["v_head_dim"],
    )


def _routing(data: dict[str, Any]) -> GroupedRouting | None:
    if "n_routed_experts" not in data:
        return None
    return GroupedRouting(
        num_groups=data["n_group"],
        num_active_groups=data["topk_group"],
        scale=float(data["routed_scaling_factor"]),
        num_shared=data["n_shared_experts"],
    )


def _experts(data: dict[str, Any]) -> Experts | None:
    if "num_experts" not in data and "n_routed_experts" not in data:
        return None
    return Experts(
        num_layers=data["num_hidden_layers"] - data.get("first_k_dense_replace", 0),
        num_experts=data.get("n_routed_experts") or data["num_experts"],
        num_active=data["num_experts_per_tok"],
        intermediate_size=data["moe_intermediate_size"],
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path} does not exist: a checkpoint is a folder with config.json and *.safetensors")
    try:
        data = read_json(path)
    except (OSError, ValueError) as wrong:
        raise ModelError(f"{path} cannot be read: {wrong}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} is no JSON object")
    return data


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """Returns rope_parameters; if missing (before Transformers 5), all fields of `data`, and those of rope_scaling."""
    return data.get("rope_parameters") or {**data, **(data.get("rope_scaling") or {})}


_SCALINGS: dict[str, tuple[str, type[RopeScaling | YarnScaling]]] = {
    "llama3": ("rope_scaling", RopeScaling),
    "yarn": ("yarn", YarnScaling),
}
"""For each rope type: the field of LlamaArchitecture that has the rope's settings, and the class of the settings."""


def _rope_scaling(rope: dict[str, Any], folder: Path, *, is_latent: bool) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = ("llama3", "yarn") if is_latent else ("llama3",)
    if kind == "default":
        return {}
    if kind not in known:
        raise ModelError(f"{folder}/config.json: rope type {kind!r} is none of default, {', '.join(known)}")
    name, made_of = _SCALINGS[kind]
    needed = [field.name for field in fields(made_of) if field.default is MISSING]
    given = [field.name for field in fields(made_of) if rope.get(field.name) is not None]
    return {name: made_of(**{field: rope[field] for field in dict.fromkeys([*needed, *given])})}


def model_config(options: Options, name: str) -> ModelConfig:
    """Returns the shape of a model, without loading torch. name: the model in the catalog. Raises ModelError if real
    mode cannot run the model, or the checkpoint has another shape than the catalog's model.
    """
    catalog = from_catalog(name)
    if options.weights.startswith("seed:"):
        return catalog
    checkpoint = from_checkpoint(Path(options.weights))
    check_same_shape(checkpoint, catalog)
    return checkpoint
