"""Hold pdsim's manual and sticky_least_loaded to SGLang's own gateway and vLLM's own router: python compare_gateway.py

pdsim's router is told of the same requests, and sends each where the gateway did. Each choice must be one that pdsim
may make: the worker of the session or, for a new session, a worker with the fewest requests or sessions.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from gateway_loads import LOADS, NUM_WORKERS, events

from pdsim.core.messages import Drain, PeerUp
from pdsim.core.routing.role_router import RoleRouter
from pdsim.core.sequence import Spans
from pdsim.policy.draws import Draws, ItemT
from pdsim.policy.sessions import Manual, StickyLeastLoaded

LOGS = Path(__file__).with_name("logs")
PROMPT = Spans.of(0, 10)


@dataclass
class Told(Draws):
    """Draws the worker that it is told, if it may."""

    told: str = ""
    offered: list[str] = field(default_factory=list)
    """Workers among which the last request was drawn. Empty: its session had a worker."""

    def one_of(self, items: Sequence[ItemT], seed: int) -> ItemT:
        self.offered = list(map(str, items))
        return next((item for item in items if item == self.told), items[0])


class Compared(NamedTuple):
    num_choices: int
    num_differing: int
    num_kept: int
    """Number of requests that went to the worker of their session."""
    num_open: int
    """Number of choices among all workers."""


def compare(name: str) -> Compared:
    load = LOADS[name]
    logged = [line.split()[1:] for line in (LOGS / f"{name}.txt").read_text().splitlines()]
    names = [str(worker) for worker in range(NUM_WORKERS)]
    draws = [Told() for _ in logged[0]]
    roles = []
    for told in draws:
        policy = StickyLeastLoaded() if load.mode == "sticky_least_loaded" else Manual(load.mode)
        policy._draws = told  # noqa: SLF001  the policy's random choices are replaced
        roles.append(RoleRouter(names, policy, "prefill"))
        roles[-1].counts_streams = load.is_pair
    kept: list[bool] = []
    differing: list[bool] = []
    offered: list[int] = []
    for what, number, session in events(name):
        if what in ("down", "up"):
            roles[0].note((Drain if what == "down" else PeerUp)(str(number)))
            continue
        for role, told, worker in zip(roles, draws, logged[number], strict=True):
            if what == "route":
                told.told, told.offered = worker, []
                differing.append(role.pick(PROMPT, 0, "", number, session) != worker)
                kept.append(not told.offered)
                offered.append(len(told.offered))
            elif load.is_pair:
                role.count(worker, 1 if what == "begins" else -1, 0)
            elif what == "gone":
                role.release(worker, len(PROMPT), number)
    return Compared(len(differing), sum(differing), sum(kept), offered.count(NUM_WORKERS))


if __name__ == "__main__":
    print("| load | choices | differing | kept | among all |\n|---|---|---|---|---|")
    for load_name in sys.argv[1:] or LOADS:
        found = compare(load_name)
        print(f"| {load_name} | " + " | ".join(map(str, found)) + " |")
