"""Limits of an aggregated instance, the data of a request in the instance, and the interval at which the instance takes
new requests.
"""

from pdsim.core.decode.running_batch import Drafts, RunningRequest
from pdsim.core.engine_rules import SGLANG_0_5_23, EngineRules
from pdsim.core.messages import DecodeStep, MixedStep, Step, Wait
from pdsim.dataclass import dataclass

MAX_ESTIMATED_TOKENS = 4096
"""The scheduler expects a request to produce at most this many further output tokens
(SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""


@dataclass(frozen=True, kw_only=True)
class AggregatedLimits:
    """Limits of one forward and of the whole instance, by SGLang's names."""

    max_running_requests: int
    """Maximum number of requests that are partly computed prompts or run in the batch. Retracted requests do not count.
    """
    chunked_prefill_tokens: int | None
    """Maximum tokens of one forward. None: every prompt is computed in one piece."""
    max_prefill_tokens: int
    """Maximum uncached tokens of one forward. The first prompt of a batch may exceed the limit."""
    schedule_conservativeness: float = 1.0
    """Factor on the number of output tokens that running requests are expected to produce
    (--schedule-conservativeness). Above 1, the instance reserves more tokens for running requests, and begins fewer new
    requests."""
    overlap: bool = True
    """True: the instance chooses a step while the previous step runs (SGLang's overlap schedule). Messages that arrive
    during a step wait for one more step. Must be False if the driver asks for steps early by itself.
    """
    drafts: Drafts | None = None
    """Numbers of tokens per request in a speculative step. None: no speculative decoding; each step gives each request
    one token."""
    wave_requests: float | None = None
    """Number of requests whose attention runs at the same time and therefore reads shared KV once. None: all requests
    of the batch."""
    waiting_timeout_ns: int | None = None
    """Maximum time in ns from a request's arrival until a forward begins it (SGLANG_REQ_WAITING_TIMEOUT). None: no
    limit."""
    preemption_threshold: int | None = None
    """If all slots are taken, a waiting request preempts a running request whose priority is lower by more than this
    number (--priority-scheduling-preemption-threshold). None: no preemption."""
    prefill_max_requests: int | None = None
    """Maximum number of prompts in one forward. None: no limit."""
    mixed_chunk: bool = False
    """True: a forward with prompts also decodes one token of each running request, if there are pages for all these
    tokens (--enable-mixed-chunk)."""
    recv_interval_steps: int = 1
    """The loop takes new requests only after every n-th decode step, where n is this number
    (--scheduler-recv-interval). Above 1 only with overlap."""
    rules: EngineRules = SGLANG_0_5_23
    """Rules of the engine's release."""


@dataclass(slots=True, kw_only=True)
class AggregatedRequest(RunningRequest):
    has_fixed_output: bool = False

    @property
    def num_growth_tokens(self) -> int:
        return min(max(self.max_output_tokens - self.num_output_tokens, 0), MAX_ESTIMATED_TOKENS)

    @property
    def num_reserved_tokens(self) -> int:
        """Number of tokens reserved for the request's maximum output. The number does not shrink as outputs are
        produced, even before a retraction.
        """
        return min(self.max_output_tokens, MAX_ESTIMATED_TOKENS)

    @property
    def num_asked_tokens(self) -> int:
        return self.max_output_tokens

    @property
    def ignores_eos(self) -> bool:
        return self.has_fixed_output


class ReceiveInterval:
    """Decides how many decode steps begin before an instance takes new requests. SGLang's loop takes new requests after
    each forward with prompts, whenever it is idle, and after every n-th decode step (--scheduler-recv-interval; 0.5.23,
    managers/scheduler_components/recv_skipper.py:66).
    """

    def __init__(self, num_steps: int) -> None:
        """num_steps: number n of decode steps after which SGLang's loop takes new requests. 1: after each step."""
        self._interval = num_steps
        self._start = 0
        """Number of decode steps that had ended when the loop last chose a step with prompts, or no step. If that step
        also decodes, it is counted as ended."""

    def num_held_steps(self, step: Step | Wait, num_done: int) -> int:
        """Number of decode steps that begin after `step` before SGLang's loop takes new requests. The caller must call
        this for each step that it chooses, in order. num_done: number of decode steps that have ended so far.
        """
        if not isinstance(step, DecodeStep):
            self._start = num_done + isinstance(step, MixedStep)  # which num_done counts, too
            return 0
        return -(num_done - self._start + 1) % self._interval
