"""Times of the copies between host memory and GPU that decode steps with HiSparse wait for.

In each layer with an indexer, a kernel finds the chosen tokens that a request's buffer lacks, and copies them from host
memory. Each request has one block of threads, which copies its tokens in turn. Blocks share the host link. Layers
without an indexer use the tokens that an earlier layer's indexer chose, so they lack the same tokens. Other kernels
copy these tokens for one layer after another, while earlier layers compute.

Times of the kernels are those of SGLang 0.5.23's on an H200 (experiments/hisparse), and are assumed for other GPUs.
"""

from pdsim.core.messages import HiSparseStep
from pdsim.dataclass import dataclass

FIND_NS, SHORT_NS = 11_200, 5_000
"""Times in ns of the kernel that finds missing tokens, without copies: if the KV of at least one request does not fit
its buffer, and if all KV fits."""
TOKEN_NS = 118.5
"""Time in ns in which one block of threads copies the KV of one token in one layer, if the host link is not the
bottleneck.
"""
COPY_NS, COPY_TOKEN_NS = 4_800, 28.0
"""Times in ns of the kernel that copies tokens of a layer without an indexer: a fixed time, and the time for each token
of any request."""


@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """Times of the copies that decode steps with HiSparse wait for: copies of one rank's KV, without indexer keys,
    between host memory and the requests' buffers on the GPU.

    All ranks of an instance copy at the same time. A layer's attention begins when its tokens are on the GPU. A step
    begins when the new tokens of the previous step are saved (SGLang 0.5.23, managers/hisparse_coordinator.py:1587,
    1265).
    """

    num_layers: int
    """Number of layers whose KV is copied."""
    num_index_layers: int
    """Number of layers with an indexer."""
    token_bytes: int
    """KV bytes of one token on one rank, over all layers."""
    buffer_tokens: int
    """Number of tokens that a request's buffer on the GPU holds. If a request has more KV, the rest is in host memory
    only.
    """
    chosen_tokens: int
    """Number of tokens that attention chooses for a request."""
    miss_rate: float
    """Share of the tokens chosen by sparse attention that are missing in the request's buffer on the GPU, on average.
    """
    load_bandwidth: float
    """Rate in bytes per second of copies to the GPU."""
    save_bandwidth: float
    """Rate in bytes per second of copies to host memory."""

    def step_ns(self, step: HiSparseStep, computing_ns: int) -> int:
        """Time in ns by which copies between GPU and host memory prolong this step. computing_ns: duration of the step
        without the time of reading KV.
        """
        filled = step.num_filled_tokens * self.token_bytes / self.load_bandwidth
        saved = step.num_saved_tokens * self.token_bytes / self.save_bandwidth
        return round(1e9 * (filled + saved) + self._swap_ns(step, computing_ns / self.num_layers))

    def usual_ns(self, num_requests: int, context_tokens: float, computing_ns: int) -> int:
        """Time in ns by which copies prolong a step without new requests. context_tokens: KV tokens of each request.
        computing_ns: duration of the step without the time of reading KV.
        """
        num_long = num_requests if context_tokens > self.buffer_tokens else 0
        step = HiSparseStep(0, (), (), num_requests, 0, 0, 1, 0, 0, num_long, num_requests)
        return self.step_ns(step, computing_ns)

    def _swap_ns(self, step: HiSparseStep, layer_ns: float) -> float:
        """Time in ns by which the kernels of all layers prolong a step. layer_ns: time of one layer's computation.

        A layer with an indexer waits for its whole kernel. A layer that shares the index copies while the layer before
        it computes, and waits only if copying takes longer than layer_ns.
        """
        missed = self.chosen_tokens * (step.num_first_requests + self.miss_rate * step.num_long_requests)
        late_ns = max(0.0, COPY_NS + COPY_TOKEN_NS * missed - layer_ns)
        num_others = self.num_layers - self.num_index_layers
        return self.num_index_layers * self._index_layer_ns(step, missed) + num_others * late_ns

    def _index_layer_ns(self, step: HiSparseStep, missed: float) -> float:
        """Time in ns of the kernel of one layer with an indexer, which finds the tokens that buffers lack and copies
        them. missed: number of these tokens, over all requests.
        """
        if not step.num_first_requests and not step.num_long_requests:
            return SHORT_NS
        largest = self.chosen_tokens * (1 if step.num_first_requests else self.miss_rate)
        link_ns = 1e9 * missed * self.token_bytes / self.num_layers / self.load_bandwidth
        return FIND_NS + max(link_ns, largest * TOKEN_NS)
