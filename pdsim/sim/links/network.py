"""Transfer engines that send KV over links, and the flows of bytes that share the links.

A transfer first takes the engine's time per batch and per descriptor and, with staging, the time of the gather. Then
its bytes share the links with the bytes of all other running transfers, max-min fairly: no flow can be faster without
slowing a flow that is at most as fast. Law: tests/laws/test_fair_links.py.
"""

from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf, prod
from typing import Any

from pdsim.core import messages as m
from pdsim.core.messages import TransferUnit, receiver_of
from pdsim.core.transfer.sender import Sender
from pdsim.dataclass import dataclass
from pdsim.metrics.recorder import transfer_record
from pdsim.metrics.records import TransferRecord
from pdsim.scenario.building.wiring import Interconnect
from pdsim.sim.bus import Alarm, Bus, Timeline
from pdsim.sim.links.posting_lines import PostingLines
from pdsim.system.transport import Path


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes that are being moved over a path of links. remaining: number of bytes; rate: in bytes per second. owner:
    what the bytes belong to, such as a Transfer.
    """

    owner: Any
    path: Path
    limit: float
    """Maximum rate of this flow in bytes per second."""
    remaining: float
    rate: float = 0.0
    finish_ns: float = 0.0
    """Time in ns at which the last byte arrives. Infinite: a link of the path has no bandwidth."""


def fair_rates(flows: Iterable[Flow], capacity: Mapping[str, float]) -> None:
    """Sets the rates of flows to max-min fair values. capacity: bytes per second by link. All rates rise evenly until a
    link or a flow reaches its limit. The flows that reach a limit keep their rates, and the other rates rise further.
    """
    open_flows = list(flows)
    links = [link for flow in open_flows for link, _ in flow.path]
    if len(open_flows) == 1 or len(set(links)) == len(links):  # nothing is shared
        for flow in open_flows:
            flow.rate = flow.limit
            for link, weight in flow.path:
                flow.rate = min(flow.rate, capacity[link] / weight)
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
    """Simulates flows of bytes over shared links, whose capacity the flows divide fairly. capacity: bytes per second by
    link. on_arrived: called with the owner of each flow whose bytes have arrived.
    """

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
        """Begins one flow for each pair of bytes and path. All flows have the same owner, which is reported once for
        each flow that arrives.
        """
        self._progress()
        self._flows += [Flow(owner, path, inf, num_bytes) for num_bytes, path in moves]
        self._share()

    def drop(self, is_gone: Callable[[Any], bool]) -> None:
        """Removes all flows for whose owner is_gone returns True. Their bytes never arrive."""
        self._progress()
        self._flows = [flow for flow in self._flows if not is_gone(flow.owner)]
        self._share()

    def add_links(self, capacity: Mapping[str, float]) -> None:
        """Adds links. capacity: bytes per second by link. A link that exists keeps its bandwidth."""
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


@dataclass(slots=True, eq=False)
class Transfer:
    """A running transfer of one unit. start_ns: time when a worker began with the unit. Durations so far: setup_ns of
    the set-up (with staging, also of the gather), line_ns of waiting for transfers of other workers, and posting_ns by
    which posting descriptors delays the bytes.
    """

    unit: TransferUnit
    num_bytes: int
    """Number of bytes that one prefill rank sends to all its decode ranks."""
    start_ns: int
    since_ns: int
    """Time in ns at which the present stage of the transfer began."""
    setup_ns: int
    least_ns: float
    """Minimum time in ns for moving the bytes. The last bytes move only after their descriptors are posted."""
    line_ns: int = 0
    posting_ns: int = 0
    is_stuck: bool = False
    """True: the target has died. No bytes move, and the engine waits for its timeout."""
    is_over: bool = False
    """True: the transfer has finished or failed, or its source has died."""

    def took(self, now_ns: int) -> int:
        """Ends the present stage of the transfer, and begins the next stage. Returns the duration of the ended stage in
        ns.
        """
        duration_ns, self.since_ns = now_ns - self.since_ns, now_ns
        return duration_ns


class Network:
    """Sends transfer units over links, and reports when each transfer has ended or failed."""

    def __init__(
        self,
        timeline: Timeline,
        interconnect: Interconnect,
        *,
        on_done: Callable[[Transfer], None],
        on_failed: Callable[[Transfer], None] | None = None,
        on_posting: Callable[[str, float], None] | None = None,
        timeout_ns: int | None = None,
    ) -> None:
        """on_done: called with each transfer that has ended. on_failed: called with each transfer that its engine has
        given up. on_posting: called with an instance's id and its loop's speed while threads post, as a share of
        the normal speed. timeout_ns: time in ns after which an engine gives up a transfer; None: never.
        """
        self._timeline = timeline
        self._topology = interconnect.topology
        self._transport = interconnect.transport
        self._posting_each_ns = interconnect.transport.posting_each_ns
        self._moving_each_ns = interconnect.transport.moving_each_ns
        self._wire = interconnect.wire
        self._staging = interconnect.staging
        self._on_done = on_done
        self._on_failed = on_failed
        self._timeout_ns = timeout_ns
        self._factors: dict[str, list[float]] = {}
        """Factors by which present faults slow each link, by link."""
        self._dead: set[str] = set()
        self._under_way: list[Transfer] = []
        """Running transfers. Empty unless transfers have a timeout."""
        self.flows = Flows(timeline, interconnect.topology.capacity, self._on_arrived)
        self._lines: PostingLines | None = None
        if interconnect.transport.serial:
            self._lines = PostingLines(timeline, interconnect.transport, self._on_posted, on_posting)

    def start(self, command: m.StartTransfer) -> None:
        unit = command.unit
        num_targets = self._wire.num_targets
        setup_ns = num_targets * self._batch_ns(unit)
        if unit.cell is not None:
            assert self._staging is not None
            setup_ns += num_targets * self._staging.gather_ns(unit.num_bytes)
        now_ns, least_ns = self._timeline.now_ns, self._moving_each_ns * (unit.num_descriptors * num_targets)
        transfer = Transfer(unit, unit.num_bytes * num_targets, now_ns, now_ns, setup_ns, least_ns)
        if self._timeout_ns is not None:
            self._watch(transfer, self._timeout_ns)
        if self._lines is not None:
            self._timeline.after(setup_ns, self._stand_in_line, transfer)
        else:
            transfer.since_ns += setup_ns
            transfer.posting_ns = self._posting_ns(transfer)
            self._timeline.after(setup_ns + transfer.posting_ns, self._move, transfer)

    def _batch_ns(self, unit: TransferUnit) -> int:
        """Time in ns that the engine takes to set up one batch of a unit; a unit has one batch for each target rank. A
        unit counts as staged if it has a cell, or if it is the last unit of a staged request, which has no pages.
        """
        is_staged = self._staging is not None and (unit.cell is not None or not unit.source_pages)
        staged_ns = self._transport.staged_batch_ns
        return staged_ns if is_staged and staged_ns is not None else self._transport.batch_ns

    def _stand_in_line(self, transfer: Transfer) -> None:
        assert self._lines is not None
        transfer.since_ns = self._timeline.now_ns
        if not transfer.is_over:
            self._lines.join(transfer.unit.source, transfer, self._posting_ns(transfer))

    def _on_posted(self, transfer: Transfer, posting_ns: int) -> None:
        transfer.posting_ns = posting_ns
        self._move(transfer)

    def _posting_ns(self, transfer: Transfer) -> int:
        return round(self._posting_each_ns * (transfer.unit.num_descriptors * self._wire.num_targets))

    def _move(self, transfer: Transfer) -> None:
        if transfer.is_over or transfer.is_stuck:
            return
        transfer.line_ns = transfer.took(self._timeline.now_ns) - transfer.posting_ns
        if not transfer.num_bytes:
            self._finish(transfer)
            return
        unit = transfer.unit
        limit = 1e9 * transfer.num_bytes / transfer.least_ns if transfer.least_ns else inf
        path = self._topology.ways_out[unit.source] + self._topology.ways_in[unit.target]
        self.flows.begin(transfer, transfer.num_bytes, path, limit)

    def _on_arrived(self, owner: Any) -> None:
        if isinstance(owner, Transfer):
            self._finish(owner)
        else:
            owner.arrived()

    def _finish(self, transfer: Transfer) -> None:
        if self._under_way:
            self._under_way.remove(transfer)
            transfer.is_over = True
        moving_ns = transfer.took(self._timeline.now_ns)
        if moving_ns - transfer.least_ns <= 1:  # its descriptors set the pace
            transfer.posting_ns += moving_ns
        if self._lines is not None:
            self._lines.leave(transfer.unit.source, transfer)
        self._on_done(transfer)

    # What goes wrong.

    def slow(self, links: Iterable[str], factor: float) -> None:
        """Slows links by a factor, in addition to the factors of other faults."""
        for link in links:
            self._factors.setdefault(link, []).append(factor)
        self._change_capacity(links)

    def unslow(self, links: Iterable[str], factor: float) -> None:
        for link in links:
            self._factors[link].remove(factor)
        self._change_capacity(links)

    def _change_capacity(self, links: Iterable[str]) -> None:
        whole = self._topology.capacity
        self.flows.set_capacity({link: whole[link] * prod(self._factors[link]) for link in links})

    def kill(self, instance_id: str) -> None:
        """Drops transfers from a dead instance. Transfers to a dead instance make no progress until their engine times
        out.
        """
        self._dead.add(instance_id)
        for transfer in self._under_way:
            transfer.is_over = transfer.unit.source == instance_id
            transfer.is_stuck |= transfer.unit.target == instance_id
        self._under_way = [transfer for transfer in self._under_way if not transfer.is_over]
        if self._lines is not None:
            self._lines.drop(instance_id)
        self._drop_flows()

    def revive(self, instance_id: str) -> None:
        self._dead.discard(instance_id)

    def _watch(self, transfer: Transfer, timeout_ns: int) -> None:
        transfer.is_stuck = transfer.unit.target in self._dead
        self._under_way.append(transfer)
        self._timeline.after(timeout_ns, self._on_timeout, transfer)

    def _on_timeout(self, transfer: Transfer) -> None:
        if transfer.is_over:
            return
        transfer.is_over = True
        self._under_way.remove(transfer)
        self._drop_flows()
        if self._lines is not None:
            self._lines.leave(transfer.unit.source, transfer)
        assert self._on_failed is not None
        self._on_failed(transfer)

    def _drop_flows(self) -> None:
        """Removes failed and stuck transfers, and those whose source has died, from the links, so that other transfers
        get their bandwidth. A transfer is stuck if its target has died and the engine waits for a timeout.
        """
        self.flows.drop(lambda owner: isinstance(owner, Transfer) and (owner.is_over or owner.is_stuck))


class Transfers:
    """Starts the transfers of a disaggregated cluster, and tells senders and receivers how each transfer ended."""

    def __init__(self, bus: Bus, interconnect: Interconnect) -> None:
        cluster, health = bus.cluster, bus.cluster.scenario.health
        self._bus = bus
        self._timeline = bus.timeline
        self._interconnect = interconnect
        self._kv_reads = {name: cost.kv_reads for name, cost in cluster.costs.items() if cost.kv_reads is not None}
        self._senders = {agent.instance_id: agent for agent in cluster.agents if isinstance(agent, Sender)}
        self._scatter_free_ns: dict[str, int] = {}
        self.network = Network(
            self._timeline,
            interconnect,
            on_done=self._on_done,
            on_failed=self._on_failed,
            on_posting=self._on_posting if interconnect.transport.loop_turn_ns else None,
            timeout_ns=None if health is None else health.transfer_timeout,
        )
        self.commands: dict[type, Callable[[Any], None]] = {
            m.StartTransfer: self.network.start,
            m.Scatter: self.scatter,
            m.ReturnKv: self.give_back,
        }
        """Handlers of commands that move KV, by type."""

    def scatter(self, command: m.Scatter) -> None:
        """Copies the KV of one cell from the staging ring of a decode instance to its pages (scatter), after the
        instance's earlier scatters. Scatters run in parallel with forwards.
        """
        assert self._interconnect.staging is not None
        now_ns = self._timeline.now_ns
        start_ns = max(now_ns, self._scatter_free_ns.get(command.decode_id, 0))
        end_ns = start_ns + self._interconnect.staging.scatter_ns(command.num_bytes)
        self._scatter_free_ns[command.decode_id] = end_ns
        self._timeline.after(end_ns - now_ns, self._on_scattered, command)

    def _on_done(self, transfer: Transfer) -> None:
        unit = transfer.unit
        sender_id = self._bus.sender_ids[unit.source]
        sender = self._senders.get(sender_id)
        if unit.source in self._kv_reads:
            self._kv_reads[unit.source].ended(transfer.start_ns, self._timeline.now_ns)
        worker = 0 if sender is None else sender.worker(unit)
        row = transfer_record(
            unit,
            self._interconnect.wire,
            worker,
            transfer.start_ns,
            self._timeline.now_ns,
            setup_ns=transfer.setup_ns,
            line_ns=transfer.line_ns,
            posting_ns=transfer.posting_ns,
        )
        if sender is None:
            self._on_returned(row)
            return
        self._bus.recorder.on_transfer(row)
        self._bus.tell_agent(sender_id, m.UnitSent(unit))

    def give_back(self, command: m.ReturnKv) -> None:
        self.network.start(m.StartTransfer(command.unit, None))

    def _on_returned(self, row: TransferRecord) -> None:
        """Tells the decode and the prefill instance that KV has returned to prefill. row: record of the transfer that
        returned it.
        """
        self._bus.recorder.on_returned(row)
        for name in (row.target, row.source):
            self._bus.send(m.Send(name, m.KvReturned(row.request_id)))

    def _on_failed(self, transfer: Transfer) -> None:
        unit, health = transfer.unit, self._bus.cluster.scenario.health
        assert health is not None, "only watched transfers time out"
        limit = f"transfer_timeout {health.transfer_timeout / 1e9:g} s"
        reason = f"no transfer from {unit.source} to {unit.target} within {limit}"
        self._bus.tell_agent(self._bus.sender_ids[unit.source], m.TransferFailed(unit, reason))

    def _on_scattered(self, command: m.Scatter) -> None:
        self._bus.tell_agent(receiver_of(command.decode_id), m.CellScattered(command.request_id, command.cell))

    def _on_posting(self, instance_id: str, pace: float) -> None:
        """Sets the speed of an instance's loop while threads on its host post descriptors. pace: the speed as a share
        of the normal speed.
        """
        self._bus.drivers[instance_id].go_at(pace)

    def kill(self, instance_id: str) -> None:
        self.network.kill(instance_id)
        self._scatter_free_ns.pop(instance_id, None)

    def links_of(self, name: str) -> list[str]:
        """Returns the names of an instance's own links: the first link of its way out and of its way in, if it has
        them. GPUs of other instances may share these links. If `name` is no instance, returns the link of this name.
        """
        topology = self._interconnect.topology
        paths = [ways[name] for ways in (topology.ways_out, topology.ways_in) if name in ways]
        return [link for path in paths for link, _ in path[:1]] or [name]
