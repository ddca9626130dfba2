"""The loads of one instance: its settings, and requests that come before given steps, drawn from seeds.

A load's name is a seed, of an aggregated instance, or a kind and a seed: priority-3, adaptive-3, prefill-3, decode-3,
hybrid-3, stages-3.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Literal

VOCABULARY = 2048
STAGE_NS = 1000
"""What a batch takes in each pipeline stage."""
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
    long_prefill_token_threshold_adaptive: bool = False
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    mamba_groups: int = 0
    """Groups of linear-attention layers, each with a block of every state. 0: the model has none."""
    kv_role: Literal["kv_producer", "kv_consumer"] | None = None
    """Of its NixlConnector."""
    num_stages: int = 1
    """Pipeline stages. With several, requests come at times (arrival_ns) and not before steps."""


@dataclass(frozen=True)
class Request:
    at_step: int
    prompt: list[int]
    output: list[int]
    abort_at_step: int | None = None
    priority: int = 0
    """The least goes first."""
    read_steps: int = 0
    """Steps that pass from the allocation until decode has read it, or on prefill from its last chunk."""


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


def _with_priorities(load: Load, draw: random.Random) -> Load:
    requests = [replace(request, priority=draw.randrange(3)) for request in load.requests]
    return Load(replace(load.settings, policy="priority"), requests)


def _with_adaptive_threshold(load: Load, draw: random.Random) -> Load:
    threshold = draw.choice([4, 24])
    settings = replace(
        load.settings, long_prefill_token_threshold=threshold, long_prefill_token_threshold_adaptive=True
    )
    return Load(settings, load.requests)


def _on_prefill(load: Load, draw: random.Random) -> Load:
    """One token each, and its blocks are held until decode has read them."""
    longest = draw.choice([2, 10, 30])
    requests = [
        replace(request, output=request.output[:1], read_steps=draw.randint(1, longest)) for request in load.requests
    ]
    return Load(replace(load.settings, kv_role="kv_producer"), requests)


def _on_decode(load: Load, draw: random.Random) -> Load:
    """Prompts end at least two tokens behind a block, and one before its end: pdsim's ends one token earlier."""
    longest = draw.choice([2, 10, 30])
    size = draw.choice([4, 16])
    num_blocks = load.settings.num_blocks * load.settings.block_size // size
    settings = replace(load.settings, kv_role="kv_consumer", block_size=size, num_blocks=num_blocks)
    requests = []
    for request in load.requests:
        most = (num_blocks - 2) * size - len(request.output)
        whole = min(len(request.prompt), most) // size * size
        prompt = request.prompt[:whole] + _tokens(draw, draw.randint(2, size - 1))
        requests.append(replace(request, prompt=prompt, read_steps=draw.randint(1, longest)))
    return Load(settings, requests)


def _hybrid(load: Load, draw: random.Random) -> Load:
    """A model with layers of linear attention: states take blocks, and prompts continue from states."""
    size, groups = draw.choice([4, 16]), draw.choice([1, 3])
    num_blocks = (load.settings.num_blocks * load.settings.block_size // size) + draw.choice([20, 100])
    settings = replace(load.settings, block_size=size, num_blocks=num_blocks, mamba_groups=groups)
    return Load(settings, load.requests)


def _staged(load: Load, draw: random.Random) -> Load:
    """Several pipeline stages; prompts that several micro-batches compute."""
    return Load(replace(load.settings, num_stages=draw.choice([2, 2, 3, 4])), load.requests)


def arrival_ns(i: int, at_step: int) -> int:
    """When request i comes or goes, with several stages: as a rule not together with a result."""
    return at_step * STAGE_NS + 1 + i * 37 % (STAGE_NS - 1)


KINDS = {
    "stages": _staged,
    "hybrid": _hybrid,
    "priority": _with_priorities,
    "adaptive": _with_adaptive_threshold,
    "prefill": _on_prefill,
    "decode": _on_decode,
}


def load_of(name: str) -> Load:
    """The load of that name."""
    kind, _, seed = name.rpartition("-")
    load = random_load(int(seed))
    return KINDS[kind](load, random.Random(name)) if kind else load
