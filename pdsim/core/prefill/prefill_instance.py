"""Life of a request in a prefill instance.

state          meaning                                                left by
bootstrapping  NewRequest came; decode has not granted pages yet      on_message(KvGranted), or optimistic: at once
granted        decode waits for its KV                                next_step, when a slot for its first token is free
waiting        the prompt waits until the policy picks it             next_step -> PrefillStep
begun          chunks are computed; one prompt may be incomplete      next_step, on_step_done -> TransferUnit per chunk
parked         computed before decode has granted pages               -> PromptComputed, on_message(KvGranted)
sending        computed; pages and slot stay held                     on_message(KvSent), seen by the next next_step
gone           its whole pages stay in the prefix cache               -> PrefillDone

Late, early and missing grants: bootstrap_queue.py. A request may be given up: Cancel, Abort, PeerDown of its decode
instance, or no grant in time. A request that no forward has taken is dropped at once. Other requests are dropped when
their present forward and transfer end.

Optimistic prompts begin before decode has granted pages. They give their pages and slots to granted prompts: partly
computed prompts at the end of a chunk, parked prompts if no other request can proceed. Their KV stays cached (SGLang
0.5.23, disaggregation/prefill.py:586).
"""

from bisect import insort
from operator import attrgetter

from pdsim.core import messages as m
from pdsim.core.fixed_outputs import INITIAL_RATIO, SimulatedEnds
from pdsim.core.instance import Levels
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.messages import sender_of
from pdsim.core.prefill.bootstrap_queue import BootstrapQueue
from pdsim.core.prefill.chunk_sizer import ChunkSizer
from pdsim.core.prefill.forward_builder import Forward, ForwardBuilder
from pdsim.core.prefill.prefill_limits import PrefillLimits
from pdsim.core.transfer.kv_returns import KvTaker, Returning
from pdsim.core.transfer.send_planner import PrefillRequest, SendPlanner
from pdsim.policy.protocols import PrefillPolicy

_WAIT = m.Wait()
_ARRIVAL = attrgetter("arrival_ns", "request_id")


class PrefillInstance:
    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: PrefillLimits,
        policy: PrefillPolicy,
        planner: SendPlanner,
        taker: KvTaker | None = None,
        sizer: ChunkSizer | None = None,
    ) -> None:
        """taker: receives KV that decode sends back; None: decode sends none. sizer: determines the size of each chunk
        of a long prompt after its first chunk; None: each chunk may fill a forward.
        """
        self.instance_id = instance_id
        self.cache = cache
        self.limits = limits
        self.page_size = cache.page_size
        self.max_steps_in_flight = limits.max_steps_in_flight
        self.granted: list[PrefillRequest] = []
        """Requests that have a grant, or are optimistic, and wait for a slot for their first token, by arrival."""
        self.sending: dict[int, PrefillRequest] = {}
        by_layer = limits.overlap and planner.sends_layers  # from pages that a cached chunk may give up
        self._builder: ForwardBuilder[PrefillRequest] = ForwardBuilder(
            cache=cache,
            policy=policy,
            chunk_tokens=limits.chunked_prefill_tokens,
            max_prefill_tokens=limits.max_prefill_tokens,
            max_requests=limits.prefill_max_requests,
            sizer=sizer,
            rules=limits.rules,
            allows_fixed=self._allows_fixed,
            shares_late=not (limits.rules.computes_aborted_prompts or limits.num_stages > 1 or by_layer),
        )
        self._ends = SimulatedEnds((), INITIAL_RATIO)  # of the prompts of the forward that is being filled
        self._bootstrap = BootstrapQueue(instance_id, timeout_ns=limits.bootstrap_timeout_ns)
        self._set_aside: dict[int, PrefillRequest] = {}
        """Optimistic requests that gave up their slot and pages, and now wait for their grant."""
        self._down: set[str] = set()
        """Decode instances that are down."""
        self._sent: list[int] = []
        self._planner = planner
        self._unwritten: list[m.Command] = []  # cached prefixes that the forward under way still computes
        self._taker = taker
        self._max_prompts_begun = max(1, limits.max_running_requests // limits.num_stages)
        """Maximum number of prompts that one forward may begin (SGLang's pp_max_micro_batch_size)."""
        self._max_first_tokens = limits.max_first_tokens
        self._num_steps = 0
        self._blocked_by = ""

    @property
    def num_available_pages(self) -> int:
        return self.cache.num_available_pages

    @property
    def num_slots_sending(self) -> int:
        """Number of slots held by requests in `sending`: computed or given up, with a transfer that has not ended."""
        return len(self.sending)

    # What a driver calls.

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        refused = self._bootstrap.refused
        refused.now_ns = now_ns
        if refused.kept:
            refused.forget()
        match message:
            case m.NewRequest():
                return self._on_new_request(message, now_ns)
            case m.KvGranted():
                if request := self._bootstrap.ungranted.pop(message.request_id, None):
                    return self._grant(request, message, now_ns)
                return self._bootstrap.keep(message, now_ns)
            case m.KvSent():
                self._sent.append(message.request_id)
            case m.Abort():
                return self._on_abort(message.request_id)
            case m.Cancel():
                return self._give_up(message.request_id)
            case m.PeerDown():
                return self._on_decode_down(message)
            case m.PeerUp():
                self._down.discard(message.instance_id)
            case m.KvOffered():
                assert self._taker is not None
                return [self._taker.on_offered(message)]
            case m.KvReturned():
                assert self._taker is not None
                self._taker.on_returned(message.request_id)
            case m.FlushCache():
                self.cache.flush()
            case m.Prefetched():
                assert self.cache.prefetcher is not None
                self.cache.prefetcher.on_prefetched(message)
            case m.Woken():
                pass
            case _:
                raise TypeError(f"{self.instance_id}: a prefill instance does not take {message}")
        return []

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        step, commands = self._next_step(now_ns)
        if self.cache.host is not None:
            commands = [*self.cache.host.take_copies(), *commands]
        return step, commands

    def _next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        commands = self._release_sent() if self._sent else []
        if self.limits.bootstrap_timeout_ns is not None:
            commands += self._expire(now_ns)
        self._blocked_by = ""
        if not self.granted and not self._builder.has_work:
            return _WAIT, commands
        self._stop_optimistic_chunks()
        if self.granted:
            self._enqueue_granted()
        forward = self._fill(now_ns)
        while not forward.chunks and forward.blocked_by and (parked := self._in_the_way()) is not None:
            self._give_way(self.sending.pop(parked), again=False)
            self._enqueue_granted()
            forward = self._fill(now_ns)
        self._blocked_by = forward.blocked_by or self._blocked_by
        if not forward.chunks:
            return (_WAIT if forward.hold_until_ns is None else m.Wait(forward.hold_until_ns)), commands
        self._num_steps += 1
        step = m.PrefillStep(self._num_steps, tuple(forward.chunks), media=tuple(forward.media))
        for chunk in step.chunks:
            request = self._builder.begun[chunk.request_id]
            if request.is_granted and not request.given_up:
                if chunk.num_context_tokens == request.num_cached_tokens:
                    commands += self._begin_sending(request, now_ns)
                commands += self._planner.with_chunk(request, chunk, step.step_id, now_ns)
        return step, commands

    def _begin_sending(self, request: PrefillRequest, now_ns: int) -> list[m.Command]:
        """Asks for room in the decode rank's staging ring, and sends the cached prefix unless a forward under way still
        computes it.
        """
        asked, cached = self._planner.ask_staging(request), self._planner.with_cached(request, now_ns)
        if cached and self._builder.reads_unwritten(request):
            self._unwritten, cached = self._unwritten + cached, []
        return asked + cached

    def _fill(self, now_ns: int) -> Forward:
        if not self._builder.has_work:
            return Forward(blocked_by=self._blocked_by)
        self._ends = SimulatedEnds((), INITIAL_RATIO)
        num_slots = self.limits.max_running_requests - len(self._builder.begun) - self.num_slots_sending
        return self._builder.fill(now_ns, min(num_slots, self._max_prompts_begun))

    def _allows_fixed(self, request: PrefillRequest, begun: list[PrefillRequest], num_free_tokens: int) -> bool:
        return self._ends.allow(request, begun, num_free_tokens)

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        assert isinstance(step, m.PrefillStep)
        ended = {request_id for request_id, _ in result.ended}
        commands, self._unwritten = self._unwritten, []
        for chunk in step.chunks:
            request = self._builder.complete(chunk)
            if request.given_up:
                if chunk.is_last or not self.limits.rules.computes_aborted_prompts:
                    commands += self._stop_sending(request)
                continue
            if request.gives_way:
                self._builder.begun.pop(request.request_id)
                self._give_way(request, again=True)
                continue
            if chunk.is_last:
                self.sending[chunk.request_id] = request
            if request.is_granted:
                commands += self._planner.after_chunk(request, chunk.is_last, chunk.request_id in ended, now_ns)
            elif chunk.is_last:
                request.ends_with_first_token = chunk.request_id in ended
                commands.append(m.Send(request.decode_id, m.PromptComputed(request.request_id)))
        return commands

    def lease(self, request_id: int) -> Lease:
        """Lease of a prompt that is begun or being sent. Raises KeyError if the prompt has no pages."""
        return (self._builder.begun.get(request_id) or self.sending[request_id]).lease

    def requests(self) -> list[int]:
        """Ids of all requests of the instance, in any state, and of requests whose grant came before NewRequest."""
        queued = [*self._bootstrap.bootstrapping, *self.granted, *self._builder.unbegun]
        held = [*self._builder.begun, *self.sending, *self._set_aside]
        return [*(request.request_id for request in queued), *self._bootstrap.early, *held]

    def holding(self) -> list[PrefillRequest | Returning]:
        """All requests that hold pages, and KV that decode sends back into pages (Returning)."""
        taking = [] if self._taker is None else self._taker.held.values()
        return [*self._builder.begun.values(), *self.sending.values(), *taking]

    def levels(self) -> Levels:
        num_queued = len(self.granted) + self._builder.num_unbegun
        return Levels(
            *self.cache.levels(),
            num_queued=num_queued,
            num_transferring=len(self.sending),
            num_running=len(self._builder.begun),
            blocked_by=self._blocked_by if num_queued else "",
        )

    def waiting_for(self) -> list[str]:
        where = self.instance_id
        bootstrapping = [request.request_id for request in self._bootstrap.bootstrapping]
        parked = [i for i in self.sending if i in self._bootstrap.ungranted]
        ungranted = [*bootstrapping, *self._set_aside, *parked]
        lines = [f"{where}: request {i} waits for decode to grant pages" for i in ungranted]
        lines += [f"{where}: request {r.request_id} waits for a first-token slot" for r in self.granted]
        for r in self._builder.unbegun:
            have = f"{self.num_available_pages} of {self.cache.pool.num_pages} pages available"
            lines.append(f"{where}: request {r.request_id} ({r.num_prompt_tokens} tokens) waits for its turn, {have}")
        sending = [i for i in self.sending if i not in parked]
        return lines + [f"{where}: request {i} waits for its transfer to end" for i in sending]

    # Arriving and leaving.

    def _on_new_request(self, new: m.NewRequest, now_ns: int) -> list[m.Command]:
        if new.request_id in self._bootstrap.refused.kept or new.decode_id in self._down:
            return []
        num_tokens = len(new.prompt)
        if num_tokens + 1 + self.page_size + self._builder.spare_tokens > (capacity := self.cache.capacity_tokens):
            reason = f"a prompt of {num_tokens} tokens does not fit the {capacity} tokens of {self.instance_id}"
            self._bootstrap.refuse(new.request_id)
            return [m.Send(new.decode_id, m.Abort(new.request_id, reason))]
        request = PrefillRequest(
            new.request_id,
            new.arrival_ns,
            new.prompt,
            num_tokens,
            new.priority,
            media=new.media,
            encode_ids=new.encode_ids,
            decode_id=new.decode_id,
            has_fixed_output=new.ignores_eos,
        )
        self.cache.prefetch(request.request_id, request.prompt, now_ns)
        if early := self._bootstrap.early.pop(request.request_id, None):
            return self._grant(request, early, now_ns)
        if self.limits.optimistic_attempts:
            request.num_attempts = 1
            insort(self.granted, request, key=_ARRIVAL)
        self._bootstrap.ungranted[request.request_id] = request
        return [] if self.limits.bootstrap_timeout_ns is None else self._bootstrap.watch(request.request_id, now_ns)

    def _grant(self, request: PrefillRequest, grant: m.KvGranted, now_ns: int) -> list[m.Command]:
        """Handles decode's grant of pages. With optimistic attempts (PrefillLimits.optimistic_attempts), prefill may
        have begun or computed the prompt already.
        """
        cursor = self._planner.cursor(grant)
        if cursor is None:
            reason = f"the request's KV does not fit the staging ring of {request.decode_id}"
            return [m.Send(request.decode_id, m.Abort(request.request_id, reason)), *self._give_up_ungranted(request)]
        request.cursor = cursor
        if request.request_id in self._set_aside or not request.is_optimistic:
            self._set_aside.pop(request.request_id, None)
            insort(self.granted, request, key=_ARRIVAL)
        is_begun = request.num_scheduled_tokens and not request.gives_way
        commands = self._planner.ask_staging(request) if is_begun else []
        if request.request_id in self.sending:
            commands += self._planner.after_chunk(request, True, request.ends_with_first_token, now_ns)
        return commands

    def _enqueue_granted(self) -> None:
        """Moves requests from `granted` into the queue of prompts, by arrival. `granted` has requests to which decode
        has granted pages, and requests that may begin before their grant (optimistic prefill).

        Each begun prompt needs a slot for its first token, so as many requests move as slots are free.
        """
        held = self._builder.num_unbegun + len(self._builder.begun) + self.num_slots_sending
        num_free = self._max_first_tokens - held
        if num_free < len(self.granted):
            self._blocked_by = "slots"
        for request in self.granted[:num_free]:
            self._builder.enqueue(request)
        del self.granted[:num_free]

    def _release_sent(self) -> list[m.Command]:
        commands: list[m.Command] = []
        for request_id in self._sent:
            if (request := self.sending.pop(request_id, None)) is None:
                continue  # it was given up as its last unit arrived, and both said so
            if request.given_up and not self.limits.rules.computes_aborted_prompts:
                self.cache.drop(request.lease)
            else:
                self.cache.close(request.lease, request.prompt, request.num_computed_tokens)
            commands.append(m.PrefillDone(request_id))
        self._sent = []
        return commands

    # Giving way to prompts that decode has granted pages.

    def _stop_optimistic_chunks(self) -> None:
        partial = self._builder.partial
        if partial is None or partial.is_granted or not self._granted_wait():
            return
        self._builder.stop(partial, caches=True)
        if partial.is_in_forward:
            partial.gives_way = True
        else:
            self._builder.begun.pop(partial.request_id)
            self._give_way(partial, again=True)

    def _in_the_way(self) -> int | None:
        """Id of the parked request that must give its slot and pages to a request with a grant. A parked request is
        computed, but has no grant of pages on decode. The latest parked request must give way if a request with a grant
        waits, and all requests that hold slots are parked. None: no request must give way. SGLang instead waits for a
        timeout.
        """
        ungranted = self._bootstrap.ungranted.keys()
        all_parked = bool(self.sending) and not self._builder.begun and self.sending.keys() <= ungranted
        return next(reversed(self.sending)) if all_parked and self._granted_wait() else None

    def _granted_wait(self) -> bool:
        return any(request.is_granted for request in (*self._builder.waiting, *self.granted))

    def _give_way(self, request: PrefillRequest, *, again: bool) -> None:
        """Takes pages and slot from a request that was begun without a grant. The request is queued again if it now has
        a grant, or if `again` is True and it has attempts left. Otherwise the request waits for its grant.
        """
        self.cache.drop(request.lease)
        request.num_cached_tokens = request.num_scheduled_tokens = request.num_computed_tokens = 0
        request.gives_way = False
        if request.is_granted or (again and request.num_attempts < self.limits.optimistic_attempts):
            request.num_attempts += 1
            self._builder.enqueue(request, first=True)
        else:
            self._set_aside[request.request_id] = request

    # Giving up.

    def _give_up(self, request_id: int) -> list[m.Command]:
        """Stops serving a request. Returns messages that stop its transfer. A forward that computes the request and a
        transfer that sends it still run to their end, and until then the request holds its slot and pages. KV that the
        prefix cache has stays there. With EngineRules.computes_aborted_prompts, a partly computed prompt is still
        computed completely.
        """
        self.cache.stop_prefetch(request_id)
        ungranted = self._bootstrap.refuse(request_id)
        if request := self._builder.begun.get(request_id):
            request.given_up = True
            if self.limits.rules.computes_aborted_prompts and self._builder.partial is request:
                return []
            self._builder.stop(request)
            return self._stop_sending(request)
        found = self._forget(request_id) or ungranted
        return [self._tell_sender(request_id, found.decode_id if found else "")]

    def _give_up_ungranted(self, request: PrefillRequest) -> list[m.Command]:
        """Stops serving a request that the caller has removed from BootstrapQueue.ungranted. Does nothing unless the
        request is optimistic: prefill holds other requests without a grant nowhere else.
        """
        return self._give_up(request.request_id) if request.is_optimistic else []

    def _forget(self, request_id: int) -> PrefillRequest | None:
        """Returns a request that waits, is set aside or is being sent, and removes it from the queue that has it, but
        not from `sending`, where it stays until its transfer ends. None: no request with this id waits, is set aside or
        is being sent.
        """
        if request := self._builder.withdraw(request_id):
            return request
        if request := self.sending.get(request_id) or self._set_aside.pop(request_id, None):
            return request
        for i, request in enumerate(self.granted):
            if request.request_id == request_id:
                return self.granted.pop(i)
        return None

    def _stop_sending(self, request: PrefillRequest) -> list[m.Command]:
        """Moves a request that is given up to `sending`, and returns a message that stops its transfer. If a forward
        still computes the request, does nothing; on_step_done calls this method again when the forward has ended.
        """
        if request.is_in_forward:
            return []
        self._builder.begun.pop(request.request_id, None)
        self.sending[request.request_id] = request
        return [self._tell_sender(request.request_id, request.decode_id)]

    def _tell_sender(self, request_id: int, decode_id: str) -> m.Tell:
        return m.Tell(sender_of(self.instance_id), m.StopSending(request_id, decode_id))

    def _on_decode_down(self, down: m.PeerDown) -> list[m.Command]:
        if not down.has_restarted:
            self._down.add(down.instance_id)
        waiting = [*self._bootstrap.bootstrapping, *self.granted, *self._builder.unbegun]
        here = [*waiting, *self._builder.begun.values(), *self.sending.values(), *self._set_aside.values()]
        lost = [request.request_id for request in here if request.decode_id == down.instance_id]
        return [command for request_id in lost for command in self._give_up(request_id)]

    def _on_abort(self, request_id: int) -> list[m.Command]:
        if request_id in self._builder.begun or request_id in self.sending:
            return self._give_up(request_id)
        self.cache.stop_prefetch(request_id)
        if request := self._bootstrap.ungranted.pop(request_id, None):
            return self._give_up_ungranted(request)
        self._bootstrap.refuse(request_id)
        return []

    def _expire(self, now_ns: int) -> list[m.Command]:
        commands: list[m.Command] = []
        for request in self._bootstrap.expired(now_ns, commands):
            self.cache.stop_prefetch(request.request_id)
            reason = f"{request.decode_id} granted no pages within {self._bootstrap.limit}"
            commands.append(m.Send(request.decode_id, m.Abort(request.request_id, reason, retryable=True)))
            commands += self._give_up_ungranted(request)
        return commands
