"""Tests whether a prompt that ignores EOS fits, if the instance has no prefix cache (SGLang's add_one_req_ignore_eos).
The test simulates the ends of all running requests: at each end, every request that still runs needs one free token.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

INITIAL_RATIO = 0.7
"""Share of its longest output that a request with EOS is expected to produce, before the instance has experience
(SGLANG_INIT_NEW_TOKEN_RATIO)."""


class Growing(Protocol):
    """A request with a longest output, and its tokens so far."""

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
    """Number of tokens that the request is expected to still produce."""
    num_tokens: int
    """Number of tokens that the request's end frees."""


class SimulatedEnds:
    """Ends of the running requests and of the requests that one forward begins, soonest first."""

    def __init__(self, running: Iterable[Growing], ratio: float) -> None:
        """ratio: expected share of their longest outputs, for requests that may end sooner."""
        self._running = running
        self._ratio = ratio
        self._ends: list[_End] | None = None

    def allow(self, request: Growing, begun: Iterable[Growing], num_free_tokens: int) -> bool:
        """True if the request fits beside the running ones. num_free_tokens: free tokens without the request's prompt.
        begun: requests that this forward already had at the first call; requests of later calls are added.
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
        """Inserts an end. As in SGLang, an end later than all others is put before the last one."""
        assert self._ends is not None
        if new.tokens_left > 0:
            last = max(0, len(self._ends) - 1)
            sooner = (i for i, end in enumerate(self._ends) if new.tokens_left <= end.tokens_left)
            self._ends.insert(next(sooner, last), new)
