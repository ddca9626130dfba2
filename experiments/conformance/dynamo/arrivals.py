"""Loads of the comparison: what the router is configured to, and requests that arrive, are computed and leave."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NUM_WORKERS = 4
FLAGS = {
    "overlap_score_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "overlap_score_credit_decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    "prefill_load_scale": "DYN_ROUTER_PREFILL_LOAD_SCALE",
    "decode_active_request_weight": "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
    "router_temperature": "DYN_ROUTER_TEMPERATURE",
}


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

    def session(self, number: int) -> int:
        """Of a request. -1: none."""
        return number * 7 % self.num_sessions if self.num_sessions else -1

    @property
    def environment(self) -> dict[str, str]:
        """On decode the frontend sets the credit to 0 for each request; of the service only the environment does."""
        settings = {"overlap_score_credit": 0.0, **self.settings} if self.role == "decode" else self.settings
        given = {FLAGS[name]: str(value) for name, value in settings.items()}
        return {"DYN_ROUTER_USE_KV_EVENTS": "false", **given}

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
