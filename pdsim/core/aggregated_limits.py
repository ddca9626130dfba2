"""Limits of an aggregated instance, and a request in it."""

from dataclasses import dataclass

from pdsim.core.decode.running_batch import Drafts, RunningRequest
from pdsim.core.engine_rules import SGLANG_0_5_23, EngineRules

MAX_ESTIMATED_TOKENS = 4096
"""Maximum output that a request is expected to still produce (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""


@dataclass(frozen=True, kw_only=True)
class AggregatedLimits:
    """Limits of one forward and of the whole instance, by SGLang's names."""

    max_running_requests: int
    chunked_prefill_tokens: int | None
    """Maximum tokens of one forward. None: every prompt is computed in one piece."""
    max_prefill_tokens: int
    """Maximum uncached tokens of one forward. The first prompt of a batch may exceed the limit."""
    schedule_conservativeness: float = 1.0
    """Factor on the expected growth of running requests. Above 1, fewer requests are begun beside them."""
    overlap: bool = True
    """True: a step is chosen when the step before begins (SGLang's overlap schedule). Messages that arrive meanwhile
    wait for one more step. A driver that itself chooses steps early must switch this off."""
    drafts: Drafts | None = None
    """Tokens of each request that a step verifies. None: each step gives each request one token."""
    wave_requests: float | None = None
    """Number of requests whose attention runs at the same time, and reads shared KV once. None: all."""
    waiting_timeout_ns: int | None = None
    """Maximum time from a request's arrival until it is begun (SGLANG_REQ_WAITING_TIMEOUT)."""
    preemption_threshold: int | None = None
    """A request without a slot preempts a running request whose priority is lower by more than this
    (--priority-scheduling-preemption-threshold). None: no preemption."""
    prefill_max_requests: int | None = None
    """Maximum number of prompts of one forward. None: no limit."""
    mixed_chunk: bool = False
    """True: a forward with prompts also gives each running request a token, if there are pages for it
    (--enable-mixed-chunk)."""
    rules: EngineRules = SGLANG_0_5_23


@dataclass(slots=True, kw_only=True)
class AggregatedRequest(RunningRequest):
    has_fixed_output: bool = False

    @property
    def num_growth_tokens(self) -> int:
        return min(max(self.max_output_tokens - self.num_output_tokens, 0), MAX_ESTIMATED_TOKENS)

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens reserved for the request's longest output. Outputs before a retraction are not subtracted."""
        return min(self.max_output_tokens, MAX_ESTIMATED_TOKENS)

    @property
    def num_asked_tokens(self) -> int:
        return self.max_output_tokens

    @property
    def ignores_eos(self) -> bool:
        return self.has_fixed_output
