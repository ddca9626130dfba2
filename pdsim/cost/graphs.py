"""Batch sizes that SGLang captures CUDA graphs for."""

from bisect import bisect_left

_FOREVER = 1 << 30


def captured_batches(max_batch: int, max_running: int, *, speculative: bool = False) -> list[int]:
    """SGLang's sizes up to max_batch, which is always one (0.5.23, generate_decode_cuda_graph_batch_sizes)."""
    ranges = (
        [range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8), range(272, _FOREVER, 16)]
        if speculative
        else [(1, 2, 4, 8, 12), range(16, 257, 8), range(272, 512, 16), range(512, _FOREVER, 32)]
    )
    largest = min(max_batch, max_running)
    sizes = {size for sizes in ranges for size in sizes[: bisect_left(sizes, largest + 1)]}
    return sorted(sizes | {largest})
