"""How a scenario is run for real: what the flags of pdreal say, and scenarios do not."""

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
RealDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Options:
    device: Device = "cpu"
    dtype: RealDtype = "float32"
    """Of weights and KV."""
    weights: str = "seed:0"
    """Random by that seed, or the folder of a checkpoint."""
    check_kv: bool = False
    """Compare the KV of every request on both sides as it arrives."""
    model_answers_at_once: bool = False
    """With tokens that mean nothing: what is measured then is the harness."""
