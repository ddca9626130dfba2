"""Drive vLLM's Scheduler with pipeline stages: its engine's own step_with_batch_queue, beside a clock in place of GPUs.

Each batch takes STAGE_NS in every stage, and stages compute different batches at the same time. An empty batch takes no
time, but its result does not come before the result of an earlier batch.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from draws import STAGE_NS, Load, arrival_ns
from record import Bench


class _Due(Future[Any]):
    """A result that comes at a time: who asks for the result waits."""

    def __init__(self, clock: "StagedBench", due_ns: int, value: Any) -> None:
        super().__init__()
        self._clock, self._due_ns, self._value = clock, due_ns, value

    def result(self, timeout: float | None = None) -> Any:
        self._clock.now_ns = max(self._clock.now_ns, self._due_ns)
        return self._value


class StagedBench(Bench):
    """The engine's loop, without its queues to clients."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.now_ns = 0
        self._free_ns = [0] * load.settings.num_stages
        self._last_ns = 0
        self._sampled_ns = deque([0] * load.settings.num_stages)
        """When the tokens of the last choices have been sampled; 0: there are none. A batch waits for the tokens of the
        choice that lies as many choices back as there are stages (v1/worker/gpu/pp_utils.py)."""
        self._rows: list[dict[str, Any]] = []
        arrivals = [(arrival_ns(i, one.at_step), i, True) for i, one in enumerate(load.requests)]
        aborts = [(i, one.abort_at_step) for i, one in enumerate(load.requests) if one.abort_at_step is not None]
        self._events = sorted([*arrivals, *((arrival_ns(i, at_step), i, False) for i, at_step in aborts)])

    def run(self) -> Iterator[dict[str, Any]]:
        """A row for each batch that computes anything."""
        from vllm.v1.engine.core import EngineCore

        size = self.load.settings.num_stages + 1
        engine = SimpleNamespace(
            batch_queue=deque(maxlen=size),
            batch_queue_size=size,
            scheduler=self.scheduler,
            model_executor=self,
            is_mm_encoder_only=False,
            is_pooling_model=False,
            check_for_draft_tokens=False,
            log_error_detail=lambda _: nullcontext(),
            capture_iteration_details=lambda _: nullcontext(),
            _should_throttle_prefills=lambda: False,
            _process_aborts_queue=self._tell_aborts,
            _attach_iteration_details=lambda *_: None,
            _attach_weight_version=lambda _: None,
        )
        while True:
            self._tell()
            if self.scheduler.has_requests() or engine.batch_queue:
                EngineCore.step_with_batch_queue(engine)
            elif self._events:
                self.now_ns = self._events[0][0]
            else:
                break
            yield from self._rows
            self._rows = []

    def _tell(self) -> None:
        """Tells the scheduler of all requests and aborts until now, in order."""
        while self._events and self._events[0][0] <= self.now_ns:
            _, i, is_new = self._events.pop(0)
            if is_new:
                self.scheduler.add_request(self._request(i))
            else:
                self._abort(i)

    def _tell_aborts(self) -> None:
        """Tells the scheduler of aborts only, as the engine does before it handles a result."""
        for at_ns, i, is_new in self._events:
            if at_ns <= self.now_ns and not is_new:
                self._abort(i)

    def _abort(self, i: int) -> None:
        from vllm.v1.request import RequestStatus

        if self._is_live(i):
            self.scheduler.finish_requests([str(i)], RequestStatus.FINISHED_ABORTED)

    # What the engine asks of its executor.

    def execute_model(self, said: Any, *, non_block: bool) -> Future[Any]:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        begin_ns = max(self.now_ns, self._sampled_ns.popleft())
        self._sampled_ns.append(0)
        if said.total_num_scheduled_tokens:
            for stage, free_ns in enumerate(self._free_ns):
                self._free_ns[stage] = begin_ns = max(begin_ns, free_ns) + STAGE_NS
            self._last_ns = begin_ns
            if self._note(said):
                self._sampled_ns[-1] = begin_ns
        return _Due(self, self._last_ns, EMPTY_MODEL_RUNNER_OUTPUT)

    def sample_tokens(self, _: Any, *, non_block: bool) -> Future[Any]:
        return _Due(self, self._last_ns, self._output)

    def _note(self, said: Any) -> bool:
        """Notes what a batch computes. Returns True if tokens are sampled."""
        from vllm.v1.outputs import ModelRunnerOutput

        requests, sampled, computed = self.scheduler.requests, [], []
        for name, num_tokens in said.num_scheduled_tokens.items():
            request, i = requests[name], int(name)
            done, output = request.num_computed_tokens, self.load.requests[i].output
            computed.append([i, done - num_tokens, num_tokens])
            sampled.append([] if request.is_prefill_chunk else [output[done - request.num_prompt_tokens]])
        index = {name: place for place, name in enumerate(said.num_scheduled_tokens)}
        self._output = ModelRunnerOutput([*index], index, sampled)
        preempted = sorted(map(int, said.preempted_req_ids or ()))
        self._rows.append({"at": self.now_ns, "computed": sorted(computed), "preempted": preempted})
        return any(sampled)
