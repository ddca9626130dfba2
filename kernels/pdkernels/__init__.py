"""Triton kernels that move the pages of a KV cache between tensor-parallel layouts, and kernels that attend over pages.

Register a cache once as a Pool; then gather its pages into staging, and scatter staging into pages, or push pages into
those of a peer. Decode steps append new K and V, then attend over pages. Prefill attends over a batch of prompts whose
tokens lie one behind another. Every kernel has an oracle (a function in plain torch with the same result) in
pdkernels.reference; the oracle of pdkernels.delta is pdreal.model.delta. Kernels that real mode does not use are in
pdkernels.unused.
"""

from pdkernels.attention.append import append
from pdkernels.attention.decode import DecodeTiling, decode_workspace, paged_decode
from pdkernels.attention.latent import latent_decode, latent_workspace
from pdkernels.attention.prefill import packed_prefill
from pdkernels.attention.shares import DecodeWorkspace
from pdkernels.copies.gather import gather, gather_batch
from pdkernels.copies.push import map_peer, push
from pdkernels.copies.scatter import scatter, scatter_batch
from pdkernels.copies.staging import staging_bytes
from pdkernels.copies.tiling import Tiling
from pdkernels.heads import HeadMove, head_moves
from pdkernels.interpreter import repair_interpreter
from pdkernels.layout import KvLayout, MappedPool, Pool

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
