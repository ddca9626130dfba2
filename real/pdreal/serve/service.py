"""The service behind all endpoints, and the life of one request between them and the cluster."""

import asyncio
import time
from collections.abc import AsyncIterator
from hmac import compare_digest
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from pdreal.requests import RequestFailed, Sampling
from pdreal.serve.fields import RefusedError, unavailable
from pdreal.serve.metrics import Meter, Metrics
from pdreal.serve.room import Room
from pdreal.serve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pdreal.launcher import Launcher

_RETRY_AFTER_S = 1


class Entrance:
    """Open to those that have the key, if there is one, while few enough wait for their first token."""

    def __init__(self, api_key: str | None = None, max_waiting_requests: int = 4096) -> None:
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_waiting_requests = max_waiting_requests
        self._inside: set[Answer] = set()
        self._waiting: set[Answer] = set()
        """Requests inside that have no token yet."""
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

    def enter(self, answer: "Answer") -> None:
        self._inside.add(answer)
        self._waiting.add(answer)
        self._empty.clear()

    def served(self, answer: "Answer") -> None:
        """It has its first token."""
        self._waiting.discard(answer)

    def leave(self, answer: "Answer") -> None:
        self._waiting.discard(answer)
        self._inside.discard(answer)
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
        for answer in list(self._inside):
            answer.give_up("the server stops")


class Service(NamedTuple):
    """The cluster behind the endpoints, and what they must know of it."""

    cluster: "Launcher"
    model_name: str
    tokenizer: Tokenizer
    room: Room
    page_size: int
    metrics: Metrics
    entrance: Entrance


class Generation(NamedTuple):
    """A client's request, in whichever way it asked."""

    prompt: list[int]
    sampling: Sampling
    stream: bool
    closing_usage: bool = False
    """A stream ends with an event of token counts. An answer in one piece always has them."""
    running_usage: bool = False
    """Every event of a stream has them."""


class Answer:
    """A request under way: enter to submit it, iterate over its tokens, and leave; early is to abort it."""

    def __init__(self, service: Service, generation: Generation) -> None:
        self.service = service
        self.generation = generation
        self.created_s = int(time.time())
        self.began_s = time.monotonic()
        self.tokens: list[int] = []
        self._has_ended = False

    async def __aenter__(self) -> Self:
        prompt, sampling = self.generation[:2]
        self._request = self.service.cluster.submit(prompt, sampling)
        self._meter = Meter(self.service.metrics, len(prompt))
        self.service.entrance.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._has_ended and not isinstance(error, RequestFailed):
            self.service.cluster.abort(self.request_id)
        self._meter.end(is_complete=self._has_ended)
        self.service.entrance.leave(self)

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        """New tokens, one or more each time."""
        async for new in self._request:
            self._meter.add_tokens(len(new))
            self.service.entrance.served(self)
            self.tokens += new
            yield new
        self._has_ended = True

    def give_up(self, reason: str) -> None:
        """It fails with this reason."""
        self.service.cluster.abort(self.request_id, reason)

    @property
    def request_id(self) -> int:
        return self._request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.generation.prompt)

    @property
    def num_cached_tokens(self) -> int:
        return self._request.num_cached_tokens

    @property
    def text(self) -> str:
        return self.service.tokenizer.decode(self.tokens)

    @property
    def finish_reason(self) -> str | None:
        """Known with the last token, or if that was one that ends a sequence, when nothing comes behind it."""
        if len(self.tokens) >= self.generation.sampling.max_tokens:
            return "length"
        return "stop" if self._has_ended else None
