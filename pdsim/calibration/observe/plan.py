"""Plan of an observation: probes by round, within a budget of requests, then a load that is not fitted."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import NamedTuple

SHORTEST_TOKENS = 32
STEPS_TIMED = 32
"""Decode steps timed of each batch."""
LONGEST_OUTPUT = 1024
"""Output tokens asked for where streams end early, as soon as enough steps are timed."""
ROUND_TRIPS = 5
SETUP_REQUESTS = 4
"""Completions that find out how long prompts are and which fields are refused, at most."""
LOAD_REQUESTS_PER_SLOT = 20
LOAD_SHARE = 0.25
"""Share of time and requests that the load may take."""
LOAD_OUTPUT_TOKENS = (16, 64)


class Probe(NamedTuple):
    """A measurement. Its requests are sent together."""

    kind: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    what: str


@dataclass(frozen=True)
class ObservationBudget:
    num_minutes: float = 10.0
    num_requests: int = 600
    concurrency: int = 16
    """Most requests under way at a time."""
    longest_prompt: int = 4096


def one_round(budget: ObservationBudget) -> list[Probe]:
    """Every kind of probe, the most needed first."""
    lengths = _lengths(budget.longest_prompt)
    batches = _powers(1, budget.concurrency, 2)
    contexts = _powers(SHORTEST_TOKENS * 2, budget.longest_prompt // 4, 4)
    probes = [Probe("ttft", 1, tokens, 2, "a single prompt: TTFT") for tokens in lengths]
    probes += [
        Probe(
            "decode", batch, tokens, LONGEST_OUTPUT, f"equal streams: ITL of {STEPS_TIMED} steps, then they are ended"
        )
        for tokens in contexts
        for batch in batches
    ]
    if budget.concurrency > 1:
        streams = min(2, budget.concurrency - 1)
        probes += [
            Probe("stall", 1 + streams, tokens, LONGEST_OUTPUT, "a prompt beside streams: how long they wait for it")
            for tokens in _every_other(lengths)
        ]
        probes += [
            Probe("burst", size, SHORTEST_TOKENS * 2, 2, "prompts at once: the last TTFT")
            for size in sorted({max(2, budget.concurrency // 2), budget.concurrency})
        ]
    probes += [
        Probe("prefix", 3, tokens, 2, "one prompt, then with a new last quarter and a new short end: is it cached?")
        for tokens in _every_other(lengths)
    ]
    return probes


def planned(budget: ObservationBudget) -> Iterator[Probe]:
    """Rounds of probes until the requests are spent that the load leaves. Probes that do not fit are left out."""
    left = budget.num_requests - SETUP_REQUESTS - sum(len(load.lengths) for load in loads(budget))
    for number in count():
        sent = 0
        for probe in one_round(budget):
            if probe.num_requests <= left:
                left -= probe.num_requests
                sent += 1
                yield probe
        if not sent or number > budget.num_requests:
            return


@dataclass(frozen=True)
class Load:
    """A closed loop of prompts that share nothing."""

    name: str
    concurrency: int
    lengths: tuple[tuple[int, int], ...]
    """Prompt and output tokens of each request."""


def loads(budget: ObservationBudget) -> tuple[Load, ...]:
    """A load at half of the concurrency and one at all of it, as far as requests go."""
    sizes = sorted({max(1, budget.concurrency // 2), budget.concurrency})
    return tuple(Load(f"c{size}", size, tuple(_drawn(size, budget))) for size in sizes)


def _drawn(size: int, budget: ObservationBudget) -> Iterator[tuple[int, int]]:
    rng = Random(size)
    for _ in range(min(LOAD_REQUESTS_PER_SLOT * size, int(budget.num_requests * LOAD_SHARE / 2))):
        ratio = budget.longest_prompt / 2 / SHORTEST_TOKENS
        yield round(SHORTEST_TOKENS * ratio ** rng.random()), rng.randint(*LOAD_OUTPUT_TOKENS)


def _lengths(longest: int) -> list[int]:
    """Two for each doubling, which is how shapes are told apart."""
    found, tokens = [], float(SHORTEST_TOKENS)
    while tokens <= longest:
        found.append(round(tokens))
        tokens *= 2**0.5
    return found or [longest]


def _powers(first: int, last: int, factor: int) -> list[int]:
    """Powers from first to last, both among them."""
    found = [min(first, last)]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return sorted({*found, last})


def _every_other(lengths: list[int]) -> list[int]:
    """Doublings, from twice the shortest on."""
    return lengths[2::2] or lengths[-1:]
