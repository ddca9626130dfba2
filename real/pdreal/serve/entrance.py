"""The door of the server: who may come in, who is inside, and how they leave when it closes."""

import asyncio
from hmac import compare_digest
from http import HTTPStatus
from typing import Protocol

from pdreal.serve.refusal import RefusedError, unavailable

_RETRY_AFTER_S = 1


class Visitor(Protocol):
    """A request under way."""

    def give_up(self, reason: str) -> None: ...


class Entrance:
    """Open to those that have the key, if there is one, while few enough wait for their first token."""

    def __init__(self, api_key: str | None = None, max_waiting_requests: int = 4096) -> None:
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_waiting_requests = max_waiting_requests
        self._inside: set[Visitor] = set()
        self._waiting: set[Visitor] = set()
        """Of those inside."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_closed = False

    def check_key(self, authorization: str) -> None:
        """Raises RefusedError."""
        given = authorization.encode(errors="surrogateescape")
        if self._authorization is not None and not compare_digest(given, self._authorization):
            raise RefusedError(
                "this server wants its API key, as in the header Authorization: Bearer KEY",
                status=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_open(self) -> None:
        """Raises RefusedError."""
        if self.is_closed:
            raise unavailable("the server stops")
        if len(self._waiting) >= self._max_waiting_requests:
            message = f"{len(self._waiting)} requests wait for their first token, and more may not: try again"
            raise unavailable(message, retry_after_s=_RETRY_AFTER_S)

    def enter(self, visitor: Visitor) -> None:
        self._inside.add(visitor)
        self._waiting.add(visitor)
        self._empty.clear()

    def served(self, visitor: Visitor) -> None:
        """It has its first token."""
        self._waiting.discard(visitor)

    def leave(self, visitor: Visitor) -> None:
        self._waiting.discard(visitor)
        self._inside.discard(visitor)
        if not self._inside:
            self._empty.set()

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    async def close(self, patience_s: float, hurry: asyncio.Event) -> None:
        """Let nobody in, and those inside end in peace; who is left when time is up, or in a hurry, is told why."""
        self.is_closed = True
        waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, hurry)]
        await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for visitor in list(self._inside):
            visitor.give_up("the server stops")
