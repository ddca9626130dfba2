"""Built-in policies for KV pages. Admission: when a request gets pages. Preemption: which running request loses its
pages. Eviction: which cached pages are freed first.
"""

from pdsim.dataclass import dataclass
from pdsim.policy.protocols import ADMITTED, Admitted, Deferred
from pdsim.policy.views import CachedLeaf, Candidate, DecodeView, QueuedDecode


def num_kv_tokens(request: QueuedDecode) -> int:
    """Number of a request's tokens that have KV. The last output token has no KV until the next step computes it."""
    return request.num_prompt_tokens + max(request.num_output_tokens - 1, 0)


def num_pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def whole(num_tokens: int, unit_tokens: int) -> int:
    """Number of tokens in whole units: num_tokens, rounded up to a multiple of unit_tokens."""
    return num_pages(num_tokens, unit_tokens) * unit_tokens


@dataclass
class ReserveDecodeTokens:
    """SGLang's rule: each active request reserves a fixed number of tokens for its outputs.

    The rule over-commits on purpose: a request with more outputs takes tokens that other requests have reserved, or
    causes a retraction.
    """

    reserved_tokens: int = 512
    """Number of tokens that each active request reserves (--num-reserved-decode-tokens)."""
    max_estimated_output_tokens: int = 4096
    """Maximum number of output tokens that the rule expects of a request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""

    def __post_init__(self) -> None:
        if self.reserved_tokens < 0 or self.max_estimated_output_tokens < 1:
            raise ValueError(f"needs reserved_tokens >= 0 and max_estimated_output_tokens >= 1, found {self}")

    def admit(self, candidate: Candidate, view: DecodeView) -> Admitted | Deferred:
        budget = view.num_available_pages * view.page_size
        reserve = self.reserved_tokens * view.num_active
        if candidate.resumes:
            need = whole(candidate.num_tokens, view.resume_unit_tokens) + self.reserved_tokens
            return ADMITTED if need <= budget - reserve else Deferred(ask_again_steps=None)
        for request in view.retracted:
            budget -= whole(num_kv_tokens(request), view.resume_unit_tokens) + self.reserved_tokens
        need = candidate.num_new_pages * view.page_size + self.reserved_tokens
        if need > budget - reserve:
            return Deferred(ask_again_steps=None)
        running = view.num_running_tokens
        need = max(need, self._whole_tokens(candidate.request) - candidate.num_cached_tokens - running)
        if reserve < self.max_estimated_output_tokens:  # else no running request can exceed the reserve
            reserve = max([reserve, *(self._whole_tokens(request) - running for request in view.running)])
        return ADMITTED if need <= budget - reserve else Deferred()

    def _whole_tokens(self, request: QueuedDecode) -> int:
        return request.num_prompt_tokens + min(request.max_output_tokens, self.max_estimated_output_tokens)


@dataclass
class ReserveMaxOutput:
    """Admits a request only if this request and all active requests can reach their maximum outputs, so that no request
    is ever retracted.
    """

    def admit(self, candidate: Candidate, view: DecodeView) -> Admitted | Deferred:
        to_grow = sum(self._pages_to_grow(request, view) for request in (*view.active, candidate.request))
        fits = candidate.num_new_pages + to_grow <= view.num_available_pages
        return ADMITTED if fits else Deferred(ask_again_steps=None)

    @staticmethod
    def _pages_to_grow(request: QueuedDecode, view: DecodeView) -> int:
        longest = request.num_prompt_tokens + request.max_output_tokens - 2 + view.num_ahead_tokens
        return num_pages(longest, view.page_size) - num_pages(num_kv_tokens(request), view.page_size)


@dataclass
class FreePages:
    """Admits every request whose KV fits now (vLLM's rule). If running requests need more pages than there are,
    requests are preempted.
    """

    def admit(self, candidate: Candidate, view: DecodeView) -> Admitted | Deferred:
        return ADMITTED if candidate.num_new_pages <= view.num_available_pages else Deferred(ask_again_steps=None)


@dataclass
class FewestOutputsFirst:
    """Preempts the request with the fewest output tokens, as SGLang does. Among requests with equally few: the one with
    the longest prompt; among equal prompts: the last in the batch.
    """

    def victim(self, view: DecodeView) -> int:
        return min(reversed(view.running), key=lambda r: (r.num_output_tokens, -r.num_prompt_tokens)).request_id


@dataclass
class LowestPriorityFirst:
    """Preempts the request with the lowest priority (SGLang's --retraction-policy priority). Among equals: the one with
    the fewest output tokens, then the longest prompt, then the last in the batch (fewest_outputs_first).
    """

    last_arrived: bool = False
    """True: among equal priorities, preempts the request that arrived last, as vLLM's priority scheduling does."""

    def victim(self, view: DecodeView) -> int:
        lowest = min(request.priority for request in view.running)
        among = [request for request in view.running if request.priority == lowest]
        if self.last_arrived:
            return max(among, key=lambda r: (r.arrival_ns, r.request_id)).request_id
        return min(reversed(among), key=lambda r: (r.num_output_tokens, -r.num_prompt_tokens)).request_id


@dataclass
class LastArrivedFirst:
    """Preempts the request that arrived last, so that earlier requests keep their progress."""

    def victim(self, view: DecodeView) -> int:
        return max(view.running, key=lambda r: (r.arrival_ns, r.request_id)).request_id


@dataclass
class LastAdmittedFirst:
    """Preempts the last request of the batch (vLLM's rule with first come, first served)."""

    def victim(self, view: DecodeView) -> int:
        return view.running[-1].request_id


@dataclass
class LeastRecentlyUsed:
    """Evicts the least recently used leaf of the prefix tree."""

    def key(self, leaf: CachedLeaf) -> int:
        return leaf.last_access


@dataclass
class LeastFrequentlyUsed:
    """Evicts the leaf with the fewest uses by requests. Among equals: the least recently used leaf."""

    def key(self, leaf: CachedLeaf) -> tuple[int, int]:
        return (leaf.num_hits, leaf.last_access)


@dataclass
class FirstInFirstOut:
    """Evicts the leaf that was inserted first."""

    def key(self, leaf: CachedLeaf) -> int:
        return leaf.born
