"""Limits of a decode instance."""

from dataclasses import dataclass

from pdsim.core.decode.running_batch import Drafts
from pdsim.core.engine_rules import SGLANG_0_5_23, EngineRules


@dataclass(frozen=True, kw_only=True)
class DecodeLimits:
    """Limits of a decode instance, by SGLang's names."""

    max_running_requests: int
    extra_slots: int = 0
    """Number of requests that may wait for their KV beyond the running ones (--disaggregation-decode-extra-slots)."""
    waiting_timeout_ns: int | None = None
    """Maximum time from the grant until all KV has arrived (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)."""
    release_timeout_ns: int | None = None
    """Time in ns for which pages are kept while a sender does not confirm that it has stopped writing."""
    polling_interval_steps: int = 1
    """Number of steps between checks of queue and transfers while requests run
    (--disaggregation-decode-polling-interval)."""
    saves_retracted: bool = False
    """True: report which pages are copied to host memory and back. A driver with real KV needs the report."""
    retracts_to_host_cache: bool = False
    """True: retracted KV goes into pages of the host cache (--disaggregation-decode-retraction-backup host_pool)."""
    drafts: Drafts | None = None
    """Numbers of drafted tokens per request and step. None: no speculative decoding; each step gives each request one
    token."""
    wave_requests: float | None = None
    """Number of requests whose attention runs at the same time, and reads shared KV once. None: all."""
    grants_computed_only: bool = False
    """True: pages are granted when prefill has computed the prompt (--disaggregation-decode-allocation-policy)."""
    rules: EngineRules = SGLANG_0_5_23

    @property
    def num_slots(self) -> int:
        return self.max_running_requests + self.extra_slots

    @property
    def max_transferring(self) -> int:
        """Maximum number of requests whose KV is on its way: each has a metadata buffer for its first token."""
        return 2 * self.max_running_requests
