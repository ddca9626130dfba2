"""Computes the memory for linear-attention states. SGLang: the number of slots (0.5.23,
mem_cache/kv_cache_configurator.py, _handle_max_mamba_cache and _calculate_mamba_ratio). vLLM: the number of tokens of a
block, and the number of pages that a state takes.
"""

from math import ceil, lcm
from typing import Literal, NamedTuple

from pdsim.dataclass import dataclass

STATE_SHARE = 0.9
"""Memory for linear-attention states, divided by the memory for KV (mamba_full_memory_ratio)."""
CACHED_SLOTS = 3
"""Number of state slots per running request if the prefix cache keeps states (strategy no_buffer). The request takes
one of these slots; the others are for cached states.
"""

CHUNK_TOKENS = 64
"""Kernels write a request's state after each multiple of this number of tokens (FLA_CHUNK_SIZE), unless the model's
config gives another number."""
TRACK_TOKENS = 256
"""Default number of tokens after which decode steps keep a further copy of a request's state (mamba_track_interval)."""

StateStrategy = Literal["no_buffer", "extra_buffer"]


def slots_per_request(strategy: StateStrategy, *, radix_cache: bool, overlap: bool) -> int:
    """Returns the number of state slots per running request. Without a radix cache: 1. With a radix cache, the number
    includes slots for cached states and, with extra_buffer, slots that decode steps write alternately. overlap: True:
    the scheduler prepares the next step while the GPU computes.
    """
    if not radix_cache:
        return 1
    return CACHED_SLOTS + (0 if strategy == "no_buffer" else 2 if overlap else 1)


def grid_tokens(chunk_tokens: int, page_size: int) -> int:
    """Returns the distance in tokens between the places of a prompt at which the prefix cache can keep a state with
    strategy extra_buffer (mamba_checkpoint_grid of SGLang 0.5.23). chunk_tokens: number of tokens after which kernels
    write a state.
    """
    return lcm(max(chunk_tokens, page_size), page_size)


def interval_tokens(chunk_tokens: int, page_size: int, track_interval: int) -> int:
    """Returns the distance in tokens between the places of a decoding request at which the prefix cache can keep a
    state with strategy extra_buffer (mamba_track_grid of SGLang 0.5.23). chunk_tokens: number of tokens after which
    kernels write a state. track_interval: mamba_track_interval, in tokens.
    """
    return lcm(grid_tokens(chunk_tokens, page_size), track_interval)


class StateMemory(NamedTuple):
    """Number of slots for linear-attention states on one rank, and bytes of the rank's memory for states. Each slot
    holds one state.
    """

    num_slots: int
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class StateRule:
    """Rule for the number of states that one data-parallel rank has room for."""

    slots_per_request: int
    """Number of slots per running request."""
    num_verified: int = 0
    """Number of tokens per request that a step of speculative decoding verifies. Each of these tokens has its own
    state. 0: the server does not decode speculatively.
    """
    max_running: int | None = None
    """Maximum number of running requests, if it is known before memory is divided. None: it is not."""
    is_fixed: bool = False
    """True: there are max_running slots, and all memory beyond that of states (StateMemory) is for KV. Used without a
    prefix cache. False, or max_running is None: states and KV share memory by STATE_SHARE.
    """

    def memory(self, room: float, state_bytes: int) -> StateMemory:
        """Returns the number of slots for states, and the bytes of all memory for states: the slots, the states of
        verified tokens of all running requests, and padding. Padding is one further slot, and the states of verified
        tokens of one further request. room: bytes of one rank for states and KV together. state_bytes: bytes of one
        state.
        """
        if self.is_fixed and self.max_running is not None:
            num_slots = self.max_running
        else:
            budget = room * STATE_SHARE / (1 + STATE_SHARE) / state_bytes
            verified = self.num_verified
            num_slots = max(0, int((budget - 1 - verified) // (1 + verified / self.slots_per_request)))
        running = num_slots // self.slots_per_request
        if self.max_running is not None:
            running = min(running, self.max_running)
        num_states = num_slots + 1 + (running + 1) * self.num_verified
        return StateMemory(num_slots, num_states * state_bytes)


KERNEL_BLOCK_TOKENS, LATENT_BLOCK_TOKENS = 16, 128
"""In models with states, vLLM's blocks have a multiple of this number of tokens: the second number if the KV is latent,
otherwise the first.
"""
_UNEVEN = 1.5
"""vLLM divides attention layers and linear-attention layers into groups of equal size. If the more frequent kind has
less than _UNEVEN times as many layers as the other kind, a group has as many layers as the more frequent kind.
Otherwise, a group has as many layers as the less frequent kind.
"""


def block_tokens(state_bytes: float, token_bytes: float, unit_tokens: int) -> int:
    """Number of tokens per block in vLLM, such that one layer's KV of a block has at least the size of one layer's
    state (0.33.0, platforms/interface.py:1084).

    state_bytes, token_bytes: bytes of a state and of a token's KV, of one layer on one rank. unit_tokens: the result is
    a multiple of this number.
    """
    return unit_tokens * max(1, ceil(state_bytes / (unit_tokens * token_bytes)))


class StateBlocks(NamedTuple):
    """Division of vLLM's KV pool between attention layers and linear-attention layers. Each block holds KV or states of
    one group of layers.
    """

    pages_per_state: int
    """Number of pages that the state of one request takes. A page is the set of blocks, one for each group of attention
    layers, that hold the KV of the same tokens."""
    padding: float
    """Bytes of the blocks that form a page, divided by the bytes of KV in these blocks. At least 1."""


def state_blocks(num_attention_layers: int, num_state_layers: int) -> StateBlocks:
    """Divides a model's layers into groups of equal size, each with layers of one kind: attention or linear attention.
    Each group takes one block for each page of KV, or for each state (vLLM 0.33.0, v1/core/kv_cache_planning.py:521).
    """
    least, most = sorted((num_attention_layers, num_state_layers))
    size = most if most < _UNEVEN * least else least
    of_pages, of_states = ceil(num_attention_layers / size), ceil(num_state_layers / size)
    return StateBlocks(ceil(of_states / of_pages), size * of_pages / num_attention_layers)
