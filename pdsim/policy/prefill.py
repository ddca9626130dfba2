"""Built-in policies of prefill: in which order prompts are computed, and how much KV is sent after each chunk."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import field
from itertools import chain
from math import inf
from typing import ClassVar

from pdsim.dataclass import dataclass
from pdsim.policy.draws import Draws
from pdsim.policy.protocols import Pick
from pdsim.policy.views import PrefillView, QueuedPrefill, SendingPrefill

_MOST_RANKED = 128
"""Maximum length of a queue that lpm and hrrn sort. SGLang does not sort longer queues
(WAITING_QUEUE_PREFIX_MATCH_MAX)."""
_FEW_CACHED_TOKENS = 32
"""A prompt with at most this number of cached tokens waits for an earlier prompt with the same beginning
(IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD)."""
_ALIKE_TOKENS = 32
"""Two prompts have the same beginning if at least this number of their first tokens are equal
(IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD).
"""


@dataclass
class FirstComeFirstServed:
    """Computes prompts in the order of their arrival or, on prefill, in the order in which decode granted pages
    (SGLang's fcfs).
    """

    def select(self, view: PrefillView) -> Iterable[Pick]:
        return (Pick(request.request_id) for request in view.waiting)


@dataclass
class HighestPriorityFirst:
    """Computes the prompt with the highest priority first. Among equals: first come, first served (SGLang's priority
    scheduling).
    """

    def select(self, view: PrefillView) -> Iterable[Pick]:
        return (Pick(r.request_id) for r in sorted(view.waiting, key=lambda request: -request.priority))


@dataclass
class ShortestPromptFirst:
    """Computes the shortest prompt first. A prompt that has waited longer than patience_ns goes before all others."""

    patience_ns: int = 10_000_000_000
    """Time after a prompt's arrival from which the prompt goes before shorter prompts."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        def rank(request: QueuedPrefill) -> tuple[bool, int, int]:
            overdue = view.now_ns - request.arrival_ns > self.patience_ns
            return (not overdue, request.num_prompt_tokens, request.request_id)

        return (Pick(request.request_id) for request in sorted(view.waiting, key=rank))


@dataclass
class LongestOutputFirst:
    """Computes the prompt with the longest requested output first, after priorities (SGLang's lof). On prefill
    instances all prompts request one token, so those of equal priority keep the order of the queue.
    """

    def select(self, view: PrefillView) -> Iterable[Pick]:
        waiting = sorted(view.waiting, key=lambda request: (-request.priority, -request.num_asked_tokens))
        return (Pick(request.request_id) for request in waiting)


@dataclass
class RandomOrder:
    """Computes prompts in random order, which changes with each forward (SGLang's random)."""

    seed: int = 0
    """Seed of the random order."""
    _draws: Draws = field(default_factory=Draws, init=False)

    def select(self, view: PrefillView) -> Iterable[Pick]:
        waiting = list(view.waiting)
        drawn = [waiting.pop(self._draws.below(left, self.seed)) for left in range(len(waiting), 0, -1)]
        return [Pick(request.request_id) for request in drawn]


Rank = tuple[float, ...]
"""Sort key of a prompt in the queue. Lower ranks go first. Prompts of equal rank keep their order."""


def _lookups(waiting: list[QueuedPrefill], view: PrefillView) -> Iterator[tuple[QueuedPrefill, int, bool]]:
    """Yields, for each waiting prompt: the prompt, its number of cached tokens, and True if it should wait for an
    earlier prompt.

    A prompt should wait if it has hardly any cached tokens, and an earlier prompt has the same beginning. The earlier
    prompt will cache the tokens that both share.
    """
    first: set[Hashable] = set()
    for request in waiting:
        num_cached, follows = view.use_cached_tokens(request), False
        if num_cached <= _FEW_CACHED_TOKENS and request.num_prompt_tokens >= _ALIKE_TOKENS:
            beginning = request.prompt.page_key(0, _ALIKE_TOKENS)
            follows = beginning in first
            first.add(beginning)
        yield request, num_cached, follows


@dataclass
class CacheAwareOrder:
    """Base class of orders that look up all waiting prompts in the prefix cache. The core keeps the queue in the sorted
    order, so prompts of equal rank keep the order in which the last sort left them. Without a prefix cache, the order
    is fcfs.
    """

    sorts_long_queues: ClassVar[bool] = False
    """True: queues of any length are sorted. False: a queue of more than 128 prompts is not sorted."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        waiting = list(view.waiting)
        if len(waiting) <= _MOST_RANKED or self.sorts_long_queues:
            ranks = self._ranks(waiting, view)
            waiting.sort(key=lambda request: ranks[request.request_id])
        return [Pick(request.request_id) for request in waiting]

    def _ranks(self, waiting: list[QueuedPrefill], view: PrefillView) -> dict[int, Rank]:
        raise NotImplementedError


@dataclass
class LongestPrefixFirst(CacheAwareOrder):
    """Computes the prompt with the longest cached prefix first (SGLang's lpm). A prompt with at most 32 cached tokens
    comes last if an earlier such prompt has the same first 32 tokens, because the cache will soon have these tokens.
    """

    def _ranks(self, waiting: list[QueuedPrefill], view: PrefillView) -> dict[int, Rank]:
        return {
            request.request_id: (1,) if follows else (-num_cached,)
            for request, num_cached, follows in _lookups(waiting, view)
        }


@dataclass
class HighestResponseRatioFirst(CacheAwareOrder):
    """Computes the prompt with the highest response ratio first (SGLang's hrrn). The response ratio is the number of
    tokens that the instance has computed for any prompts since the prompt joined the queue, divided by the prompt's own
    uncached tokens. Among equals: the order of arrival (SGLang: of client ids). A prompt with at most 32 cached tokens
    comes last if an earlier such prompt has the same first 32 tokens.
    """

    def _ranks(self, waiting: list[QueuedPrefill], view: PrefillView) -> dict[int, Rank]:
        ranks: dict[int, Rank] = {}
        for request, num_cached, follows in _lookups(waiting, view):
            num_uncached = request.num_prompt_tokens - num_cached
            ratio = view.num_waited_tokens(request) / num_uncached if num_uncached > 0 else inf
            ranks[request.request_id] = (inf if follows else -ratio, request.request_id)
        return ranks


@dataclass
class ShortestPrefillFirst(CacheAwareOrder):
    """Computes the prompt with the fewest uncached tokens first (SGLang's shortest-prefill-first). A partly computed
    prompt takes smaller chunks, so that waiting prompts with fewer uncached tokens fit into the same forwards.
    """

    sorts_long_queues = True

    def _ranks(self, waiting: list[QueuedPrefill], view: PrefillView) -> dict[int, Rank]:
        return {
            request.request_id: (follows, max(1, request.num_tokens - num_cached), request.entry)
            for request, num_cached, follows in _lookups(waiting, view)
        }

    def max_chunk_tokens(self, num_left_tokens: int, budget_tokens: int, view: PrefillView) -> int | None:
        """Maximum chunk of a partly computed prompt, so that the shorter prompts at the head of the sorted queue fit
        into the same forward. None: no limit. num_left_tokens: uncomputed tokens of the partly computed prompt.
        budget_tokens: maximum tokens of the forward.
        """
        size = view.page_size
        num_reserved = 0
        for request in view.waiting:
            work_tokens = max(1, request.num_tokens - view.num_cached_tokens(request))
            whole_pages = -(-work_tokens // size) * size
            if work_tokens >= num_left_tokens or num_reserved + whole_pages > budget_tokens - size:
                break
            num_reserved += whole_pages
        return (budget_tokens - num_reserved) // size * size if num_reserved else None


@dataclass
class DepthFirst(CacheAwareOrder):
    """Computes prompts in the order of a walk through the prefix tree (SGLang's dfs-weight). Subtrees with more waiting
    prompts come first. Prompts that end at a node come after the prompts in its subtrees.
    """

    sorts_long_queues = True

    def _ranks(self, waiting: list[QueuedPrefill], view: PrefillView) -> dict[int, Rank]:
        for request in waiting:
            view.use_cached_tokens(request)
        paths = {request.request_id: view.cached_path(request) for request in waiting}
        weights = Counter(path[:depth] for path in paths.values() for depth in range(1, len(path) + 1))

        def rank(path: tuple[int, ...]) -> Rank:
            steps = [(-weights[path[: depth + 1]], place) for depth, place in enumerate(path)]
            return (*chain.from_iterable(steps), inf)

        return {request_id: rank(path) for request_id, path in paths.items()}


@dataclass
class EveryChunk:
    """Sends the KV of each chunk as soon as it is computed (SGLang's default). Only the last chunk's transfer delays
    the first token.
    """

    cached_prefix_first: bool = True
    """True: cached pages are sent before the first forward. False: with the first chunk
    (SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX)."""

    def send_until(self, request: SendingPrefill) -> int:
        if request.num_computed_tokens == request.num_cached_tokens and not self.cached_prefix_first:
            return request.num_sent_tokens
        return request.num_computed_tokens


@dataclass
class WholePrompt:
    """Sends all KV after the last chunk, in one transfer. The whole transfer delays the first token."""

    def send_until(self, request: SendingPrefill) -> int:
        return request.num_sent_tokens
