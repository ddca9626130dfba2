"""Limits of a decode instance."""

from pdsim.core.decode.running_batch import Drafts
from pdsim.core.engine_rules import SGLANG_0_5_23, EngineRules
from pdsim.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class DecodeLimits:
    """Limits of a decode instance, by SGLang's names."""

    max_running_requests: int
    """Maximum number of requests in the batch."""
    extra_slots: int = 0
    """Number of requests that may wait for their KV in addition to max_running_requests
    (--disaggregation-decode-extra-slots)."""
    waiting_timeout_ns: int | None = None
    """Maximum time in ns from the grant of pages until all KV has arrived (SGLANG_DISAGGREGATION_WAITING_TIMEOUT).
    None: no limit."""
    release_timeout_ns: int | None = None
    """Maximum time in ns that a failed request keeps its pages while its sender does not confirm that it stopped
    writing. None: no limit."""
    polling_interval_steps: int = 1
    """The instance checks its queue and its transfers once in this number of steps while requests run
    (--disaggregation-decode-polling-interval)."""
    saves_retracted: bool = False
    """True: for a retracted request, commands (SaveKv, LoadKv) name the pages to copy to host memory and back, as real
    mode needs. False, or with retracts_to_host_cache: no such commands are made.
    """
    retracts_to_host_cache: bool = False
    """True: KV of retracted requests is stored in pages of the host cache (--disaggregation-decode-retraction-backup
    host_pool)."""
    drafts: Drafts | None = None
    """Numbers of tokens per request in a speculative step. None: no speculative decoding; each step gives each request
    one token."""
    wave_requests: float | None = None
    """Number of requests whose attention runs at the same time and therefore reads shared KV once. None: all requests
    of the batch."""
    grants_computed_only: bool = False
    """True: decode grants pages only when prefill has computed the prompt
    (--disaggregation-decode-allocation-policy)."""
    rules: EngineRules = SGLANG_0_5_23
    """Rules of the engine's release."""

    @property
    def max_transferring(self) -> int:
        """Maximum number of requests in transfer. Each request in transfer has a metadata buffer for its first
        token.
        """
        return 2 * self.max_running_requests
