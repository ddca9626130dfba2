"""Durations by fitted coefficients: linear functions, to which interpolated tables of times can be added."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from math import exp
from typing import TYPE_CHECKING

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import DecodeLine, Terms, tiled

if TYPE_CHECKING:
    from pdsim.cost.settings import Affine, AffineTable

_WORK = ("base and tokens", "attention", "attention behind a context", "context", "prompts")


class AffineModel:
    """Durations of steps by the coefficients of Affine: sums of terms in proportion to tokens, attended pairs, prompts,
    requests and KV tokens. A forward takes at least the time of launching its kernels (`_least_ns`), and takes longer
    on a GPU that computes without pause (GpuClock).
    """

    def __init__(self, settings: "Affine") -> None:
        self._settings = settings
        self._clock = GpuClock(settings.prefill_slowdown, settings.prefill_slowdown_memory_ns)

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        tokens, attention, continued, context, prompts = self._work(step)
        rested_ns = tokens + attention + continued + context + prompts
        return max(1, round(max(self._least_ns(step), self._clock.stretch(start_ns, rested_ns))))

    def prefill_terms(self, step: PrefillStep) -> Terms:
        terms = dict(zip(_WORK, self._work(step), strict=True))
        return {**terms, "launches beyond that": max(0.0, self._least_ns(step) - sum(terms.values()))}

    def _work(self, step: PrefillStep) -> tuple[float, float, float, float, float]:
        """Returns the terms of a forward's duration in ns: base and tokens, attention, additional attention of chunks
        that continue a prompt, gathering of their contexts, and prompts. Least times and the GPU's slowdown are not
        included.
        """
        settings, chunks = self._settings, step.chunks
        num_tokens, graph = step.num_tokens, self._graph_tokens(step.num_tokens)
        per_pair_ns = settings.prefill_graph_per_pair_ns if graph else settings.prefill_per_pair_ns
        idle_rows = -num_tokens % settings.prefill_wave_tokens / num_tokens
        waves = idle_rows * sum(chunk.num_tokens * chunk.num_context_tokens for chunk in chunks)
        pairs = sum([chunk.num_pairs for chunk in chunks]) + waves
        continued = [chunk for chunk in chunks if chunk.num_context_tokens]
        return (
            self._tokens_ns(graph or tiled(num_tokens, settings.prefill_tile_tokens)),
            per_pair_ns * pairs,
            settings.prefill_per_continued_pair_ns * sum([chunk.num_pairs for chunk in continued]),
            settings.prefill_per_context_token_ns * sum(chunk.num_context_tokens for chunk in continued),
            settings.prefill_per_prompt_ns * len(chunks),
        )

    def _graph_tokens(self, num_tokens: int) -> int:
        """Size in tokens of the smallest CUDA graph that holds num_tokens. 0: no graph is large enough."""
        sizes = self._settings.prefill_graph_sizes
        index = bisect_left(sizes, num_tokens)
        return sizes[index] if index < len(sizes) else 0

    def _least_ns(self, step: PrefillStep) -> float:
        settings = self._settings
        num_continued = sum(chunk.num_context_tokens > 0 for chunk in step.chunks)
        return (
            settings.prefill_least_ns
            + settings.prefill_least_per_prompt_ns * len(step.chunks)
            + settings.prefill_least_per_continued_prompt_ns * num_continued
        )

    def decode_line(self, num_requests: int) -> DecodeLine:
        settings, base_ns = self._settings, max(1, self._batch_ns(num_requests))
        return DecodeLine.of_ns(base_ns, settings.decode_per_context_token_ns, settings.decode_per_distinct_token_ns)

    def decode_terms(self, num_requests: int) -> Terms:
        per_request_ns = self._settings.decode_per_request_ns * num_requests
        base_ns = max(1, self._batch_ns(num_requests)) - per_request_ns
        return {"base and weights": base_ns, "requests": per_request_ns}

    def _tokens_ns(self, num_tokens: int) -> float:
        return self._settings.prefill_base_ns + self._settings.prefill_per_token_ns * num_tokens

    def _batch_ns(self, num_requests: int) -> float:
        settings = self._settings
        matrices_ns = max(settings.decode_weights_ns, settings.decode_matrices_per_request_ns * num_requests)
        return settings.decode_base_ns + matrices_ns + settings.decode_per_request_ns * num_requests


class TableModel(AffineModel):
    def __init__(self, settings: "AffineTable") -> None:
        super().__init__(settings)
        self._prefill = Entries(settings.prefill_ns or {})
        self._decode = Entries(settings.decode_ns or {})

    def _tokens_ns(self, num_tokens: int) -> float:
        return super()._tokens_ns(num_tokens) + self._prefill.at(num_tokens)

    def _batch_ns(self, num_requests: int) -> float:
        return super()._batch_ns(num_requests) + self._decode.at(num_requests)


class Entries:
    """Linear interpolation between table entries. times_ns: time in ns by size (number of tokens or of requests). Above
    the last entry, the line through the last two entries continues. Below the first entry, the first time holds. If
    there is only one entry, its time holds for all sizes.
    """

    def __init__(self, times_ns: Mapping[int, float]) -> None:
        self._sizes = sorted(times_ns)
        self._times_ns = [times_ns[size] for size in self._sizes]

    def at(self, size: int) -> float:
        """Returns the time in ns for a size; 0 if the table is empty."""
        after = min(bisect_right(self._sizes, size), len(self._sizes) - 1)
        if after < 1:
            return self._times_ns[0] if self._sizes else 0.0
        low, high = self._sizes[after - 1], self._sizes[after]
        first, last = self._times_ns[after - 1], self._times_ns[after]
        return first + (last - first) * (size - low) / (high - low)


class GpuClock:
    """Slows forwards on a GPU that computes without pause, because its clock falls with recent utilisation.

    Measured on an H200 (data of the sglang-h200 study): after a second of uninterrupted forwards, the same forward
    takes 19 % longer than after a pause. The slowdown is proportional to an exponential average of utilisation over
    about 0.1 s.
    """

    def __init__(self, slowdown: float, memory_ns: float) -> None:
        """slowdown: share by which forwards take longer if the GPU computes all the time. memory_ns: time constant in
        ns of the exponential average of the GPU's utilisation.
        """
        self._slowdown = slowdown
        self._memory_ns = memory_ns
        self._utilisation = 0.0
        self._busy_until_ns = 0

    def stretch(self, start_ns: int, duration_ns: float) -> float:
        """Returns the duration in ns of a forward that begins at start_ns. duration_ns: duration of the same forward
        without slowdown.
        """
        if not self._slowdown:
            return duration_ns
        at_start = self._utilisation * exp(-(start_ns - self._busy_until_ns) / self._memory_ns)
        x = duration_ns / self._memory_ns
        weight = (1 - exp(-x)) / x
        mean = at_start * weight + 1 - weight
        stretched = duration_ns * (1 + self._slowdown * mean)
        self._utilisation = 1 - (1 - at_start) * exp(-stretched / self._memory_ns)
        self._busy_until_ns = start_ns + round(stretched)
        return stretched
