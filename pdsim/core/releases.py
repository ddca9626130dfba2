"""Pages of failed requests into which a sender may still write.

held        the request failed before its KV had come         the sender is told to stop, or lost track itself
given back  nobody writes any more: Abort came, or all KV       or the writer is dead, or it took too long

SGLang's deferred release (disaggregation/decode.py): 30 s.
"""

from collections.abc import Iterable
from typing import Protocol

from pdsim.core.deadlines import Deadlines
from pdsim.core.kv_cache import KvCache, Lease
from pdsim.core.messages import Abort, Command, Tell, receiver_of


class Releasing(Protocol):
    request_id: int
    prefill_id: str
    lease: Lease


class Releases:
    """The held pages of one decode instance."""

    def __init__(self, decode_id: str, cache: KvCache, *, timeout_ns: int | None, staged: bool) -> None:
        """timeout_ns: how long an answer is waited for; staged: what was written may be in a staging ring."""
        self._decode_id = decode_id
        self._cache = cache
        self._staged = staged
        self._held: dict[int, Releasing] = {}
        self._deadlines = Deadlines(decode_id, timeout_ns)

    @property
    def held(self) -> Iterable[Releasing]:
        return self._held.values()

    def hold(self, request: Releasing, now_ns: int) -> list[Command]:
        self._held[request.request_id] = request
        return self._deadlines.add(request.request_id, now_ns)

    def give_back(self, request_id: int) -> bool:
        """Nobody writes any more, and nothing is on its way from the ring. Whether the request's pages were held."""
        request = self._held.pop(request_id, None)
        if request is None:
            return False
        self._cache.drop(request.lease)
        return True

    def on_writer_dead(self, prefill_id: str) -> list[Command]:
        dead = [request.request_id for request in self._held.values() if request.prefill_id == prefill_id]
        return [command for request_id in dead for command in self._stop_waiting(request_id)]

    def expire(self, now_ns: int, commands: list[Command]) -> None:
        for request_id in self._deadlines.expired(now_ns, commands, self._held.__contains__):
            commands += self._stop_waiting(request_id)

    def _stop_waiting(self, request_id: int) -> list[Command]:
        """Give up waiting for the sender. With staging the receiver has the last word, when no scatter is under way."""
        if self._staged:
            abort = Abort(request_id, "nobody writes any more", retryable=True)
            return [Tell(receiver_of(self._decode_id), abort)]
        self.give_back(request_id)
        return []
