"""Carries out transfers in simulated time: what planners and senders command, and scatters on the other side."""

from collections.abc import Callable

from pdsim.core import messages as m
from pdsim.core.messages import receiver_of, sender_of
from pdsim.core.sender import Sender
from pdsim.core.transfer_plan import TransferUnit
from pdsim.metrics.recorder import Recorder, transfer_record
from pdsim.scenario.build import Cluster, Interconnect
from pdsim.sim.network import Network, Transfer
from pdsim.sim.timeline import Timeline


class Transfers:
    """The interconnect of a disaggregated cluster. It tells senders and receivers at once what has happened."""

    def __init__(
        self,
        timeline: Timeline,
        cluster: Cluster,
        interconnect: Interconnect,
        *,
        recorder: Recorder,
        tell: Callable[[str, m.Message], None],
    ) -> None:
        health = cluster.scenario.health
        self._timeline = timeline
        self._interconnect = interconnect
        self._recorder = recorder
        self._tell = tell
        self._sender_of = {instance.instance_id: sender_of(instance.instance_id) for instance in cluster.instances}
        self._senders = {agent.instance_id: agent for agent in cluster.agents if isinstance(agent, Sender)}
        self._scatter_free_ns: dict[str, int] = {}
        self._network = Network(
            timeline,
            topology=interconnect.topology,
            transport=interconnect.transport,
            wire=interconnect.wire,
            staging=interconnect.staging,
            on_done=self._on_done,
            on_failed=self._on_failed,
            timeout_ns=None if health is None else health.transfer_timeout,
        )

    def plan(self, unit: TransferUnit) -> None:
        self._tell(self._sender_of[unit.source], unit)

    def start(self, command: m.StartTransfer) -> None:
        self._network.start(command.unit)

    def on_layers(self, prefill_id: str, computed: m.LayersComputed) -> None:
        self._tell(self._sender_of[prefill_id], computed)

    def scatter(self, command: m.Scatter) -> None:
        """On a stream of its own, behind the scatters before it."""
        assert self._interconnect.staging is not None
        now_ns = self._timeline.now_ns
        start_ns = max(now_ns, self._scatter_free_ns.get(command.decode_id, 0))
        end_ns = start_ns + self._interconnect.staging.scatter_ns(command.num_bytes)
        self._scatter_free_ns[command.decode_id] = end_ns
        self._timeline.after(end_ns - now_ns, self._on_scattered, command)

    def _on_done(self, transfer: Transfer) -> None:
        unit = transfer.unit
        sender_id = self._sender_of[unit.source]
        worker = self._senders[sender_id].worker(unit)
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
        self._recorder.on_transfer(row)
        self._tell(sender_id, m.UnitSent(unit))

    def _on_failed(self, transfer: Transfer) -> None:
        unit = transfer.unit
        reason = f"no transfer from {unit.source} to {unit.target} in time"
        self._tell(self._sender_of[unit.source], m.TransferFailed(unit, reason))

    def _on_scattered(self, command: m.Scatter) -> None:
        self._tell(receiver_of(command.decode_id), m.CellScattered(command.request_id, command.cell))

    # What goes wrong.

    def kill(self, instance_id: str) -> None:
        self._network.kill(instance_id)
        self._scatter_free_ns.pop(instance_id, None)

    def revive(self, instance_id: str) -> None:
        self._network.revive(instance_id)

    def slow(self, name: str, factor: float) -> None:
        self._network.slow(self._links_of(name), factor)

    def unslow(self, name: str, factor: float) -> None:
        self._network.unslow(self._links_of(name), factor)

    def _links_of(self, name: str) -> list[str]:
        """Of an instance, or the shared one."""
        topology = self._interconnect.topology
        paths = [ways[name] for ways in (topology.ways_out, topology.ways_in) if name in ways]
        return [link for path in paths for link, _ in path[:1]] or [name]
