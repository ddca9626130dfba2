"""Links and the engines that use them.

A transfer takes the engine's time per batch and per descriptor, and the gather's if it is staged; then its bytes cross
links that all transfers under way share max-min fairly: none can be faster without slowing one that is no faster.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf

from pdsim.core.transfer_plan import TransferUnit
from pdsim.core.wire import Wire
from pdsim.cost.staging import StagingCost
from pdsim.sim.timeline import Alarm, Timeline
from pdsim.system.topology import Path, Topology
from pdsim.system.transport import Transport


class Flow:
    """A transfer whose bytes are moving."""

    __slots__ = ("finish_ns", "limit", "path", "rate", "remaining", "transfer")

    def __init__(self, transfer: "Transfer", path: Path, limit: float) -> None:
        self.transfer = transfer
        self.path = path
        self.limit = limit
        """Bytes per second that its engine allows, whatever the links."""
        self.remaining = float(transfer.num_bytes)
        self.rate = 0.0
        self.finish_ns = 0


class Transfer:
    """A unit under way."""

    __slots__ = ("num_bytes", "start_ns", "unit")

    def __init__(self, unit: TransferUnit, num_bytes: int, start_ns: int) -> None:
        self.unit = unit
        self.num_bytes = num_bytes
        """That one rank sends, to all its targets together."""
        self.start_ns = start_ns


def fair_rates(flows: Iterable[Flow], capacity: Mapping[str, float]) -> None:
    """Max-min fair: fill all flows evenly until a link or a flow is at its limit, fix those, go on with the rest."""
    open_flows = list(flows)
    if len(open_flows) == 1:
        (flow,) = open_flows
        flow.rate = min(flow.limit, *(capacity[link] / weight for link, weight in flow.path))
        return
    free = {link: capacity[link] for flow in open_flows for link, _ in flow.path}
    while open_flows:
        users: dict[str, float] = {}
        for flow in open_flows:
            for link, weight in flow.path:
                users[link] = users.get(link, 0.0) + weight
        share = min(free[link] / n for link, n in users.items())
        share = min(share, *(flow.limit for flow in open_flows))
        full = {link for link, n in users.items() if free[link] / n <= share}
        still_open = []
        for flow in open_flows:
            if flow.limit <= share or any(link in full for link, _ in flow.path):
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
        staging: StagingCost | None = None,
        on_done: Callable[[Transfer], None],
    ) -> None:
        self._timeline = timeline
        self._topology = topology
        self._transport = transport
        self._wire = wire
        self._staging = staging
        self._on_done = on_done
        self._flows: list[Flow] = []
        self._updated_ns = 0
        self._next_end: Alarm | None = None
        self._lines: dict[str, deque[Transfer]] = {}
        """With a serial engine: the transfers of each prefill instance that post or wait to post, in order."""

    def start(self, unit: TransferUnit) -> None:
        num_targets = self._wire.num_targets
        setup_ns = num_targets * self._transport.batch_ns
        if unit.cell is not None:
            assert self._staging is not None
            setup_ns += num_targets * self._staging.gather_ns(unit.num_bytes)
        transfer = Transfer(unit, unit.num_bytes * num_targets, self._timeline.now_ns)
        if self._transport.serial:
            self._timeline.after(setup_ns, self._stand_in_line, transfer)
        else:
            self._timeline.after(setup_ns + self._posting_ns(transfer), self._move, transfer)

    def _stand_in_line(self, transfer: Transfer) -> None:
        line = self._lines.setdefault(transfer.unit.source, deque())
        line.append(transfer)
        if len(line) == 1:
            self._post(transfer)

    def _post(self, transfer: Transfer) -> None:
        self._timeline.after(self._posting_ns(transfer), self._move, transfer)

    def _posting_ns(self, transfer: Transfer) -> int:
        return self._transport.posting_ns(transfer.unit.num_descriptors * self._wire.num_targets)

    def _move(self, transfer: Transfer) -> None:
        if not transfer.num_bytes:
            self._finish(transfer)
            return
        unit = transfer.unit
        least_ns = self._transport.least_moving_ns(unit.num_descriptors * self._wire.num_targets)
        limit = 1e9 * transfer.num_bytes / least_ns if least_ns else inf
        self._progress()
        self._flows.append(Flow(transfer, self._topology.path(unit.source, unit.target), limit))
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
        if self._transport.serial:
            line = self._lines[transfer.unit.source]
            line.popleft()
            if line:
                self._post(line[0])
        self._on_done(transfer)

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
