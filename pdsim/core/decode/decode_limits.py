"""Limits of a decode instance."""

from dataclasses import dataclass

from pdsim.core.decode.running_batch import Drafts
from pdsim.core.engine_rules import SGLANG_0_5_23, EngineRules


@dataclass(frozen=True, kw_only=True)
class DecodeLimits:
    """Limits of a decode instance, by SGLang's names."""

    max_running_requests: int
    extra_slots: int = 0
    """Requests that may wait for their KV beyond those that may run (--disaggregation-decode-extra-slots)."""
    waiting_timeout_ns: int | None = None
    """Time from the grant until all KV must have come (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)."""
    release_timeout_ns: int | None = None
    """Time in ns for which pages are kept while a sender does not confirm that it has stopped writing."""
    polling_interval_steps: int = 1
    """Steps between looks at queue and transfers while anything runs (--disaggregation-decode-polling-interval)."""
    saves_retracted: bool = False
    """Report which pages are copied to host memory and back. A driver with real KV needs the report."""
    retracts_to_host_cache: bool = False
    """Retracted KV goes into pages of the host cache (--disaggregation-decode-retraction-backup host_pool)."""
    drafts: Drafts | None = None
    """Tokens that a step verifies of each request. None: each step gives each request one token."""
    wave_requests: float | None = None
    """Requests whose attention runs at a time, and reads what they share once; None: all."""
    grants_computed_only: bool = False
    """Pages are granted when prefill has computed the prompt (--disaggregation-decode-allocation-policy)."""
    rules: EngineRules = SGLANG_0_5_23

    @property
    def max_transferring(self) -> int:
        """Requests whose KV may be on its way: each has a metadata buffer for its first token."""
        return 2 * self.max_running_requests
