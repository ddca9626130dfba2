"""Life of a request in a decode instance.

queued        NewRequest came                                          next_step: matched, locked, granted pages
transferring  pages reserved, KV on its way                            on_message(KvArrived), seen by the next next_step
ready         KV complete                                              next_step -> FirstToken; the prompt is cached
running       one token per step                                       next_step -> DecodeStep, on_step_done
retracted     gave its pages back, its KV is in host memory            next_step: ready again when its pages fit
gone          prompt and output are cached                             -> Finished
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from pdsim.core.instance import Levels, PolicyError
from pdsim.core.kv_cache import KvCache
from pdsim.core.messages import (
    Abort,
    CellScattered,
    Command,
    DecodeStep,
    Failed,
    Finished,
    FirstToken,
    FreeCells,
    KvArrived,
    KvGranted,
    Message,
    NewRequest,
    Retracted,
    Send,
    Step,
    StepResult,
    Tell,
    Wait,
)
from pdsim.core.names import receiver_of
from pdsim.core.running_batch import RunningBatch, RunningRequest
from pdsim.policy.protocols import AdmissionPolicy, Admitted, PreemptionPolicy
from pdsim.policy.views import Candidate

_FOREVER = 1 << 62
_WAIT = Wait()


@dataclass(frozen=True, kw_only=True)
class DecodeLimits:
    """What bounds a decode instance, by SGLang's names."""

    max_running_requests: int
    extra_slots: int = 0
    """Requests that may wait for their KV beyond those that may run (--disaggregation-decode-extra-slots)."""


@dataclass(slots=True, kw_only=True)
class DecodeRequest(RunningRequest):
    prefill_id: str
    ends_with_first_token: bool = False


class DecodeInstance:
    max_steps_in_flight = 1

    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: DecodeLimits,
        admission_policy: AdmissionPolicy,
        preemption_policy: PreemptionPolicy,
    ) -> None:
        self.instance_id = instance_id
        self.cache = cache
        self.limits = limits
        self.page_size = cache.page_size
        self.now_ns = 0
        self.batch: RunningBatch[DecodeRequest] = RunningBatch(cache)
        self.queued: deque[DecodeRequest] = deque()
        self.transferring: dict[int, DecodeRequest] = {}
        self.ready: deque[DecodeRequest] = deque()
        self._retracted: dict[int, DecodeRequest] = {}
        self._refused: dict[int, str] = {}
        """Requests that one side will not serve, and why."""
        self._arrived: set[int] = set()
        """Of those transferring; seen by the next next_step, as are the cells of the staging ring."""
        self._scattered: list[CellScattered] = []
        self._admission_policy = admission_policy
        self._preemption_policy = preemption_policy
        self._blocked_by = ""

    # What admission and preemption policies see.

    @property
    def num_available_pages(self) -> int:
        return self.cache.num_available_pages

    @property
    def num_active(self) -> int:
        return self.batch.num_requests + len(self.transferring) + len(self.ready)

    @property
    def num_running_tokens(self) -> int:
        return self.batch.num_kv_tokens + self.batch.num_requests

    @property
    def running(self) -> list[DecodeRequest]:
        return self.batch.requests()

    @property
    def active(self) -> list[DecodeRequest]:
        return [*self.batch.requests(), *self.ready, *self.transferring.values()]

    @property
    def retracted(self) -> Collection[DecodeRequest]:
        return self._retracted.values()

    # What a driver calls.

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        match message:
            case NewRequest():
                return self._on_new_request(message)
            case KvArrived():
                return self._on_arrived(message)
            case CellScattered():
                self._scattered.append(message)
                return [] if message.completes is None else self._on_arrived(message.completes)
            case Abort():
                return self._on_abort(message.request_id, message.reason)
            case _:
                raise TypeError(f"{self.instance_id}: a decode instance does not take {message}")

    def next_step(self, now_ns: int) -> tuple[Step | Wait, list[Command]]:
        """In SGLang's order: resume, admit, see arrivals, merge, make room; while any is retracted, no new work."""
        self.now_ns = now_ns
        commands: list[Command] = []
        while True:
            ask_again_steps = self._take_in(commands)
            changed = bool(self.ready) and self._merge(commands)
            if self.batch.num_requests:
                changed |= self._make_room(commands)
            if self.batch.num_requests:
                waits = changed and (self.queued or self._retracted)
                return self.batch.step(1 if waits else ask_again_steps), commands
            if not changed:
                return _WAIT, commands

    def on_step_done(self, step: Step, result: StepResult, now_ns: int) -> list[Command]:
        assert isinstance(step, DecodeStep)
        self.batch.advance(result.num_steps)
        for request_id, output in result.ended:
            self.batch.end(request_id, output)
        return [Finished(request_id) for request_id, _ in result.ended]

    def holding(self) -> list[DecodeRequest]:
        """Requests that hold pages."""
        return self.active

    def levels(self) -> Levels:
        return Levels(
            *self.cache.levels(),
            num_queued=len(self.queued),
            num_transferring=len(self.transferring),
            num_ready=len(self.ready),
            num_running=self.batch.num_requests,
            num_retracted=len(self._retracted),
            blocked_by=self._blocked_by if self.queued else "",
        )

    def waiting_for(self) -> list[str]:
        where, have = self.instance_id, f"{self.num_available_pages} of {self.cache.pool.num_pages} pages available"
        lines = [
            f"{where}: request {r.request_id} ({r.num_prompt_tokens} tokens) waits for admission, {have}"
            for r in self.queued
        ]
        lines += [f"{where}: request {i} waits for its KV" for i in self.transferring if i not in self._arrived]
        lines += [f"{where}: request {i} is retracted and waits for pages, {have}" for i in self._retracted]
        return lines + [f"{where}: request {r.request_id} waits for a place in the batch" for r in self.ready]

    # Admission.

    def _take_in(self, commands: list[Command]) -> int:
        """Returns after how many steps, if nothing else happens, to try again."""
        if self._retracted:
            ask_again_steps = self._resume()
            if self._retracted:
                if not self.batch.num_requests and not self.ready:
                    self._collect_arrived(commands)  # or it would hold its pages for ever: SGLang can lock up here
                return ask_again_steps
        if self._arrived or self._scattered:
            ask_again_steps = self._admit(commands)
            self._collect_arrived(commands)
            return ask_again_steps
        return self._admit(commands)

    def _on_new_request(self, message: NewRequest) -> list[Command]:
        if (reason := self._refused.get(message.request_id)) is not None:
            return [Failed(message.request_id, reason)]
        num_tokens = len(message.prompt)
        if num_tokens > (capacity := self.cache.pool.num_pages * self.page_size):
            reason = f"a prompt of {num_tokens} tokens does not fit the {capacity} tokens of {self.instance_id}"
            self._refused[message.request_id] = reason
            return [Failed(message.request_id, reason), Send(message.prefill_id, Abort(message.request_id, reason))]
        self.queued.append(
            DecodeRequest(
                message.request_id,
                message.arrival_ns,
                message.prompt,
                num_tokens,
                message.max_output_tokens,
                prefill_id=message.prefill_id,
            )
        )
        return []

    def _on_arrived(self, message: KvArrived) -> list[Command]:
        self.transferring[message.request_id].ends_with_first_token = message.first_token_ends
        self._arrived.add(message.request_id)
        return []

    def _on_abort(self, request_id: int, reason: str) -> list[Command]:
        """Prefill refuses a request before it computed anything: nothing is being written into its pages."""
        if request := self.transferring.pop(request_id, None):
            self.cache.drop(request.lease)
        elif request := next((r for r in self.queued if r.request_id == request_id), None):
            self.queued.remove(request)
        else:  # refused here as well, or not here yet
            self._refused.setdefault(request_id, reason)
            return []
        return [Failed(request_id, reason)]

    def _admit(self, commands: list[Command]) -> int:
        """First come first served, up to the first that does not fit. Returns in how many steps to try again."""
        num_slots = self.limits.max_running_requests + self.limits.extra_slots
        self._blocked_by = ""
        while self.queued:
            if self.num_active >= num_slots:
                self._blocked_by = "slots"
                break
            request = self.queued[0]
            lease = self.cache.open(request.prompt, request.num_prompt_tokens)
            num_cached = lease.num_shared * self.page_size
            num_new_pages = -(-request.num_prompt_tokens // self.page_size) - lease.num_shared
            answer = self._admission_policy.admit(
                Candidate(request, request.num_prompt_tokens, num_cached, num_new_pages), self
            )
            if not isinstance(answer, Admitted):
                self.cache.drop(lease)
                self._blocked_by = "pages"
                return answer.ask_again_steps or _FOREVER
            self._check_admitted(request, num_new_pages)
            self.cache.grow(lease, num_new_pages)
            request.lease = lease
            self.transferring[request.request_id] = self.queued.popleft()
            pages = tuple(lease.table[lease.num_shared :])
            commands.append(Send(request.prefill_id, KvGranted(request.request_id, num_cached, pages)))
        return _FOREVER

    def _resume(self) -> int:
        """Retracted requests come back first, whole: they are not matched against the prefix cache again."""
        num_slots = self.limits.max_running_requests + self.limits.extra_slots
        while self._retracted and self.num_active < num_slots:
            request = next(iter(self._retracted.values()))
            num_pages = -(-request.num_kv_tokens // self.page_size)
            answer = self._admission_policy.admit(
                Candidate(request, request.num_kv_tokens, 0, num_pages, resumes=True), self
            )
            if not isinstance(answer, Admitted):
                return answer.ask_again_steps or _FOREVER
            self._check_admitted(request, num_pages)
            request.lease = self.cache.open(request.prompt, 0)
            self.cache.grow(request.lease, num_pages)
            del self._retracted[request.request_id]
            self.ready.append(request)
        return _FOREVER

    def _check_admitted(self, request: DecodeRequest, num_new_pages: int) -> None:
        if num_new_pages > self.num_available_pages:
            raise PolicyError(
                f"{self._admission_policy}: admitted request {request.request_id}, which needs {num_new_pages} pages; "
                f"{self.num_available_pages} are available on {self.instance_id}"
            )

    # Running.

    def _collect_arrived(self, commands: list[Command]) -> None:
        """In order of admission. Spans of the staging ring come back only now."""
        if self._scattered:
            commands.append(Tell(receiver_of(self.instance_id), FreeCells(tuple(self._scattered))))
            self._scattered = []
        for request_id in [i for i in self.transferring if i in self._arrived]:
            self.ready.append(self.transferring.pop(request_id))
        self._arrived.clear()

    def _merge(self, commands: list[Command]) -> bool:
        """Fill the batch. Whether pages came free or prompts were cached: the head of the queue may fit now."""
        merged = False
        while self.ready and self.batch.num_requests < self.limits.max_running_requests:
            request = self.ready.popleft()
            self.cache.checkpoint(request.lease, request.prompt, request.num_prompt_tokens)
            merged = True
            if not request.num_output_tokens:
                request.num_output_tokens = 1
                commands.append(FirstToken(request.request_id))
                if request.ends_with_first_token or request.max_output_tokens == 1:
                    self.cache.close(request.lease, request.prompt, request.num_prompt_tokens)
                    commands.append(Finished(request.request_id))
                    continue
            self.batch.join(request)
        return merged

    def _make_room(self, commands: list[Command]) -> bool:
        """Open the pages of the next step; take them from others if there are too few. Whether it came to that."""
        lacked = False
        for request in self.batch.make_room(self._preemption_policy, self):
            lacked = True
            if self.batch.num_requests:
                self._retracted[request.request_id] = request
                commands.append(Retracted(request.request_id))
            else:
                capacity = self.cache.pool.num_pages * self.page_size
                reason = f"{request.num_kv_tokens + 1} tokens do not fit the {capacity} tokens of {self.instance_id}"
                commands.append(Failed(request.request_id, reason))
        return lacked
