"""Outputs and times of two layers on two ranks: tokens sent to the ranks of their experts, beside sums of all tokens.

python experiments/all-to-all-two-h200/same_outputs.py [MODEL]
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from pdreal.model import exchange
from pdreal.model.parallel import TensorParallel
from pdreal.model.transformer import Transformer
from pdreal.model.weights import LatentHeads, RandomWeights
from pdreal.settings.model import ModelConfig, from_catalog
from torch import Tensor
from torch.multiprocessing import spawn

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
ROUNDING = 0.05
"""Difference in a token's output, over the largest output of all tokens, that counts as rounding in bf16."""
LENGTHS = (1, 2, 7, 32, 64, 512, 2048, 2500, 8192)
REPEATS = 20 if ON_GPU else 2


class Nothing:
    """Attention of each token to itself alone, without a cache."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def latent(self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        return heads.expand(latent)[1]

    def delta(self, *_: object) -> Tensor:
        raise NotImplementedError


def short(name: str) -> ModelConfig:
    config = from_catalog(name)
    assert config.experts is not None
    experts = replace(config.experts, num_layers=2 - min(1, config.num_dense_layers))
    return replace(config, num_layers=2, experts=experts)


def us(work: Callable[[], object]) -> float:
    work()
    if ON_GPU:
        torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(REPEATS):
        work()
    if ON_GPU:
        torch.cuda.synchronize()
    return 1e6 * (perf_counter() - begin) / REPEATS


def captured(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Returns the work as a CUDA graph, and its output."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = work()
    return graph.replay, output


@torch.inference_mode()
def rank(index: int, name: str, rendezvous: str) -> None:
    device = torch.device("cuda", index) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    ranks = TensorParallel.join(index, 2, rendezvous, device, has_whole_experts=True)
    config, wrong = short(name), 0
    both = [
        Transformer.load(config, RandomWeights(0, device), dtype=DTYPE, device=device, tp=each)
        for each in (ranks, replace(ranks, sends_to_experts=True))
    ]
    for length in LENGTHS if ON_GPU else LENGTHS[:5]:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(config.vocab_size, (length,), generator=generator).to(device)
        positions = torch.arange(length, device=device)
        forwards = [partial(model.hidden, tokens, positions, Nothing()) for model in both]
        expected, found = (forward().float() for forward in forwards)
        outputs = {"all-to-all": found}
        times = [us(forward) for forward in forwards]
        if ON_GPU and length <= exchange.MOST_FIXED_TOKENS:
            graphs = [captured(forward) for forward in forwards]
            times += [us(replay) for replay, _ in graphs]
            outputs["in a graph"] = graphs[1][1].float()
        for what, output in outputs.items():
            beyond = (output - expected).abs().amax(dim=1) > ROUNDING * expected.abs().max()
            wrong += int(beyond.sum())
            if index == 0:
                print(f"{name}, {length} tokens, {what}: {int(beyond.sum())} of {length} differ", flush=True)
        if index == 0:
            names = ("all-reduce", "all-to-all", "all-reduce in a graph", "all-to-all in a graph")
            print(f"  two layers in us: {table(names, times)}", flush=True)
    if wrong and index == 0:
        print(f"{wrong} tokens differ: near ties of the router, if they are few", flush=True)
    ranks.sum_(torch.zeros(1, device=device)).tolist()
    os._exit(0)  # without waiting for graphs that hold NCCL


def table(names: Sequence[str], times: Sequence[float]) -> str:
    return ", ".join(f"{name} {time:,.0f}" for name, time in zip(names, times, strict=False))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank, (sys.argv[1] if len(sys.argv) > 1 else "qwen3-30b-a3b", f"file://{folder}/meet"), 2)
