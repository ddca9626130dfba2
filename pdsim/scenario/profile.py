"""Cost settings that were fitted to measurements, in a file of their own with where they come from.

name: qwen3-32b-b200-tp2
cost: {use: affine, ...}          or {prefill: {...}, decode: {...}}
provenance: {fitted_on: ..., command: ..., date: ...}
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationInfo

from pdsim.scenario.component import base_folder
from pdsim.scenario.yaml_file import read_yaml


def cost_by_role(value: Any, info: ValidationInfo[Any]) -> Any:
    """Replaces {profile: FILE} by what the file says."""
    if not (isinstance(value, dict) and "profile" in value):
        return value
    if len(value) > 1:
        raise ValueError(f"profile stands alone, found {', '.join(value)} beside it")
    return read_profile(base_folder(info) / str(value["profile"]))


def read_profile(path: Path) -> Any:
    profile = read_yaml(path)
    for field in ("cost", "provenance"):
        if not isinstance(profile, dict) or field not in profile:
            raise ValueError(f"profile {path} has no field {field!r}")
    return profile["cost"]
