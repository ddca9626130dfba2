"""One sequence on one process without a cache: slow and obvious, what everything else is compared with."""

from collections.abc import Sequence

import torch

from pdreal.model.attention import WholeSequence
from pdreal.model.transformer import Transformer


@torch.inference_mode()
def generate(model: Transformer, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation. All ranks of a model call it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        sequence = torch.tensor(tokens, device=model.device)
        positions = torch.arange(len(tokens), device=model.device)
        last = torch.tensor([len(tokens) - 1], device=model.device)
        logits = model.logits(sequence, positions, WholeSequence(), last)
        tokens.append(int(model.best_tokens(logits)))
    return tokens[len(prompt) :]
