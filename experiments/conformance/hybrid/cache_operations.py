"""Loads that are drawn from a seed: the same operations for SGLang's cache and for pdsim's."""

import random
from dataclasses import dataclass
from typing import NamedTuple

NUM_OPERATIONS = 150
MAX_REQUESTS = 4
LONGEST = 150
"""Maximum number of tokens of a prompt that later prompts continue."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    page_size: int
    has_buffer: bool
    """False: the strategy no_buffer."""
    overlap: bool
    """True: two slots that decode steps write in turn. False: one."""
    chunk_tokens: int
    """Chunk of the model's kernels. A checkpoint's grid is its least common multiple with the page."""
    track_interval: int
    num_pages: int
    num_slots: int
    is_decode: bool
    """True: prompts arrive whole, and a request is admitted only when its slots are free."""

    @property
    def own_slots(self) -> int:
        return 1 + (0 if not self.has_buffer else 2 if self.overlap else 1)


class Operation(NamedTuple):
    kind: str
    """admit, compute, generate, finish, drop or look."""
    which: int = 0
    """Place of the request among those that live, modulo their number."""
    ids: tuple[int, ...] = ()
    share: float = 1.0
    """compute: share of the tokens left that the chunk has."""


class Load(NamedTuple):
    settings: Settings
    operations: list[Operation]


def load_of(seed: int) -> Load:
    rng = random.Random(seed)
    has_buffer = rng.choice([True, True, True, True, False])
    page = rng.choice([1, 2, 4, 8]) if has_buffer else 1
    chunk = rng.choice([4, 8])
    is_decode = has_buffer and rng.choice([True, False, False])
    overlap = rng.choice([True, False])
    slots_each = 2 + overlap if is_decode else 1 + 2 * has_buffer + 2
    settings = Settings(
        page_size=page,
        has_buffer=has_buffer,
        overlap=overlap,
        chunk_tokens=chunk,
        track_interval=rng.choice([8, 16, 24]),
        num_pages=rng.randint(200, 700) // page,
        num_slots=(MAX_REQUESTS - is_decode) * slots_each + rng.randint(0, 2 if is_decode else 12),
        is_decode=is_decode,
    )
    return Load(settings, list(_operations(rng)))


def _operations(rng: random.Random) -> list[Operation]:
    known: list[tuple[int, ...]] = [()]
    found = []
    for _ in range(NUM_OPERATIONS):
        kind = rng.choices(["admit", "compute", "generate", "finish", "drop", "look"], [30, 45, 20, 18, 4, 8], k=1)[0]
        ids: tuple[int, ...] = ()
        if kind in ("admit", "look"):
            begin = rng.choice(known)
            kept = rng.choice([len(begin), rng.randint(0, len(begin))])
            ids = begin[:kept] + (0,) * rng.choice([0, rng.randint(0, 70)]) + _tokens(rng, rng.randint(1, 60))
            known = [*known[-20:], ids[:LONGEST]]
        elif kind == "generate":
            ids = rng.choice([_tokens(rng, rng.randint(1, 40)), (0,) * rng.randint(1, 40)])
        share = rng.choice([1.0, rng.random()])
        found.append(Operation(kind, rng.randrange(1000), ids, share))
    return found


def _tokens(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Tokens of a small vocabulary in runs, so that prompts part at many places."""
    token = rng.randrange(3)
    return tuple(rng.choice([*[token] * 20, 0, 1, 2]) for _ in range(num_tokens))
