"""Times matrix products of a layer of Llama-3.1-8B at uneven numbers of tokens, on one GPU: python uneven.py

Needs torch. Prints the time in us of the four products, by kind and number of tokens. Kinds: bf16 (cuBLAS), fp8 with
one scale (cuBLAS), and fp8 with a scale for each token and channel (CUTLASS). Each time is the median of replays of a
CUDA graph that multiplies by several copies of the weights, more than the L2 cache holds, as layers do.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Rows and columns of a layer's weights."""
TOKENS = (1024, 1025, 1280, 1281, 1536, 1537, 2048, 2049, 3072, 3073, 4096, 4097, 8192)
L2_BYTES = 160 << 20
KINDS = ("bf16", "fp8, one scale", "fp8, scales of tokens and channels")


def random(rows: int, columns: int, kind: str) -> Any:
    values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return values if kind == "bf16" else values.to(torch.float8_e4m3fn)


def products(kind: str, tokens: int, weights: list[Any]) -> Callable[[], object]:
    """Returns a function that multiplies activations of this number of tokens by all copies of the weights."""
    inner, outer = weights[0].shape
    activations = random(tokens, inner, kind)
    if kind == "bf16":
        return lambda: [torch.mm(activations, copy) for copy in weights]
    sizes = ((tokens, 1), (1, outer)) if "tokens" in kind else ((), ())
    scale_a, scale_b = (torch.ones(size, device="cuda") for size in sizes)
    options = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return lambda: [torch._scaled_mm(activations, copy, **options) for copy in weights]  # noqa: SLF001


def time_us(run: Callable[[], object], num_products: int) -> float:
    """Median time of one product in us, over five replays of a graph of all products."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    found = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / num_products)
    return median(found)


def main() -> None:
    print(torch.__version__, torch.cuda.get_device_name())
    for kind in KINDS:
        total_us = dict.fromkeys(TOKENS, 0.0)
        for rows, columns in SHAPES:
            num_copies = -(-L2_BYTES // (rows * columns * (2 if kind == "bf16" else 1)))
            weights = [random(rows, columns, kind).t() for _ in range(max(2, num_copies))]
            for tokens in TOKENS:
                total_us[tokens] += time_us(products(kind, tokens, weights), len(weights))
        print(kind, *(f"{tokens}: {us:.0f}" for tokens, us in total_us.items()), sep=", ")


if __name__ == "__main__":
    main()
