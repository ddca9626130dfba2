"""Links: each instance has a way out and a way in, whose bandwidth the transfers that cross them share fairly.

One transfer at a time per pair of instances, in order, as one worker thread per destination sends them. Transfers of
different pairs share max-min fairly: none can be faster without slowing one that is no faster. Bytes are conserved.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf

from pdsim.core.transfer_plan import TransferUnit
from pdsim.metrics.records import TransferRecord
from pdsim.sim.timeline import Alarm, Timeline

Port = tuple[str, str]
"""An instance and "out" or "in"."""


class Flow:
    """A transfer whose bytes are moving."""

    __slots__ = ("finish_ns", "ports", "rate", "remaining", "start_ns", "transfer")

    def __init__(self, transfer: "Transfer", ports: tuple[Port, Port], start_ns: int) -> None:
        self.transfer = transfer
        self.ports = ports
        self.start_ns = start_ns
        self.remaining = float(transfer.unit.num_bytes)
        self.rate = 0.0
        self.finish_ns = start_ns


class Transfer:
    """A unit, queued behind the earlier ones of its pair."""

    __slots__ = ("queued_ns", "start_ns", "unit")

    def __init__(self, unit: TransferUnit, queued_ns: int) -> None:
        self.unit = unit
        self.queued_ns = queued_ns
        self.start_ns = queued_ns


def fair_rates(flows: Iterable[Flow], capacity: Mapping[Port, float]) -> None:
    """Max-min fair: fill all flows evenly until a port is full, fix its flows, go on with the rest."""
    open_flows = list(flows)
    if len(open_flows) == 1:
        open_flows[0].rate = min(capacity[port] for port in open_flows[0].ports)
        return
    free = {port: capacity[port] for flow in open_flows for port in flow.ports}
    while open_flows:
        users: dict[Port, int] = {}
        for flow in open_flows:
            for port in flow.ports:
                users[port] = users.get(port, 0) + 1
        share = min(free[port] / n for port, n in users.items())
        full = {port for port, n in users.items() if free[port] / n <= share}
        for flow in open_flows:
            if not full.isdisjoint(flow.ports):
                flow.rate = share
                for port in flow.ports:
                    free[port] -= share
        open_flows = [flow for flow in open_flows if full.isdisjoint(flow.ports)]


class Network:
    """Carries transfer units and reports the end of each."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        bandwidth: Mapping[str, float],
        latency_ns: int,
        on_done: Callable[[TransferUnit, TransferRecord], None],
    ) -> None:
        """bandwidth: bytes per second of one rank of each instance, per direction."""
        self._timeline = timeline
        self._capacity = {(i, way): float(rate) for i, rate in bandwidth.items() for way in ("out", "in")}
        self._latency_ns = latency_ns
        self._on_done = on_done
        self._queues: dict[tuple[str, str], deque[Transfer]] = {}
        self._flows: list[Flow] = []
        self._updated_ns = 0
        self._next_end: Alarm | None = None

    def send(self, unit: TransferUnit) -> None:
        transfer = Transfer(unit, self._timeline.now_ns)
        queue = self._queues.setdefault((unit.source, unit.target), deque())
        queue.append(transfer)
        if len(queue) == 1:
            self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        """A fixed time per transfer, then its bytes."""
        transfer.start_ns = self._timeline.now_ns
        self._timeline.after(self._latency_ns, self._on_ready, transfer)

    def _on_ready(self, transfer: Transfer) -> None:
        unit = transfer.unit
        if not unit.num_bytes:
            self._finish(transfer)
            return
        self._progress()
        self._flows.append(Flow(transfer, ((unit.source, "out"), (unit.target, "in")), self._timeline.now_ns))
        self._share()

    def _on_end(self, _: None) -> None:
        now = self._timeline.now_ns
        self._progress()
        ended = [flow for flow in self._flows if flow.finish_ns <= now]
        self._flows = [flow for flow in self._flows if flow.finish_ns > now]
        self._share()
        for flow in ended:
            self._finish(flow.transfer)

    def _finish(self, transfer: Transfer) -> None:
        unit = transfer.unit
        queue = self._queues[unit.source, unit.target]
        queue.popleft()
        if queue:
            self._start(queue[0])
        record = TransferRecord(
            unit.request_id,
            unit.source,
            unit.target,
            unit.num_bytes,
            len(unit.target_pages),
            unit.is_last,
            transfer.queued_ns,
            transfer.start_ns,
            self._timeline.now_ns,
        )
        self._on_done(unit, record)

    def _progress(self) -> None:
        """What moved since rates last changed."""
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
        first = inf
        for flow in self._flows:
            flow.finish_ns = now + max(0, ceil(flow.remaining / flow.rate * 1e9))
            first = min(first, flow.finish_ns)
        self._next_end = self._timeline.after(int(first) - now, self._on_end)
