"""Faults of a run: things that go wrong, and how the cluster finds out and goes on."""

from dataclasses import dataclass

from pydantic import Field

from pdsim.scenario.fields import Duration, Section


@dataclass(frozen=True, kw_only=True)
class Kill:
    """An instance dies, at any moment, with all that it holds and all that is under way from it."""

    at_ns: int
    """Time since the run began."""
    kill: str
    """An instance, such as prefill-0."""
    restart_after_ns: int | None = None
    """Time until it comes back empty; None: it stays down."""

    def __post_init__(self) -> None:
        if self.restart_after_ns == 0:
            raise ValueError("restart_after must be longer than 0")


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """The links of an instance carry less for a while; messages are not affected. Aggregated clusters have no links."""

    at_ns: int
    """Time since the run began."""
    link: str
    """An instance, for its links; or `shared`, the link that all transfers cross."""
    bandwidth_factor: float
    """0 stalls transfers; factors at one time multiply."""
    lasts_ns: int | None = None
    """Its duration; None: to the end."""

    def __post_init__(self) -> None:
        if self.bandwidth_factor < 0 or self.lasts_ns == 0:
            raise ValueError("a link needs bandwidth_factor >= 0 and lasts longer than 0")


@dataclass(frozen=True, kw_only=True)
class ClientAbort:
    """A client gives up one request. Nothing happens if it has not sent it, or has its answer."""

    at_ns: int
    """Time since the run began."""
    abort: int
    """A request_id: requests are counted from 0."""


@dataclass(frozen=True, kw_only=True)
class ClientAborts:
    """Clients give up this fraction of all requests, each at a time drawn uniformly after it was sent."""

    abort_fraction: float
    """Share of all requests, drawn."""
    within_ns: int
    """Longest time from sending to giving up."""

    def __post_init__(self) -> None:
        if not 0 < self.abort_fraction <= 1 or not self.within_ns:
            raise ValueError("needs abort_fraction above 0, at most 1, and within longer than 0")


Fault = Kill | SlowLink | ClientAbort | ClientAborts


class HealthSettings(Section):
    """Detection of failures, and retries of requests. Without this section nothing is watched or tried again."""

    heartbeat_interval: Duration = Field(default=5_000_000_000, gt=0)
    """Time between two heartbeats (SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL)."""
    heartbeat_failures: int = Field(default=2, ge=1)
    """Missed heartbeats in a row, after which the instance is down."""
    bootstrap_timeout: Duration = Field(default=300_000_000_000, gt=0)
    """Time from arrival at prefill until decode has granted pages (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)."""
    waiting_timeout: Duration = Field(default=300_000_000_000, gt=0)
    """Time from the grant until the KV is there (SGLANG_DISAGGREGATION_WAITING_TIMEOUT).

    Aggregated: from a request's arrival until it is begun (SGLANG_REQ_WAITING_TIMEOUT, which SGLang does not set).
    """
    release_timeout: Duration = Field(default=30_000_000_000, gt=0)
    """Decode keeps a failed request's pages so long for a silent sender
    (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT)."""
    transfer_timeout: Duration = Field(default=30_000_000_000, gt=0)
    """Time of one transfer unit, from its start (MC_TRANSFER_TIMEOUT)."""
    max_retries: int = Field(default=5, ge=0)
    """Attempts after the first."""
    backoff_jitter: float = Field(default=0.2, ge=0, lt=1)
    """Share by which a backoff is longer or shorter, drawn; the first is 50 ms, each next 1.5 times as long."""
