"""A router that outlives its instances: it routes around those that are down, and tries failed requests again.

routed      an attempt is under way                            Arrival, or Woken for a retry -> NewRequest to a pair
waiting     for its next attempt: backoff                      Failed (retryable), PeerDown of decode, nobody healthy
gone        -> Finished or Failed                              the attempt finished, or nothing is left to try

What it says to the client, PrefillDone and FirstToken too, is of the attempt under way and goes by the client's id.
A request whose first token was streamed is not tried again: the client has part of the answer (SGLang's gateway retries
by HTTP status, which it has passed on by then).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from pdsim.core.attempts import attempt_id, request_of
from pdsim.core.messages import (
    Arrival,
    Cancel,
    Command,
    Failed,
    Finished,
    FirstToken,
    FlushCache,
    Message,
    NewRequest,
    PeerDown,
    PeerUp,
    PrefillDone,
    Send,
    WakeAt,
    Woken,
)
from pdsim.core.router import RoleRouter, Router
from pdsim.policy.routing import Draws

_FINE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RetryLimits:
    """By the names and defaults of SGLang's gateway."""

    max_retries: int = 5
    initial_backoff_ns: int = 50_000_000
    backoff_multiplier: float = 1.5
    max_backoff_ns: int = 30_000_000_000
    backoff_jitter: float = 0.2
    """Each backoff is longer or shorter by up to this fraction, drawn."""
    seed: int = 0


class PlainRouter(Protocol):
    """A router that knows nothing of faults: of pairs, or of aggregated instances."""

    @property
    def roles(self) -> Mapping[str, RoleRouter]: ...
    def on_message(self, message: Message, now_ns: int) -> list[Command]: ...
    def route(self, arrival: Arrival, now_ns: int, avoid: tuple[str, str]) -> NewRequest: ...
    def lose(self, instance_id: str) -> tuple[list[int], list[NewRequest]]: ...
    def leave(self, request_id: int) -> None: ...


@dataclass(slots=True)
class _Request:
    arrival: Arrival
    num_retries: int = 0
    routed: NewRequest | None = None
    """The attempt under way."""
    avoid: tuple[str, str] = ("", "")
    """The pair of the last attempt."""
    streamed: bool = False


class RetryingRouter:
    instance_id = Router.instance_id

    def __init__(self, router: PlainRouter, limits: RetryLimits) -> None:
        self.router = router
        self._limits = limits
        self.live: dict[int, _Request] = {}
        self._backing_off: list[tuple[int, int, int]] = []
        """(when, request, retry), as a heap; entries of requests that were cancelled are stale."""
        self._draws = Draws()

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        match message:
            case Arrival():
                self.live[message.request_id] = _Request(message)
                return self._try(self.live[message.request_id], now_ns)
            case FlushCache():
                return self.router.on_message(message, now_ns)
            case Woken():
                return self._try_due(now_ns)
            case FirstToken():
                return self._on_first_token(message)
            case PrefillDone():
                self.router.on_message(message, now_ns)
                return self._on_prefill_done(message.request_id)
            case Finished() | Failed():
                return self._on_outcome(message, now_ns)
            case Cancel():
                return self._cancel(message)
            case PeerDown():
                return self._on_down(message, now_ns)
            case PeerUp():
                for instances in self.router.roles.values():
                    instances.mark_up(message.instance_id)
                return []
            case _:
                raise TypeError(f"a router does not take {message}")

    def _of(self, attempt: int) -> _Request | None:
        """The request of an attempt, if it is the one under way."""
        request = self.live.get(request_of(attempt))
        under_way = request is not None and request.routed is not None and request.routed.request_id == attempt
        return request if under_way else None

    def _try(self, request: _Request, now_ns: int) -> list[Command]:
        for role, instances in self.router.roles.items():
            if instances.all_down:
                return self._try_later(request, f"no {role} instance is up", now_ns)
        attempt = attempt_id(request.arrival.request_id, request.num_retries)
        new = self.router.route(request.arrival._replace(request_id=attempt), now_ns, request.avoid)
        request.routed = new
        request.avoid = new.prefill_id, new.decode_id
        return [Send(to, new) for to in new.instance_ids]

    def _try_due(self, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        while self._backing_off and self._backing_off[0][0] <= now_ns:
            _, request_id, num_retries = heappop(self._backing_off)
            request = self.live.get(request_id)
            if request is not None and request.num_retries == num_retries:
                commands += self._try(request, now_ns)
        return commands

    def _try_later(self, request: _Request, reason: str, now_ns: int) -> list[Command]:
        """After a backoff, unless retries are used up."""
        request.routed = None
        request_id, limits = request.arrival.request_id, self._limits
        if request.streamed or request.num_retries == limits.max_retries:
            del self.live[request_id]
            return [Failed(request_id, reason)]
        backoff_ns = min(
            limits.initial_backoff_ns * limits.backoff_multiplier**request.num_retries, limits.max_backoff_ns
        )
        drawn = 2 * self._draws.below(_FINE, limits.seed) / _FINE - 1
        request.num_retries += 1
        due_ns = now_ns + round(backoff_ns * (1 + limits.backoff_jitter * drawn))
        heappush(self._backing_off, (due_ns, request_id, request.num_retries))
        return [WakeAt(self.instance_id, due_ns)]

    def _on_prefill_done(self, attempt: int) -> list[Command]:
        """Also of a request that has ended: its answer may be held back for this."""
        is_old = request_of(attempt) in self.live and self._of(attempt) is None
        return [] if is_old else [PrefillDone(request_of(attempt))]

    def _on_outcome(self, outcome: Finished | Failed, now_ns: int) -> list[Command]:
        self.router.on_message(outcome, now_ns)
        request = self._of(outcome.request_id)
        if request is None:
            return []
        if isinstance(outcome, Failed) and outcome.retryable:
            return self._try_later(request, outcome.reason, now_ns)
        del self.live[request.arrival.request_id]
        return [outcome._replace(request_id=request.arrival.request_id)]

    def _on_first_token(self, token: FirstToken) -> list[Command]:
        request = self._of(token.request_id)
        if request is None:
            return []
        request.streamed = True
        return [FirstToken(request.arrival.request_id)]

    def _cancel(self, cancel: Cancel) -> list[Command]:
        request = self.live.pop(cancel.request_id, None)
        if request is None:
            return []
        commands = [] if request.routed is None else self._give_up(request.routed, cancel.reason)
        return [*commands, Failed(*cancel)]

    def _give_up(self, attempt: NewRequest, reason: str) -> list[Command]:
        self.router.leave(attempt.request_id)
        cancel = Cancel(attempt.request_id, reason)
        return [Send(to, cancel) for to in attempt.instance_ids]

    def _on_down(self, down: PeerDown, now_ns: int) -> list[Command]:
        instance_id = down.instance_id
        for instances in self.router.roles.values():
            instances.mark_down(instance_id)
            if down.has_restarted:
                instances.mark_up(instance_id)
        commands: list[Command] = []
        unanswered, lost = self.router.lose(instance_id)
        for request_id in unanswered:
            commands += self._on_prefill_done(request_id)  # its connection breaks: nothing to wait for
        for attempt in lost:
            reason = f"{instance_id} was lost"
            commands += self._give_up(attempt, reason)
            if request := self._of(attempt.request_id):
                commands += self._try_later(request, reason, now_ns)
        return commands
