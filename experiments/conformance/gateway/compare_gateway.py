"""Hold pdsim's policy manual to the choices of SGLang's own gateway: python compare_gateway.py

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
from pdsim.policy.sessions import Manual
from pdsim.policy.views import InstanceLoad

LOGS = Path(__file__).with_name("logs")
PROMPT = Spans.of(0, 10)


@dataclass
class Told(Manual):
    """Draws the worker that it is told, if it may."""

    told: str = ""
    offered: list[str] = field(default_factory=list)
    """Workers among which the last request was drawn. Empty: its session had a worker."""

    def _drawn(self, loads: Sequence[InstanceLoad]) -> str:
        self.offered = [load.instance_id for load in loads]
        return self.told if self.told in self.offered else self.offered[0]


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
    policies = [Told(load.assignment_mode) for _ in logged[0]]
    roles = [RoleRouter(names, policy, "prefill") for policy in policies]
    for role in roles:
        role.counts_streams = load.is_pair
    kept: list[bool] = []
    differing: list[bool] = []
    offered: list[int] = []
    for what, number, session in events(name):
        if what in ("down", "up"):
            roles[0].note((Drain if what == "down" else PeerUp)(str(number)))
            continue
        for role, policy, worker in zip(roles, policies, logged[number], strict=True):
            if what == "route":
                policy.told, policy.offered = worker, []
                differing.append(role.pick(PROMPT, 0, "", number, session) != worker)
                kept.append(not policy.offered)
                offered.append(len(policy.offered))
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
