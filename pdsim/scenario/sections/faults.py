"""Faults of a run, how they are detected, and how requests are retried."""

from pydantic import Field

from pdsim.dataclass import dataclass
from pdsim.scenario.sections.fields import Duration, Section


@dataclass(frozen=True, kw_only=True)
class Kill:
    """An instance dies, with all its memory and all its transfers."""

    at_ns: int
    """Time of the fault since the run began."""
    kill: str
    """Name of the instance that dies, such as prefill-0."""
    restart_after_ns: int | None = None
    """Time until the instance restarts with empty memory; it serves after cost.host.loading. None: the instance stays
    down."""

    def __post_init__(self) -> None:
        if self.restart_after_ns == 0:
            raise ValueError("restart_after must be longer than 0")


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """The bandwidth of an instance's links is lower for a while. Messages are not affected. Aggregated clusters have no
    links.
    """

    at_ns: int
    """Time when the fault begins, since the run began."""
    link: str
    """Name of the instance whose links slow down; or `shared`, the link that all transfers share."""
    bandwidth_factor: float
    """Factor on the bandwidth; 0 stalls transfers. If several faults slow the same link at a time, their factors are
    multiplied.
    """
    lasts_ns: int | None = None
    """Duration of the fault. None: to the end of the run."""

    def __post_init__(self) -> None:
        if self.bandwidth_factor < 0 or self.lasts_ns == 0:
            raise ValueError("a link needs bandwidth_factor >= 0 and lasts longer than 0")


@dataclass(frozen=True, kw_only=True)
class ClientAbort:
    """A client aborts one request. An abort before the request is sent, or after its answer is complete, has no
    effect.
    """

    at_ns: int
    """Time of the abort since the run began."""
    abort: int
    """Number of the request in order of arrival, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class ClientAborts:
    """Clients abort a share of all requests, each at a time drawn uniformly after it was sent."""

    abort_fraction: float
    """Share of all requests that are aborted."""
    within_ns: int
    """Maximum time from sending a request to aborting it."""

    def __post_init__(self) -> None:
        if not 0 < self.abort_fraction <= 1 or not self.within_ns:
            raise ValueError("needs abort_fraction above 0, at most 1, and within longer than 0")


Fault = Kill | SlowLink | ClientAbort | ClientAborts


class HealthSettings(Section):
    """How failures are detected and requests are retried. Without this section and without faults, pdsim neither
    watches instances nor retries requests. With faults, the defaults of this section apply.
    """

    heartbeat_interval: Duration = Field(default=5_000_000_000, gt=0)
    """Time between two heartbeats (SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL)."""
    heartbeat_failures: int = Field(default=2, ge=1)
    """Number of consecutive missed heartbeats after which an instance counts as down."""
    bootstrap_timeout: Duration = Field(default=300_000_000_000, gt=0)
    """Maximum time from arrival at prefill until decode has granted pages (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)."""
    waiting_timeout: Duration = Field(default=300_000_000_000, gt=0)
    """Maximum time from the grant until the KV has arrived (SGLANG_DISAGGREGATION_WAITING_TIMEOUT).

    On an aggregated instance: maximum time that a request waits before a forward begins its prompt
    (SGLANG_REQ_WAITING_TIMEOUT, unset in SGLang).
    """
    release_timeout: Duration = Field(default=30_000_000_000, gt=0)
    """Time for which decode keeps the pages of a failed request while its sender is silent
    (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT)."""
    transfer_timeout: Duration = Field(default=30_000_000_000, gt=0)
    """Maximum time of one transfer unit, from its start (MC_TRANSFER_TIMEOUT)."""
    max_retries: int = Field(default=5, ge=0)
    """Maximum number of retries of a request."""
    backoff_jitter: float = Field(default=0.2, ge=0, lt=1)
    """Largest share by which chance makes a backoff longer or shorter. The first backoff is 50 ms, and each further
    backoff is 1.5 times as long as the one before, up to 30 s.
    """
