"""All ranks of one instance: the leader's own threads, and its followers over the control channel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdreal import notices
from pdreal.channel import Channel
from pdreal.rank_threads import RankThreads
from pdreal.tasks import Compute, Task


@dataclass
class _UnderWay:
    num_missing: int
    on_done: Callable[[list[Any], str | None], None]
    results: list[Any] = field(default_factory=list)
    error: str | None = None


class RankGroup:
    def __init__(self, channel: Channel, threads: RankThreads, followers: Sequence[str]) -> None:
        self._channel = channel
        self._threads = threads
        self._followers = followers
        self._under_way: dict[int, _UnderWay] = {}
        self._num_tickets = 0

    def compute(
        self,
        task: Compute,
        on_done: Callable[[Any, BaseException | None], None],
        on_layers: Callable[[int], None] | None = None,
    ) -> None:
        """Broadcast; return the leader's result to on_done. A follower that fails brings the instance down."""
        for follower in self._followers:
            self._channel.send(follower, notices.Task(0), payload=task)
        self._threads.begin(task, on_done, on_layers)

    def begin(self, task: Task, on_done: Callable[[list[Any], str | None], None]) -> None:
        """on_done: called when all ranks are done, with what each returned, or with why one failed."""
        self._num_tickets += 1
        ticket = self._num_tickets
        self._under_way[ticket] = _UnderWay(1 + len(self._followers), on_done)
        for follower in self._followers:
            self._channel.send(follower, notices.Task(ticket), payload=task)
        self._threads.begin(task, lambda result, error: self._take(ticket, result, describe(error) if error else None))

    def on_done(self, done: notices.Done) -> None:
        self._take(done.ticket, done.result, done.error)

    def _take(self, ticket: int, result: Any, error: str | None) -> None:
        task = self._under_way[ticket]
        task.num_missing -= 1
        task.results.append(result)
        task.error = task.error or error
        if not task.num_missing:
            del self._under_way[ticket]
            task.on_done(task.results, task.error)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
