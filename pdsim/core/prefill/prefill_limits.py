"""Limits of a prefill instance."""

from pdsim.core.engine_rules import SGLANG_0_5_23, EngineRules
from pdsim.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class PrefillLimits:
    """Limits of one forward and of the whole instance, by SGLang's names."""

    max_running_requests: int
    """Maximum number of requests that have begun and whose transfer has not ended."""
    chunked_prefill_tokens: int | None
    """Maximum tokens of one forward. None: every prompt is computed in one piece."""
    max_prefill_tokens: int
    """Maximum uncached tokens of one forward. The first prompt of a forward may exceed the limit."""
    overlap: bool = True
    """True: the instance chooses the next forward while one runs, and handles results one forward late (SGLang's
    overlap schedule)."""
    bootstrap_timeout_ns: int | None = None
    """Maximum time in ns from a request's arrival until decode has granted pages
    (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT). None: no limit."""
    optimistic_attempts: int = 0
    """Maximum number of attempts to compute a prompt before decode has granted pages (--optimistic-prefill-attempts).
    0: a prompt waits for its grant."""
    num_stages: int = 1
    """Number of pipeline stages, and of forwards under way. Above 1, overlap has no effect."""
    prefill_max_requests: int | None = None
    """Maximum number of prompts in one forward. None: no limit."""
    rules: EngineRules = SGLANG_0_5_23
    """Rules of the engine's release."""

    @property
    def max_first_tokens(self) -> int:
        """Number of slots for first tokens: SGLang's metadata buffers. A first token holds a slot until it is sent."""
        return 2 * self.max_running_requests

    @property
    def max_steps_in_flight(self) -> int:
        return self.num_stages if self.num_stages > 1 else 2 if self.overlap else 1
