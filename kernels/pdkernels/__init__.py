"""Triton kernels that move a paged KV cache between tensor-parallel layouts, and attention over its pages.

Register a cache once as a Pool; then gather its pages into staging, and scatter staging into pages, or push pages into
those of a peer.
Decode steps append new K and V and attend over pages; prompts attend packed one after another. Every kernel has an
oracle in pdkernels.reference. Kernels that real mode does not use are in pdkernels.unused.
"""

from pdkernels.append import append
from pdkernels.decode import DecodeTiling, decode_workspace, paged_decode
from pdkernels.gather import gather, gather_batch
from pdkernels.heads import HeadMove, head_moves
from pdkernels.interpreter import repair_interpreter
from pdkernels.latent import latent_decode, latent_workspace
from pdkernels.layout import KvLayout, MappedPool, Pool
from pdkernels.prefill import packed_prefill
from pdkernels.push import map_peer, push
from pdkernels.scatter import scatter, scatter_batch
from pdkernels.shares import DecodeWorkspace
from pdkernels.staging import staging_bytes
from pdkernels.tiling import Tiling

repair_interpreter()

__all__ = [
    "DecodeTiling",
    "DecodeWorkspace",
    "HeadMove",
    "KvLayout",
    "MappedPool",
    "Pool",
    "Tiling",
    "append",
    "decode_workspace",
    "gather",
    "gather_batch",
    "head_moves",
    "latent_decode",
    "latent_workspace",
    "map_peer",
    "packed_prefill",
    "paged_decode",
    "push",
    "scatter",
    "scatter_batch",
    "staging_bytes",
]
