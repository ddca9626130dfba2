"""How a copy is divided into programs.

Measured on an H200 over tile sizes, warps, planes per program, orders of programs and cache hints
(kernels/measured.md): programs of one plane with 16 or 32 bytes per thread, with all data marked to leave L2 first, are
the best or within 1 % of the best at every length, row and page size. Many small programs hide latency better than few
large ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a copy is divided.

    Attributes:
        units: number of 16-byte units, of one plane (K or V of one layer), that a program copies in one step. A power
            of two.
        warps: number of warps of a program.

    """

    units: int
    warps: int


GATHER = Tiling(units=128, warps=4)
SCATTER = Tiling(units=256, warps=4)
FEW_PROGRAMS = Tiling(units=1024, warps=8)
"""Default tiling if the number of programs is limited. Tiles are larger than in GATHER and SCATTER, so that few
programs, at most one per multiprocessor, have enough bytes in flight.
"""


def grid_of(tiles: int, requests: int, planes: int, programs: int | None) -> tuple[int, int, int]:
    """Returns the grid [tiles, requests, planes]: one program for each tile of each plane (K or V of one layer), but at
    most `programs` programs per request. None: no limit.
    """
    if programs is None or programs >= tiles * planes:
        return tiles, requests, planes
    if programs <= planes:
        return 1, requests, max(1, programs)
    return programs // planes, requests, planes
