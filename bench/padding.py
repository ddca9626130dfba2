"""Compares the experts that tokens choose in a padded forward and in a forward without padding:
python bench/padding.py --model qwen3-30b-a3b

A padded forward runs other kernels, which round differently. If two experts have nearly equal scores, the router may
then choose the other one. Each row counts the tokens whose experts differ in some layer, and how many of these had
nearly equal scores in the first such layer.
"""

import argparse
import csv
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from pdreal.control.tasks import PrefillBatch, PrefillInput
from pdreal.measure.rows import driver_version, machine_name
from pdreal.model import transformer
from pdreal.model.transformer import Transformer
from pdreal.model.weights import ExpertWeights, RandomWeights
from pdreal.rank.graphs import PrefillGraphs
from pdreal.rank.runner import ModelRunner
from pdreal.settings.model import from_catalog
from torch import Tensor
from torch.nn.functional import linear

CASES = {"none": (0, 0, 0), "random": (512, 2048, 300)}
"""Cases by name: for each of the three prompts, the number of its cached tokens."""
NEW = 70, 130, 60
PAGE = 64
Layers = list[tuple[Tensor, Tensor]]
"""For each layer: the router's scores, and the experts that it chose."""


class Uncaptured(PrefillGraphs):
    """Prefill forwards with the kernels and the padding of PrefillGraphs, but launched one by one, so that the router's
    scores can be read.
    """

    def _capture(self) -> None:
        pass


def batch_of(contexts: tuple[int, ...], vocab_size: int) -> PrefillBatch:
    sizes = [-(-(context + new) // PAGE) for context, new in zip(contexts, NEW, strict=True)]
    chunks = []
    for i, (context, new, end) in enumerate(zip(contexts, NEW, accumulate(sizes), strict=True)):
        tokens = array("i", ((7919 * (1000 * i + at)) % vocab_size for at in range(new)))
        chunks.append(PrefillInput(i, tokens, context, array("i", range(1 + end - sizes[i], 1 + end))))
    return PrefillBatch(tuple(chunks))


def seen(runner: ModelRunner, forward: Callable[[], list[int]]) -> tuple[list[int], Layers]:
    """Returns the tokens that a forward chooses over the same random KV, and the scores and choices of its routers."""
    layers: Layers = []
    run_experts = transformer.run_experts

    def recording(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        mixed, chosen = run_experts(x, weights)
        layers.append((linear(x, weights.router)[: sum(NEW)].float(), chosen[: sum(NEW)].long()))
        return mixed, chosen

    torch.manual_seed(1)
    with torch.inference_mode():
        runner.kv.memory.normal_()
        transformer.run_experts = recording
        try:
            return forward(), layers
        finally:
            transformer.run_experts = run_experts


def padded_tokens(graphs: PrefillGraphs, model: Transformer, batch: PrefillBatch) -> list[int]:
    tokens: list[int] = model.best_tokens(model.logits_of(graphs.hidden(batch))).tolist()
    return tokens


def compare(eager: Layers, padded: Layers) -> dict[str, int | float]:
    differs = torch.zeros(sum(NEW), dtype=torch.bool, device=eager[0][0].device)
    num_near, gaps = 0, []
    for (scores, chosen), (other_scores, others) in zip(eager, padded, strict=True):
        first = (chosen.sort().values != others.sort().values).any(1) & ~differs
        best = scores.sort(descending=True).values
        gap = best[:, chosen.shape[1] - 1] - best[:, chosen.shape[1]]
        num_near += int((first & (gap <= 2 * (scores - other_scores).abs().amax(1))).sum())
        gaps.append(gap)
        differs |= first
    return {
        "other_experts": int(differs.sum()),
        "near": num_near,
        "median_gap": round(float(torch.cat(gaps).median()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-qwen3-moe")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    device, config = torch.device(given.device), from_catalog(given.model)
    assert config.experts is not None, f"{given.model} has no experts"
    config = replace(config, num_layers=given.layers, experts=replace(config.experts, num_layers=given.layers))
    table = None
    for dtype in (torch.bfloat16, torch.float32):
        model = Transformer.load(config, RandomWeights(0, device), dtype=dtype, device=device)
        runner = ModelRunner(model, num_pages=80, page_size=PAGE)
        graphs = Uncaptured(model, runner.kv)
        for name, contexts in CASES.items():
            batch = batch_of(contexts, config.vocab_size)
            tokens, eager = seen(runner, partial(runner.prefill, batch))
            others, padded = seen(runner, partial(padded_tokens, graphs, model, batch))
            row = {"model": given.model, "layers": given.layers, "dtype": str(dtype)[6:], "context": name}
            row |= {"tokens": sum(NEW), **compare(eager, padded), "same_tokens": tokens == others}
            row |= {"device": machine_name(device), "driver": driver_version(), "torch": torch.__version__}
            if table is None:
                table = csv.DictWriter(sys.stdout, row)
                table.writeheader()
            table.writerow(row)


if __name__ == "__main__":
    main()
