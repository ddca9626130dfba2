"""Reads and checks the fields of a config.json. Model families use different names for the same field."""

import re
from collections.abc import Mapping
from typing import Any

from pdsim.inputs import shown
from pdsim.system.catalog import EntryError

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
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _LINEAR),
    **{key: {"no_rope_layer_interval": 4} for key in ("llama4", "llama4_text")},
    "gemma4_text": {"tie_word_embeddings": True},
}
"""Values of fields that published config files leave out, by model_type, as in transformers."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_attention_groups", "n_kv_heads"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "layers": ("num_hidden_layers", "n_layer"),
    "context": ("max_position_embeddings", "max_seq_len", "model_max_length", "seq_length"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"),
    "expert_size": ("moe_intermediate_size", "expert_intermediate_size", "expert_hidden_dim", "expert_ffn_hidden_size"),
    "dense_size": ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_size": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
        "shared_intermediate_size",
    ),
    "expert_input": ("moe_latent_size", "routed_expert_hidden_size"),
    "first_dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "mtp": ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"),
}
"""Names of a field in the config files of different model families. Keys: names of the fields in this package."""

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_NOT_READ = re.compile(
    r"rwkv|lightning|lru_width|block_use_lowrank|retention|hyena|xlstm|^multi_query$|^new_decoder_architecture$|"
    r"^conv_L_cache$|^expert_retrieval_size$|^H_cycles$|^type_vocab_size$"
)
"""Pattern of field names that mark unsupported models: modules.py cannot count the parameters of their layers, or
attention.py cannot count their KV."""
_FAMILIES_NOT_READ = ("bert-generation", "doge", "jetmoe")
"""Further unsupported model families, by model_type: modules.py or attention.py cannot count their layers' parameters
or KV."""
MOST_LAYERS = 10_000


class Config:
    """The fields of the text model in a config.json."""

    def __init__(self, fields: Any) -> None:
        """fields: content of config.json. Raises EntryError if `fields` is no mapping, if model_type is no text, or if
        pdsim does not model the layers of this model.
        """
        if not isinstance(fields, Mapping):
            raise EntryError(f"expected a mapping of fields, found {fields!r}")
        given = _text_of(fields)
        family = given.get("model_type")
        if family is not None and not isinstance(family, str):
            raise EntryError(f"model_type: expected a name, found {family!r}")
        self.family: str = family or ""
        self._fields = {**DEFAULTS.get(self.family, {}), **given}
        foreign = sorted(name for name in given if _NOT_READ.search(str(name)))
        if foreign or self.family in _FAMILIES_NOT_READ:
            raise EntryError(
                f"{', '.join(foreign) or 'model_type'}: {self.family or 'this model'} has layers that pdsim does not "
                "model; write the entry by hand, as `pdsim catalog show` prints others"
            )

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def names(self, pattern: str) -> list[str]:
        """Names of the file's fields of which some part matches a regular expression."""
        return [name for name in self._fields if re.search(pattern, str(name))]

    def count(self, *names: str, default: int | None = None) -> int:
        """Value of the first of the given fields that the file has. A name that is a key of NAMES stands for several
        fields. A list of equal numbers (one per layer) counts as one of them. default: value if neither the file nor
        DEFAULTS has one of the fields; None: raises EntryError. Also raises EntryError unless the value is a whole
        number from 0 on.
        """
        fields = [field for name in names for field in NAMES.get(name, (name,))]
        for field in fields:
            value = self._fields.get(field)
            if value is None:
                continue
            if isinstance(value, list) and value and all(one == value[0] for one in value):
                value = value[0]  # the same in each layer
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise EntryError(f"{field}: expected a whole number from 0 on, found {value!r}")
            return value
        if default is None:
            raise EntryError(f"{fields[0]} is missing" + (f" (or {', '.join(fields[1:])})" if fields[1:] else ""))
        return default

    def flags(self, name: str) -> list[Any] | None:
        """Returns the values of a field that has a list with one value per layer. None: the field is missing or is no
        list. Values for layers beyond the last belong to layers that predict further tokens, and are left out. Raises
        EntryError if there are too few values.
        """
        value = self._fields.get(name)
        if not isinstance(value, list):
            return None
        if len(value) < self.num_layers:
            raise EntryError(f"{name}: expected {self.num_layers} values, one per layer, found {len(value)}")
        return value[: self.num_layers]

    @property
    def num_layers(self) -> int:
        listed = self._fields.get("layers_block_type") or self._fields.get("hybrid_override_pattern")
        found = self.count("layers", default=len(listed) if isinstance(listed, list | str) else None)
        if not 0 < found <= MOST_LAYERS:
            raise EntryError(f"num_hidden_layers: expected 1 to {MOST_LAYERS:,}, found {shown(found)}")
        return found

    @property
    def hidden(self) -> int:
        return self.count("hidden_size", "n_embd")

    @property
    def heads(self) -> int:
        return self.count("heads")

    @property
    def kv_heads(self) -> int:
        return self.count("kv_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        return self.count("head_dim", default=self.hidden // max(1, self.heads))


def _text_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of the text model. A model with images or audio has these fields in a section of its
    config.json. The result then also has the fields outside the section; if a field is in both places, the section's
    value counts.
    """
    for name in _TEXT:
        nested = fields.get(name)
        if isinstance(nested, Mapping):
            return {**{key: value for key, value in fields.items() if key != name}, **_text_of(nested)}
    return fields


def delta_attention(config: Config) -> tuple[int, int, int, bool] | None:
    """Sizes of Kimi delta attention: (number of heads, width of a head, width of the convolution in tokens, True if
    gates have full rank). None: the model has no such layers.
    """
    if isinstance(linear := config.get("linear_attn_config"), dict) and "num_heads" in linear:
        is_full = bool(linear.get("use_full_rank_gate"))
        return linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"], is_full
    if config.get("linear_num_heads") is not None:
        kernel = config.count("linear_conv_kernel_dim")
        return config.count("linear_num_heads"), config.count("linear_head_dim"), kernel, False
    return None
