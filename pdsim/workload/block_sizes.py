"""Infers the number of tokens per block of a trace with hash ids from the prompts' lengths and numbers of ids."""

from collections.abc import Iterable, Sequence
from math import inf

from pdsim.workload import trace_fields as names
from pdsim.workload.trace_file import Line, TraceError, warn

_USUAL_BLOCK_TOKENS = 512
"""Number of tokens per block in Mooncake's traces."""


def has_only_whole(lines: Sequence[Line], block_tokens: int) -> bool:
    """True if each prompt with ids has one id per full block and none for tokens after its last full block, and some
    prompt has such tokens. Engines' own hashes are of this kind. One single prompt is enough in Dynamo's traces only.
    """
    sizes = [
        (line.count(length[0]), len(ids[1]))
        for line in lines
        if (ids := line.quantity(names.BLOCKS)) and (length := line.quantity(names.INPUT)) and isinstance(ids[1], list)
    ]
    is_dynamo = any(line.get("input_sequence_hashes") is not None for line in lines)
    has_rest = any(num_tokens % block_tokens for num_tokens, _ in sizes)
    return has_rest and (is_dynamo or len(sizes) > 1) and all(num_ids == num // block_tokens for num, num_ids in sizes)


def block_tokens_of(lines: Iterable[Line], path: str) -> int:
    """Returns the number of tokens per block that the first row with such a field gives. If no row has one: 512 if 512
    fits the prompt lengths and numbers of block ids of all rows, or if no prompt has two ids; otherwise the smallest
    power of two that fits, with a warning; otherwise the only number that fits. Raises TraceError if several other
    numbers or none fit.
    """
    whole_low, whole_high, cut_low, cut_high = 1, inf, 1, inf
    for line in lines:
        if (said := line.quantity(names.BLOCK_TOKENS)) is not None:
            return line.count(said[0])
        ids, length = line.quantity(names.BLOCKS), line.quantity(names.INPUT)
        if ids is None or length is None or not isinstance(ids[1], list) or not ids[1]:
            continue
        num_tokens, num_ids = line.count(length[0]), len(ids[1])
        cut_low = max(cut_low, -(-num_tokens // num_ids))
        cut_high = min(cut_high, (num_tokens - 1) // (num_ids - 1) if num_ids > 1 else inf)
        whole_low = max(whole_low, num_tokens // (num_ids + 1) + 1)
        whole_high = min(whole_high, num_tokens // num_ids)
    if cut_low <= _USUAL_BLOCK_TOKENS <= cut_high or cut_high == inf:  # with no bound above, a wrong line says so
        return _USUAL_BLOCK_TOKENS
    bounds = ((cut_low, cut_high), (whole_low, whole_high))
    for low, high in bounds:
        size = 1 << (low - 1).bit_length()
        if size <= high:
            warn(f"{path}: blocks of {size} tokens fit all lengths and hash_ids; if they have others, set block_tokens")
            return size
    for low, high in bounds:
        if low == high:
            return low
        if low < high:
            raise TraceError(f"{path}: blocks of {low} to {high} tokens fit all lengths and hash_ids: set block_tokens")
    raise TraceError(f"{path}: no block size fits all lengths and hash_ids: set block_tokens")
