"""Requests that wait for pages of a decode instance, and requests that wait for a place in its batch. Also pages of
failed requests into which a prefill instance may still write.

state         meaning                                                  left by
uncomputed    waits until prefill has computed the prompt              on_computed
              (only with allocation: prefill_complete)
queued        waits for pages; by priority, then by arrival            admit_next: matched, locked, pages reserved
retracted     ran, lost its pages, and waits for pages                 resume_next: pages reserved
ready         KV is complete, waits for a place in the batch           take
"""

from collections import deque

from pdsim.core.deadlines import Deadlines, LateRequests
from pdsim.core.decode.running_batch import FOREVER, RunningRequest
from pdsim.core.engine_rules import EngineRules
from pdsim.core.instance import PolicyError
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.messages import Abort, Command, Failed, NewRequest, Send, Tell, receiver_of
from pdsim.dataclass import dataclass
from pdsim.policy.protocols import AdmissionPolicy, Admitted
from pdsim.policy.views import Candidate, DecodeView


@dataclass(slots=True, kw_only=True)
class DecodeRequest(RunningRequest):
    prefill_id: str
    ends_with_first_token: bool = False


def decode_request(new: NewRequest) -> DecodeRequest:
    return DecodeRequest(
        new.request_id,
        new.arrival_ns,
        new.prompt,
        len(new.prompt),
        new.priority,
        media=new.media,
        encode_ids=new.encode_ids,
        max_output_tokens=new.max_output_tokens,
        prefill_id=new.prefill_id,
    )


class AdmissionQueue:
    """Requests that wait for pages of one decode instance.

    grants_computed_only: True: a request joins the queue only when prefill has computed its prompt.
    """

    def __init__(
        self,
        decode_id: str,
        cache: KvCache,
        policy: AdmissionPolicy,
        rules: EngineRules,
        *,
        grants_computed_only: bool,
    ) -> None:
        self.queued: deque[DecodeRequest] = deque()
        self.uncomputed: dict[int, DecodeRequest] = {}
        self.retracted: dict[int, DecodeRequest] = {}
        self.blocked_by = ""
        """Resource that the head of the queue lacked at its last test: "slots", "pages", or empty."""
        self.ask_again_steps = FOREVER
        """Number of steps after which the admission policy may answer differently, if nothing else happens."""
        self._computed_early = LateRequests()
        """Requests for which PromptComputed came before NewRequest."""
        self._refused = LateRequests()
        """Requests that this or a prefill instance refuses to serve, each with the reason."""
        self._down: set[str] = set()
        """Prefill instances that are down."""
        self._decode_id = decode_id
        self._cache = cache
        self._policy = policy
        self._keeps_aborted_places = rules.keeps_aborted_places
        self._num_aborted = 0
        """Number of aborted requests that are still in the queue."""
        self._grants_computed_only = grants_computed_only

    def requests(self) -> list[DecodeRequest]:
        return [*self.queued, *self.uncomputed.values(), *self.retracted.values()]

    # Coming.

    def at(self, now_ns: int) -> None:
        for late in (self._computed_early, self._refused):
            late.now_ns = now_ns
            if late.kept:
                late.forget()

    def on_new_request(self, message: NewRequest) -> list[Command]:
        if message.request_id in self._refused.kept:
            return [Failed(message.request_id, self._refused.why(message.request_id))]
        if message.prefill_id in self._down:
            return [Failed(message.request_id, f"{message.prefill_id} is down", retryable=True)]
        num_tokens = len(message.prompt)
        if num_tokens > (capacity := self._cache.capacity_tokens):
            reason = f"a prompt of {num_tokens} tokens does not fit the {capacity} tokens of {self._decode_id}"
            self._refused.add(message.request_id, reason)
            return [Failed(message.request_id, reason), Send(message.prefill_id, Abort(message.request_id, reason))]
        request = decode_request(message)
        if self._grants_computed_only and request.request_id not in self._computed_early.kept:
            self.uncomputed[request.request_id] = request
        else:
            self._computed_early.kept.pop(request.request_id, None)
            self._enqueue(request)
        return []

    def on_computed(self, request_id: int) -> None:
        """Handles the message that prefill has computed a prompt. If the instance grants pages only for computed
        prompts, the request may now get pages. Otherwise the message has no effect.
        """
        if request := self.uncomputed.pop(request_id, None):
            self._enqueue(request)
        elif self._grants_computed_only and request_id not in self._refused.kept:
            self._computed_early.add(request_id)

    def _enqueue(self, request: DecodeRequest) -> None:
        """Puts a request behind all requests of the same or a higher priority, and removes aborted requests from the
        queue.
        """
        if self._num_aborted:
            self.queued = deque([queued for queued in self.queued if not queued.is_aborted])
            self._num_aborted = 0
        place = len(self.queued)
        while place and self.queued[place - 1].priority < request.priority:
            place -= 1
        self.queued.insert(place, request)

    # Getting pages.

    def admit_next(self, view: DecodeView, num_slots: int, num_buffers: int = FOREVER) -> DecodeRequest | None:
        """Admits and returns the first queued request, and gives it pages for its prompt. None: the queue is empty, or
        its first request lacks a slot or buffer or is not admitted by the policy. Later requests are not tried.

        view: the decode instance, as the policy sees it. num_slots: maximum number of requests that are in transfer,
        ready or running. num_buffers: number of free metadata buffers; each transfer takes one, and FOREVER means no
        limit.
        """
        self.blocked_by, self.ask_again_steps = "", FOREVER
        if not self.queued:
            return None
        if view.num_active >= num_slots or num_buffers <= 0 or not self._cache.makes_room_for_states():
            self.blocked_by = "slots"
            return None
        request = self.queued[0]
        lease = self._cache.open(request.prompt, request.num_prompt_tokens)
        num_loadable = self._cache.num_loadable_pages(
            lease, request.prompt, request.num_prompt_tokens, request.request_id
        )
        num_cached_tokens = lease.num_shared * self._cache.page_size
        num_new_pages = -(-request.num_prompt_tokens // self._cache.page_size) - lease.num_shared
        candidate = Candidate(request, request.num_prompt_tokens, num_cached_tokens, num_new_pages)
        if not self._fits(candidate, view):
            self._cache.drop(lease)
            self.blocked_by = "pages"
            return None
        if num_loadable:
            self._cache.load(lease, request.prompt, num_loadable, request.request_id)
        self._cache.grow(lease, num_new_pages - num_loadable)
        request.lease = lease
        self._num_aborted -= request.is_aborted
        return self.queued.popleft()

    def resume_next(self, view: DecodeView, num_slots: int) -> DecodeRequest | None:
        """Resumes and returns the first retracted request, and gives it pages for all its KV. None: no request is
        retracted, or the first one lacks a slot or is not admitted by the policy. A resumed request does not use the
        prefix cache.

        view: the decode instance, as the policy sees it. num_slots: maximum number of requests that are in transfer,
        ready or running.
        """
        self.ask_again_steps = FOREVER
        if not self.retracted or view.num_active >= num_slots or not self._cache.makes_room_for_states():
            return None
        request = next(iter(self.retracted.values()))
        num_pages = -(-request.num_kv_tokens // self._cache.page_size)
        if not self._fits(Candidate(request, request.num_kv_tokens, 0, num_pages, resumes=True), view):
            return None
        request.lease = self._cache.open(request.prompt, 0)
        self._cache.grow(request.lease, num_pages)
        return self.retracted.pop(request.request_id)

    def _fits(self, candidate: Candidate, view: DecodeView) -> bool:
        answer = self._policy.admit(candidate, view)
        if not isinstance(answer, Admitted):
            self.ask_again_steps = answer.ask_again_steps or FOREVER
            return False
        if candidate.num_new_pages > view.num_available_pages:
            raise PolicyError(
                f"{self._policy}: admitted request {candidate.request.request_id}, which needs "
                f"{candidate.num_new_pages} pages; {view.num_available_pages} are available on {self._decode_id}"
            )
        return True

    # Giving up.

    def refuse(self, request_id: int, reason: str) -> None:
        """Remembers that a request will not be served. If its NewRequest comes later, the request fails with this
        reason.
        """
        self._refused.add(request_id, reason)

    def give_up(self, request_id: int) -> bool:
        """Drops an aborted request that has no pages yet. Returns False if the queue does not hold the request."""
        if not self._keeps_aborted_places:
            return self.withdraw(request_id) is not None
        for request in self.queued:
            if request.request_id == request_id:
                self._num_aborted += not request.is_aborted
                request.is_aborted = True
                return True
        return self.uncomputed.pop(request_id, None) is not None

    def has_aborted(self, request_id: int) -> bool:
        """True if the request has been aborted and still stands in the queue."""
        return self._num_aborted > 0 and any(r.request_id == request_id and r.is_aborted for r in self.queued)

    def withdraw(self, request_id: int) -> DecodeRequest | None:
        """Removes and returns a request that never had pages. None: the queue does not hold the request."""
        request = next((r for r in self.queued if r.request_id == request_id), None)
        if request is None:
            return self.uncomputed.pop(request_id, None)
        self.queued.remove(request)
        self._num_aborted -= request.is_aborted
        return request

    def on_prefill_down(self, prefill_id: str, reason: str, *, has_restarted: bool) -> list[Command]:
        if not has_restarted:
            self._down.add(prefill_id)
        lost = [r.request_id for r in (*self.queued, *self.uncomputed.values()) if r.prefill_id == prefill_id]
        for request_id in lost:
            self.withdraw(request_id)
        return [Failed(request_id, reason, retryable=True) for request_id in lost]

    def on_prefill_up(self, prefill_id: str) -> None:
        self._down.discard(prefill_id)


class Releases:
    """Pages of failed requests of one decode instance, into which a prefill instance may still write. If a request
    fails before all its KV has arrived, its pages stay here, because its sender may not have stopped yet. The pages
    become free when Abort or all KV arrives, when the sender is down, or after a timeout (30 s in SGLang's deferred
    release, disaggregation/decode.py). With a staging ring, pages of a sender that is down or late become free only
    when no copy from the ring writes into them.
    """

    def __init__(self, decode_id: str, cache: KvCache, *, timeout_ns: int | None, staged: bool) -> None:
        """timeout_ns: maximum time for which pages are held until the sender says that no KV will come; None: no limit.
        staged: True: KV goes through a staging ring, and may still wait there.
        """
        self._decode_id = decode_id
        self._cache = cache
        self._staged = staged
        self.held: dict[int, DecodeRequest] = {}
        self.unseen: set[int] = set()
        """Held requests that failed since decode last checked its transfers. Until this check SGLang counts the
        requests as active (disaggregation/decode.py, 0.5.23, :2048; pop_transferred, :2861)."""
        self._deadlines = Deadlines(decode_id, timeout_ns)

    def hold(self, request: DecodeRequest, now_ns: int) -> list[Command]:
        self.held[request.request_id] = request
        self.unseen.add(request.request_id)
        return self._deadlines.add(request.request_id, now_ns)

    def give_back(self, request_id: int) -> bool:
        """Frees the pages of a failed request. The caller knows that neither a sender nor a copy from the staging ring
        writes into these pages any more. Returns False if the request held no pages.
        """
        request = self.held.pop(request_id, None)
        if request is None:
            return False
        self.unseen.discard(request_id)
        self._cache.drop(request.lease)
        return True

    def on_writer_dead(self, prefill_id: str) -> list[Command]:
        dead = [request.request_id for request in self.held.values() if request.prefill_id == prefill_id]
        return [command for request_id in dead for command in self._stop_waiting(request_id)]

    def expire(self, now_ns: int, commands: list[Command]) -> None:
        for request_id in self._deadlines.expired(now_ns, commands, self.held.__contains__):
            commands += self._stop_waiting(request_id)

    def _stop_waiting(self, request_id: int) -> list[Command]:
        """No longer waits for an answer of the request's sender, and frees the request's pages. With staging, keeps the
        pages and returns a message that asks the receiver to report when no copy from the ring writes into these pages
        any more.
        """
        if self._staged:
            abort = Abort(request_id, "nobody writes any more", retryable=True)
            return [Tell(receiver_of(self._decode_id), abort)]
        self.give_back(request_id)
        return []


class ReadyQueue:
    """Requests of a decode instance that have complete KV, and wait until the batch has room for them.

    Requests leave in the order in which they were added, until one has a priority other than 0. From then on, requests
    of the highest priority leave first, as in SGLang's get_new_prebuilt_batch, and requests of equal priority leave by
    rank, in the order in which they first became ready. keeps_ranks: True: a retracted request keeps its rank. False: a
    retraction gives it a new rank behind all others (EngineRules.keeps_ranks).
    """

    def __init__(self, *, keeps_ranks: bool) -> None:
        self._keeps_ranks = keeps_ranks
        self.requests: list[DecodeRequest] = []
        """Requests in order of arrival, or by priority as of the last call of `take`."""
        self._num_entries = 0
        """Number of ranks that the queue has given so far."""
        self._has_priorities = False

    def append(self, request: DecodeRequest) -> None:
        if not request.entry:
            self._num_entries += 1
            request.entry = self._num_entries
        self._has_priorities |= request.priority != 0
        self.requests.append(request)

    def on_retraction(self, request: DecodeRequest) -> None:
        """Ranks a retracted request behind all earlier requests, unless EngineRules.keeps_ranks is True."""
        if not self._keeps_ranks:
            self._num_entries += 1
            request.entry = self._num_entries

    def take(self, num_places: int) -> list[DecodeRequest]:
        """Removes and returns the first requests of the queue, at most num_places."""
        if self._has_priorities:
            self.requests.sort(key=lambda request: (-request.priority, request.entry))
        num_places = max(num_places, 0)
        taken = self.requests[:num_places]
        del self.requests[:num_places]
        return taken

    def withdraw(self, request_id: int) -> DecodeRequest | None:
        """Removes and returns a request. None: the queue does not hold the request."""
        for i, request in enumerate(self.requests):
            if request.request_id == request_id:
                return self.requests.pop(i)
        return None
