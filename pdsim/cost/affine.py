"""Times fitted to measurements: straight lines in what a forward has to do. Profiles hold their coefficients."""

from dataclasses import dataclass
from typing import ClassVar

from pdsim.core.messages import PrefillStep
from pdsim.cost.gpu_clock import GpuClock
from pdsim.cost.model import CostModel, DecodeLine, Terms
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


_WORK = ("base and tokens", "attention", "attention behind a context", "context", "prompts")


class AffineModel:
    """The lines, for one GPU."""

    def __init__(self, settings: Affine) -> None:
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
        """Times in the order of _WORK."""
        settings, chunks = self._settings, step.chunks
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        idle_rows = -num_tokens % settings.prefill_wave_tokens / num_tokens
        waves = idle_rows * sum(chunk.num_tokens * chunk.num_context_tokens for chunk in chunks)
        pairs = sum(attended_pairs(chunk) for chunk in chunks) + waves
        continued = [chunk for chunk in chunks if chunk.num_context_tokens]
        return (
            self._tokens_ns(num_tokens),
            settings.prefill_per_pair_ns * pairs,
            settings.prefill_per_continued_pair_ns * sum(map(attended_pairs, continued)),
            settings.prefill_per_context_token_ns * sum(chunk.num_context_tokens for chunk in continued),
            settings.prefill_per_prompt_ns * len(chunks),
        )

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
