"""Times fitted to measurements: straight lines in what a forward has to do. Profiles hold their coefficients."""

from dataclasses import dataclass
from typing import ClassVar

from pdsim.core.messages import PrefillStep
from pdsim.cost.gpu_clock import GpuClock
from pdsim.cost.model import CostModel, DecodeLine
from pdsim.cost.work import attended_pairs
from pdsim.system.memory import Layout


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Prefill forwards: base + tokens + attended pairs + prompts. Decode steps: base + matrices + requests + KV.

    A prompt is continued if some of it is context: cached, or computed before.
    """

    HOST_FIELDS: ClassVar = (
        "prefill_least_ns",
        "prefill_least_per_prompt_ns",
        "prefill_least_per_continued_prompt_ns",
    )
    """Launches, which a slow host slows."""

    prefill_base_ns: float = 0
    prefill_per_token_ns: float = 0
    prefill_per_pair_ns: float = 0
    """Per pair of a new token and a token before it."""
    prefill_per_continued_pair_ns: float = 0
    """More of it in prompts that are continued: their attention is another kernel."""
    prefill_per_context_token_ns: float = 0
    """Of the prompts' contexts, which are gathered."""
    prefill_wave_tokens: int = 1
    """Context is read by waves of so many new tokens, the last of them perhaps half empty."""
    prefill_per_prompt_ns: float = 0
    prefill_least_ns: float = 0
    """However few its tokens: the launch of its kernels."""
    prefill_least_per_prompt_ns: float = 0
    """More of it for each prompt, whose attention is launched by itself."""
    prefill_least_per_continued_prompt_ns: float = 0
    """More of it for each that is continued."""
    prefill_slowdown: float = 0
    """Of a GPU that has been computing without pause (gpu_clock.py)."""
    prefill_slowdown_memory_ns: float = 100_000_000
    decode_base_ns: float = 0
    decode_weights_ns: float = 0
    """Reading the weights: where told apart from the base, the matrices of a large batch may take longer."""
    decode_matrices_per_request_ns: float = 0
    """Computing them, of which only what is longer than the reading counts."""
    decode_per_request_ns: float = 0
    decode_per_context_token_ns: float = 0
    """For each request that reads it."""
    decode_per_distinct_token_ns: float = 0
    """Once, however many requests share it."""

    def model(self, layout: Layout) -> CostModel:
        del layout
        return AffineModel(self)


class AffineModel:
    """The lines, for one GPU."""

    def __init__(self, settings: Affine) -> None:
        self._settings = settings
        self._clock = GpuClock(settings.prefill_slowdown, settings.prefill_slowdown_memory_ns)

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        of = self._settings
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
        idle_rows = -num_tokens % of.prefill_wave_tokens / num_tokens
        waves = idle_rows * sum(chunk.num_tokens * chunk.num_context_tokens for chunk in step.chunks)
        pairs = sum(attended_pairs(chunk) for chunk in step.chunks) + waves
        continued = [chunk for chunk in step.chunks if chunk.num_context_tokens]
        rested_ns = (
            self._tokens_ns(num_tokens)
            + of.prefill_per_pair_ns * pairs
            + of.prefill_per_continued_pair_ns * sum(map(attended_pairs, continued))
            + of.prefill_per_context_token_ns * sum(chunk.num_context_tokens for chunk in continued)
            + of.prefill_per_prompt_ns * len(step.chunks)
        )
        least_ns = (
            of.prefill_least_ns
            + of.prefill_least_per_prompt_ns * len(step.chunks)
            + of.prefill_least_per_continued_prompt_ns * len(continued)
        )
        return max(1, round(max(least_ns, self._clock.stretch(start_ns, rested_ns))))

    def decode_line(self, num_requests: int) -> DecodeLine:
        of, base_ns = self._settings, max(1, self._batch_ns(num_requests))
        return DecodeLine.of_ns(base_ns, of.decode_per_context_token_ns, of.decode_per_distinct_token_ns)

    def _tokens_ns(self, num_tokens: int) -> float:
        return self._settings.prefill_base_ns + self._settings.prefill_per_token_ns * num_tokens

    def _batch_ns(self, num_requests: int) -> float:
        of = self._settings
        matrices_ns = max(of.decode_weights_ns, of.decode_matrices_per_request_ns * num_requests)
        return of.decode_base_ns + matrices_ns + of.decode_per_request_ns * num_requests
