"""What all endpoints share, and the life of one request between them and the cluster."""

import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from pdreal.requests import Request, RequestFailed
from pdreal.sampling import Sampling
from pdreal.serve.entrance import Entrance
from pdreal.serve.metrics import Meter, Metrics
from pdreal.serve.room import Room
from pdreal.serve.tokenizer import Tokenizer
from pdsim.core.instance import Levels


class Cluster(Protocol):
    """What the front end needs of the launcher."""

    def submit(self, prompt_ids: list[int], sampling: Sampling) -> Request: ...

    def abort(self, request_id: int, reason: str = ...) -> None: ...

    def load(self) -> dict[str, Levels]: ...

    def flush_cache(self) -> None: ...

    @property
    def num_live_requests(self) -> int: ...

    @property
    def missing_roles(self) -> list[str]:
        """Roles of which no instance is up."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the cluster cannot go on, if it cannot."""
        ...


class Service(NamedTuple):
    """The cluster behind the endpoints, and what they must know of it."""

    cluster: Cluster
    model_name: str
    tokenizer: Tokenizer
    room: Room
    page_size: int
    metrics: Metrics
    entrance: Entrance


class Generation(NamedTuple):
    """What a client asked for, in whichever way it asked."""

    prompt: list[int]
    sampling: Sampling
    stream: bool
    closing_usage: bool = False
    """A stream ends with an event of token counts. An answer in one piece always has them."""
    running_usage: bool = False
    """Every event of a stream has them."""


class Answer:
    """One request under way: enter to submit it, iterate over its tokens, and leave; early is to abort it."""

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
        """What is new, one token or more each time."""
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
