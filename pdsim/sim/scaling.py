"""Gives the autoscaler of an elastic cluster the state of the cluster, and carries out its commands."""

from pdsim.core import messages as m
from pdsim.core.autoscaler import DRAINING, SERVING, STARTING, Autoscaler
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.routing.role_router import RoutedLoad
from pdsim.metrics.records import RequestRecord, ServerRecord
from pdsim.metrics.summary import tpot_ms, ttft_ms
from pdsim.sim.bus import Bus
from pdsim.sim.clients import Clients

_MS = 1e6


class Scaling:
    def __init__(self, bus: Bus, autoscaler: Autoscaler, clients: Clients) -> None:
        self._bus = bus
        self._clients = clients
        self._timeline = bus.timeline
        self._autoscaler = autoscaler
        self._recorded = bus.recorded(autoscaler)
        self._records = bus.recorder.records
        self._states: dict[int, tuple[str, str]] = {}
        self._num_arrived = self._num_arrived_tokens = 0
        self._num_finished = self._num_output_tokens = 0
        self._ttft_ns = self._tpot_ns = 0.0
        clients.on_ended = self._on_ended

    def start(self) -> None:
        self._note_changes()
        self._timeline.after(self._autoscaler.interval_ns, self._look)

    def _on_ended(self, record: RequestRecord) -> None:
        """Adds a finished request to the totals that the autoscaler gets: requests, output tokens, TTFT and, with more
        than one output token, TPOT. Ignores failed requests. Called when the client sees the request's end.
        """
        if record.outcome == "finished":
            self._num_finished += 1
            self._num_output_tokens += record.num_output_tokens
            self._ttft_ns += ttft_ms(record) * _MS
            self._tpot_ns += tpot_ms(record) * _MS if record.num_output_tokens > 1 else 0.0

    def _look(self, _: None) -> None:
        if self._clients.num_ended == len(self._bus.cluster.requests):
            return
        nothing_is_due = self._timeline.has_ended
        now_ns = self._timeline.now_ns
        *commands, wake = self._recorded.on_message(self._seen(), now_ns)
        self._note_changes()
        for command in commands:
            if isinstance(command.message, m.FlushCache):  # its role ends, and a Drain that is taken back ends none
                self._bus.cluster.costs[command.to].restart()
            self._bus.send(command)
        changing = any(server.state in (STARTING, DRAINING) for server in self._autoscaler.servers)
        if commands or changing or not nothing_is_due:  # else the run has come to a halt
            self._timeline.after(wake.time_ns - now_ns, self._look)

    def _seen(self) -> m.ClusterSeen:
        for record in self._records.requests[self._num_arrived :]:
            self._num_arrived_tokens += record.num_prompt_tokens
        self._num_arrived = len(self._records.requests)
        loads = [load for role in self._bus.cluster.router.roles.values() for load in role.loads]
        on = {server.instance_id for server in self._autoscaler.servers if server.state in (SERVING, DRAINING)}
        return m.ClusterSeen(
            tuple(self._see(load) for load in loads if load.instance_id in on),
            self._num_arrived,
            self._num_arrived_tokens,
            self._num_finished,
            self._num_output_tokens,
            round(self._ttft_ns),
            round(self._tpot_ns),
        )

    def _see(self, load: RoutedLoad) -> m.InstanceSeen:
        instance = self._bus.instance(load.instance_id)
        levels = instance.levels()
        is_empty = not load.num_requests and not instance.requests()
        num_tokens = levels.num_used_pages * instance.page_size
        if isinstance(instance, DecodeInstance):
            num_tokens = instance.batch.num_kv_tokens
            num_tokens += self._bus.drivers[load.instance_id].num_steps_done * instance.batch.num_requests
            num_tokens += sum(r.num_kv_tokens for r in (*instance.ready.requests, *instance.transferring.values()))
        use = min(1.0, num_tokens / instance.cache.capacity_tokens)
        return m.InstanceSeen(load.instance_id, load.num_requests, levels.num_queued, use, is_empty)

    def _note_changes(self) -> None:
        for server in self._autoscaler.servers:
            state = (server.role, server.state)
            if self._states.get(server.index) != state:
                self._states[server.index] = state
                self._records.servers.append(ServerRecord(server.index, self._timeline.now_ns, *state))
