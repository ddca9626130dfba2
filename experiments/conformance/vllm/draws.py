"""The loads of one aggregated instance: its settings, and requests that come before given steps, drawn from seeds."""

import random
from dataclasses import dataclass, field

VOCABULARY = 2048
CACHED = 0.7
"""Part of the loads that have a prefix cache."""


@dataclass(frozen=True)
class Settings:
    """By vLLM's names."""

    num_blocks: int = 64
    """Blocks that requests may have."""
    block_size: int = 16
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 16
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class Request:
    at_step: int
    prompt: list[int]
    output: list[int]
    abort_at_step: int | None = None


@dataclass(frozen=True)
class Load:
    settings: Settings
    requests: list[Request] = field(repr=False)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def random_load(seed: int) -> Load:
    """A small load: pools from roomy to tight, prompts of one token to several steps, repeats, equal ones, aborts."""
    draw = random.Random(seed)
    block_size = draw.choice([1, 4, 16])
    pool_tokens = draw.choice([320, 640, 1600])
    settings = Settings(
        num_blocks=pool_tokens // block_size,
        block_size=block_size,
        max_num_batched_tokens=draw.choice([32, 64, 256, 1024]),
        max_num_seqs=draw.choice([4, 16, 32]),
        long_prefill_token_threshold=draw.choice([0, 0, 24]),
        enable_prefix_caching=draw.random() < CACHED,
    )
    longest = draw.choice([20, 120, 250])
    stems = [_tokens(draw, draw.randint(1, longest)) for _ in range(3)]
    aborts, shares = draw.choice([0, 0, 0.2]), draw.choice([0, 0.5, 1])
    burst, gap = draw.choice([1, 4, 10]), draw.choice([1, 4, 12])
    requests, at_step = [], 0
    for i in range(draw.randint(20, 50)):
        at_step += draw.randint(0, gap) if i % burst == 0 else 0
        stem = draw.choice(stems) if draw.random() < shares else []
        prompt = [*stem[: draw.choice([len(stem), draw.randint(0, len(stem))])]]
        prompt += _tokens(draw, draw.choice([0 if prompt else 1, draw.randint(1, longest)]))
        output = _tokens(draw, draw.choice([1, 2, draw.randint(1, 60)]))
        prompt = prompt[: pool_tokens - len(output) - block_size]  # or it never ends
        abort = at_step + draw.randint(1, 30) if draw.random() < aborts else None
        requests.append(Request(at_step, prompt, output, abort))
    return Load(settings, requests)
