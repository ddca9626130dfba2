"""How a copy is cut into programs, by measurement."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut a copy.

    Attributes:
        units: 16-byte units of one plane per program and step, a power of two.
        planes: planes that share one page lookup; all their loads are issued before the first store.
        warps: per program.
        load_hint, store_hint: what L2 does with the line afterwards ("", "evict_first", "evict_last").
        planes_first: whether neighbouring programs take neighbouring planes of the same tokens, not neighbouring
            tokens of the same plane.
    """

    units: int
    planes: int
    warps: int
    load_hint: str = ""
    store_hint: str = ""
    planes_first: bool = False


SMALL = Tiling(units=128, planes=1, warps=4)
GATHER = Tiling(units=256, planes=1, warps=4, load_hint="evict_first")
SCATTER = Tiling(units=512, planes=2, warps=4)
_SMALL_BYTES = 16 << 20


def gather_tiling(payload_bytes: int) -> Tiling:
    return SMALL if payload_bytes < _SMALL_BYTES else GATHER


def scatter_tiling(payload_bytes: int) -> Tiling:
    return SMALL if payload_bytes < _SMALL_BYTES else SCATTER


def push_tiling(payload_bytes: int) -> Tiling:
    return SMALL if payload_bytes < _SMALL_BYTES else SCATTER
