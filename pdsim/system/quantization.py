"""Quantisation of a checkpoint, as its config.json or ModelOpt's hf_quant_config.json says it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pdsim.system.catalog import EntryError
from pdsim.system.model import Dtype, KvDtype

FILE_BESIDE = "hf_quant_config.json"
"""ModelOpt's file beside config.json. Engines read it where config.json has no quantization_config (SGLang 0.5.23,
configs/model_config.py, _parse_quant_hf_config)."""
_METHODS: Mapping[Any, Dtype] = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4"}
_ALGORITHMS: Mapping[Any, Dtype] = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), "fp8"),
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"), "fp4"),
    "W4A16_AWQ": "int4",
}
"""Types of weights by ModelOpt's quant_algo."""
_MODELOPT = (None, "modelopt", "modelopt_fp4", "modelopt_fp8")
_INTEGERS = ("gptq", "awq")
"""Methods that say their bits."""
_GROUPS = {"fp4": 16, "int4": 128}
"""Weights that share a scale, by type: what the types' bytes are computed with (system/model.py, DTYPE_BYTES)."""


@dataclass(frozen=True)
class Quantization:
    """Types of a checkpoint's weights and KV."""

    dtype: Dtype
    left: tuple[str, ...] = ()
    """Names, globs or regular expressions (re:...) of modules that keep bf16."""
    kv: str | None = None
    """The checkpoint's scheme of KV, by ModelOpt's name; None: it has none."""
    in_blocks: bool = False
    """Each scale is for a block of rows and columns."""

    @property
    def kv_dtype(self) -> KvDtype | None:
        """Type in which engines keep KV unless they are told another (SGLang 0.5.23, mem_cache/kv_cache_dtype.py)."""
        return "fp8" if self.kv is not None and self.kv.upper() == "FP8" else None

    def leaves(self, module: str) -> bool:
        """True if a module keeps bf16: it, a module around it or a part of its name is listed."""
        return any(covers(pattern, module) for pattern in self.left)

    def not_understood(self, modules: Iterable[str]) -> list[str]:
        """Names of `left` that are none of these modules, with N for numbers."""
        known = list(modules)
        missing = [one for one in self.left if not any(covers(one, module) for module in known)]
        return sorted({re.sub(r"\d+", "N", one) for one in missing})


def covers(pattern: str, module: str) -> bool:
    """The rule by which engines skip modules (SGLang 0.5.23, modelopt_quant.py, is_layer_excluded)."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    pattern = pattern.removeprefix("language_model.")
    parts = module.split(".")
    around = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(name, pattern) for name in (*around, *parts))


def quantization_of(in_config: Any, beside: Any) -> Quantization | None:
    """Reads config.json's quantization_config, or else the file beside it. None: nothing is quantised.

    Raises EntryError for what changes bytes in a way that no type here has.
    """
    where, given = "quantization_config", in_config
    if not given and beside:
        where = FILE_BESIDE
        given = beside.get("quantization", beside) if isinstance(beside, Mapping) else beside
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise EntryError(f"{where}: expected a mapping of fields, found {given!r}")
    if where == FILE_BESIDE and given.get("quant_algo") is None:
        return None
    dtype = _dtype(given, where)
    _require_group(given, dtype, where)
    return Quantization(dtype, tuple(_left(given, where)), _kv(given, where), bool(given.get("weight_block_size")))


def _dtype(given: Mapping[str, Any], where: str) -> Dtype:
    method = given.get("quant_method")
    if method == "compressed-tensors":
        groups = given.get("config_groups") or {}
        weights = [group.get("weights") or {} for group in groups.values()]
        kinds = {(one.get("num_bits"), one.get("type")) for one in weights}
        made: dict[Any, Dtype] = {(8, "float"): "fp8", (4, "float"): "fp4", (4, "int"): "int4"}
        if len(kinds) == 1 and (kind := kinds.pop()) in made:
            return made[kind]
        raise EntryError(f"{where}: expected weights of 8 or 4 bits in one group, found {weights!r}")
    if method in _INTEGERS:
        if (bits := given.get("bits", given.get("w_bit"))) != 4:  # noqa: PLR2004
            raise EntryError(f"{where}.bits: expected 4 with {method}, found {bits!r}")
        return "int4"
    known = _ALGORITHMS if method in _MODELOPT else _METHODS
    named = given.get("quant_algo") if method in _MODELOPT else method
    if named not in known:
        possible = ", ".join(known if method in _MODELOPT else [*_METHODS, *_INTEGERS, "modelopt"])
        raise EntryError(f"{where}: expected one of {possible} or compressed-tensors, found {named!r}")
    return known[named]


def _require_group(given: Mapping[str, Any], dtype: Dtype, where: str) -> None:
    """Raises EntryError if so many weights share a scale that the type's bytes are others."""
    size = given.get("group_size")
    if given.get("quant_method") in _MODELOPT and size is not None and size != _GROUPS.get(dtype, size):
        raise EntryError(f"{where}.group_size: expected {_GROUPS[dtype]} with {dtype}, found {size!r}")


def _left(given: Mapping[str, Any], where: str) -> Sequence[str]:
    names = ("modules_to_not_convert", "ignore", "exclude_modules")
    found = next((given[name] for name in names if given.get(name)), ())
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) for one in found):
        raise EntryError(f"{where}: expected names of modules that are not quantised, found {found!r}")
    return found


def _kv(given: Mapping[str, Any], where: str) -> str | None:
    """The scheme of the KV cache, by name or by bits."""
    named, scheme = given.get("kv_cache_quant_algo"), given.get("kv_cache_scheme")
    if named is None and isinstance(scheme, Mapping):
        is_fp8 = (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        named = "FP8" if is_fp8 else f"{dict(scheme)}"
    if named is None or str(named).upper() in ("NONE", "AUTO"):
        return None
    if not isinstance(named, str):
        raise EntryError(f"{where}.kv_cache_quant_algo: expected a name such as FP8, found {named!r}")
    return named
