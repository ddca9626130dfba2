"""Triton kernels that move a paged KV cache between tensor-parallel layouts, and attention over its pages.

Register a cache once as a Pool; then gather its pages into staging, scatter staging into pages, or push pages to pages.
Decode steps append new K and V and attend over pages. Every kernel has an oracle in pdkernels.reference.
"""

from pdkernels.append import append
from pdkernels.captured import CapturedCopy
from pdkernels.decode import DecodeTiling, DecodeWorkspace, paged_decode
from pdkernels.fp8_wire import fp8_scales, gather_fp8, scatter_fp8
from pdkernels.gather import gather, gather_batch
from pdkernels.heads import HeadMove, head_moves
from pdkernels.interpreter import repair_interpreter
from pdkernels.layout import KvLayout, Pool
from pdkernels.push import map_peer, push
from pdkernels.scatter import scatter, scatter_batch
from pdkernels.staging import staging_bytes
from pdkernels.tiling import Tiling

repair_interpreter()

__all__ = [
    "CapturedCopy",
    "DecodeTiling",
    "DecodeWorkspace",
    "HeadMove",
    "KvLayout",
    "Pool",
    "Tiling",
    "append",
    "fp8_scales",
    "gather",
    "gather_batch",
    "gather_fp8",
    "head_moves",
    "map_peer",
    "paged_decode",
    "push",
    "scatter",
    "scatter_batch",
    "scatter_fp8",
    "staging_bytes",
]
