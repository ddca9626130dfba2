"""Experts of a layer on one GPU: what two ranks with whole experts compute must add up to what one rank computes.

python experiments/expert-parallel-h200/ranks_add_up.py [MODEL]
"""

import sys
from dataclasses import replace

import torch
from pdreal.model.experts import run_experts
from pdreal.model.parallel import TensorParallel
from pdreal.model.weights import ExpertWeights, RandomWeights, load_weights
from pdreal.settings.model import ModelConfig, from_catalog

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ROUNDING = 0.03
"""The largest difference over the largest value, in bf16."""


def experts(config: ModelConfig, ranks: TensorParallel) -> ExpertWeights:
    layer = load_weights(config, RandomWeights(0, DEVICE), ranks, DTYPE, DEVICE).layers[-1].mlp
    assert isinstance(layer, ExpertWeights)
    return layer


def main() -> None:
    config = from_catalog(sys.argv[1] if len(sys.argv) > 1 else "qwen3-30b-a3b")
    assert config.experts is not None
    config = replace(config, num_layers=1, experts=replace(config.experts, num_layers=1))
    undivided = experts(config, TensorParallel())
    halves = [experts(config, TensorParallel(rank, 2, has_whole_experts=True)) for rank in range(2)]
    for num_tokens in (1, 16, 300, 4096):
        x = torch.randn(num_tokens, config.hidden_size, device=DEVICE).to(DTYPE)
        expected, chosen = run_experts(x, undivided)
        mixes = [run_experts(x, half) for half in halves]
        assert all(torch.equal(of_rank, chosen) for _, of_rank in mixes)
        found = mixes[0][0].float() + mixes[1][0].float()
        difference = ((found - expected.float()).abs().max() / expected.abs().max()).item()
        print(f"{num_tokens} tokens: the largest difference is {difference:.2%} of the largest value")
        assert difference < ROUNDING


if __name__ == "__main__":
    main()
