"""The router: chooses a prefill and a decode instance for each request, and retries failed requests on other instances.

state       meaning                                            begins with
held        all instances are busy (router.queue)              Arrival, or Woken for a retry
routed      an attempt is under way                            Arrival, Woken, any message if held -> NewRequest
waiting     backoff before the next attempt                    Failed (retryable), PeerDown of decode, or a role is down
gone        the client knows that the request has ended        the attempt finished, Cancel, or no attempt is left

Each retry has a new id, so that no instance confuses late messages of an old attempt with the new attempt. The first
attempt has the client's id; the second retry of request 17 has id 2000000017. A request whose first token was streamed
is not retried, because the client has a part of the answer. SGLang's gateway retries by HTTP status, which the client
also has by then.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import ClassVar, Final

from pdsim.core import messages as m
from pdsim.core.instance import PolicyError
from pdsim.core.routing.held_requests import HeldRequests
from pdsim.core.routing.role_router import RoleRouter, RoutedLoad
from pdsim.dataclass import dataclass
from pdsim.policy.draws import Draws
from pdsim.policy.protocols import DisaggregationPolicy, SheddingPolicy

_RETRY: Final = 1_000_000_000
"""Distance between the ids of successive attempts of a request: retry N of request R has the id N * _RETRY + R. Ids of
requests are smaller than _RETRY.
"""
_FINE = 1 << 30


def attempt_id(request_id: int, num_retries: int) -> int:
    return num_retries * _RETRY + request_id


def request_of(attempt: int) -> int:
    """Returns the client's id of a request, from the id of one of its attempts."""
    return attempt % _RETRY


def num_retries(attempt: int) -> int:
    return attempt // _RETRY


@dataclass(frozen=True, kw_only=True)
class RetryLimits:
    """Limits of retries, with the defaults of SGLang's gateway."""

    max_retries: int = 5
    initial_backoff_ns: int = 50_000_000
    backoff_multiplier: float = 1.5
    max_backoff_ns: int = 30_000_000_000
    backoff_jitter: float = 0.2
    """Maximum random change of a backoff, as a share of the backoff."""
    seed: int = 0
    """Seed of the random jitter."""


NO_RETRIES = RetryLimits(max_retries=0)


@dataclass(slots=True)
class _Pair:
    """A decode instance that was chosen for a prompt, and the loads of the prefill instances that accept requests, as
    a disaggregation policy sees them.
    """

    num_decode_cached_tokens: int
    """Number of the prompt's first tokens that the router remembers having sent to the decode instance."""
    decode: RoutedLoad
    prefill: Sequence[RoutedLoad]


@dataclass(slots=True)
class _Request:
    """A request that has not ended for its client, or on which its prefill instance still works."""

    arrival: m.Arrival
    """The client's message. Its `cached` lacks instances whose caches were emptied since."""
    num_tokens: int
    """Length of the prompt in tokens."""
    num_retries: int = 0
    """Number of retries, including a retry that waits for the end of its backoff."""
    attempt: m.NewRequest | None = None
    """The last attempt; at_prefill and at_decode tell which instances still work on this attempt. None: the request was
    never routed."""
    at_prefill: bool = False
    at_decode: bool = False
    streamed: bool = False
    """True: an instance has streamed the first token."""
    is_counted: bool = False
    """True: the request counts in the loads of its prefill and its decode instance. Used with counts_streams only."""

    @property
    def request_id(self) -> int:
        return self.arrival.request_id

    @property
    def priority(self) -> int:
        return self.arrival.priority


class Router:
    """Routes requests to pairs of prefill and decode instances, or to aggregated instances. on_message returns messages
    to send, alarms (WakeAt), Failed for requests that the router ends, and PrefillDone for requests whose prefill
    instance has died. The driver passes the instances' Finished, PrefillDone and FirstToken to the client itself, if
    `client_of` knows the attempt.
    """

    instance_id: ClassVar[str] = "router"

    def __init__(
        self,
        *,
        prefill: RoleRouter,
        decode: RoleRouter | None,
        limits: RetryLimits = NO_RETRIES,
        shedding: SheddingPolicy | None = None,
        disaggregation: DisaggregationPolicy | None = None,
        counts_streams: bool = False,
        held: HeldRequests | None = None,
    ) -> None:
        """decode: None: the instances are aggregated. shedding: None: no request is refused.

        disaggregation: None: prefill instances compute all prompts. counts_streams: True: a request counts as load of
        its two instances only while its client receives tokens, which begins when prefill has answered. held: queue for
        requests that arrive while all instances are busy. None: the router sends each request at once.
        """
        self.roles = {"aggregated": prefill} if decode is None else {"prefill": prefill, "decode": decode}
        self.live: dict[int, _Request] = {}
        """By the client's id: requests that have not ended for their clients, or on which prefill still works. A
        request that is tried again moves to the end."""
        self._waiting: dict[int, _Request] = {}
        """By the client's id: held and routed requests whose clients have no token yet. A request in backoff is left
        out. If hears_first_tokens is False, a request with tokens stays included until decode ends it."""
        self._prefill = prefill
        self._decode = prefill if decode is None else decode
        self._is_aggregated = decode is None
        (prefill_id, *others), (decode_id, *more) = prefill.instance_ids, self._decode.instance_ids
        reads_loads = disaggregation is not None or held is not None or counts_streams
        self._only_pair = None if others or more or reads_loads else (prefill_id, decode_id)
        """Ids of the only prefill and the only decode instance (equal if aggregated). None: a role has several
        instances, or their loads are needed."""
        self._role_down = ""
        """First role of which no instance is up. Empty: each role has an instance that is up."""
        self._limits = limits
        self._shedding = shedding
        self._disaggregation = disaggregation
        self._held = held
        if disaggregation is not None:
            self._decode.num_picked_cached_tokens = 0
        self._counts_streams = prefill.counts_streams = self._decode.counts_streams = counts_streams
        self.hears_first_tokens = counts_streams or limits.max_retries > 0 or shedding is not None
        self.hears_first_tokens |= prefill.hears_first_tokens
        """True if the driver must send first tokens to the router."""
        self.metrics_interval_ns = min((i for one in self.roles.values() if (i := one.metrics_interval_ns)), default=0)
        """Interval in ns at which the driver must send MetricsSeen to the router. 0: never."""
        self.reads_sessions = any(one.reads_sessions for one in self.roles.values())
        self.asked_caches = prefill.instance_ids if prefill.reads_caches else []
        """Ids of the instances whose cached tokens each Arrival must have. Empty: no policy reads them."""
        self._backing_off: list[tuple[int, int, int]] = []
        """Heap of (time in ns, request id, number of the retry). An entry whose request was cancelled has no effect."""
        self._draws = Draws()
        self._now_ns = 0

    def client_of(self, attempt: int) -> int | None:
        """Returns the client's id of a request, if `attempt` is the id of the request's last attempt and an instance
        still works on this attempt. Otherwise None.
        """
        request = self._under_way(attempt)
        return None if request is None else request.arrival.request_id

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        commands = self._answer(message, now_ns)
        return commands if self._held is None else [*commands, *self._release_held(self._held, now_ns)]

    def _answer(self, message: m.Message, now_ns: int) -> list[m.Command]:
        self._now_ns = now_ns
        match message:
            case m.Arrival():
                new = _Request(message, len(message.prompt))
                return self._try(new, now_ns) if self._shedding is None else self._take_or_shed(new, now_ns)
            case m.PrefillDone():
                if request := self._under_way(message.request_id):
                    self._leave_prefill(request)
                    self._count_stream(request)
                    self._forget_if_over(request)
            case m.FirstToken():
                if request := self._under_way(message.request_id):
                    request.streamed = True
                    self._count_stream(request)
                    if self._is_aggregated and self._only_pair is None:
                        self._prefill.on_computed(request.request_id)
                    self._waiting.pop(request.arrival.request_id, None)
            case m.Finished():
                if request := self._under_way(message.request_id):
                    self._leave_decode(request)
                    self._forget_if_over(request)
            case m.Failed():
                return self._on_failed(message, now_ns)
            case m.Cancel():
                return self._cancel(message)
            case m.FlushCache():
                return [command for instances in self.roles.values() for command in instances.forget()]
            case m.Woken():
                return self._try_due(now_ns)
            case m.MetricsSeen():
                for instances in self.roles.values():
                    instances.read(message.instances)
            case m.Serve() | m.Drain() | m.PeerUp():
                self._note(message)
            case m.PeerDown():
                return self._on_down(message, now_ns)
            case _:
                raise TypeError(f"a router does not take {message}")
        return []

    def _under_way(self, attempt: int) -> _Request | None:
        request = self.live.get(request_of(attempt))
        if request is None or request.attempt is None or request.attempt.request_id != attempt:
            return None
        return request if request.at_decode or request.at_prefill else None

    # Shedding.

    @property
    def waiting(self) -> list[_Request]:
        return list(self._waiting.values())

    def _take_or_shed(self, request: _Request, now_ns: int) -> list[m.Command]:
        assert self._shedding is not None
        shed = self._shedding.shed(request, self)
        if shed is None:
            return self._try(request, now_ns)
        if shed == request.request_id:
            return [m.Failed(shed, "shed: too many requests wait")]
        if (other := self.live.get(shed)) is None or other.streamed:
            raise PolicyError(f"{self._shedding}: shed request {shed}, which does not wait")
        given_up = self._cancel(m.Cancel(shed, "shed for a request of a higher priority"))
        return [*given_up, *self._try(request, now_ns)]

    # Attempts.

    def _try(self, request: _Request, now_ns: int) -> list[m.Command]:
        request_id = request.arrival.request_id
        self.live.pop(request_id, None)
        self.live[request_id] = request
        if role := self._role_down:
            return self._try_later(request, f"no {role} instance is up", now_ns)
        if self._held is None or not self._held.must_wait():
            return self._route(request, now_ns)
        self._held.add(request.arrival, now_ns)
        self._waiting[request_id] = request
        return []

    def _release_held(self, held: HeldRequests, now_ns: int) -> list[m.Command]:
        """Routes held requests until all instances are busy again. If all instances of a role are down, every held
        request waits for another attempt instead, or fails if it has no retry left.
        """
        commands: list[m.Command] = []
        role = self._role_down
        while (request_id := held.take(anyway=bool(role))) is not None:
            request = self.live[request_id]
            if role:
                del self._waiting[request_id]
                commands += self._try_later(request, f"no {role} instance is up", now_ns)
            else:
                commands += self._route(request, now_ns)
        return commands

    def _note(self, message: m.Serve | m.Drain | m.PeerUp | m.PeerDown) -> None:
        for instances in self.roles.values():
            instances.note(message)
        self._role_down = next((role for role, instances in self.roles.items() if instances.all_down), "")
        if self.asked_caches and isinstance(message, m.Serve | m.PeerDown):
            self._forget_cached(message.instance_id)

    def _forget_cached(self, instance_id: str) -> None:
        """Forgets which tokens of unfinished requests an instance had cached, because its caches are empty now."""
        for request in self.live.values():
            cached = tuple(one for one in request.arrival.cached if one.instance_id != instance_id)
            if len(cached) < len(request.arrival.cached):
                request.arrival = replace(request.arrival, cached=cached)

    def _route(self, request: _Request, now_ns: int) -> list[m.Command]:
        arrival = request.arrival
        prefill_id, decode_id = self._only_pair or self._choose(request, now_ns)
        attempt = attempt_id(arrival.request_id, request.num_retries)
        new = m.NewRequest(
            attempt,
            now_ns,
            arrival.prompt,
            arrival.max_output_tokens,
            prefill_id,
            decode_id,
            arrival.priority,
            arrival.ignores_eos,
            arrival.media,
        )
        request.attempt, request.at_prefill, request.at_decode = new, prefill_id != decode_id, True
        self._waiting[arrival.request_id] = request
        return [m.Send(to, new) for to in new.instance_ids]

    def _choose(self, request: _Request, now_ns: int) -> tuple[str, str]:
        """Picks a prefill and a decode instance, and returns their ids. Both ids are equal if one instance does
        everything.
        """
        arrival, prompt, last = request.arrival, request.arrival.prompt, request.attempt
        avoid_prefill, avoid_decode = ("", "") if last is None else (last.prefill_id, last.decode_id)
        named = arrival.request_id, arrival.session, arrival.agent
        self._prefill.see(arrival.cached)
        if self._disaggregation is None:
            decode_id = prefill_id = self._prefill.pick(prompt, now_ns, avoid_prefill, *named)
            if not self._is_aggregated:
                decode_id = self._decode.pick(prompt, now_ns, avoid_decode, *named)
            return prefill_id, decode_id
        decode_id = self._decode.pick(prompt, now_ns, avoid_decode, *named)
        if not self._disaggregation.is_remote(prompt, self._pair(decode_id, len(prompt))):
            return decode_id, decode_id
        return self._prefill.pick(prompt, now_ns, avoid_prefill, *named), decode_id

    def _pair(self, decode_id: str, num_tokens: int) -> _Pair:
        assert self._decode.num_picked_cached_tokens is not None
        chosen = self._decode.load_of(decode_id)
        decode = RoutedLoad(decode_id, chosen.num_requests - 1, chosen.num_tokens - num_tokens)
        return _Pair(self._decode.num_picked_cached_tokens, decode, self._prefill.offered)

    def _try_later(self, request: _Request, reason: str, now_ns: int) -> list[m.Command]:
        """Schedules another attempt after a backoff, and returns an alarm. If no retry is left, or the first token was
        streamed, ends the request and returns Failed.
        """
        request_id, limits = request.arrival.request_id, self._limits
        if request.streamed or request.num_retries == limits.max_retries:
            del self.live[request_id]
            return [m.Failed(request_id, reason)]
        backoff_ns = min(
            limits.initial_backoff_ns * limits.backoff_multiplier**request.num_retries, limits.max_backoff_ns
        )
        drawn = 2 * self._draws.below(_FINE, limits.seed) / _FINE - 1
        request.num_retries += 1
        due_ns = now_ns + round(backoff_ns * (1 + limits.backoff_jitter * drawn))
        heappush(self._backing_off, (due_ns, request_id, request.num_retries))
        return [m.WakeAt(self.instance_id, due_ns)]

    def _try_due(self, now_ns: int) -> list[m.Command]:
        commands: list[m.Command] = []
        while self._backing_off and self._backing_off[0][0] <= now_ns:
            _, request_id, num_retries = heappop(self._backing_off)
            request = self.live.get(request_id)
            if request is not None and request.num_retries == num_retries:
                commands += self._try(request, now_ns)
        return commands

    # Ends.

    def _on_failed(self, failed: m.Failed, now_ns: int) -> list[m.Command]:
        request = self._under_way(failed.request_id)
        if request is None:
            return []
        if failed.retryable and request.at_decode:  # the other instance of the pair may not know
            return [*self._give_up(request, failed.reason), *self._try_later(request, failed.reason, now_ns)]
        was_finished = not request.at_decode
        self._leave_prefill(request)
        self._leave_decode(request)
        del self.live[request.arrival.request_id]
        return [] if was_finished else [replace(failed, request_id=request.arrival.request_id)]

    def _cancel(self, cancel: m.Cancel) -> list[m.Command]:
        """Drops a request that was cancelled by its client or shed. No effect if the router does not know the request,
        or if decode has ended it.
        """
        request = self.live.get(cancel.request_id)
        if request is None or (request.at_prefill and not request.at_decode):
            return []
        commands = self._give_up(request, cancel.reason) if request.at_decode else []
        if self._held is not None:
            self._held.withdraw(cancel.request_id)
        self._waiting.pop(cancel.request_id, None)
        del self.live[cancel.request_id]
        return [*commands, m.Failed(cancel.request_id, cancel.reason)]

    def _give_up(self, request: _Request, reason: str) -> list[m.Command]:
        """Cancels a request's attempt at both instances, as a gateway drops both connections. The caller may retry the
        request.
        """
        assert request.attempt is not None
        self._leave_prefill(request)
        self._leave_decode(request)
        cancel = m.Cancel(request.attempt.request_id, reason)
        return [m.Send(to, cancel) for to in request.attempt.instance_ids]

    def _leave_prefill(self, request: _Request) -> None:
        if request.at_prefill:
            assert request.attempt is not None
            request.at_prefill = False
            self._release(self._prefill, request.attempt.prefill_id, request)

    def _leave_decode(self, request: _Request) -> None:
        if request.at_decode:
            assert request.attempt is not None
            request.at_decode = False
            self._waiting.pop(request.arrival.request_id, None)
            if request.is_counted:
                request.is_counted = False
                self._count(request.attempt, -1, -request.num_tokens)
            self._release(self._decode, request.attempt.decode_id, request)

    def _release(self, instances: RoleRouter, instance_id: str, request: _Request) -> None:
        if self._only_pair is None:
            instances.release(instance_id, request.num_tokens, request.arrival.request_id, self._now_ns)

    def _count_stream(self, request: _Request) -> None:
        if not self._counts_streams or request.is_counted:
            return
        if request.streamed and request.at_decode and not request.at_prefill:
            assert request.attempt is not None
            request.is_counted = True
            self._count(request.attempt, 1, request.num_tokens)

    def _count(self, attempt: m.NewRequest, num_requests: int, num_tokens: int) -> None:
        self._prefill.count(attempt.prefill_id, num_requests, num_tokens)
        self._decode.count(attempt.decode_id, num_requests, num_tokens)

    def _forget_if_over(self, request: _Request) -> None:
        if not (request.at_prefill or request.at_decode):
            del self.live[request.arrival.request_id]

    def _on_down(self, down: m.PeerDown, now_ns: int) -> list[m.Command]:
        """Handles the failure of an instance. Retries requests whose decode instance is dead, or fails them if no retry
        is left or the first token was streamed. For requests whose prefill instance is dead, returns PrefillDone only:
        decode instances report requests that lost their KV as Failed, and the router retries them then.
        """
        instance_id = down.instance_id
        self._note(down)
        commands: list[m.Command] = []
        attempts = [(request, request.attempt) for request in self.live.values() if request.attempt is not None]
        for request, attempt in attempts:
            if request.at_prefill and attempt.prefill_id == instance_id:
                self._leave_prefill(request)  # its connection breaks: nothing to wait for
                self._forget_if_over(request)
                commands.append(m.PrefillDone(request.arrival.request_id))
        for request, attempt in attempts:
            if request.at_decode and attempt.decode_id == instance_id:
                reason = f"{instance_id} was lost"
                commands += [*self._give_up(request, reason), *self._try_later(request, reason, now_ns)]
        return commands
