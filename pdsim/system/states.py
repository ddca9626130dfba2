"""Memory of linear-attention states: slots by SGLang's arithmetic (0.5.23, mem_cache/kv_cache_configurator.py,
_handle_max_mamba_cache and _calculate_mamba_ratio), and blocks by vLLM's.
"""

from dataclasses import dataclass
from math import ceil, lcm
from typing import Literal, NamedTuple

STATE_SHARE = 0.9
"""Memory of linear-attention states relative to the memory of KV (mamba_full_memory_ratio)."""
CACHED_SLOTS = 3
"""Number of slots of a running request with a prefix cache, which keeps states."""

CHUNK_TOKENS = 64
"""Number of tokens behind which kernels leave a state (FLA_CHUNK_SIZE), unless the model's config says another."""
TRACK_TOKENS = 256
"""Number of output tokens between two states that decode steps leave (mamba_track_interval), by default."""

StateStrategy = Literal["no_buffer", "extra_buffer"]


def slots_per_request(strategy: StateStrategy, *, radix_cache: bool, overlap: bool) -> int:
    """Number of slots of a running request. With extra_buffer this includes slots that decode steps write in turn."""
    if not radix_cache:
        return 1
    return CACHED_SLOTS + (0 if strategy == "no_buffer" else 2 if overlap else 1)


def grid_tokens(chunk_tokens: int, page_size: int) -> int:
    """Number of tokens between places in a prompt where its state can be kept (mamba_checkpoint_grid)."""
    return lcm(max(chunk_tokens, page_size), page_size)


def interval_tokens(chunk_tokens: int, page_size: int, track_interval: int) -> int:
    """Number of tokens between places in an output where its state can be kept (mamba_track_grid)."""
    return lcm(grid_tokens(chunk_tokens, page_size), track_interval)


class StateMemory(NamedTuple):
    num_slots: int
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class StateRule:
    """Rule for the number of states that one data-parallel rank keeps."""

    slots_per_request: int
    num_drafts: int = 0
    """Number of tokens of each request that a step verifies, each with its own state. 0: no drafts."""
    max_running: int | None = None
    """Maximum number of running requests, if known before memory is divided."""
    is_fixed: bool = False
    """True: as many slots as running requests, and all other memory for KV, as without a prefix cache."""

    def memory(self, room: float, state_bytes: int) -> StateMemory:
        """Slots and bytes of states. room: bytes for states and KV of one rank. One further slot of each kind is
        padding.
        """
        if self.is_fixed and self.max_running is not None:
            num_slots = self.max_running
        else:
            budget = room * STATE_SHARE / (1 + STATE_SHARE) / state_bytes
            drafts = self.num_drafts
            num_slots = max(0, int((budget - 1 - drafts) // (1 + drafts / self.slots_per_request)))
        running = num_slots // self.slots_per_request
        if self.max_running is not None:
            running = min(running, self.max_running)
        num_states = num_slots + 1 + (running + 1) * self.num_drafts
        return StateMemory(num_slots, num_states * state_bytes)


KERNEL_BLOCK_TOKENS, LATENT_BLOCK_TOKENS = 16, 128
"""Number of tokens that vLLM's blocks are multiples of beside states, and with latent KV."""
_UNEVEN = 1.5
"""Layers of one kind per layer of the other below which all layers of a kind share a block."""


def block_tokens(state_bytes: float, token_bytes: float, unit_tokens: int) -> int:
    """Number of tokens of vLLM's blocks, so that a layer's KV of a block is no smaller than a layer's state (0.33.0,
    platforms/interface.py:1084).

    state_bytes, token_bytes: of one layer on one rank. unit_tokens: what blocks are multiples of.
    """
    return unit_tokens * max(1, ceil(state_bytes / (unit_tokens * token_bytes)))


class StateBlocks(NamedTuple):
    """How vLLM shares a pool of blocks between KV and states."""

    pages_per_state: int
    """Number of blocks of a state, in units of the blocks that KV of a page takes."""
    padding: float
    """Bytes of the blocks of a page relative to the bytes of its KV."""


def state_blocks(num_attention_layers: int, num_state_layers: int) -> StateBlocks:
    """Groups of equally many layers, each with a block of a page or of a state (0.33.0,
    v1/core/kv_cache_planning.py:521).
    """
    least, most = sorted((num_attention_layers, num_state_layers))
    size = most if most < _UNEVEN * least else least
    of_pages, of_states = ceil(num_attention_layers / size), ceil(num_state_layers / size)
    return StateBlocks(ceil(of_states / of_pages), size * of_pages / num_attention_layers)
