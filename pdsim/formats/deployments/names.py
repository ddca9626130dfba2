"""Finds models and GPUs of the catalog by the names that deployments use."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from pdsim.formats.deployments.readers import Value
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import names

_WORDS = re.compile(
    r"-(instruct|chat|hf|it|base|dynamic|block|kv|w8a8|bf16|fp16|redhatai|\d{4}|tput|v\d+|preview|nvfp4|fp8|fp4|awq|gptq|int4|int8)(?=-|$)"
)
"""Words in the names of checkpoints that say nothing about the model's architecture or number of parameters."""
_DTYPES = {"nvfp4": "fp4", "fp4": "fp4", "fp8": "fp8", "awq": "int4", "gptq": "int4", "int4": "int4"}
_SAME_SIZES = {"llama-3.3-70b": "llama-3.1-70b", "llama-3-70b": "llama-3.1-70b", "llama-3-8b": "llama-3.1-8b"}
"""Models that the catalog lacks (keys), and the model of the catalog with the same sizes (values)."""
_STAND_INS = {
    8: "llama-3.1-8b",
    7: "llama-3.1-8b",
    14: "qwen3-14b",
    32: "qwen3-32b",
    70: "llama-3.1-70b",
    72: "llama-3.1-70b",
}
"""Dense models of the catalog that stand for models that the catalog lacks. Keys: billions of parameters of the models
that the catalog lacks.
"""


_STANDS_IN = "model: the catalog has no"


def model_named(given: str) -> tuple[str, str | None, str]:
    """The model's name in the catalog, the weight type if the given name has it (else None), and a text if another
    model of the catalog stands for the given one (else empty). Raises ConfigError if no model fits.
    """
    known = names("models")
    base = given.rstrip("/").rsplit("/", 1)[-1].lower().replace("_", "-")
    if base in known:
        return base, None, ""
    plain = _WORDS.sub("", base).removeprefix("meta-")
    dtype = next((dtype for word, dtype in _DTYPES.items() if f"-{word}" in base), None)
    if plain in known:
        return plain, dtype, ""
    if _SAME_SIZES.get(plain) in known:
        return _SAME_SIZES[plain], dtype, f"model: {given} has the sizes of {_SAME_SIZES[plain]}"
    size = re.search(r"(?<![\d.])(\d+)b(?!\w)", plain)
    stand_in = _STAND_INS.get(int(size[1])) if size and not re.search(r"-a\d", plain) else None
    if stand_in in known and stand_in is not None:
        said = f"{_STANDS_IN} {given}: {stand_in} stands for it; --model NAME or pdsim catalog add gives the right one"
        return stand_in, dtype, said
    near = get_close_matches(plain, known, n=1)
    hint = f"; did you mean --model {near[0]}?" if near else ""
    raise ConfigError(f"model {given}: not in the catalog: give --model NAME, or add it by pdsim catalog add{hint}")


def is_known(given: str) -> bool:
    """True if the catalog has the model, or has the same architecture and sizes under another name."""
    try:
        return not model_named(given)[2].startswith(_STANDS_IN)
    except ConfigError:
        return False


def model_of(alone: Sequence[str], flags: Mapping[str, Value]) -> tuple[str, str | None]:
    """A text to look up in the catalog, and the path or name from which the server loads the model (None: not known).
    The text is the first of --model-path, --model, alone[0] and --served-model-name that the catalog knows, or else the
    first that is given; empty: none. alone: words of the command that belong to no option.
    """
    given = [flags.get("model-path"), flags.get("model"), *alone[:1]]
    paths = [one for one in given if isinstance(one, str) and "$" not in one]
    found = [*paths, *(one for one in [flags.get("served-model-name")] if isinstance(one, str) and "$" not in one)]
    return next((one for one in found if is_known(one)), found[0] if found else ""), next(iter(paths), None)


def gpu_named(label: str) -> str | None:
    """The longest GPU name of the catalog that the label contains, such as h100 in NVIDIA-H100-80GB-HBM3. None: there
    is none.
    """
    text = re.sub(r"[^a-z0-9]", "", label.lower())
    return _longest(name for name in names("gpus") if re.sub(r"[^a-z0-9]", "", name) in text)


_NOTE = re.compile(r"#\s*(prefill|decode|aggregated|encode): instances \d+, .*\bgpu (\S+)")
"""Pattern of a note that `pdsim launch` writes; its groups are the role and the GPU."""


def noted_gpus(texts: Iterable[str]) -> dict[str, str]:
    """The GPU of each role, read from the notes that `pdsim launch` writes in addition to commands."""
    return {role: gpu for text in texts for role, gpu in _NOTE.findall(text)}


def _longest(found: Iterable[str]) -> str | None:
    return max(found, key=len, default=None)
