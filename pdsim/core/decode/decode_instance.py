"""Life of a request in a decode instance.

state         meaning                                                  left by
queued        NewRequest came                                          next_step: prefix matched, locked; pages granted
transferring  pages reserved, KV on its way                            on_message(KvArrived), seen by the next next_step
ready         KV complete                                              next_step -> FirstToken; the prompt is cached
running       one token per step                                       next_step -> DecodeStep, on_step_done
retracted     lost its pages, its KV is in host memory                 next_step: ready again when its pages fit
gone          prompt and output are cached                             -> Finished

Queued and retracted requests: admission_queue.py. If a request fails before its KV has arrived (Cancel, KvLost,
PeerDown of its prefill instance, a timeout), Releases keeps its pages while a sender may still write into them.
"""

from collections.abc import Collection
from itertools import islice

from pdsim.core import messages as m
from pdsim.core.deadlines import Deadlines
from pdsim.core.decode.admission_queue import AdmissionQueue, DecodeRequest, ReadyQueue, Releases
from pdsim.core.decode.asked_outputs import AskedOutputs
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.decode.running_batch import FOREVER, DecodingInstance, RunningBatch, running_batch
from pdsim.core.instance import LACKS, Levels
from pdsim.core.memory.host_cache import HostCache
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.messages import receiver_of
from pdsim.core.transfer.kv_returns import KvGiver, Returning
from pdsim.policy.protocols import AdmissionPolicy, PreemptionPolicy

_WAIT = m.Wait()


class DecodeInstance(DecodingInstance[DecodeRequest]):
    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: DecodeLimits,
        admission_policy: AdmissionPolicy,
        preemption_policy: PreemptionPolicy,
        staged: bool = False,
        giver: KvGiver | None = None,
    ) -> None:
        """staged: KV arrives through a staging ring. giver: sends KV back to prefill; None: no KV returns."""
        self.instance_id = instance_id
        self.max_steps_in_flight = 1
        self.cache = cache
        self.limits = limits
        self.page_size = cache.page_size
        self.now_ns = 0
        self.batch: RunningBatch[DecodeRequest] = running_batch(cache, limits.drafts, limits.wave_requests)
        self.batch.sorts_at_retraction = limits.rules.sorts_at_retraction
        self.queue = AdmissionQueue(
            instance_id, cache, admission_policy, limits.rules, grants_computed_only=limits.grants_computed_only
        )
        self.transferring: dict[int, DecodeRequest] = {}
        self.ready = ReadyQueue(keeps_ranks=limits.rules.keeps_ranks)
        self._max_transferring = limits.max_transferring
        self._arrived: set[int] = set()
        """Requests in `transferring` whose KV has arrived in its pages. next_step handles them."""
        self._loading: set[int] = set()
        """Requests whose cached KV is being loaded from host memory."""
        self._asked: AskedOutputs[DecodeRequest] = AskedOutputs(instance_id, self.batch, cache)
        self._giver = giver
        self._scattered: list[m.CellScattered] = []
        self._releases = Releases(instance_id, cache, timeout_ns=limits.release_timeout_ns, staged=staged)
        self._times_out = limits.waiting_timeout_ns is not None
        self._ungiven = Deadlines(instance_id, limits.waiting_timeout_ns, "waiting_timeout")
        self._preemption_policy = preemption_policy

    # What admission and preemption policies see.

    @property
    def num_active(self) -> int:
        num_in_batch, num_unseen = self.batch.num_requests + len(self.batch.ended), len(self._releases.unseen)
        return num_in_batch + len(self.transferring) + len(self.ready.requests) + num_unseen

    @property
    def active(self) -> list[DecodeRequest]:
        return [*self.batch.requests(), *self.ready.requests, *self.transferring.values()]

    @property
    def retracted(self) -> Collection[DecodeRequest]:
        return self.queue.retracted.values()

    @property
    def resume_unit_tokens(self) -> int:
        return 1 if self.limits.rules.resumes_by_tokens else self.page_size

    # What a driver calls.

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        self.queue.at(now_ns)
        match message:
            case m.NewRequest():
                return self.queue.on_new_request(message)
            case m.KvArrived():
                return self._on_arrived(message)
            case m.LoadedBack():
                self._loading.discard(message.request_id)
            case m.PromptComputed():
                self.queue.on_computed(message.request_id)
            case m.CellScattered():
                self._scattered.append(message)
                return [] if message.completes is None else self._on_arrived(message.completes)
            case m.Abort():
                return self._on_abort(message)
            case m.KvLost():
                return self._on_lost(message, now_ns)
            case m.Cancel():
                return self._cancel(message, now_ns)
            case m.PutOut():
                self._asked.on_put_out(message, self.queue.retracted)
            case m.PeerDown():
                return self._on_prefill_down(message, now_ns)
            case m.PeerUp():
                self.queue.on_prefill_up(message.instance_id)
            case m.KvWanted():
                assert self._giver is not None
                return self._giver.on_wanted(message, now_ns)
            case m.KvReturned():
                assert self._giver is not None
                self._giver.release(message.request_id)
            case m.FlushCache():
                self.cache.flush()
            case m.Woken():
                pass
            case _:
                raise TypeError(f"{self.instance_id}: a decode instance does not take {message}")
        return []

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        """Updates queue and batch in the order of SGLang's loop. Returns a step or a Wait, and messages to send."""
        self.now_ns = now_ns
        commands: list[m.Command] = []
        if self._times_out:
            self._expire(now_ns, commands)
        while True:
            step = self.look(commands)
            if step is not None:
                return step, commands

    def look(self, commands: list[m.Command]) -> m.DecodeStep | m.Wait | None:
        """Runs one iteration of SGLang's loop, adds to `commands`, and returns a step or a Wait. None: call again."""
        frees_places = bool(self.batch.ended)
        ask_again_steps, changed = self._change(commands)
        self._copy(commands)
        if self._awaits_return:
            return _WAIT
        if self.batch.num_requests:
            soon = changed and bool(self.queue.queued or self.queue.retracted)
            soon |= bool(self.ready.requests) and (frees_places or self.batch.num_requests < self._num_places)
            return self.batch.step(1 if soon or self.batch.num_aborted else ask_again_steps)
        return None if changed else _WAIT

    def _change(self, commands: list[m.Command]) -> tuple[int, bool]:
        """Updates queue and batch. Returns (steps until the next update, True if batch or number of slots changed)."""
        has_unseen = bool(self._releases.unseen)
        ask_again_steps = self._take_in(commands)
        changed = has_unseen and not self._releases.unseen
        changed |= bool(self.ready.requests) and self._merge(commands)
        if self.batch.ended:
            self.batch.ended, changed = [], True
        if self.batch.num_requests:
            changed |= self._make_room(commands)
        return ask_again_steps, changed

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        assert isinstance(step, m.DecodeStep)
        self.batch.advance(result)
        commands: list[m.Command] = []
        for request_id, output in result.ended:
            request = self.batch.end(request_id, output)
            if request.is_aborted:
                continue
            commands.append(m.Finished(request_id))
            if self._giver is not None and request.prefill_id != self.instance_id:  # else it was computed here
                sequence = request.prompt.then(output)
                commands.append(self._giver.offer(request_id, request.prefill_id, sequence, request.num_kv_tokens))
        for request in self.batch.take_aborted() if self.batch.num_aborted else ():
            commands += self._asked.close(request)
        return commands

    def lease(self, request_id: int) -> Lease:
        """Lease of a request that has pages. Raises KeyError if the request has no pages."""
        if self.batch.has(request_id):
            return self.batch.lease(request_id)
        ready = {request.request_id: request for request in self.ready.requests}
        return (self.transferring.get(request_id) or ready[request_id]).lease

    def holding(self) -> list[DecodeRequest | Returning]:
        """All requests that hold pages."""
        returning = [] if self._giver is None else self._giver.held.values()
        return [*self.active, *self._asked.closing.values(), *self._releases.held.values(), *returning]

    def requests(self) -> list[int]:
        """Ids of all requests of the instance, in any state."""
        held = [*self.holding(), *self.queue.requests()]
        scattered = [cell.request_id for cell in self._scattered]
        return [*(request.request_id for request in held), *scattered]

    def levels(self) -> Levels:
        return Levels(
            *self.cache.levels(),
            num_queued=len(self.queue.queued),
            num_transferring=len(self.transferring),
            num_ready=len(self.ready.requests),
            num_running=self.batch.num_requests,
            num_retracted=len(self.queue.retracted),
            blocked_by=self.queue.blocked_by if self.queue.queued else "",
        )

    def waiting_for(self) -> list[str]:
        where, have = self.instance_id, f"{self.num_available_pages} of {self.cache.pool.num_pages} pages available"
        lines = [
            f"{where}: request {r.request_id} ({r.num_prompt_tokens} tokens) waits for admission, {have}"
            for r in self.queue.queued
        ]
        lines += [f"{where}: request {i} waits for prefill to compute it" for i in self.queue.uncomputed]
        lines += [f"{where}: request {i} waits for its KV" for i in self.transferring if i not in self._arrived]
        lines += [f"{where}: request {i} is retracted and waits for pages, {have}" for i in self.queue.retracted]
        return lines + [f"{where}: request {r.request_id} waits for a place in the batch" for r in self.ready.requests]

    # Admission.

    def _take_in(self, commands: list[m.Command]) -> int:
        """Resumes and admits requests. Returns after how many steps to call again, if no message comes first."""
        if self.queue.retracted:
            self._resume(commands)
            if self.queue.retracted:
                if not self.batch.num_requests and not self.ready.requests:
                    self._collect_arrived(commands)  # or it would hold its pages for ever: SGLang can lock up here
                return self.queue.ask_again_steps
        waits_steps = -self.batch.num_steps % self.limits.polling_interval_steps
        if waits_steps and self.batch.num_requests:  # an idle loop looks at queue and transfers all the time
            return waits_steps if self.queue.queued or self._arrived or self._scattered else FOREVER
        self._admit(commands)
        self._releases.unseen.clear()
        if self._arrived or self._scattered:
            self._collect_arrived(commands)
        return self.queue.ask_again_steps

    def _resume(self, commands: list[m.Command]) -> None:
        while request := self.queue.resume_next(self, self._num_slots):
            self.ready.append(request)
            if (host := self._host_of_retracted) is not None:
                host.resume(request.request_id, request.lease.table)
            elif self.limits.saves_retracted:
                self._copy(commands)
                commands.append(m.LoadKv(request.request_id, tuple(request.lease.table)))

    def _admit(self, commands: list[m.Command]) -> None:
        aborted: list[DecodeRequest] = []
        num_buffers = self._max_transferring - len(self.transferring) - len(self._releases.held)
        while request := self.queue.admit_next(self, self._num_slots, num_buffers):  # with vLLM, slots change
            num_buffers -= 1
            self.transferring[request.request_id] = request
            if request.is_aborted:  # which is seen only when all are admitted
                aborted.append(request)
                continue
            table, num_shared = request.lease.table, request.lease.num_shared
            pages = tuple(table[num_shared:] if num_shared else table)
            granted = m.KvGranted(request.request_id, num_shared * self.page_size, pages)
            self._copy(commands)
            commands.append(m.Send(request.prefill_id, granted))
            if request.lease.num_loaded:
                self._loading.add(request.request_id)
            if self._times_out:
                commands += self._ungiven.add(request.request_id, self.now_ns)
        for request in aborted:
            self.cache.drop(self.transferring.pop(request.request_id).lease)

    def _copy(self, commands: list[m.Command]) -> None:
        """Adds to `commands` the pending copies of pages to host memory, before other requests get these pages."""
        if self.cache.host is not None:
            commands += self.cache.host.take_copies()

    @property
    def _num_slots(self) -> int:
        num_slots = self.limits.max_running_requests + self.limits.extra_slots
        return num_slots + len(self.batch.ended) - len(self._releases.held) + len(self._releases.unseen)

    @property
    def _num_places(self) -> int:
        """Maximum number of running requests. Requests that have just ended still take places until the next step."""
        return self.limits.max_running_requests - len(self.batch.ended)

    # Giving up.

    def _on_abort(self, message: m.Abort) -> list[m.Command]:
        """Handles a prefill instance's Abort: the request fails, and nothing writes into its pages any more."""
        request_id, reason = message.request_id, message.reason
        if self._releases.give_back(request_id) or request_id in self._arrived or self.queue.has_aborted(request_id):
            return []
        if request := self.transferring.pop(request_id, None):
            self.cache.drop(request.lease)
        elif not self.queue.withdraw(request_id):  # refused here as well, or not here yet, or gone
            self.queue.refuse(request_id, reason)
            return []
        elif message.retryable:  # it waited here for too long
            reason += LACKS[self.queue.blocked_by]
        return [m.Failed(request_id, reason, message.retryable)]

    def _on_lost(self, lost: m.KvLost, now_ns: int) -> list[m.Command]:
        """Fails a request whose transfer was lost, and holds its pages. No effect if the request has failed already."""
        if not self._is_due(lost.request_id):
            return []
        held = self._releases.hold(self.transferring.pop(lost.request_id), now_ns)
        return [m.Failed(lost.request_id, lost.reason, retryable=True), *held]

    def _cancel(self, cancel: m.Cancel, now_ns: int) -> list[m.Command]:
        """Drops a request that the router has cancelled. The router has already told the client."""
        request_id = cancel.request_id
        if self._is_due(request_id):
            return self._releases.hold(self.transferring.pop(request_id), now_ns)
        if request_id in self.transferring:
            self._arrived.remove(request_id)
            self.cache.drop(self.transferring.pop(request_id).lease)
        elif ready := self.ready.withdraw(request_id):
            num_tokens = ready.num_prompt_tokens if self.limits.rules.runs_aborted_on else 0
            self.cache.close(ready.lease, ready.prompt, num_tokens)
        elif self.batch.has(request_id):
            stop = self.batch.abort if self.limits.rules.runs_aborted_on else self.batch.remove
            stop(request_id)
        elif self.queue.retracted.pop(request_id, None):
            if (host := self._host_of_retracted) is not None:
                host.forget(request_id)
        elif not self.queue.give_up(request_id):
            self.queue.refuse(request_id, cancel.reason)
        return []

    def _on_prefill_down(self, down: m.PeerDown, now_ns: int) -> list[m.Command]:
        """Fails requests whose KV a dead prefill instance has yet to send. New ones fail until the instance is up."""
        reason = f"{down.instance_id} was lost"
        commands = self.queue.on_prefill_down(down.instance_id, reason, has_restarted=down.has_restarted)
        due = [r for r in self.transferring.values() if r.prefill_id == down.instance_id and self._is_due(r.request_id)]
        for request in due:
            commands += self._fail(request, reason, now_ns)
        return commands if down.has_restarted else commands + self._releases.on_writer_dead(down.instance_id)

    def _fail(self, request: DecodeRequest, reason: str, now_ns: int) -> list[m.Command]:
        cancel = m.Send(request.prefill_id, m.Cancel(request.request_id, reason))
        failed = m.Failed(request.request_id, reason, retryable=True)
        return [failed, cancel, *self._releases.hold(self.transferring.pop(request.request_id), now_ns)]

    def _expire(self, now_ns: int, commands: list[m.Command]) -> None:
        for request_id in self._ungiven.expired(now_ns, commands, self._is_due):
            request = self.transferring[request_id]
            commands += self._fail(request, f"{request.prefill_id} sent no KV within {self._ungiven.limit}", now_ns)
        self._releases.expire(now_ns, commands)

    def _is_due(self, request_id: int) -> bool:
        return request_id in self.transferring and request_id not in self._arrived

    # Running.

    def _on_arrived(self, message: m.KvArrived) -> list[m.Command]:
        request = self.transferring.get(message.request_id)
        if request is not None:
            request.ends_with_first_token = message.first_token_ends
            self._arrived.add(message.request_id)
        else:  # it failed meanwhile; nothing comes behind its last unit
            self._releases.give_back(message.request_id)
        return []

    def _collect_arrived(self, commands: list[m.Command]) -> None:
        """Makes arrived requests ready, in order of admission, and frees their cells of the staging ring."""
        if self._scattered:
            commands.append(m.Tell(receiver_of(self.instance_id), m.FreeCells(tuple(self._scattered))))
            self._scattered = []
        arrived = self._arrived - self._loading
        for request_id in list(islice((i for i in self.transferring if i in arrived), len(arrived))):  # they come first
            self.ready.append(self.transferring.pop(request_id))
            self._arrived.remove(request_id)

    def _merge(self, commands: list[m.Command]) -> bool:
        """Moves ready requests into the batch, or ends them after one token. Returns True if a request left `ready`."""
        taken = self.ready.take(self._num_places - self.batch.num_requests)  # each takes a place, if it ends, too
        for request in taken:  # all are cached before one of them ends
            self._cache_arrived(request)
        for request in taken:
            self._merge_one(request, commands)
        return bool(taken)

    def _cache_arrived(self, request: DecodeRequest) -> None:
        num_tokens = request.num_prompt_tokens if request.output is None else request.num_kv_tokens
        self.cache.checkpoint(request.lease, request.sequence, num_tokens, request.num_prompt_tokens)

    def _merge_one(self, request: DecodeRequest, commands: list[m.Command]) -> None:
        if not request.num_output_tokens:
            request.num_output_tokens = 1
            commands.append(m.FirstToken(request.request_id))
            if request.ends_with_first_token or request.max_output_tokens == 1:
                self.cache.close(request.lease, request.prompt, request.num_prompt_tokens)
                commands.append(m.Finished(request.request_id))
                return
        self.batch.join(request)

    def _make_room(self, commands: list[m.Command]) -> bool:
        """Allocates pages for the next step. Returns True if requests were retracted to free pages."""
        lacked = False
        for request in self.batch.make_room(self._preemption_policy, self, keeps_last=self._is_returning):
            lacked = True
            if self.batch.num_requests:
                commands += self._retract(request)
            else:
                commands.append(m.Failed(request.request_id, self._outgrown(request)))
        return lacked

    @property
    def _is_returning(self) -> bool:
        return self._giver is not None and bool(self._giver.held)

    @property
    def _awaits_return(self) -> bool:
        """True if the only running request lacks pages that become free once KV has been sent back to prefill."""
        if not self._is_returning or self.batch.num_requests != 1:
            return False
        (request,) = self.batch.requests()
        return len(request.lease.table) * self.page_size < request.num_kv_tokens + self.batch.num_ahead_tokens

    def _retract(self, request: DecodeRequest) -> list[m.Command]:
        """Queues a retracted request, and saves its KV to host memory before other requests overwrite its pages."""
        if request.is_aborted:
            return []
        request_id, num_pages = request.request_id, -(-request.num_kv_tokens // self.page_size)
        pages = request.lease.table[:num_pages]
        host = self._host_of_retracted
        if host is not None and not host.retract(request_id, pages):
            why = f"{num_pages} pages of a retracted request do not fit the host memory of {self.instance_id}"
            return [m.Failed(request_id, why)]
        self.queue.retracted[request_id] = request
        self.ready.on_retraction(request)
        saved = [m.SaveKv(request_id, tuple(pages))] if host is None and self.limits.saves_retracted else []
        return [m.Retracted(request_id), *self._asked.ask(request), *saved]

    @property
    def _host_of_retracted(self) -> HostCache | None:
        return self.cache.host if self.limits.retracts_to_host_cache else None

    def _outgrown(self, request: DecodeRequest) -> str:
        """Error message for a request that lacks pages although it is the only request of the batch."""
        num_tokens = request.num_kv_tokens + self.batch.num_ahead_tokens
        if num_tokens > (capacity := self.cache.capacity_tokens):
            return f"{num_tokens} tokens do not fit the {capacity} tokens of {self.instance_id}"
        num_held = len({page for other in self.holding() for page in other.lease.table})
        held = f"{num_held} of {self.cache.pool.num_pages} pages of {self.instance_id}"
        return f"{num_tokens} tokens do not fit: requests that do not run hold {held}"
