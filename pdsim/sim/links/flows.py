"""Moves bytes over links that several flows share.

Flows share links max-min fairly: no flow can be faster without slowing a flow that is at most as fast. Law:
tests/laws/test_fair_links.py.
"""

from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.sim.bus import Alarm, Timeline
from pdsim.system.transport import Path


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes that are being moved over a path of links."""

    owner: Any
    path: Path
    limit: float
    """Maximum rate of this flow in bytes per second."""
    remaining: float
    rate: float = 0.0
    finish_ns: float = 0.0
    """Time in ns at which the last byte arrives. Infinite: a link of the path has no bandwidth."""


def fair_rates(flows: Iterable[Flow], capacity: Mapping[str, float]) -> None:
    """Sets max-min fair rates. All rates rise evenly until a link or a flow reaches its limit. The flows that reach a
    limit keep their rates, and the other rates rise further.
    """
    open_flows = list(flows)
    links = [link for flow in open_flows for link, _ in flow.path]
    if len(open_flows) == 1 or len(set(links)) == len(links):  # nothing is shared
        for flow in open_flows:
            flow.rate = min(flow.limit, *[capacity[link] / weight for link, weight in flow.path])
        return
    free = {link: capacity[link] for link in links}
    while open_flows:
        users: dict[str, float] = {}
        share = inf
        for flow in open_flows:
            share = min(share, flow.limit)
            for link, weight in flow.path:
                users[link] = users.get(link, 0.0) + weight
        shares = {link: free[link] / n for link, n in users.items()}
        share = min(share, *shares.values())
        still_open = []
        for flow in open_flows:
            if flow.limit <= share or any(shares[link] <= share for link, _ in flow.path):
                flow.rate = share
                for link, weight in flow.path:
                    free[link] -= share * weight
            else:
                still_open.append(flow)
        open_flows = still_open


class Flows:
    """Moves bytes over shared links. Calls a function with the owner of each flow that has arrived."""

    def __init__(self, timeline: Timeline, capacity: Mapping[str, float], on_arrived: Callable[[Any], None]) -> None:
        self._timeline = timeline
        self._capacity = dict(capacity)
        self._on_arrived = on_arrived
        self._flows: list[Flow] = []
        self._updated_ns = 0
        self._next_end: Alarm | None = None

    def begin(self, owner: Any, num_bytes: int, path: Path, limit: float = inf) -> None:
        self._progress()
        self._flows.append(Flow(owner, path, limit, float(num_bytes)))
        self._share()

    def begin_together(self, owner: Any, moves: Iterable[tuple[float, Path]]) -> None:
        """Begins one flow per pair of bytes and path. Every arrival calls the function with the same owner."""
        self._progress()
        self._flows += [Flow(owner, path, inf, num_bytes) for num_bytes, path in moves]
        self._share()

    def drop(self, is_gone: Callable[[Any], bool]) -> None:
        """Removes all flows for whose owner is_gone returns True. Their bytes never arrive."""
        self._progress()
        self._flows = [flow for flow in self._flows if not is_gone(flow.owner)]
        self._share()

    def add_links(self, capacity: Mapping[str, float]) -> None:
        """Adds links. A link that exists keeps its bandwidth."""
        self._capacity = {**capacity, **self._capacity}

    def set_capacity(self, capacity: Mapping[str, float]) -> None:
        self._progress()
        self._capacity |= capacity
        self._share()

    def _on_end(self, _: None) -> None:
        now = self._timeline.now_ns
        self._progress()
        ended = [flow for flow in self._flows if flow.finish_ns <= now]
        self._flows = [flow for flow in self._flows if flow.finish_ns > now]
        self._share()
        for flow in ended:
            self._on_arrived(flow.owner)

    def _progress(self) -> None:
        """Subtracts from each flow the bytes that have moved since the rates last changed."""
        seconds = (self._timeline.now_ns - self._updated_ns) / 1e9
        for flow in self._flows:
            flow.remaining -= flow.rate * seconds
        self._updated_ns = self._timeline.now_ns

    def _share(self) -> None:
        if self._next_end is not None:
            self._next_end.cancel()
            self._next_end = None
        if not self._flows:
            return
        fair_rates(self._flows, self._capacity)
        now = self._timeline.now_ns
        first: float = inf
        for flow in self._flows:
            flow.finish_ns = now + max(0, ceil(flow.remaining / flow.rate * 1e9)) if flow.rate else inf
            first = min(first, flow.finish_ns)
        if first < inf:
            self._next_end = self._timeline.after(int(first) - now, self._on_end)
