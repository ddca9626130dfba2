"""The service behind all HTTP endpoints: passes an endpoint's request to the cluster, and the generated tokens back to
the endpoint.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from hmac import compare_digest
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from pdreal.control.refused import RefusedError
from pdreal.control.requests import Logprobs, Sampling
from pdreal.serve.fields import AnswerSettings, unavailable
from pdreal.serve.metrics import Meter, Metrics
from pdreal.serve.tokenizer import CheckpointTokenizer, StopTexts, Tokenizer
from pdreal.settings.scenario import Room

if TYPE_CHECKING:
    from pdreal.launcher import Launcher

_RETRY_AFTER_S = 1
_SEEDS_APART = 0x9E3779B97F4A7C15
"""Difference, modulo 2**62, between the sampling seeds of two consecutive answers (OpenAI's choices) to one request."""


class Entrance:
    """Admits requests. A request is refused if it lacks the API key (if there is a key), if the server stops, or if too
    many answers wait for their first token. A request may ask for several answers.
    """

    def __init__(self, api_key: str | None = None, max_waiting_requests: int = 4096) -> None:
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_waiting_requests = max_waiting_requests
        self._inside: set[Answer] = set()
        self._waiting: set[Answer] = set()
        """Admitted answers that have no first token yet."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_closed = False

    @property
    def has_key(self) -> bool:
        return self._authorization is not None

    def check_key(self, authorization: str) -> None:
        """Raises RefusedError if the key is missing or wrong. authorization: the request's header Authorization."""
        given = authorization.encode(errors="surrogateescape")
        if self._authorization is not None and not compare_digest(given, self._authorization):
            raise RefusedError(
                "this server needs its API key in the header Authorization: Bearer KEY",
                status=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_open(self, num_answers: int = 1) -> None:
        """Raises RefusedError if the server is closed, or too many answers would wait with the request's own.
        num_answers: number of answers that the request asks for.
        """
        if self.is_closed:
            raise unavailable("the server stops")
        num_waiting, most = len(self._waiting), self._max_waiting_requests
        if num_answers > most:
            raise RefusedError(f"n must be at most {most}, not {num_answers}: no more answers may wait at a time")
        if num_waiting + num_answers > most:
            message = f"{num_waiting} answers wait for their first token, and at most {most} may: try again later"
            raise unavailable(message, retry_after_s=_RETRY_AFTER_S)

    def enter(self, answer: "Answer") -> None:
        self._inside.add(answer)
        self._waiting.add(answer)
        self._empty.clear()

    def served(self, answer: "Answer") -> None:
        """Notes that an answer has its first token, so it no longer counts as waiting."""
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
        """Refuses new requests, and waits until running requests have ended, but at most patience_s seconds and only
        until the event `hurry` is set. Then aborts the remaining requests; their clients get a reason.
        """
        self.is_closed = True
        waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, hurry)]
        await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for answer in list(self._inside):
            answer.give_up("the server stops")


class Service(NamedTuple):
    """The cluster that all endpoints use, with its model, limits and tokenizer."""

    cluster: "Launcher"
    """The running instances."""
    model_name: str
    """Name of the model for clients."""
    tokenizer: Tokenizer | CheckpointTokenizer
    room: Room
    """Largest numbers of tokens that a request may have."""
    page_size: int
    """Number of tokens of a page."""
    metrics: Metrics
    entrance: Entrance
    """Admits requests, or refuses them."""


class Generation(NamedTuple):
    """A client's request, in the same form for all endpoints."""

    prompt: list[int]
    """Token ids of the prompt."""
    settings: AnswerSettings
    stream: bool
    """True: the answer is sent as events while its tokens arrive."""
    closing_usage: bool = False
    """True if a stream ends with an event of token counts. An answer that is not streamed always has token counts."""
    running_usage: bool = False
    """True if every event of a stream has token counts."""


class Part(NamedTuple):
    """A new part of an answer: tokens, and the text that can be sent because it cannot belong to a stop text."""

    text: str
    """Text to send. Empty: the text is held back, because the new tokens may belong to a stop text or an unfinished
    character; or the tokens have no text to send, such as special tokens or a stop text.
    """
    first_token: int
    """Position in the answer of the part's first token, from 0."""


class Answer:
    """One answer to a client's request, while it is generated. A request may ask for several answers ("n"). Entering
    the context submits the request to the cluster, iterating yields the parts of the answer, and leaving the context
    early aborts the request.
    """

    def __init__(self, service: Service, generation: Generation, index: int = 0) -> None:
        self.service = service
        self.generation = generation
        self.index = index
        """Index among the choices of one request, from 0; each choice has a sampling seed of its own."""
        self.text = ""
        self.matched: str | None = None
        """The stop text that ended the answer. None: no stop text has ended it."""
        self._detokenizer = service.tokenizer.detokenizer()
        self._stops = StopTexts(generation.settings.stop)
        self.created_s = int(time.time())
        self.began_s = time.monotonic()
        self.tokens: list[int] = []
        self._has_ended = False

    async def __aenter__(self) -> Self:
        prompt, sampling = self.generation.prompt, self.sampling
        self._request = self.service.cluster.submit(prompt, sampling)
        self._meter = Meter(self.service.metrics, len(prompt))
        self.service.entrance.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._has_ended and not self._request.has_ended:
            self.service.cluster.abort(self.request_id)
        self._meter.end(is_complete=self._has_ended)
        self.service.entrance.leave(self)

    async def __aiter__(self) -> AsyncIterator[Part]:
        """Yields the parts of the answer as they arrive. Each part has at least one new token, except perhaps the last,
        which may have only text that was held back because a stop text might have begun with it. Raises RequestFailed
        if the request fails.
        """
        async for new in self._request:
            self._meter.add_tokens(len(new), self.num_cached_tokens)
            self.service.entrance.served(self)
            first = len(self.tokens)
            self.tokens += new
            text, self.matched = self._stops.add(self._detokenizer.add(new))
            if self.matched is None and len(self.tokens) >= self.sampling.max_tokens:
                text += self._stops.rest()
            self.text += text
            if self.matched is not None:
                self._has_ended = True
                if not self._request.has_ended:
                    self.service.cluster.abort(self.request_id, "it has its stop text")
                yield Part(text, first)
                return
            yield Part(text, first)
        self._has_ended = True
        if rest := self._stops.rest():
            self.text += rest
            yield Part(rest, len(self.tokens))

    def give_up(self, reason: str) -> None:
        """Aborts the request. reason: sent to the client."""
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
    def sampling(self) -> Sampling:
        sampling = self.generation.settings.sampling
        return sampling._replace(seed=(sampling.seed + self.index * _SEEDS_APART) % (1 << 62))

    @property
    def logprobs(self) -> Sequence[Logprobs]:
        """Returns one entry for each token. Entries are None if the request does not ask for log probabilities."""
        return self._request.logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended: stop or length. None: the answer goes on, or a stop token or end-of-sequence token has
        ended it and the iteration over its parts has not ended yet.
        """
        if self.matched is not None:
            return "stop"
        if len(self.tokens) >= self.sampling.max_tokens:
            return "length"
        return "stop" if self._has_ended else None
