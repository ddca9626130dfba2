"""Simulates a serial transfer engine: workers take turns to post descriptors, and one transfer moves at a time.
tests/laws/test_serial_lines.py compares pdsim with this module.
"""

from collections import deque
from dataclasses import dataclass
from math import inf


@dataclass(eq=False)
class NaiveTransfer:
    source: str
    target: str
    start_ns: int
    posting_ns: int
    moving_ns: int


@dataclass(frozen=True)
class Death:
    instance: str
    died_ns: int
    back_ns: int


def ends(
    transfers: list[NaiveTransfer], deaths: list[Death], *, turn_ns: int, timeout_ns: int
) -> dict[NaiveTransfer, tuple[int, bool]]:
    """For each transfer: the time in ns when it ends, and True if all bytes have arrived. Transfers that end because
    their source died are left out. turn_ns: time for which a worker posts before the next worker's turn.
    """
    lives: dict[tuple[str, float], list[NaiveTransfer]] = {}
    for transfer in sorted(transfers, key=lambda transfer: transfer.start_ns):
        until = [d.died_ns for d in deaths if d.instance == transfer.source and d.died_ns > transfer.start_ns]
        lives.setdefault((transfer.source, min(until, default=inf)), []).append(transfer)
    found = {}
    for (_, death_ns), own in lives.items():
        told = ends_of_life(own, deaths, turn_ns, timeout_ns)
        found |= {transfer: end for transfer, end in told.items() if end[0] < death_ns}
    return found


def ends_of_life(own: list[NaiveTransfer], deaths: list[Death], turn_ns: int, timeout_ns: int):
    found: dict[NaiveTransfer, tuple[int, bool]] = {}
    coming, line, unposted_ns = deque(own), deque(), {transfer: transfer.posting_ns for transfer in own}
    now_ns = 0

    def pass_until(time_ns: int) -> None:
        """Moves the clock on to time_ns. Transfers that start by then join the end of the line, and transfers whose
        time is up leave it.
        """
        nonlocal now_ns
        now_ns = time_ns
        while coming and coming[0].start_ns <= now_ns:
            line.append(coming.popleft())
        for transfer in [transfer for transfer in line if transfer.start_ns + timeout_ns <= now_ns]:
            found[transfer] = (transfer.start_ns + timeout_ns, False)
            line.remove(transfer)

    while coming or line:
        if not line:
            pass_until(max(now_ns, coming[0].start_ns))
            continue
        first = line[0]
        due_ns, takes_turns = first.start_ns + timeout_ns, first.posting_ns > turn_ns
        part_ns = min(unposted_ns[first], turn_ns) if takes_turns else unposted_ns[first]
        unposted_ns[first] -= part_ns
        pass_until(min(now_ns + part_ns, due_ns))
        if first in found:
            continue
        if unposted_ns[first]:
            line.rotate(-1)
            continue
        end_ns = now_ns + first.moving_ns
        reaches = (d.died_ns < end_ns and d.back_ns > first.start_ns for d in deaths if d.instance == first.target)
        if any(reaches) or end_ns > due_ns:
            pass_until(due_ns)
        else:
            found[first] = (end_ns, True)
            line.popleft()
            pass_until(end_ns)
    return found
