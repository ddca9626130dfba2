"""A rank that does what its leader says, and decides nothing."""

from collections.abc import Callable
from typing import Any

from pdreal import notices
from pdreal.channel import Channel
from pdreal.rank_group import describe
from pdreal.rank_threads import RankThreads
from pdreal.tasks import Task


class Follower:
    def __init__(
        self, leader: str, channel: Channel, threads: RankThreads, fail: Callable[[BaseException], None]
    ) -> None:
        self._leader = leader
        self._channel = channel
        self._threads = threads
        self._fail = fail

    def levels(self) -> list[Any]:
        """Its leader knows them."""
        return []

    def on_message(self, to: str, message: Any, payload: Any) -> None:
        if not isinstance(message, notices.Task):
            raise TypeError(f"a follower does not take {message}")
        self._begin(message.ticket, payload)

    def _begin(self, ticket: int, task: Task) -> None:
        def on_done(result: Any, error: BaseException | None) -> None:
            if ticket:
                done = notices.Done(ticket, result, None if error is None else describe(error))
                self._channel.send(self._leader, done)
            elif error is not None:
                self._fail(error)

        self._threads.begin(task, on_done)
