"""Models, GPUs and transfer engines by name: one YAML file each, in this package."""

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pdsim.system.model import (
    Dtype,
    Experts,
    GroupedQueryAttention,
    LatentAttention,
    LlamaArchitecture,
    ModelSpec,
    RecurrentState,
    RopeScaling,
)
from pdsim.system.transport import Transport


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One GPU; `sources` says where each number comes from. Rates are per second and per direction."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    flops: dict[Dtype, float]
    """Dense; a type that the GPU has no units for is absent."""
    nvlink_bandwidth: float
    nic_bandwidth: float
    host_bandwidth: float
    """Of the link to the memory of its host."""
    gpus_per_server: int = 8
    """Joined by one NVLink domain, or on one board: as far as tensor parallelism goes."""
    sources: dict[str, str]

    def flops_for(self, dtype: Dtype) -> float:
        """Of the type itself, or of the widest narrower type's compute it runs in: bf16."""
        return self.flops.get(dtype, self.flops["bf16"])


_FOLDER = Path(__file__).parent / "catalog"


class UnknownNameError(ValueError):
    """A name that no catalog entry has."""


def names(kind: str) -> list[str]:
    """Entries of "models", "gpus" or "transports"."""
    return sorted(path.stem for path in (_FOLDER / kind).glob("*.yaml"))


@cache
def load_model(name: str) -> ModelSpec:
    data = _read("models", name)
    attention = data.pop("attention")
    kinds: dict[str, Any] = {"grouped-query": GroupedQueryAttention, "latent": LatentAttention}
    experts, state, llama = data.pop("experts", None), data.pop("state", None), data.pop("llama", None)
    return ModelSpec(
        name=name,
        attention=kinds[attention.pop("kind")](**attention),
        experts=None if experts is None else Experts(**experts),
        state=None if state is None else RecurrentState(**state),
        llama=None if llama is None else _llama(**llama),
        **data,
    )


def _llama(rope_scaling: dict[str, Any] | None = None, **fields: Any) -> LlamaArchitecture:
    return LlamaArchitecture(rope_scaling=None if rope_scaling is None else RopeScaling(**rope_scaling), **fields)


@cache
def load_gpu(name: str) -> GpuSpec:
    return GpuSpec(name=name, **_read("gpus", name))


@cache
def load_transport(name: str) -> Transport:
    return Transport(name=name, **_read("transports", name))


def _read(kind: str, name: str) -> dict[str, Any]:
    path = _FOLDER / kind / f"{name}.yaml"
    if not path.is_file():
        known = names(kind)
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownNameError(f"no {kind[:-1]} {name!r} in the catalog, which has {', '.join(known)}{hint}")
    from ruamel.yaml import YAML  # noqa: PLC0415  the catalog alone needs it here

    data: dict[str, Any] = YAML(typ="safe", pure=True).load(path)
    return _read(kind, data["same_as"]) if "same_as" in data else data
