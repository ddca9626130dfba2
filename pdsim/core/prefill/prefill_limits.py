"""Limits of a prefill instance."""

from pdsim.core.engine_rules import SGLANG_0_5_23, EngineRules
from pdsim.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class PrefillLimits:
    """Limits of one forward and of a whole prefill instance. vLLM's prefill instance limits the tokens and prompts of
    its forwards by TokenBudget instead.
    """

    max_running_requests: int
    """SGLang: maximum number of requests that have begun and whose transfer has not ended. vLLM: maximum number of
    begun prompts that are not computed completely."""
    chunked_prefill_tokens: int | None
    """Maximum uncached tokens of one forward; with a ChunkSizer, only of a forward that continues no prompt. None: no
    limit, so that a prompt is computed in one piece unless the policy cuts it (Pick.max_tokens)."""
    max_prefill_tokens: int
    """Number of uncached tokens after which a forward begins no further prompt. If prompts are not cut into chunks
    (chunked_prefill_tokens None), or with EngineRules.caps_chunked_prompts, a prompt that needs all remaining tokens or
    more also waits, unless the prompt is the forward's first."""
    overlap: bool = True
    """True: the instance chooses the next forward while one runs, and handles results one forward late (SGLang's
    overlap schedule)."""
    bootstrap_timeout_ns: int | None = None
    """Maximum time in ns from a request's arrival at prefill until decode has granted pages, or from an earlier grant
    until the request arrives (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT). None: no limit."""
    optimistic_attempts: int = 0
    """Maximum number of attempts to compute a prompt before decode has granted pages (--optimistic-prefill-attempts).
    0: a prompt waits for its grant."""
    num_stages: int = 1
    """Number of pipeline stages. Above 1, this is also the maximum number of forwards under way, and `overlap` has no
    effect."""
    prefill_max_requests: int | None = None
    """Maximum number of prompts in one forward. None: no limit."""
    rules: EngineRules = SGLANG_0_5_23
    """Rules of scheduling in which releases of the engine differ."""

    @property
    def max_first_tokens(self) -> int:
        """Number of slots for first tokens: SGLang's metadata buffers. A request holds a slot from its entry into the
        queue of prompts until its transfer ends (vLLM: until its prompt is computed).
        """
        return 2 * self.max_running_requests

    @property
    def max_steps_in_flight(self) -> int:
        return self.num_stages if self.num_stages > 1 else 2 if self.overlap else 1
