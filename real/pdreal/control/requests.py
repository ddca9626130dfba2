"""A request as its sender sees it: rules for choosing tokens, and the stream of its tokens. Needs no torch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from pdsim.core.sequence import TokenIds


class Draw(NamedTuple):
    """Rule by which one token is chosen."""

    temperature: float
    """Temperature. 0: the likeliest token is chosen."""
    top_p: float
    """Tokens are drawn from the smallest set of likeliest tokens that together have at least this probability. 1: from
    all.
    """
    top_k: int
    """Number of likeliest tokens to choose from. 0: all."""
    min_p: float
    """Smallest probability of a token, as a share of the likeliest token's. 0: any."""
    seed: int
    """Seed of the random numbers, which depend on nothing but seed, position and token."""
    position: int
    """Position of the token in its sequence."""
    num_logprobs: int | None
    """Number of likeliest tokens whose log probabilities are returned, besides the chosen token's. None: no log
    probabilities."""


Logprobs = list[Any]
"""Log probabilities for one chosen token, as plain JSON: [log probability of the chosen token, [[token, log
probability], ...] of the likeliest tokens]. Temperature, top-k and top-p do not change these values."""


class Sampling(NamedTuple):
    """Rules by which tokens are chosen and by which the output ends. At temperature 0 the likeliest token is chosen.

    The output ends with the first of: max_tokens, stop_after_tokens, an end-of-sequence token, a stop token.
    """

    max_tokens: int
    """Maximum number of output tokens that the client asks for. Scheduling policies see this number."""
    stop_after_tokens: int | None = None
    """The workload's number of output tokens, after which the output ends. Scheduling policies do not see this number.
    None: the workload does not set the number."""
    ignore_eos: bool = False
    """True: end-of-sequence tokens do not end the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids of the stop tokens, which end the output."""
    temperature: float = 0.0
    """Temperature at which tokens are drawn; at most 0: the likeliest token is chosen. The next five fields have the
    same meaning as in Draw.
    """
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None
    reference: tuple[int, ...] = ()
    """Output token ids of the same request in a run without drafts. In this run each draft that counts as accepted is
    replaced by the token at the same position of that output. Empty: accepted drafts are the draft model's own
    proposals."""

    @property
    def has_fixed_length(self) -> bool:
        """True if no token can end the output early, so its length is known."""
        return self.ignore_eos and not self.stop_token_ids and self.stop_after_tokens in {None, self.max_tokens}

    @property
    def is_plain(self) -> bool:
        """True if the likeliest tokens are chosen, and no log probabilities are requested."""
        return self.temperature <= 0 and self.num_logprobs is None


class Drafted(NamedTuple):
    """Numbers of a request's drafts that were accepted."""

    num_accepted: int = 0
    """Number of drafts that decode steps accepted."""
    num_confirmed: int = 0
    """Number of accepted drafts that equal the target model's own choice at the same position."""
    num_near: int = 0
    """Number of accepted drafts that differ from the target model's choice, but whose score is at most one step of bf16
    below that choice's score."""

    def plus(self, other: "Drafted") -> "Drafted":
        return Drafted(*(one + another for one, another in zip(self, other, strict=True)))


NO_DRAFTS = Drafted()


class RequestFailed(Exception):  # noqa: N818  it is news, not a mistake
    """Raised if a request ends without the rest of its tokens. The message gives the reason."""


class RestartError(Exception):
    """Raised if an instance cannot be restarted without failing requests."""


class Request:
    """A running request. Iterating over it yields its tokens, in batches as they arrive. Raises RequestFailed if the
    request fails.
    """

    def __init__(self, request_id: int, prompt: TokenIds, sampling: Sampling) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.num_cached_tokens = 0
        """Number of prompt tokens that a prefix cache had, known when the prompt is computed."""
        self.tokens: list[int] = []
        """Ids of all output tokens so far."""
        self.logprobs: list[Any] = []
        """One Logprobs for each output token so far; None in its place if the request does not ask for them."""
        self.drafted = NO_DRAFTS
        """Numbers of accepted drafts. All are 0 until the request ends."""
        self._ended: str | None = None
        """Reason of a failure. Empty: the request finished. None: it has not ended."""
        self._news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def put(self, token: int, logprobs: Any = None) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprobs)
        self._news.set()

    def end(self, reason: str = "") -> None:
        self._ended = reason
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        taken = 0
        while True:
            await self._news.wait()
            self._news.clear()
            if taken < len(self.tokens):
                fresh = self.tokens[taken:]
                taken += len(fresh)
                yield fresh
            if self._ended is not None:
                if self._ended:
                    raise RequestFailed(self._ended)
                return
