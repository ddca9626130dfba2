"""Loads of the comparison: what the router is configured to, and requests that arrive, are computed and leave."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NUM_WORKERS = 4
FLAGS = {
    "overlap_score_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "overlap_score_credit_decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    "prefill_load_scale": "DYN_ROUTER_PREFILL_LOAD_SCALE",
    "decode_active_request_weight": "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
    "router_temperature": "DYN_ROUTER_TEMPERATURE",
    "host_cache_hit_weight": "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
}
TIERS = ("GPU", "CPU")
"""Media of KV events, GPU memory first."""


class Prompt(NamedTuple):
    """Its beginning is `num_shared` tokens of a stem that other prompts share; the rest is its own."""

    stem: int
    num_shared: int
    num_own: int

    def spans(self, number: int) -> list[tuple[int, int, int]]:
        """(stream, start, count) of its parts."""
        return [(self.stem, 0, self.num_shared), (100 + number, 0, self.num_own)]


@dataclass(frozen=True)
class Load:
    role: str
    block_size: int = 16
    settings: dict[str, float] = field(default_factory=dict)
    """Settings of Dynamo's router that are not its defaults, by their names in pdsim."""
    num_requests: int = 200
    num_sessions: int = 0
    """0: requests name no session."""
    has_events: bool = False
    """True: workers tell by KV events which blocks they have in GPU and in host memory."""

    def session(self, number: int) -> int:
        """Of a request. -1: none."""
        return number * 7 % self.num_sessions if self.num_sessions else -1

    @property
    def environment(self) -> dict[str, str]:
        """On decode the frontend sets the credit to 0 for each request; of the service only the environment does."""
        settings = {"overlap_score_credit": 0.0, **self.settings} if self.role == "decode" else self.settings
        given = {FLAGS[name]: str(value) for name, value in settings.items()}
        return {"DYN_ROUTER_USE_KV_EVENTS": str(self.has_events).lower(), **given}

    @property
    def override(self) -> dict[str, Any] | None:
        """What Dynamo's frontend says for each request to the router of decode workers."""
        if self.role != "decode":
            return None
        return {"assume_kv_reuse": False, "track_prefill_tokens": False}


LOADS = {
    "aggregated": Load("aggregated"),
    "aggregated-blocks-of-64": Load("aggregated", 64),
    "aggregated-weights": Load(
        "aggregated",
        settings={"overlap_score_credit": 0.75, "prefill_load_scale": 2.0, "decode_active_request_weight": 3.0},
    ),
    "aggregated-decay": Load("aggregated", settings={"overlap_score_credit_decay": 1.0}),
    "aggregated-much-credit": Load(
        "aggregated", settings={"overlap_score_credit_decay": 0.5, "overlap_score_credit": 1.5}
    ),
    "decode": Load("decode"),
    "decode-requests": Load("decode", settings={"decode_active_request_weight": 10.0}),
    "sessions": Load("aggregated", num_sessions=30),
    "tiers": Load("aggregated", has_events=True),
    "tiers-weights": Load(
        "aggregated",
        settings={"host_cache_hit_weight": 0.4, "overlap_score_credit": 1.2, "overlap_score_credit_decay": 0.5},
        has_events=True,
    ),
    "temperature": Load("aggregated", settings={"router_temperature": 0.25}, num_requests=12),
}
SHARE_COMPUTED, SHARE_GONE = 0.45, 0.4
"""Probabilities that one more prompt is computed, and that one more request leaves, before the next arrives."""
NUM_DRAWS = 3000
"""Choices for one more request behind the load `temperature`, none of which is booked."""
ONE_MORE = Prompt(1, 120, 40)


def events(name: str) -> Iterator[tuple[str, int, Prompt | None]]:
    """(route, number, prompt), and (computed or gone, number, None)."""
    drawn = random.Random(name)
    waiting: list[int] = []
    running: list[int] = []
    for number in range(LOADS[name].num_requests):
        num_shared = drawn.choice((0, drawn.randrange(16, 400), 256))
        yield "route", number, Prompt(drawn.randrange(4), num_shared, drawn.randrange(1, 200))
        waiting.append(number)
        while waiting and drawn.random() < SHARE_COMPUTED:
            computed = waiting.pop(drawn.randrange(len(waiting)))
            running.append(computed)
            yield "computed", computed, None
        while running and drawn.random() < SHARE_GONE:
            yield "gone", running.pop(drawn.randrange(len(running))), None


class Change(NamedTuple):
    """A worker's cache changes: it stores a prompt's blocks in a tier, or drops all but the first num_kept blocks."""

    worker: int
    tier: int
    """Index in TIERS."""
    number: int
    """Request whose prompt it is."""
    num_kept: int | None = None
    """None: all blocks are stored."""


def changes(name: str) -> dict[int, list[Change]]:
    """What workers tell before each request arrives, by the request's number. Independent of the router's choices."""
    load, drawn = LOADS[name], random.Random(f"{name} caches")
    found: dict[int, list[Change]] = {}
    stored: list[Change] = []
    for number in range(1, load.num_requests if load.has_events else 0):
        found[number] = []
        while drawn.random() < SHARE_COMPUTED:
            tier = drawn.randrange(len(TIERS))
            found[number].append(Change(drawn.randrange(NUM_WORKERS), tier, drawn.randrange(number)))
            stored.append(found[number][-1])
        while stored and drawn.random() < SHARE_GONE:
            one = stored.pop(drawn.randrange(len(stored)))
            found[number].append(one._replace(num_kept=drawn.randrange(10)))
    return found


class Tier:
    """Blocks of one worker in one tier. They are the beginnings of prompts."""

    def __init__(self) -> None:
        self._kept: dict[int, Sequence[int]] = {}

    @property
    def blocks(self) -> set[int]:
        return {block for kept in self._kept.values() for block in kept}

    def store(self, number: int, blocks: Sequence[int]) -> list[int]:
        """Stores the blocks of a prompt. Returns the new blocks, which follow blocks that were here."""
        before = self.blocks
        self._kept[number] = blocks
        return [block for block in blocks if block not in before]

    def drop(self, number: int, num_kept: int) -> list[int]:
        """Keeps the first num_kept blocks of a prompt. Returns the blocks that are gone, the last first."""
        gone = self._kept[number][num_kept:]
        self._kept[number] = self._kept[number][:num_kept]
        left = self.blocks
        return [block for block in reversed(gone) if block not in left]


def blocks_of(tokens: Sequence[int], block_size: int) -> list[int]:
    """Names of the whole blocks of a prompt: numbers that depend on all tokens up to the end of the block."""
    ends = range(block_size, len(tokens) + 1, block_size)
    return [hash(tuple(tokens[:end])) & 0x7FFFFFFFFFFFFFFF for end in ends]


def token_ids(number: int, prompt: Prompt) -> list[int]:
    return [stream * 10_000 + start + i for stream, start, count in prompt.spans(number) for i in range(count)]


def prompts(name: str) -> list[list[int]]:
    """Token ids of each request's prompt."""
    return [token_ids(number, prompt) for _, number, prompt in events(name) if prompt is not None]
