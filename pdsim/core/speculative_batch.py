"""The requests that one instance decodes speculatively: a step verifies drafts, and each gains what is accepted.

They move on by different amounts, so each step stands alone, and lengths and pages are kept for each request.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pdsim.core.kv_cache import KvCache
from pdsim.core.messages import Result, Verified
from pdsim.core.running_batch import Request, RunningBatch
from pdsim.policy.protocols import PreemptionPolicy
from pdsim.policy.views import DecodeView


@dataclass(frozen=True, kw_only=True)
class Speculation:
    draft_tokens: int
    """That a step verifies of each request, its last token among them (--speculative-num-draft-tokens)."""
    reserved_steps: int = 2
    """For whose draft tokens a request has pages. SGLang's overlap schedule needs 2: it begins a step before it knows
    what the last one accepted."""

    @property
    def num_ahead_tokens(self) -> int:
        return self.draft_tokens * self.reserved_steps


class SpeculativeBatch(RunningBatch[Request]):
    def __init__(self, cache: KvCache, speculation: Speculation) -> None:
        super().__init__(cache)
        self.num_written_tokens = speculation.draft_tokens
        self.num_ahead_tokens = speculation.num_ahead_tokens

    def make_room(self, policy: PreemptionPolicy, view: DecodeView) -> Iterator[Request]:
        while sum(self._lacking_pages()) > self._cache.num_available_pages:
            yield from self._give_way(policy, view)
        for request, num_pages in zip(self._requests.values(), self._lacking_pages(), strict=True):
            self._cache.grow(request.lease, num_pages)

    def advance(self, result: Result) -> None:
        assert isinstance(result, Verified)
        for request, num_tokens in zip(self._requests.values(), result.num_tokens, strict=True):
            request.num_output_tokens += num_tokens
        self.num_steps += 1
        self.num_kv_tokens += sum(result.num_tokens)

    def _lacking_pages(self) -> list[int]:
        """Of each request, in order: pages that the next step needs beyond those it has."""
        return [
            max(0, -(-(request.num_kv_tokens + self.num_ahead_tokens) // self._page_size) - len(request.lease.table))
            for request in self._requests.values()
        ]

    def _max_steps(self) -> int:
        return 1

    def _phase(self, request: Request) -> int:
        """None opens its pages in a fixed rhythm."""
        return 0

    def _update(self, request: Request) -> None:
        """Lengths are always up to date."""


def running_batch(cache: KvCache, speculation: Speculation | None) -> RunningBatch[Request]:
    return RunningBatch(cache) if speculation is None else SpeculativeBatch(cache, speculation)
