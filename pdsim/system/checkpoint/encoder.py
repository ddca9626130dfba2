"""Reads the encoders of images and audio from a config.json."""

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
_AUDIO_SIZES = {
    "hidden_size": ("d_model",),
    "num_layers": ("encoder_layers",),
    "intermediate_size": ("encoder_ffn_dim",),
}
"""Fields of AudioEncoder, each with its names in `audio_config`."""
_MEL_FRAMES_PER_TOKEN = 8
"""Number of frames of a spectrogram that become one token, because three convolutions have stride 2 (SGLang 0.5.23,
models/qwen3_omni_moe.py:223)."""


def encoder_of(config: Config) -> dict[str, Any]:
    """The image encoder of a model, as fields of VisionEncoder. Empty: the model has no image encoder, or
    `vision_config` lacks a size that pdsim needs, as for encoders that do not merge patches in Qwen's way. Raises
    EntryError unless each size is a whole number from 1 on.
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


def audio_encoder_of(config: Config) -> dict[str, Any]:
    """The audio encoder of a model, as fields of AudioEncoder. Empty: the model has none, `audio_config` lacks a size
    that pdsim needs, or the encoder is not one of Qwen2-Audio, Qwen3-ASR or Qwen3-Omni. Raises EntryError unless each
    size is a whole number from 1 on.
    """
    audio = config.get("audio_config")
    if not isinstance(audio, Mapping):
        return {}
    found = {field: _size(audio, names, "audio_config") for field, names in _AUDIO_SIZES.items()}
    if None in found.values():
        return {}
    size, most, window, infer, width = (
        _size(audio, (name,), "audio_config")
        for name in ("d_model", "max_source_positions", "n_window", "n_window_infer", "output_dim")
    )
    if window and infer and width:  # Qwen3-Omni
        chunk = 2 * window
        chunk_tokens = -(-chunk // _MEL_FRAMES_PER_TOKEN)
        return {**found, "window_positions": infer // chunk * chunk_tokens, "projection_sizes": [size, width]}
    if audio.get("model_type") != "qwen2_audio_encoder" or not most:
        return {}
    whole = {"positions_per_token": 2, "padded_positions": most, "window_positions": most}
    return {**found, **whole, "projection_sizes": [config.count("hidden_size")]}


def _size(section: Mapping[str, Any], names: tuple[str, ...], where: str = "vision_config") -> Any:
    """Value of the first of the fields `names` that `section` has. None: it has none of them. where: name of the
    section in messages. Raises EntryError unless the value is a whole number from 1 on.
    """
    value = next((section[name] for name in names if section.get(name) is not None), None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise EntryError(f"{where}.{names[0]}: expected a whole number from 1 on, found {value!r}")
    return value
