"""Data types of a checkpoint's weights and KV, from config.json or ModelOpt's hf_quant_config.json."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.inputs import shown
from pdsim.system.catalog import EntryError
from pdsim.system.model import Dtype, KvDtype

FILE_BESIDE = "hf_quant_config.json"
"""File next to config.json in which NVIDIA's ModelOpt describes the quantization of a checkpoint. Engines read this
file if config.json has no quantization_config (SGLang 0.5.23, configs/model_config.py, _parse_quant_hf_config).
"""
_METHODS: Mapping[Any, Dtype] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp8", "w8a8_fp8"), "fp8"),
    **dict.fromkeys(("mxfp4", "petit_nvfp4"), "fp4"),
    **dict.fromkeys(("w8a8_int8", "int8_w8a8", "smoothquant"), "int8"),
}
_ALGORITHMS: Mapping[Any, Dtype] = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8"), "fp8"),
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8"), "fp4"),
    **dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ", "W4A16"), "int4"),
    **dict.fromkeys(("W8A8_SQ_PER_CHANNEL", "INT8_SQ", "W8A16"), "int8"),
}
"""Data type of weights for each quant_algo of ModelOpt."""
_MIXED = "MIXED_PRECISION"
_MODELOPT = (None, "modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
_INTEGERS: Mapping[Any, Dtype] = {4: "int4", 8: "int8"}
"""Data type of weights for each number of bits, for methods that name only a number of bits."""
_WITH_BITS = ("gptq", "awq", "auto-round", "autoround", "gptqmodel")
_GROUP_KINDS: Mapping[Any, Dtype] = {(8, "float"): "fp8", (4, "float"): "fp4", (4, "int"): "int4", (8, "int"): "int8"}
_QUARK: Mapping[str, Dtype] = {"fp8_e4m3": "fp8", "fp4": "fp4", "int4": "int4", "uint4": "int4", "int8": "int8"}


@dataclass(frozen=True)
class Quantization:
    """Data types of a checkpoint's weights and KV."""

    dtype: Dtype | None
    """Type of linear modules that no name or pattern in the fields `left` and `named` covers. None: bf16."""
    left: tuple[str, ...] = ()
    """Modules that stay in bf16: names, glob patterns or regular expressions (re:...)."""
    named: Mapping[str, Dtype] | None = None
    """Types of single modules, by name or pattern."""
    kv: str | None = None
    """Type of KV in the checkpoint: a name such as FP8, or the text of a kv_cache_scheme that is not 8-bit float. None:
    the checkpoint names no type."""
    in_blocks: bool = False
    """True: each scale is for a block of rows and columns of weights, and `named` is empty or None."""
    group_size: int = 0
    """Number of weights that share a scale. 0: unknown."""

    @property
    def kv_dtype(self) -> KvDtype | None:
        """Type in which engines keep KV unless a setting says otherwise (SGLang 0.5.23, mem_cache/kv_cache_dtype.py).
        None: the checkpoint gives no type that engines use.
        """
        return "fp8" if self.kv is not None and self.kv.upper() == "FP8" else None

    def type_of(self, module: str) -> Dtype:
        """Type of a module's weights. bf16: a name or pattern in `left` covers the module. Otherwise, `named` gives the
        type, by the module's name, by the name of a module that contains it, or by a pattern. Modules in neither have
        `dtype`.
        """
        if any(covers(pattern, module) for pattern in self.left):
            return "bf16"
        named, parts = self.named or {}, module.split(".")
        for end in range(len(parts), 0, -1):
            if found := named.get(".".join(parts[:end])):
                return found
        for pattern, dtype in named.items():
            if ("*" in pattern or pattern.startswith("re:")) and covers(pattern, module):
                return dtype
        return self.dtype or "bf16"

    def not_understood(self, modules: Iterable[str], num_layers: int) -> list[str]:
        """Entries of `left`, the modules that stay in bf16, that match none of the modules. In the returned entries,
        numbers are replaced by N, so that entries of different layers become one. Entries of layers from num_layers on
        are left out, because these layers predict further tokens (MTP).
        """
        known = list(modules)
        layers = [(one, re.search(r"layers\.(\d+)", one)) for one in self.left]
        inside = [one for one, layer in layers if layer is None or int(layer[1]) < num_layers]
        missing = [one for one in inside if not any(covers(one, module) for module in known)]
        return sorted({re.sub(r"\d+", "N", one) for one in missing})


def covers(pattern: str, module: str) -> bool:
    """True if a pattern of a quantisation config covers a module: a regular expression after "re:", or a wildcard
    pattern of the module's name, of a part of the name between dots, or of the name of a module around it (SGLang
    0.5.23, modelopt_quant.py, is_layer_excluded).
    """
    if pattern.startswith("re:"):
        expression = pattern.removeprefix("re:")
        return any(re.match(expression, name) is not None for name in (module, f"language_model.{module}"))
    pattern = named_alike(pattern)
    parts = module.split(".")
    around = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(name, pattern) for name in (*around, *parts))


_ALIKE = (
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^backbone\.", "model."),
    (r"^layers\.", "model.layers."),
    (r"\.(ffn|block_sparse_moe|feed_forward|moe)(?=\.|$)", ".mlp"),
    (r"\.attn(?=\.|$)", ".self_attn"),
    (r"\.shared_expert(?=\.|$)", ".shared_experts"),
    (r"\.router(?=\.|\*|$)", ".gate"),
    (r"\.w1$", ".gate_proj"),
    (r"\.w2$", ".down_proj"),
    (r"\.w3$", ".up_proj"),
)
"""Pairs of a regular expression and its replacement. Together they change a module's name in a checkpoint to the name
that modules.py uses."""


def named_alike(name: str) -> str:
    """Returns the name that pdsim/system/checkpoint/modules.py gives to a module of a checkpoint. Example:
    layers.0.ffn.w1 is model.layers.0.mlp.gate_proj.
    """
    for found, ours in _ALIKE:
        name = re.sub(found, ours, name)
    return name


def quantization_of(in_config: Any, beside: Any, expert_dtype: Any = None) -> Quantization | None:
    """Reads the data types of a quantised checkpoint. None: no module is quantised.

    in_config: config.json's quantization_config. beside: content of ModelOpt's file next to config.json, which is read
    if in_config is empty. expert_dtype: config.json's field of this name (DeepSeek V4). Raises EntryError if the
    section is wrong, or names types that catalog entries do not have.
    """
    where, given = "quantization_config", in_config
    if not given and beside is not None:
        where = FILE_BESIDE
        given = beside.get("quantization", beside) if isinstance(beside, Mapping) else beside
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise EntryError(f"{where}: expected a mapping of fields, found {shown(given)}")
    if not given or (where == FILE_BESIDE and given.get("quant_algo") is None):
        return None
    dtype, named = _types(given, where)
    if expert_dtype in _QUARK or expert_dtype in ("fp8", "fp4"):
        named = {**named, "re:.*[.]experts[.].*": _QUARK.get(expert_dtype, expert_dtype)}
    left = [] if "moe_quant_algo" in given else _left(given, where)
    in_blocks = bool(given.get("weight_block_size")) and not named
    return Quantization(dtype, tuple(left), named, _kv(given, where), in_blocks, _group_size(given))


def _group_size(given: Mapping[str, Any]) -> int:
    groups = [(group.get("weights") or {}).get("group_size") for group in (given.get("config_groups") or {}).values()]
    found = given.get("group_size", given.get("q_group_size", next(iter(groups), None)))
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def _types(given: Mapping[str, Any], where: str) -> tuple[Dtype | None, dict[str, Dtype]]:
    """Returns (type of all modules without a type of their own, types of single modules by name or pattern). The first
    is None if the section names no such type: bf16. given: the fields of a quantisation section. where: name of the
    section in messages. Raises EntryError for unknown types.
    """
    method = given.get("quant_method")
    if method == "compressed-tensors" or (
        method is None and given.get("config_groups") and not given.get("quant_algo")
    ):
        return _of_groups(given, where)
    if given.get("quant_algo") == _MIXED:
        return _METHODS.get(method), _listed_types(given, where)
    if method in _WITH_BITS:
        bits = given.get("bits", given.get("w_bit"))
        if bits not in _INTEGERS:
            raise EntryError(f"{where}.bits: expected 4 or 8 with {method}, found {bits!r}")
        return _INTEGERS[bits], {}
    if method == "bitsandbytes":
        is_narrow = given.get("load_in_4bit") or given.get("_load_in_4bit")
        return ("int4" if is_narrow else "int8"), {}
    if method == "quark":
        return _of_quark(given, where), {}
    known = _ALGORITHMS if method in _MODELOPT else _METHODS
    named = given.get("quant_algo") if method in _MODELOPT else method
    if named not in known:
        possible = ", ".join(
            [*known] if method in _MODELOPT else [*_METHODS, *_WITH_BITS, "bitsandbytes", "quark", "modelopt"]
        )
        raise EntryError(f"{where}: expected one of {possible} or compressed-tensors, found {named!r}")
    return known[named], {}


def _of_groups(given: Mapping[str, Any], where: str) -> tuple[Dtype | None, dict[str, Dtype]]:
    """Reads the config_groups of compressed-tensors. Each group has one type and targets: names of modules, patterns,
    or Linear for all modules. Returns (type of Linear, types by other targets). The type of Linear is None if no group
    has it. where: name of the section in messages. Raises EntryError for unknown types, and if there is no group.
    """
    default: Dtype | None = None
    named: dict[str, Dtype] = {}
    for name, group in (given.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        kind = weights.get("num_bits"), weights.get("type")
        if kind not in _GROUP_KINDS:
            raise EntryError(f"{where}.config_groups.{name}: expected weights of 8 or 4 bits, found {weights!r}")
        for target in group.get("targets") or ["Linear"]:
            if target == "Linear":
                default = _GROUP_KINDS[kind]
            else:
                named[named_alike(target)] = _GROUP_KINDS[kind]
    if default is None and not named:
        raise EntryError(f"{where}.config_groups: expected groups of weights, found none")
    return default, named


def _listed_types(given: Mapping[str, Any], where: str) -> dict[str, Dtype]:
    """Returns the types of single modules, by name, from ModelOpt's mapping `quantized_layers`. given: the quantisation
    section. where: name of the section in messages. Raises EntryError if the mapping is missing or names an unknown
    type.
    """
    layers = given.get("quantized_layers")
    if not isinstance(layers, Mapping):
        raise EntryError(f"{where}.quantized_layers: expected the modules of {_MIXED}, found {layers!r}")
    named: dict[str, Dtype] = {}
    for module, how in layers.items():
        algorithm = how.get("quant_algo") if isinstance(how, Mapping) else how
        if algorithm not in _ALGORITHMS:
            raise EntryError(f"{where}.quantized_layers: expected one of {', '.join(_ALGORITHMS)}, found {algorithm!r}")
        named[named_alike(module)] = _ALGORITHMS[algorithm]
    return named


def _of_quark(given: Mapping[str, Any], where: str) -> Dtype:
    weight: Any = (given.get("global_quant_config") or {}).get("weight") or {}
    kind = (weight[0] if isinstance(weight, list) and weight else weight).get("dtype")
    if not isinstance(kind, str) or kind not in _QUARK:
        raise EntryError(
            f"{where}.global_quant_config.weight.dtype: expected one of {', '.join(_QUARK)}, found {kind!r}"
        )
    return _QUARK[kind]


def _left(given: Mapping[str, Any], where: str) -> Sequence[str]:
    names = (
        "modules_to_not_convert",
        "ignore",
        "exclude_modules",
        "exclude",
        "ignored_layers",
        "llm_int8_skip_modules",
    )
    found = next((given[name] for name in names if given.get(name)), ())
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) for one in found):
        raise EntryError(f"{where}: expected names of modules that are not quantised, found {found!r}")
    return found


def _kv(given: Mapping[str, Any], where: str) -> str | None:
    """Returns the type of KV that the quantisation section `given` names. If the section gives the bits of KV instead
    of a name: FP8 for 8-bit floats, else the text of the description. None: the section says nothing, NONE or AUTO.
    where: name of the section in messages. Raises EntryError if the type is not a text.
    """
    named, scheme = given.get("kv_cache_quant_algo"), given.get("kv_cache_scheme")
    if named is None and isinstance(scheme, Mapping):
        is_fp8 = (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        named = "FP8" if is_fp8 else f"{dict(scheme)}"
    elif named is None:
        named = scheme
    if named is None or str(named).upper() in ("NONE", "AUTO"):
        return None
    if not isinstance(named, str):
        raise EntryError(f"{where}.kv_cache_quant_algo: expected a name such as FP8, found {named!r}")
    return named
