"""Built-in policies of the router: which instance serves a request, where its prompt is computed, and which request is
refused.

Routing policies have the names and defaults of SGLang's gateway.
"""

from dataclasses import field
from operator import attrgetter
from typing import Literal

from pdsim.dataclass import dataclass
from pdsim.policy.draws import Draws
from pdsim.policy.views import PairView, RoutingView, SheddingView, TokenSequence, WaitingRequest

_LOAD = attrgetter("num_requests", "num_tokens")

Gateway = Literal["main", "0.3.2"]


@dataclass
class RoundRobin:
    """Picks the instances in turn."""

    _turn: int = field(default=0, init=False)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        load = view.instances[self._turn % len(view.instances)]
        self._turn += 1
        return load.instance_id


@dataclass
class RandomChoice:
    """Picks a random instance, each with equal probability."""

    seed: int = 0
    """Seed of the random choices."""
    _draws: Draws = field(default_factory=Draws, init=False)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        return view.instances[self._draws.below(len(view.instances), self.seed)].instance_id


@dataclass
class PowerOfTwo:
    """Draws two random instances, and picks the one whose unfinished requests have fewer prompt tokens. A tie goes to
    the first drawn instance.
    """

    seed: int = 0
    """Seed of the random choices."""
    _draws: Draws = field(default_factory=Draws, init=False)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        n = len(view.instances)
        first = self._draws.below(n, self.seed)
        second = (first + 1 + self._draws.below(n - 1, self.seed)) % n if n > 1 else first
        return min(view.instances[first], view.instances[second], key=lambda load: load.num_tokens).instance_id


@dataclass
class LeastLoaded:
    """Picks the instance with the fewest unfinished requests. Among equals: the one whose unfinished requests have the
    fewest prompt tokens, then the first.
    """

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        return min(view.instances, key=_LOAD).instance_id


@dataclass
class CacheAware:
    """Picks the instance to which most of the prompt was sent before. If loads are out of balance or the match is poor,
    picks a random instance among those with the fewest requests: sgl-model-gateway/src/policies/cache_aware.rs, since
    SGLang's pull request 33138 of August 2026. Earlier releases pick the first instance with the fewest requests (since
    pull request 14650 of December 2025), or the instance with the smallest tree.
    """

    gateway: Gateway = "main"
    """Release of SGLang's gateway. Release 0.3.2 picks random prefill and decode instances while loads are in balance,
    else the first instance with the fewest requests. `main` is the source since August 2026."""
    match_threshold: float = 0.3
    """Share of the prompt that must have been sent to an instance before, so that the match counts."""
    balance_abs_threshold: int = 64
    """Loads are out of balance if the highest number of requests exceeds the lowest by more than this number, and by
    more than the factor balance_rel_threshold."""
    balance_rel_threshold: float = 1.5
    """Ratio of the highest to the lowest number of requests above which loads are out of balance, if
    balance_abs_threshold is also exceeded."""
    seed: int = 0
    """Seed of the random choices."""
    _draws: Draws = field(default_factory=Draws, init=False)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        counts = [load.num_requests for load in view.instances]
        most, fewest = max(counts), min(counts)
        if most - fewest <= self.balance_abs_threshold or most <= fewest * self.balance_rel_threshold:
            if self.gateway == "0.3.2" and view.role != "aggregated":
                return view.instances[self._draws.below(len(counts), self.seed)].instance_id
            best = self._best_match(prompt, view)
            if best is not None:
                return best
        idlest = [load.instance_id for load in view.instances if load.num_requests == fewest]
        if self.gateway == "0.3.2":
            return idlest[0]
        return self._draws.one_of(idlest, self.seed)

    def _best_match(self, prompt: TokenSequence, view: RoutingView) -> str | None:
        holders = view.holders(prompt)
        if not holders:
            return None
        names = [load.instance_id for load in view.instances if load.instance_id in holders]
        cached = {name: view.num_cached_tokens(prompt, name) for name in names}
        best = max(cached, key=cached.__getitem__, default="")
        return best if best and cached[best] > self.match_threshold * len(prompt) else None


@dataclass
class QueueLimit:
    """Limits the number of requests that wait for their first token, by SGLang's rule (--max-queued-requests). At the
    limit, an arriving request is refused. If waiting requests have a lower priority than the arriving request, one of
    them is refused instead: among those of the lowest priority, the request that came last.
    """

    max_queued_requests: int
    """Maximum number of requests of the whole cluster that wait for their first token."""

    def __post_init__(self) -> None:
        if self.max_queued_requests < 1:
            raise ValueError(f"max_queued_requests is at least 1, found {self.max_queued_requests}")

    def shed(self, request: WaitingRequest, view: SheddingView) -> int | None:
        waiting = view.waiting
        if len(waiting) < self.max_queued_requests:
            return None
        lowest = min(reversed(waiting), key=lambda other: other.priority)
        return lowest.request_id if lowest.priority < request.priority else request.request_id


@dataclass
class PrefixBased:
    """A prefill instance computes a prompt if at least non_cached_tokens of the prompt's tokens are not cached on
    decode. This is llm-d's prefix-based-pd-decider (pkg/epp/framework/plugins/scheduling/profilehandler/disagg).
    """

    non_cached_tokens: int
    """Minimum number of uncached tokens of a prompt that a prefill instance computes. 0: decode computes all
    prompts.
    """

    def __post_init__(self) -> None:
        if self.non_cached_tokens < 0:
            raise ValueError(f"non_cached_tokens is at least 0, found {self.non_cached_tokens}")

    def is_remote(self, prompt: TokenSequence, view: PairView) -> bool:
        if not self.non_cached_tokens:
            return False
        return len(prompt) - view.num_decode_cached_tokens >= self.non_cached_tokens


@dataclass
class LengthAndQueue:
    """A prefill instance computes prompts with many uncached tokens, unless too many prompts wait on prefill.

    This is the rule of Dynamo's PyDisaggregatedRouter (examples/llm/components/disagg_router.py).
    """

    max_local_prefill_length: int = 1000
    """Maximum number of uncached tokens of a prompt that decode computes itself."""
    max_prefill_queue_size: int = 2
    """Number of prompts that wait on all prefill instances together at which the queue counts as full. Decode then
    computes further prompts itself. One prompt of each prefill instance does not count, because it is being computed.
    """

    def __post_init__(self) -> None:
        if self.max_local_prefill_length < 0 or self.max_prefill_queue_size < 1:
            raise ValueError(f"needs max_local_prefill_length >= 0 and max_prefill_queue_size >= 1, found {self}")

    def is_remote(self, prompt: TokenSequence, view: PairView) -> bool:
        num_uncached = len(prompt) - view.num_decode_cached_tokens
        num_queued = sum(max(0, load.num_requests - 1) for load in view.prefill)
        return num_uncached > self.max_local_prefill_length and num_queued < self.max_prefill_queue_size
