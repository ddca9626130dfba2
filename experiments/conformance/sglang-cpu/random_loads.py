"""Small loads at random: what a scheduler is told in each iteration of its loop, and its settings."""

import random
from dataclasses import dataclass, field, replace

from loads import Load, Request, Role, Servers

VOCABULARY = 2048
STOP = 1
"""The token that ends an output early."""
BEYOND = 17
"""Each token behind an output that was drawn."""
CACHED = 0.7
"""Part of the loads that have a prefix cache."""
PREEMPTS = 0.2
"""Part of the loads that have priorities."""
SHARES = 0.6
"""Part of the requests that begin like others."""
FIXED = 0.4
"""Part of the requests that ignore the end of sequence."""
LONGEST = 0.5
"""Part of the other requests that reach their longest output."""

ABORTS = 0.3
"""Part of the requests of a load with aborts that the client gives up."""


@dataclass(frozen=True, kw_only=True)
class DrawnRequest(Request):
    output: list[int] = field(default_factory=list)
    abort_at: int | None = None
    """Iterations are counted as at_s is."""
    grant_steps: int = 0
    """Iterations of a prefill instance from its arrival to decode's grant."""
    transfer_steps: int = 0
    """Iterations from the last chunk to the end of the transfer."""


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(16, VOCABULARY) for _ in range(count)]


def _role(draw: random.Random, page_size: int, pool_tokens: int) -> Role:
    preempts = draw.random() < PREEMPTS
    return Role(
        max_total_tokens=pool_tokens,
        chunked_prefill_size=draw.choice([32, 64, 256, 1024]) // page_size * page_size or page_size,
        max_running_requests=draw.choice([4, 16, 32]),
        radix=draw.random() < CACHED,
        max_prefill_tokens=draw.choice([64, 200, 16384]),
        policy="fcfs" if preempts else draw.choice(["fcfs", "fcfs", "lpm"]),
        preempts=preempts,
    )


def _ordered(draw: random.Random, role: Role) -> Role:
    """The role, with one of the other orders of waiting prompts."""
    policy = "lof" if role.preempts else draw.choice(["lof", "hrrn", "dfs-weight", "shortest-prefill-first"])
    return replace(role, policy=policy, radix=role.radix or policy == "shortest-prefill-first")


def _request(draw: random.Random, at: int, stems: list[list[int]], longest: int, room: int) -> DrawnRequest:
    stem = draw.choice(stems) if draw.random() < SHARES else []
    prompt = stem[: draw.choice([len(stem), draw.randint(0, len(stem))])]
    prompt += _tokens(draw, draw.choice([0 if prompt else 1, draw.randint(1, longest)]))
    max_new_tokens = draw.choice([1, 2, draw.randint(1, 80)])
    prompt = prompt[: max(1, room - max_new_tokens)]
    ignore_eos = draw.random() < FIXED
    num_output_tokens = max_new_tokens if ignore_eos or draw.random() < LONGEST else draw.randint(1, max_new_tokens)
    output = _tokens(draw, num_output_tokens)
    if num_output_tokens < max_new_tokens:
        output[-1] = STOP
    return DrawnRequest(at, prompt, max_new_tokens, [STOP], ignore_eos, output=output)


def _abort_at(draw: random.Random, at: float) -> int | None:
    return int(at) + draw.randint(1, 40) if draw.random() < ABORTS else None


def drawn_load(name: str) -> Load:
    """The load of such a name: drawn-3, drawn-decode-3, drawn_0.5.12-decode-aborts-3."""
    kind, _, seed = name.rpartition("-")
    drawn, _, instance = kind.partition("-")
    load = random_load(int(seed), instance)
    return replace(load, servers=replace(load.servers, release=drawn.partition("_")[2] or "0.5.23"))


def random_load(seed: int, kind: str = "") -> Load:
    """A load of an aggregated instance, or of a kind: orders, overlap, mixed, prefill, decode, prefill-overlap ..."""
    load = _aggregated_load(seed)
    if not kind:
        return load
    if kind == "orders":
        return replace(load, servers=replace(load.servers, prefill=_ordered(random.Random(seed), load.servers.prefill)))
    if kind == "overlap":
        return replace(load, servers=replace(load.servers, prefill=replace(load.servers.prefill, overlap=True)))
    if kind == "mixed":
        return _mixed_load(seed, load)
    instance, _, variant = kind.partition("-")
    draw = random.Random(f"{instance} {seed}")
    slowest = draw.choice([0, 2, 20])
    requests = [
        replace(request, grant_steps=draw.randint(0, slowest), transfer_steps=draw.randint(0, slowest), abort_at=None)
        for request in load.requests(None)
    ]
    if variant == "aborts":
        requests = [replace(request, abort_at=_abort_at(draw, request.at_s)) for request in requests]
    if instance == "prefill":
        role = replace(load.servers.prefill, overlap=variant == "overlap")
        return Load(replace(load.servers, prefill=role, decode=Role()), lambda _: requests)
    requests = [replace(request, grant_steps=0) for request in requests]
    decode = replace(load.servers.prefill, policy="fcfs", num_reserved_decode_tokens=draw.choice([1, 8, 40]))
    return Load(replace(load.servers, decode=decode), lambda _: requests)


def _mixed_load(seed: int, load: Load) -> Load:
    """The load with mixed chunks, which have room for more than the running requests."""
    role, page_size = load.servers.prefill, load.servers.page_size
    chunk_tokens = random.Random(f"mixed {seed}").choice([48, 64, 256]) // page_size * page_size
    role = replace(role, mixed=True, chunked_prefill_size=chunk_tokens)
    return Load(replace(load.servers, prefill=role), load.requests)


def _aggregated_load(seed: int) -> Load:
    """Pools from roomy to tight, prompts of one token to several chunks, repeats, equal ones, priorities, aborts."""
    draw = random.Random(seed)
    page_size = draw.choice([1, 1, 4, 16])
    pool_tokens = draw.choice([320, 640, 1600])
    role = _role(draw, page_size, pool_tokens)
    longest = draw.choice([20, 120, 250])
    stems = [_tokens(draw, draw.randint(1, longest)) for _ in range(3)]
    aborts = draw.choice([0, 0, 0.2])
    burst, gap = draw.choice([1, 4, 10]), draw.choice([1, 4, 12])
    requests: list[Request] = []
    at = 1
    for i in range(draw.randint(20, 50)):
        at += draw.randint(0, gap) if i % burst == 0 else 0
        request = _request(draw, at, stems, longest, pool_tokens - 2 * page_size - 2)
        priority = draw.choice([0, 5, 20]) if role.preempts else 0
        abort_at = at + draw.randint(1, 30) if draw.random() < aborts else None
        requests.append(replace(request, priority=priority, abort_at=abort_at))
    return Load(Servers(page_size, role, release="0.5.23"), lambda _: requests)
