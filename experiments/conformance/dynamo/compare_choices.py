"""Hold pdsim's dynamo_kv to the choices of Dynamo's own router: python compare_choices.py

pdsim's router is told of the same requests, and sends each where Dynamo did. At each choice the cost that Dynamo
logged must be the cost that pdsim gives that worker, and the lowest. Of equal costs Dynamo draws one. With a
temperature the frequencies of many choices must be those of pdsim's softmax.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from arrivals import LOADS, NUM_WORKERS, ONE_MORE, TIERS, Tier, blocks_of, changes, events, prompts

from pdsim.core.messages import CachedTokens
from pdsim.core.routing.role_router import MemorySize, RoleRouter
from pdsim.core.sequence import Spans
from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.views import RoutingView, TokenSequence

LOGS = Path(__file__).with_name("logs")
WORKERS = [str(worker) for worker in range(NUM_WORKERS)]
ROUNDING, ROUNDED = 1e-9, 0.5001e-3
HOUR_NS = 3600 * 10**9


class Told(DynamoKv):
    """Knows its costs, and sends where it is told."""

    reads_sessions = True
    told = ""
    seen: Sequence[float] = ()
    bound = ""

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        self.seen, self.bound = self.costs(prompt, view), view.session_instance(HOUR_NS)
        return self.told


class Choice(NamedTuple):
    """Of Dynamo, with the costs of all workers that pdsim found."""

    worker: int
    cost: float
    costs: Sequence[float]
    bound: str
    """Worker of the request's session, or empty."""

    @property
    def agrees(self) -> bool:
        """The log rounds a cost for the worker of a session."""
        return abs(self.costs[self.worker] - self.cost) < (ROUNDED if self.bound else ROUNDING)

    @property
    def is_right(self) -> bool:
        if self.bound:
            return self.bound == str(self.worker)
        return self.costs[self.worker] == min(self.costs)


class Caches:
    """What the workers have, by the KV events that Dynamo's router got."""

    def __init__(self, name: str) -> None:
        self._size = LOADS[name].block_size
        self._blocks = [blocks_of(tokens, self._size) for tokens in prompts(name)]
        self._changes = changes(name)
        self._tiers = {(worker, tier): Tier() for worker in range(NUM_WORKERS) for tier in range(len(TIERS))}

    def before(self, number: int) -> list[CachedTokens]:
        """What the workers have of a request's prompt when it arrives."""
        for change in self._changes.get(number, ()):
            tier = self._tiers[change.worker, change.tier]
            if change.num_kept is None:
                tier.store(change.number, self._blocks[change.number])
            else:
                tier.drop(change.number, change.num_kept)
        return [self._of_worker(worker, self._blocks[number]) for worker in range(NUM_WORKERS)]

    def _of_worker(self, worker: int, blocks: Sequence[int]) -> CachedTokens:
        ends = [0]
        for tier in range(len(TIERS)):
            here = self._tiers[worker, tier].blocks
            ends.append(next((i for i in range(ends[-1], len(blocks)) if blocks[i] not in here), len(blocks)))
        _, device, host = ends
        return CachedTokens(str(worker), device * self._size, (host - device) * self._size)


class Replayed(NamedTuple):
    choices: list[Choice]
    router: RoleRouter
    rest: list[str]
    """Workers that Dynamo drew behind the load."""


def replay(name: str) -> Replayed:
    load, choices = LOADS[name], []
    policy = Told(**load.settings, kv_events=load.has_events)
    caches = Caches(name) if load.has_events else None
    router = RoleRouter(WORKERS, policy, load.role, MemorySize(load.block_size))
    logged = [line.split() for line in (LOGS / f"{name}.txt").read_text().splitlines()]
    num_tokens = {}
    for what, number, prompt in events(name):
        if prompt is not None:
            sequence, (_, policy.told, cost) = Spans(prompt.spans(number)), logged[number]
            num_tokens[number] = len(sequence)
            router.see(caches.before(number) if caches else ())
            router.pick(sequence, 0, request_id=number, session=load.session(number))
            choices.append(Choice(int(policy.told), float(cost), policy.seen, policy.bound))
        elif what == "computed":
            router.on_computed(number)
        else:
            router.release(logged[number][1], num_tokens[number], number)
    return Replayed(choices, router, [worker for _, worker, _ in logged[load.num_requests :]])


class Compared(NamedTuple):
    num_choices: int
    num_differing: int
    num_ties: int


def compare(name: str) -> Compared:
    choices, is_drawn = replay(name).choices, "router_temperature" in LOADS[name].settings
    num_alike = sum(choice.agrees and (is_drawn or choice.is_right) for choice in choices)
    num_ties = sum(choice.costs.count(min(choice.costs)) > 1 for choice in choices)
    return Compared(len(choices), len(choices) - num_alike, num_ties)


def drawn(name: str = "temperature") -> tuple[list[float], list[float]]:
    """Frequencies of the workers in Dynamo's draws, and in as many of pdsim's, for one more request behind the load."""
    _, router, theirs = replay(name)
    policy, one_more = DynamoKv(**LOADS[name].settings), Spans(ONE_MORE.spans(LOADS[name].num_requests))
    return _shares(theirs), _shares([policy.pick(one_more, router) for _ in theirs])


def _shares(choices: Sequence[str]) -> list[float]:
    counts = Counter(choices)
    return [counts[worker] / len(choices) for worker in WORKERS]


if __name__ == "__main__":
    print("| load | choices | differing | ties |\n|---|---|---|---|")
    for load_name in LOADS:
        found = compare(load_name)
        print(f"| {load_name} | {found.num_choices} | {found.num_differing} | {found.num_ties} |")
    for whose, shares in zip(("Dynamo", "pdsim"), drawn(), strict=True):
        print(f"draws of {whose}: " + ", ".join(f"{share:.1%}" for share in shares))
