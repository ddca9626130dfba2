"""Tests whether a prompt that ignores EOS fits, for instances without a prefix cache (SGLang's add_one_req_ignore_eos).
The test simulates when the running requests end: at each end, every request that still runs must have one free token.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

INITIAL_RATIO = 0.7
"""A request that may stop at EOS is expected to produce this share of its maximum output, until the instance has run
requests (SGLANG_INIT_NEW_TOKEN_RATIO).
"""


class Growing(Protocol):
    """A request that gets output tokens until it has max_output_tokens, or stops at EOS. num_tokens: all tokens that
    the request has now.
    """

    @property
    def ignores_eos(self) -> bool: ...

    @property
    def max_output_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


class _End(NamedTuple):
    tokens_left: float
    """Number of output tokens that the request is expected to produce from now until its end."""
    num_tokens: int
    """Number of tokens that become free when the request ends."""


class SimulatedEnds:
    """Tells whether a further request fits. Simulates the order in which requests end, and how many tokens each end
    frees. The requests are the running ones, and those that the forward being filled begins.
    """

    def __init__(self, running: Iterable[Growing], ratio: float) -> None:
        """running: the requests that run. ratio: a request that may stop at EOS is expected to produce this share of
        its maximum output; a request that ignores EOS produces all of it.
        """
        self._running = running
        self._ratio = ratio
        self._ends: list[_End] | None = None

    def allow(self, request: Growing, begun: Iterable[Growing], num_free_tokens: int) -> bool:
        """Returns True if the tokens suffice for the outputs of this request, of the running requests, and of the
        requests in `begun`, which the forward has begun already.

        num_free_tokens: tokens that stay free after the request got room for its prompt. The first call of a forward
        reads `begun`; later calls ignore it, because each call also remembers its own request.
        """
        if self._ends is None:
            others = [self._end_of(other) for other in (request, *self._running, *begun)]
            self._ends = sorted([end for end in others if end.tokens_left > 0], key=lambda end: end.tokens_left)
        else:
            self._insert(self._end_of(request))
        num_freed = 0
        for i, end in enumerate(self._ends):
            num_running = len(self._ends) - i
            if num_free_tokens + num_freed - end.tokens_left * num_running <= num_running:
                return False
            num_freed += end.num_tokens
        return True

    def _end_of(self, request: Growing) -> _End:
        ratio = 1.0 if request.ignores_eos else self._ratio
        return _End(request.max_output_tokens * ratio - request.num_output_tokens, request.num_tokens)

    def _insert(self, new: _End) -> None:
        """Inserts an expected end in order. An end that is later than all others goes before the last one, not behind
        it, as in SGLang: the order is then wrong there.
        """
        assert self._ends is not None
        if new.tokens_left > 0:
            last = max(0, len(self._ends) - 1)
            sooner = (i for i, end in enumerate(self._ends) if new.tokens_left <= end.tokens_left)
            self._ends.insert(next(sooner, last), new)
