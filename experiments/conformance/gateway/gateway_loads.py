"""Loads of the comparison: the gateway's settings, and requests that arrive, are answered and end."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

NUM_WORKERS = 4


@dataclass(frozen=True)
class Load:
    """Random requests of sessions. Clients send the session as X-SMG-Routing-Key or, to vLLM's router, as
    X-Session-ID.
    """

    mode: Literal["random", "min_load", "min_group", "sticky_least_loaded"]
    """Assignment mode of the policy manual of SGLang's gateway, or the policy of vLLM's router."""
    is_pair: bool = False
    """True: NUM_WORKERS prefill and as many decode servers. A request counts from its first streamed token."""
    num_requests: int = 150
    num_sessions: int = 40
    num_outages: int = 0
    """Number of times that one worker's health check fails for a while."""

    @property
    def is_vllm(self) -> bool:
        """True: vLLM's router instead of SGLang's gateway."""
        return self.mode == "sticky_least_loaded"


LOADS = {
    "random": Load("random"),
    "min_load": Load("min_load"),
    "min_group": Load("min_group"),
    "outages": Load("min_group", num_outages=6),
    "pair-min_load": Load("min_load", is_pair=True),
    "pair-min_group": Load("min_group", is_pair=True),
    "sticky": Load("sticky_least_loaded"),
    "sticky-outages": Load("sticky_least_loaded", num_outages=6),
}
SHARE_WITHOUT_KEY, SHARE_ANSWERED, SHARE_GONE = 0.1, 0.6, 0.45
"""Probabilities that a request has no routing key, and that one more request is answered, or ends, before the next
arrives."""

Event = tuple[Literal["route", "begins", "gone", "down", "up"], int, int]


def events(name: str) -> Iterator[Event]:
    """Yields (route, number, session), (begins, number, 0) when the first token is streamed, (gone, number, 0), and
    (down or up, worker, 0). Session -1: the request has no routing key.
    """
    load, drawn = LOADS[name], random.Random(name)
    outages = {load.num_requests * (2 * i + 1) // (2 * load.num_outages + 1): i for i in range(load.num_outages)}
    waiting: list[int] = []
    running: list[int] = []
    down = -1
    for number in range(load.num_requests):
        if number in outages:
            if down >= 0:
                yield "up", down, 0
            down = drawn.randrange(NUM_WORKERS)
            yield "down", down, 0
        yield "route", number, -1 if drawn.random() < SHARE_WITHOUT_KEY else drawn.randrange(load.num_sessions)
        waiting.append(number)
        while waiting and drawn.random() < SHARE_ANSWERED:
            running.append(waiting.pop(drawn.randrange(len(waiting))))
            yield "begins", running[-1], 0
        while running and drawn.random() < SHARE_GONE:
            yield "gone", running.pop(drawn.randrange(len(running))), 0
