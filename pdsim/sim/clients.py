"""The clients of a run with their front end and router: from a request's arrival to the end that its client sees."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pdsim.core import messages as m
from pdsim.core.router import num_retries, request_of
from pdsim.core.sequence import Spans
from pdsim.metrics.recorder import Recorder
from pdsim.metrics.records import RequestRecord
from pdsim.scenario.build import Cluster
from pdsim.sim.front_end import FrontEnd
from pdsim.sim.timeline import Timeline
from pdsim.workload.client_driver import ClientDriver
from pdsim.workload.request_spec import RequestSpec, Streams


class Clients:
    def __init__(
        self,
        timeline: Timeline,
        cluster: Cluster,
        recorder: Recorder,
        *,
        router: Any,
        outputs: dict[int, Spans],
        send: Callable[[list[m.Send]], None],
        wake_at: Callable[[m.WakeAt], None],
        progress: Callable[[int], None] | None,
        ended: Callable[[RequestRecord], None] | None,
    ) -> None:
        """router: the cluster's, recorded if the run is. outputs: of each attempt; retries are added."""
        self.num_ended = 0
        self.local: set[int] = set()
        """Attempts whose prompts vLLM computes where it decodes them, until they are computed."""
        self.on_sent: Callable[[int], None] | None = None
        """Called as a client sends a request, if anything can go wrong."""
        self.on_ended: Callable[[RequestRecord], None] | None = None
        """Called with each request that has ended, if an autoscaler looks."""
        self.commands: dict[type, Callable[[Any], None]] = {
            m.FirstToken: self._on_first_token,
            m.PrefillDone: self._on_prefill_done,
            m.Finished: self._on_finished,
            m.Failed: self.tell_router,
        }
        """Carries out the commands of instances that concern clients."""
        self._timeline = timeline
        self._recorder = recorder
        self._recorded_router = router
        self._router = cluster.router
        self._outputs = outputs
        self._send = send
        self._wake_at = wake_at
        self._progress = progress
        self._ended = ended
        self._num_requests = len(cluster.requests)
        self._is_disaggregated = cluster.interconnect is not None
        self._is_vllm = cluster.scenario.engine == "vllm"
        self._priorities = cluster.scenario.priorities
        self._waiting: set[int] = set()
        """Requests that clients wait for."""
        self._front_end: FrontEnd | None = None
        if not cluster.front_end.is_none:
            self._front_end = FrontEnd(
                timeline, cluster.front_end, on_arrival=self._arrive, route=self._route, on_first_token=self._seen
            )
        streams = Streams(cluster.scenario.seed)
        self._driver = ClientDriver(
            timeline, cluster.client, cluster.requests, streams=streams, send=self._send_request
        )

    def start(self) -> None:
        self._driver.start()

    def abort(self, request_id: int) -> None:
        """A client that waits for this request gives it up; the front end may still hold it."""
        if request_id not in self._waiting:
            return
        reason = "aborted by the client"
        self.tell_router(m.Cancel(request_id, reason))
        if request_id in self._waiting:
            self._end(m.Failed(request_id, reason))

    def _send_request(self, spec: RequestSpec) -> None:
        if self._front_end is None:
            self._arrive(spec)
            self._route(spec)
        else:
            self._front_end.send(spec)

    def _arrive(self, spec: RequestSpec) -> None:
        self._recorder.on_arrival(
            spec.request_id, len(spec.prompt), len(spec.output), self._timeline.now_ns, spec.request_class
        )
        self._waiting.add(spec.request_id)
        if self.on_sent is not None:
            self.on_sent(spec.request_id)

    def _route(self, spec: RequestSpec) -> None:
        if spec.request_id in self._waiting:
            self.tell_router(
                m.Arrival(
                    spec.request_id, spec.prompt, spec.max_output_tokens, self._priorities.get(spec.request_class, 0)
                )
            )

    # The router and the attempts under way.

    def tell_router(self, message: m.Message) -> None:
        """Carry out what it answers: attempts, their ends, and what it decides of requests."""
        sends: list[m.Send] = []
        for command in self._recorded_router.on_message(message, self._timeline.now_ns):
            if isinstance(command, m.Send):
                sends.append(command)
                new = command.message
                if isinstance(new, m.NewRequest) and command.to == new.decode_id:
                    self._on_attempt(new)
            elif isinstance(command, m.Failed):
                self._end(command)
            elif isinstance(command, m.PrefillDone):
                self._answer_of_prefill(command.request_id)
            else:
                self._wake_at(command)
        if sends:
            self._send(sends)

    def _on_attempt(self, new: m.NewRequest) -> None:
        attempt = new.request_id
        if num_retries(attempt):
            self._outputs[attempt] = self._outputs[request_of(attempt)]
            self._recorder.on_retry(attempt)
            if self._front_end is not None:
                self._front_end.on_retry(request_of(attempt))
        self._recorder.on_routed(attempt, new.prefill_id, new.decode_id, self._timeline.now_ns)
        if new.prefill_id == new.decode_id:
            if self._is_vllm:
                self.local.add(attempt)
            if self._is_disaggregated:
                self._answer_of_prefill(request_of(attempt))

    def _on_prefill_done(self, done: m.PrefillDone) -> None:
        request_id = self._router.client_of(done.request_id)
        self._recorded_router.on_message(done, self._timeline.now_ns)
        if request_id is not None:
            self._answer_of_prefill(request_id)

    def _answer_of_prefill(self, request_id: int) -> None:
        if self._front_end is not None:
            self._front_end.on_prefill_answer(request_id)

    def _on_first_token(self, token: m.FirstToken) -> None:
        now_ns = self._timeline.now_ns
        request_id = self._router.client_of(token.request_id)
        if self._router.hears_first_tokens:
            self._recorded_router.on_message(token, now_ns)
        self._recorder.on_streamed(token.request_id, now_ns)
        if request_id is None:
            return
        if self._front_end is None:
            self._recorder.on_first_token(request_id, now_ns)
        else:
            self._front_end.on_streamed(request_id)

    def _seen(self, request_id: int) -> None:
        self._recorder.on_first_token(request_id, self._timeline.now_ns)

    def _on_finished(self, finished: m.Finished) -> None:
        request_id = self._router.client_of(finished.request_id)
        self._recorded_router.on_message(finished, self._timeline.now_ns)
        if request_id is not None:
            self._end(m.Finished(request_id))

    def _end(self, outcome: m.Finished | m.Failed) -> None:
        """Nobody works on it any more; its client hears so through the front end."""
        self._waiting.discard(outcome.request_id)
        if self._front_end is None:
            self._on_end(outcome)
        else:
            failed = isinstance(outcome, m.Failed)
            self._front_end.on_end(outcome.request_id, partial(self._on_end, outcome), failed=failed)

    def _on_end(self, outcome: m.Finished | m.Failed) -> None:
        self.num_ended += 1
        record = self._recorder.on_end(outcome, self._timeline.now_ns)
        if self.on_ended is not None:
            self.on_ended(record)
        self._driver.on_end(outcome.request_id)
        if self._progress is not None and (self.num_ended % 32 == 0 or self.num_ended == self._num_requests):
            self._progress(self.num_ended)
        if self._ended is not None:
            self._ended(record)
