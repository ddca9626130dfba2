"""The image encoder in a config.json."""

from collections.abc import Mapping
from typing import Any

from pdsim.system.catalog import EntryError
from pdsim.system.checkpoint.config import Config

_SIZES = {
    "hidden_size": ("hidden_size", "embed_dim"),
    "num_layers": ("depth", "num_hidden_layers"),
    "intermediate_size": ("intermediate_size",),
    "patch_size": ("patch_size",),
    "merge_size": ("spatial_merge_size",),
    "out_hidden_size": ("out_hidden_size",),
}
"""Fields of VisionEncoder, each with its names in `vision_config`."""


def encoder_of(config: Config) -> dict[str, Any]:
    """The image encoder of a model, as fields of VisionEncoder. Empty: there is none, or its `vision_config` lacks a
    size, as in families whose encoders do not merge patches as Qwen's do.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return {}
    found = {field: _size(vision, names) for field, names in _SIZES.items()}
    if None in found.values():
        return {}
    found["temporal_patch_size"] = _size(vision, ("temporal_patch_size",)) or 1
    if vision.get("hidden_act") == "silu":  # Qwen2.5-VL
        found["num_mlp_matrices"] = 3
    if deepstack := vision.get("deepstack_visual_indexes"):
        found["num_deepstack_layers"] = len(deepstack)
    whole, window = vision.get("fullatt_block_indexes"), _size(vision, ("window_size",))
    if whole and window:
        found["num_window_layers"] = found["num_layers"] - len(whole)
        found["window_patches"] = (window // found["patch_size"]) ** 2
    return found


def _size(vision: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Value of the first of these fields that exists. None: none does."""
    value = next((vision[name] for name in names if vision.get(name) is not None), None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise EntryError(f"vision_config.{names[0]}: expected a whole number from 1 on, found {value!r}")
    return value
