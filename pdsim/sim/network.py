"""Links and the engines that use them.

A prefill rank has a few queues, each with one worker that sends one unit at a time; the units for one destination
always wait in the same queue. A unit takes the engine's time per batch and per descriptor, then its bytes cross links
that all transfers under way share max-min fairly: none can be faster without slowing one that is no faster.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf

from pdsim.core.transfer_plan import TransferUnit
from pdsim.core.wire import Wire
from pdsim.metrics.records import TransferRecord
from pdsim.sim.timeline import Alarm, Timeline
from pdsim.system.topology import Path, Topology
from pdsim.system.transport import Transport


class Flow:
    """A transfer whose bytes are moving."""

    __slots__ = ("finish_ns", "path", "rate", "remaining", "transfer")

    def __init__(self, transfer: "Transfer", path: Path) -> None:
        self.transfer = transfer
        self.path = path
        self.remaining = float(transfer.num_bytes)
        self.rate = 0.0
        self.finish_ns = 0


class Transfer:
    """A unit, queued behind the earlier ones of its worker."""

    __slots__ = ("num_bytes", "queue", "queued_ns", "start_ns", "unit")

    def __init__(self, unit: TransferUnit, queue: "deque[Transfer]", num_bytes: int, queued_ns: int) -> None:
        self.unit = unit
        self.queue = queue
        self.num_bytes = num_bytes
        """That one rank sends, to all its targets together."""
        self.queued_ns = queued_ns
        self.start_ns = queued_ns


def fair_rates(flows: Iterable[Flow], capacity: Mapping[str, float]) -> None:
    """Max-min fair: fill all flows evenly until a link is full, fix its flows, go on with the rest."""
    open_flows = list(flows)
    if len(open_flows) == 1:
        open_flows[0].rate = min(capacity[link] / weight for link, weight in open_flows[0].path)
        return
    free = {link: capacity[link] for flow in open_flows for link, _ in flow.path}
    while open_flows:
        users: dict[str, float] = {}
        for flow in open_flows:
            for link, weight in flow.path:
                users[link] = users.get(link, 0.0) + weight
        share = min(free[link] / n for link, n in users.items())
        full = {link for link, n in users.items() if free[link] / n <= share}
        still_open = []
        for flow in open_flows:
            if any(link in full for link, _ in flow.path):
                flow.rate = share
                for link, weight in flow.path:
                    free[link] -= share * weight
            else:
                still_open.append(flow)
        open_flows = still_open


class Network:
    """Carries transfer units and reports the end of each."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        topology: Topology,
        transport: Transport,
        wire: Wire,
        on_done: Callable[[TransferUnit, TransferRecord], None],
    ) -> None:
        self._timeline = timeline
        self._topology = topology
        self._transport = transport
        self._wire = wire
        self._on_done = on_done
        self._queues: dict[tuple[str, int], deque[Transfer]] = {}
        self._flows: list[Flow] = []
        self._updated_ns = 0
        self._next_end: Alarm | None = None

    def send(self, unit: TransferUnit) -> None:
        shard = self._topology.ordinal(unit.target) % self._transport.num_queues
        queue = self._queues.setdefault((unit.source, shard), deque())
        transfer = Transfer(unit, queue, unit.num_bytes * self._wire.num_targets, self._timeline.now_ns)
        queue.append(transfer)
        if len(queue) == 1:
            self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        """What the engine does per batch and per descriptor, then the bytes."""
        transfer.start_ns = self._timeline.now_ns
        setup_ns = self._wire.num_targets * self._transport.setup_ns(transfer.unit.num_descriptors)
        self._timeline.after(setup_ns, self._on_ready, transfer)

    def _on_ready(self, transfer: Transfer) -> None:
        if not transfer.num_bytes:
            self._finish(transfer)
            return
        self._progress()
        self._flows.append(Flow(transfer, self._topology.path(transfer.unit.source, transfer.unit.target)))
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
        transfer.queue.popleft()
        if transfer.queue:
            self._start(transfer.queue[0])
        record = TransferRecord(
            unit.request_id,
            unit.source,
            unit.target,
            unit.num_bytes * self._wire.num_pairs,
            len(unit.target_pages),
            unit.num_descriptors * self._wire.num_pairs,
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
        fair_rates(self._flows, self._topology.capacity)
        now = self._timeline.now_ns
        first = inf
        for flow in self._flows:
            flow.finish_ns = now + max(0, ceil(flow.remaining / flow.rate * 1e9))
            first = min(first, flow.finish_ns)
        self._next_end = self._timeline.after(int(first) - now, self._on_end)
