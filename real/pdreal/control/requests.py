"""A request as the launcher's caller holds it: how its tokens are chosen, and the stream of them. Needs no torch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from pdsim.core.sequence import TokenIds


class Draw(NamedTuple):
    """Rule by which one token is chosen."""

    temperature: float
    """0: greedily."""
    top_p: float
    top_k: int
    """0: among all."""
    min_p: float
    seed: int
    position: int
    """Position of the token in its sequence."""
    num_logprobs: int | None
    """Log probabilities of so many likeliest tokens, beside that of the chosen one; None: not even that."""


Logprobs = list[Any]
"""[of the chosen token, [[token, its own], ...]]: plain JSON, before temperature and cuts."""


class Sampling(NamedTuple):
    """Rules by which tokens are chosen, greedily unless there is a temperature, and by which that ends.

    It ends with the first of: max_tokens, stop_after_tokens, an end-of-sequence token, a token to stop at.
    """

    max_tokens: int
    """The client's limit, which policies see too."""
    stop_after_tokens: int | None = None
    """A workload's true output length."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None

    @property
    def has_fixed_length(self) -> bool:
        """True if its longest output is what ends it."""
        return self.ignore_eos and self.stop_after_tokens in {None, self.max_tokens}

    @property
    def is_plain(self) -> bool:
        """True if tokens are greedy, and nothing else is asked of them."""
        return self.temperature <= 0 and self.num_logprobs is None


class RequestFailed(Exception):  # noqa: N818  it is news, not a mistake
    """The request ends without the rest of its tokens; the message says why."""


class RestartError(Exception):
    """An instance cannot be restarted without failing requests."""


class Request:
    """Iterate over it for its tokens, in batches as they come. Raises RequestFailed if it fails."""

    def __init__(self, request_id: int, prompt: TokenIds, sampling: Sampling) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.num_cached_tokens = 0
        """Tokens of the prompt in a prefix cache; known when it is computed."""
        self.tokens: list[int] = []
        """All so far."""
        self.logprobs: list[Any] = []
        """Log probabilities of each token, if they are asked for."""
        self._ended: str | None = None
        """Reason why it failed; empty if it finished."""
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
