"""Shares the bandwidth of links among flows, anew at every event. tests/laws/test_fair_links.py compares pdsim with
this module.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf

Path = tuple[tuple[str, float], ...]
"""Links, each with the number of bytes that cross it per byte of the flow."""


@dataclass(eq=False)
class NaiveFlow:
    path: Path
    num_bytes: float = 0
    begin_ns: int = 0
    limit: float | None = None
    """Maximum rate of the flow in bytes per second. None: no limit."""
    dropped_ns: float = inf
    """Time in ns when the flow is given up, unless its last byte has arrived."""
    rate: Fraction = Fraction(0)


def share(flows: Iterable[NaiveFlow], capacity: Mapping[str, float]) -> None:
    """Sets the rate of each flow. All rates rise together; that of a flow stops at the flow's limit, or when one of its
    links is full. capacity: bytes per second of each link.
    """
    room = {link: Fraction(rate) for link, rate in capacity.items()}
    rate, growing = Fraction(0), list(flows)
    while growing:
        users = {link: sum(Fraction(dict(flow.path).get(link, 0)) for flow in growing) for link in room}
        limits = [Fraction(flow.limit) - rate for flow in growing if flow.limit is not None]
        step = min([room[link] / users[link] for link in room if users[link]] + limits)
        rate += step
        room = {link: free - step * users[link] for link, free in room.items()}
        for flow in growing:
            flow.rate = rate
        growing = [flow for flow in growing if flow.limit != rate and all(room[link] for link, _ in flow.path)]


def ends_ns(flows: list[NaiveFlow], capacity: Mapping[str, float]) -> dict[NaiveFlow, float]:
    """Time in ns when the last byte of each flow arrives. Flows that are given up before are left out."""
    now, ends = Fraction(0), {}
    left = {flow: Fraction(flow.num_bytes) for flow in flows}
    while left:
        moving = [flow for flow in left if flow.begin_ns <= now]
        share(moving, capacity)
        due = {flow: now + left[flow] / flow.rate * 10**9 for flow in moving}
        begins = [Fraction(flow.begin_ns) for flow in left if flow not in due]
        event = min([*due.values(), *begins, *(Fraction(flow.dropped_ns) for flow in left if flow.dropped_ns < inf)])
        for flow in moving:
            left[flow] -= flow.rate * (event - now) / 10**9
            if due[flow] == event:
                ends[flow] = float(event)
        left = {flow: rest for flow, rest in left.items() if flow not in ends and flow.dropped_ns > event}
        now = event
    return ends
