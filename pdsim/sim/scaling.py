"""Lets the autoscaler of an elastic cluster look at it, and carries out what it commands."""

from collections.abc import Callable
from typing import Any

from pdsim.core import messages as m
from pdsim.core.autoscaler import DRAINING, SERVING, STARTING, Autoscaler
from pdsim.core.decode_instance import DecodeInstance
from pdsim.core.invariants import AnyInstance
from pdsim.core.router import Router
from pdsim.metrics.records import RequestRecord, RunRecords, ServerRecord
from pdsim.metrics.summary import tpot_ms, ttft_ms
from pdsim.sim.timeline import Timeline

_MS = 1e6


class Scaling:
    def __init__(
        self,
        timeline: Timeline,
        autoscaler: Autoscaler,
        *,
        recorded: Any,
        router: Router,
        instance: Callable[[str], AnyInstance],
        num_steps_done: Callable[[str], int],
        records: RunRecords,
        send: Callable[[m.Send], None],
        on_started: Callable[[str], None],
        is_over: Callable[[], bool],
    ) -> None:
        """recorded: the autoscaler, recorded if the run is. on_started: called with who begins to serve."""
        self._timeline = timeline
        self._autoscaler = autoscaler
        self._recorded = recorded
        self._router = router
        self._instance = instance
        self._num_steps_done = num_steps_done
        self._records = records
        self._send = send
        self._on_started = on_started
        self._is_over = is_over
        self._states: dict[int, tuple[str, str]] = {}
        self._num_arrived = self._num_arrived_tokens = 0
        self._num_finished = self._num_output_tokens = 0
        self._ttft_ns = self._tpot_ns = 0.0

    def start(self) -> None:
        self._note_changes()
        self._timeline.after(self._autoscaler.interval_ns, self._look)

    def on_ended(self, record: RequestRecord) -> None:
        """A client has seen the end of its request."""
        if record.outcome == "finished":
            self._num_finished += 1
            self._num_output_tokens += record.num_output_tokens
            self._ttft_ns += ttft_ms(record) * _MS
            self._tpot_ns += tpot_ms(record) * _MS if record.num_output_tokens > 1 else 0.0

    def _look(self, _: None) -> None:
        if self._is_over():
            return
        nothing_is_due = self._timeline.has_ended
        now_ns = self._timeline.now_ns
        *commands, wake = self._recorded.on_message(self._seen(), now_ns)
        self._note_changes()
        for command in commands:
            if isinstance(command.message, m.Serve):
                self._on_started(command.message.instance_id)
            self._send(command)
        changing = any(server.state in (STARTING, DRAINING) for server in self._autoscaler.servers)
        if commands or changing or not nothing_is_due:  # else the run has come to a halt
            self._timeline.after(wake.time_ns - now_ns, self._look)

    def _seen(self) -> m.ClusterSeen:
        for record in self._records.requests[self._num_arrived :]:
            self._num_arrived_tokens += record.num_prompt_tokens
        self._num_arrived = len(self._records.requests)
        return m.ClusterSeen(
            tuple(self._see(load) for role in self._router.roles.values() for load in role.loads if self._is_on(load)),
            self._num_arrived,
            self._num_arrived_tokens,
            self._num_finished,
            self._num_output_tokens,
            round(self._ttft_ns),
            round(self._tpot_ns),
        )

    def _is_on(self, load: Any) -> bool:
        return any(
            server.instance_id == load.instance_id and server.state in (SERVING, DRAINING)
            for server in self._autoscaler.servers
        )

    def _see(self, load: Any) -> m.InstanceSeen:
        instance = self._instance(load.instance_id)
        levels = instance.levels()
        is_empty = not load.num_requests and not instance.requests()
        num_tokens = levels.num_used_pages * instance.page_size
        if isinstance(instance, DecodeInstance):
            num_tokens = instance.batch.num_kv_tokens
            num_tokens += self._num_steps_done(load.instance_id) * instance.batch.num_requests
            num_tokens += sum(r.num_kv_tokens for r in (*instance.ready, *instance.transferring.values()))
        use = min(1.0, num_tokens / instance.cache.capacity_tokens)
        return m.InstanceSeen(load.instance_id, load.num_requests, levels.num_queued, use, is_empty)

    def _note_changes(self) -> None:
        for server in self._autoscaler.servers:
            state = (server.role, server.state)
            if self._states.get(server.index) != state:
                self._states[server.index] = state
                self._records.servers.append(ServerRecord(server.index, self._timeline.now_ns, *state))
