"""Choice of the next token from logits: the likeliest, or a random token by the request's seed; with log probabilities
if the request asks for them.

The random number depends only on seed, position and token. So with equal logits a request gets the same tokens,
whatever other requests run, on any device, from one instance or from two.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdreal.control.requests import Draw, Logprobs

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # torch counts in signed 64 bits
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def choose(logits: Tensor, draws: Sequence[Draw | None]) -> tuple[list[int], list[Logprobs | None]]:
    """Chooses a token for each row of logits, [rows, vocabulary] in fp32. draws: rule of each row; None: the likeliest
    token. Returns the tokens, and the log probabilities of each row, or None if the row asks for none.
    """
    chosen = logits.argmax(dim=-1)
    at_random = {row: draw for row, draw in enumerate(draws) if draw is not None and draw.temperature > 0}
    if at_random:
        rows = torch.tensor(list(at_random), device=logits.device)
        chosen[rows] = _draw(logits[rows], list(at_random.values()))
    logprobs: list[Logprobs | None] = [None] * len(draws)
    for row, draw in enumerate(draws):
        if draw is not None and draw.num_logprobs is not None:
            every = logits[row].log_softmax(dim=-1)
            best, tokens = every.topk(draw.num_logprobs)
            tops = [list(pair) for pair in zip(tokens.tolist(), best.tolist(), strict=True)]
            logprobs[row] = [float(every[chosen[row]]), tops]
    return chosen.tolist(), logprobs


def _draw(logits: Tensor, draws: list[Draw]) -> Tensor:
    def column(name: str) -> Tensor:
        values = torch.tensor([float(getattr(draw, name)) for draw in draws], dtype=torch.float64)
        return values.to(logits.device)[:, None]

    probabilities, tokens = (logits / column("temperature").float()).softmax(dim=-1).sort(dim=-1, descending=True)
    before = probabilities.double().cumsum(dim=-1) - probabilities
    places = torch.arange(logits.shape[1], device=logits.device)
    top_k = column("top_k")
    is_cut = before >= column("top_p")
    is_cut |= (top_k > 0) & (places >= top_k)
    is_cut |= probabilities < column("min_p") * probabilities[:, :1]
    is_cut[:, 0] = False
    score = probabilities.double().log() + _gumbel(tokens, draws)
    best = score.masked_fill(is_cut, float("-inf")).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, best)[:, 0]


def _gumbel(tokens: Tensor, draws: list[Draw]) -> Tensor:
    """Returns noise for each token of each row. The token with the largest sum of log probability and noise is a random
    draw from the distribution. tokens: token ids, [rows, vocabulary]. draws: rule of each row.
    """
    keys = torch.tensor([_key(draw) for draw in draws], device=tokens.device)[:, None]
    mixed = _mixed(keys + (tokens + 1) * _STEP)
    uniform = (_shifted(mixed, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _key(draw: Draw) -> int:
    key = torch.tensor([draw.seed])
    return int(_mixed(_mixed(key) + draw.position))


def _mixed(z: Tensor) -> Tensor:
    """Returns SplitMix64's finalizer of each number, int64: even neighbouring numbers get unrelated values."""
    z = (z ^ _shifted(z, 30)) * _MIX[0]
    z = (z ^ _shifted(z, 27)) * _MIX[1]
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Returns each number shifted to the right by `bits`, with zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
