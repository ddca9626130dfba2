"""Makes the catalog entry of a model from its config.json and the files next to it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pdsim.system.catalog import EntryError, build
from pdsim.system.checkpoint.architecture import architecture_of
from pdsim.system.checkpoint.attention import attention_of, state_of
from pdsim.system.checkpoint.config import Config
from pdsim.system.checkpoint.encoder import audio_encoder_of, encoder_of
from pdsim.system.checkpoint.layers import Layer, layers_of
from pdsim.system.checkpoint.modules import expert_size, modules_of, num_matrices, routed_of
from pdsim.system.checkpoint.quantization import FILE_BESIDE, Quantization, quantization_of
from pdsim.system.model import DTYPE_BYTES, Dtype, ModelSpec


def entry_of(fields: Any, source: str, beside: Any = None, size_bytes: float | None = None) -> dict[str, Any]:
    """Makes the catalog entry of a model.

    fields: content of config.json. source: origin of the files. beside: content of hf_quant_config.json, which lies
    next to config.json; None: there is no such file. size_bytes: size of the weights according to the checkpoint's
    index; None: unknown. Raises EntryError if a field is missing or wrong, or if pdsim does not model the layers.
    """
    try:
        return _entry(Config(fields), source, beside, size_bytes)
    except EntryError:
        raise
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, KeyError, IndexError, OverflowError) as wrong:
        raise EntryError(f"a field has a wrong value: {wrong}") from None


def _entry(config: Config, source: str, beside: Any, size_bytes: float | None) -> dict[str, Any]:
    quantized = quantization_of(config.get("quantization_config"), beside, config.get("expert_dtype"))
    layers, hidden, vocab = layers_of(config), config.hidden, config.count("vocab_size")
    attention, state, experts = attention_of(config, layers), state_of(config, layers), _experts(config, layers)
    modules = dict(modules_of(config, layers))
    is_tied = bool(config.get("tie_word_embeddings"))
    shared = sum(modules.values()) + vocab * hidden * (1 if is_tied else 2)
    params, active = shared, shared
    if experts:
        each = experts.get("num_matrices", 3) * experts.get("input_size", hidden) * experts["intermediate_size"]
        params += experts["num_layers"] * experts["num_experts"] * each
        active += experts["num_layers"] * experts["num_active"] * each
    types = _Types(config, quantized, modules, layers, is_mixture=bool(experts))
    if types.experts is not None:
        experts["weight_dtype"] = types.experts
    can_be_read = quantized is None or quantized.in_blocks
    llama = architecture_of(config, layers, experts) if can_be_read and not state else {}
    entry = {
        "num_params": params,
        "num_active_params": active,
        "num_layers": config.num_layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "max_context_tokens": config.count("context"),
        "weight_dtype": types.shared,
        **types.in_bf16,
        **({"kv_dtype": quantized.kv_dtype} if quantized is not None and quantized.kv_dtype else {}),
        **({"tied_embeddings": True} if is_tied else {}),
        "attention": attention,
        **({"state": state} if state else {}),
        **({"experts": experts} if experts else {}),
        **({"num_nextn_layers": nextn} if (nextn := config.count("mtp", default=0)) else {}),
        **({"llama": llama} if llama else {}),
        **({"encoder": encoder} if (encoder := encoder_of(config)) else {}),
        **({"audio_encoder": audio} if (audio := audio_encoder_of(config)) else {}),
    }
    ignored = [f"{FILE_BESIDE} has no quant_algo: weights and KV are in bf16"] if beside and quantized is None else []
    notes = [*ignored, *types.notes, *_of_kv(quantized), *_left_out(config, attention), *_of_size(entry, size_bytes)]
    return entry | {
        "sources": {
            "num_params, num_active_params": "computed from config.json: attention, MLP or experts, embeddings; "
            "norms and biases left out",
            "everything else": source,
            **({"notes": "; ".join(filter(None, notes))} if any(notes) else {}),
        }
    }


def _experts(config: Config, layers: list[Layer]) -> dict[str, Any]:
    if not (num_layers := sum(layer.feed in {"experts", "both"} for layer in layers)):
        return {}
    section = {
        "num_layers": num_layers,
        "num_experts": config.count("experts"),
        "num_active": config.count("active"),
        "intermediate_size": expert_size(config),
    }
    if latent := config.count("expert_input", default=0):
        section["input_size"] = latent
    if (matrices := num_matrices(config)) != len(("gate", "up", "down")):
        section["num_matrices"] = matrices
    return section


class _Types:
    """Data types of a checkpoint's weights: one for routed experts, one for all other weights. Also counts weights that
    stay in bf16, and writes notes for the user.

    config: the checkpoint's config.json. quantized: how the weights are quantised; None: they are not. modules: number
    of parameters by the module's name, without routed experts. layers: the model's layers. is_mixture: True: the model
    has routed experts.
    """

    def __init__(
        self,
        config: Config,
        quantized: Quantization | None,
        modules: Mapping[str, int],
        layers: list[Layer],
        *,
        is_mixture: bool,
    ) -> None:
        self.notes: list[str] = []
        self.in_bf16: dict[str, float] = {}
        """Number of parameters that stay in bf16 while others have a narrower type, by the name of the entry's field.
        Empty: none."""
        self.shared: Dtype = "bf16"
        self.experts: Dtype | None = None
        """Type of the routed experts. None: the type of the other weights, or there are no experts."""
        if quantized is None:
            given = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
            self.notes += [] if given == "bfloat16" else [f"the checkpoint's {given} is counted as bf16"]
            return
        num_params: Counter[Dtype] = Counter()
        for module, size in modules.items():
            num_params[quantized.type_of(module)] += size
        self.shared = _narrow_of(num_params)
        names = routed_of(layers) if is_mixture else []
        found = {quantized.type_of(name) for name in names}
        if found and (routed := max(found, key=lambda dtype: -DTYPE_BYTES[dtype])) != self.shared:
            self.experts = routed
        self._count_in_bf16(num_params)
        self._describe(quantized, len(layers), [*modules, *names])

    def _count_in_bf16(self, num_params: Mapping[Dtype, int]) -> None:
        """Sets in_bf16, and adds notes on further types. Apart from routed experts, an entry has one type besides bf16,
        but a checkpoint can have several. The number of bf16 parameters is therefore chosen so that the entry's weights
        have as many bytes as the checkpoint's. num_params: number of the checkpoint's parameters by data type, without
        routed experts.
        """
        own = DTYPE_BYTES[self.shared]
        if self.shared != "bf16":
            others = sum(size * (DTYPE_BYTES[dtype] - own) for dtype, size in num_params.items())
            wide = max(0.0, others / (DTYPE_BYTES["bf16"] - own))
            field = "num_params_wider_than_fp4" if self.shared == "fp4" else "num_params_in_bf16"
            self.in_bf16 = {field: round(wide)} if wide >= 1 else {}
        for dtype, size in sorted(num_params.items()):
            if dtype not in (self.shared, "bf16") and size > _FEW * sum(num_params.values()):
                how = "by their bytes" if self.in_bf16 else f"in {self.shared}"
                self.notes.append(f"{size / 1e9:.2f} B parameters in {dtype} beside these are counted {how}")

    def _describe(self, quantized: Quantization, num_layers: int, known: list[str]) -> None:
        if self.shared == "bf16" and self.experts is None:
            self.notes.insert(
                0, "all counted weights are in bf16: the quantised weights are not part of the text model"
            )
        elif self.experts is not None:
            self.notes.insert(0, f"routed experts are in {self.experts} and all else in {self.shared}")
        elif self.in_bf16:
            self.notes.insert(
                0,
                f"embeddings, output projection and {sum(self.in_bf16.values()) / 1e9:.2f} B parameters of layers are "
                f"counted in bf16, all else in {self.shared}",
            )
        else:
            self.notes.insert(0, f"embeddings and output projection are counted in bf16, all else in {self.shared}")
        self.notes += _of_groups(self.experts or self.shared, quantized.group_size)
        outside = ["lm_head", "model.lm_head", "head", "model.embed_tokens", "model.embeddings", "model.norm"]
        missing = quantized.not_understood([*known, *outside], num_layers)
        if others := [name for name in missing if not _is_apart(name)]:
            self.notes.append(f"modules of unknown type, counted in {self.shared}: {', '.join(others[:8])}")


_BYTES_OF_GROUPS: Mapping[Dtype, tuple[float, float]] = {"fp4": (0.5, 1), "int4": (0.5, 2.5), "int8": (1, 2.5)}
"""For each data type: bytes of one weight alone, and bytes of the scale and zero that one group of weights shares."""


def _of_groups(dtype: Dtype, group_size: int) -> list[str]:
    """Returns a note if, with groups of group_size weights, the bytes per weight differ from those of DTYPE_BYTES by
    at least 2 %. group_size: number of weights that share a scale; 0: unknown, so no note.
    """
    if not group_size or dtype not in _BYTES_OF_GROUPS:
        return []
    own, of_group = _BYTES_OF_GROUPS[dtype]
    true = own + of_group / group_size
    if abs(true / DTYPE_BYTES[dtype] - 1) < _VISIBLE:
        return []
    return [f"groups of {group_size} weights have {true:.3f} bytes each; {dtype} is counted with {DTYPE_BYTES[dtype]}"]


_VISIBLE = 0.02


def _narrow_of(num_params: Mapping[Dtype, int]) -> Dtype:
    """Returns the most frequent data type of the parameters narrower than bf16. Returns bf16 if less than 10 % of all
    parameters are narrower. num_params: number of parameters by data type.
    """
    narrow = {dtype: size for dtype, size in num_params.items() if dtype != "bf16"}
    if sum(narrow.values()) < _SOME * sum(num_params.values()):
        return "bf16"
    return max(narrow, key=lambda dtype: (narrow[dtype], DTYPE_BYTES[dtype]))


_SOME = 0.1
"""If the share of parameters narrower than bf16 is less than this number, the type of the weights is bf16. Routed
experts are not counted."""
_APART = (
    "visual",
    "vision",
    "mtp",
    "norm",
    "bias",
    "multi_modal",
    "mm_projector",
    "patch_merge",
    "indexers_proj",
    "shared_expert_gate",
    "shared_experts_gate",
    "audio",
    "conv1d",
    "rotary",
    "hc_",
    "eh_proj",
)
_FEW = 0.01
"""Largest share of parameters with a further data type for which no note is written. Routed experts are not counted."""


def _is_apart(module: str) -> bool:
    """True if a module that modules.py does not name needs no note about its data type, because the entry counts no
    such module or because the module is small: encoders, norms, biases, convolutions, gates of shared experts, and
    layers that predict further tokens. module: the module's name in the checkpoint, by which the function decides.
    """
    return any(word in module for word in _APART)


def _of_kv(quantized: Quantization | None) -> list[str]:
    if quantized is None or quantized.kv is None:
        return []
    if quantized.kv_dtype:
        return [f"KV is in {quantized.kv_dtype}, unless a scenario gives kv_dtype"]
    return [f"the KV type {quantized.kv} is unknown: set kv_dtype in the scenario"]


def _left_out(config: Config, attention: Mapping[str, Any]) -> list[str]:
    """Returns notes about properties of the model that the entry does not contain."""
    notes = []
    if config.count("mtp", default=0):
        notes.append("modules that predict further tokens (MTP) count as drafts only")
    if not encoder_of(config) and (config.get("vision_config") or config.names("^(image|video)_token_(id|index)$")):
        notes.append("the image encoder is left out")
    if config.get("audio_config") and not audio_encoder_of(config):
        notes.append("the audio encoder is left out")
    if attention.get("has_window_pool") is False:
        notes.append("SGLang keeps and sends KV of all layers whole: it knows no windows of this family")
    if config.count("index_n_heads", default=0):
        notes.append("the indexer's time is left out")
    elif config.get("sparse_attention_config"):
        notes.append("the choice of blocks of sparse attention is left out: all blocks are read")
    return notes


def stored_bytes(index: Any) -> float | None:
    """Returns the bytes of a checkpoint's weights. index: content of model.safetensors.index.json. None: `index` does
    not contain this number.
    """
    metadata = index.get("metadata") if isinstance(index, Mapping) else None
    found = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    return found if isinstance(found, int | float) and not isinstance(found, bool) and found > 0 else None


_NEAR = 0.1
"""Largest accepted difference between the counted and the stored bytes, as a share of the stored bytes. Norms, scales
and encoders, which are not counted, explain smaller differences.
"""


def _of_size(entry: Mapping[str, Any], size_bytes: float | None) -> list[str]:
    """Returns a note if the bytes that the entry counts differ by more than 10 % from size_bytes, the bytes of the
    checkpoint's weights. size_bytes: None: unknown, so no note.
    """
    if not size_bytes:
        return []
    counted = build(ModelSpec, {**entry, "sources": {}}, name="").weight_bytes
    if abs(counted / size_bytes - 1) <= _NEAR:
        return []
    return [f"its files have {size_bytes / 1e9:.1f} GB, where {counted / 1e9:.1f} GB are counted: check both"]
