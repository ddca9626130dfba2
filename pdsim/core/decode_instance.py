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
    Command,
    DecodeStep,
    Failed,
    Finished,
    FirstToken,
    KvArrived,
    KvGranted,
    Message,
    NewRequest,
    Retracted,
    Send,
    Step,
    StepResult,
    Wait,
)
from pdsim.core.pages import cut_pages
from pdsim.core.running_batch import DecodeRequest, RunningBatch
from pdsim.policy.protocols import Admitted, AdmissionPolicy, PreemptionPolicy
from pdsim.policy.views import Candidate, TokenSequence

_FOREVER = 1 << 62


@dataclass(frozen=True, kw_only=True)
class DecodeLimits:
    """What bounds a decode instance, by SGLang's names."""

    max_running_requests: int
    extra_slots: int = 0
    """Requests that may wait for their KV beyond those that may run (--disaggregation-decode-extra-slots)."""


class DecodeInstance:
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
        self.batch = RunningBatch(cache.page_size)
        self.queued: deque[DecodeRequest] = deque()
        self.transferring: dict[int, DecodeRequest] = {}
        self.ready: deque[DecodeRequest] = deque()
        self._retracted: dict[int, DecodeRequest] = {}
        self._arrived: set[int] = set()
        """Of those transferring; seen by the next next_step."""
        self._admission_policy = admission_policy
        self._preemption_policy = preemption_policy
        self._blocked_by = ""
        self._joined: list[int] = []
        self._left: list[int] = []

    # What admission and preemption policies see.

    @property
    def num_available_pages(self) -> int:
        return self.cache.num_available_pages

    @property
    def num_active(self) -> int:
        return len(self.batch) + len(self.transferring) + len(self.ready)

    @property
    def num_running_tokens(self) -> int:
        return self.batch.num_kv_tokens + len(self.batch)

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
            case KvArrived(request_id, first_token_ends):
                self.transferring[request_id].ends_with_first_token = first_token_ends
                self._arrived.add(request_id)
                return []
            case Abort(request_id, reason):
                return self._on_abort(request_id, reason)
            case _:
                raise TypeError(f"{self.instance_id}: a decode instance does not take {message}")

    def next_step(self, now_ns: int) -> tuple[Step | Wait, list[Command]]:
        """In SGLang's order: resume, admit, see arrivals, merge, make room; while anything is retracted, no new work."""
        self.now_ns = now_ns
        commands: list[Command] = []
        ask_again_steps = self._resume() if self._retracted else _FOREVER
        if not self._retracted:
            if self.queued:
                ask_again_steps = self._admit(commands)
            if self._arrived:
                self._collect_arrived()
        if self.ready:
            self._merge(commands)
        if not self.batch:
            return Wait(), commands
        self._make_room(commands)
        if not self.batch:
            return Wait(), commands
        return self._decode_step(ask_again_steps), commands

    def on_step_done(self, step: Step, result: StepResult, now_ns: int) -> list[Command]:
        assert isinstance(step, DecodeStep)
        if result.num_steps > 1:
            self._open_pages(skip_steps=1, num_steps=result.num_steps - 1)
        self.batch.advance(result.num_steps)
        return [self._finish(self.batch.leave(request_id), output) for request_id, output in result.ended]

    def levels(self) -> Levels:
        return Levels(
            *self.cache.levels(),
            num_queued=len(self.queued),
            num_transferring=len(self.transferring),
            num_running=len(self.batch),
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

    def _on_new_request(self, message: NewRequest) -> list[Command]:
        num_tokens = len(message.prompt)
        if num_tokens > (capacity := self.cache.pool.num_pages * self.page_size):
            reason = f"a prompt of {num_tokens} tokens does not fit the {capacity} tokens of {self.instance_id}"
            return [Failed(message.request_id, reason), Send(message.prefill_id, Abort(message.request_id, reason))]
        self.queued.append(
            DecodeRequest(
                message.request_id,
                message.arrival_ns,
                message.prompt,
                num_tokens,
                message.max_output_tokens,
                message.prefill_id,
            )
        )
        return []

    def _on_abort(self, request_id: int, reason: str) -> list[Command]:
        """Prefill refuses a request before it computed anything: nothing is being written into its pages."""
        if request := self.transferring.pop(request_id, None):
            self.cache.drop(request.lease)
        else:
            self.queued = deque(request for request in self.queued if request.request_id != request_id)
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
            num_cached = lease.num_pages * self.page_size
            num_new_pages = -(-request.num_prompt_tokens // self.page_size) - lease.num_pages
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
            pages = cut_pages(lease.table, num_cached // self.page_size)
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

    def _collect_arrived(self) -> None:
        """In order of admission."""
        for request_id in [i for i in self.transferring if i in self._arrived]:
            self.ready.append(self.transferring.pop(request_id))
        self._arrived.clear()

    def _merge(self, commands: list[Command]) -> None:
        num_places = self.limits.max_running_requests - len(self.batch)
        while self.ready and num_places > 0:
            request = self.ready.popleft()
            self.cache.checkpoint(request.lease, request.prompt, request.num_prompt_tokens)
            if not request.num_output_tokens:
                request.num_output_tokens = 1
                commands.append(FirstToken(request.request_id))
                if request.ends_with_first_token or request.max_output_tokens == 1:
                    commands.append(self._finish(request, None))
                    continue
            self.batch.join(request)
            self._joined.append(request.request_id)
            num_places -= 1

    def _make_room(self, commands: list[Command]) -> None:
        """Open the pages of the next step; take them from the others if there are too few."""
        while self.batch.num_pages_due() > self.num_available_pages:
            if len(self.batch) == 1:
                (request,) = self.batch.requests()
                self._remove(request.request_id)
                capacity = self.cache.pool.num_pages * self.page_size
                reason = f"{request.num_kv_tokens + 1} tokens do not fit the {capacity} tokens of {self.instance_id}"
                commands.append(Failed(request.request_id, reason))
            else:
                request_id = self._preemption_policy.victim(self)
                self._retracted[request_id] = self._remove(request_id)
                commands.append(Retracted(request_id))
        self._open_pages(skip_steps=0, num_steps=1)

    def _remove(self, request_id: int) -> DecodeRequest:
        request = self.batch.leave(request_id)
        self.cache.drop(request.lease)
        if request_id in self._joined:
            self._joined.remove(request_id)
        else:
            self._left.append(request_id)
        return request

    def _decode_step(self, ask_again_steps: int) -> DecodeStep:
        """In page_size steps each request opens one page: that says how long the pages last."""
        num_requests = len(self.batch)
        max_steps = 1 + self.page_size * (self.num_available_pages // num_requests)
        step = DecodeStep(
            self.batch.num_steps,
            tuple(self._joined),
            tuple(self._left),
            num_requests,
            self.batch.num_kv_tokens + num_requests,
            min(max_steps, ask_again_steps),
        )
        if self._joined or self._left:
            self._joined, self._left = [], []
        return step

    def _open_pages(self, *, skip_steps: int, num_steps: int) -> None:
        order = self.batch.due(skip_steps, min(num_steps, self.page_size))
        if not order:
            return
        num_rounds, rest = divmod(num_steps, self.page_size)
        num_pages = num_rounds * len(order) + len(self.batch.due(skip_steps, rest)) if num_rounds else len(order)
        self.cache.grow_all([request.lease for request in order], num_pages)

    def _finish(self, request: DecodeRequest, output: TokenSequence | None) -> Finished:
        """Cache prompt and output; the last token has no KV."""
        if output is None or self.cache.prefix_cache is None:
            self.cache.close(request.lease, request.prompt, request.num_prompt_tokens)
        else:
            self.cache.close(request.lease, request.prompt.then(output), request.num_kv_tokens)
        return Finished(request.request_id)
