"""Built-in scaling policies: how many servers prefill and how many decode."""

from dataclasses import field
from math import ceil

from pdsim.dataclass import dataclass
from pdsim.policy.protocols import Servers
from pdsim.policy.views import ScalingView


@dataclass
class LoadThresholds:
    """Scales each role by two thresholds of its load, as Dynamo's load planner does. Above the higher threshold, the
    role gets another server. Below the lower threshold, the role loses a server.

    If all GPUs are in use, an overloaded role takes a server from the other role, but only if the other role's load is
    below its own lower threshold. If both roles are overloaded, prefill goes first. Each role keeps at least one
    server.
    """

    prefill_queue_scale_up: float = 5.0
    """A server is added if more than this number of requests wait per prefill server."""
    prefill_queue_scale_down: float = 0.2
    """A server is removed if fewer than this number of requests wait per prefill server."""
    decode_kv_scale_up: float = 0.9
    """A decode server is added if more than this share of decode's pages is in use."""
    decode_kv_scale_down: float = 0.5
    """If the share of used pages on decode is below this value, one decode server is removed."""
    keep_servers: bool = False
    """True: servers change their roles, but no server starts or stops."""

    def servers(self, view: ScalingView) -> Servers:
        prefill, decode = view.prefill.num_servers, view.decode.num_servers
        queue, use = view.prefill.num_queued / prefill, view.decode.page_use
        more_prefill, less_prefill = queue > self.prefill_queue_scale_up, queue < self.prefill_queue_scale_down
        more_decode, less_decode = use > self.decode_kv_scale_up, use < self.decode_kv_scale_down
        has_room = prefill + decode < view.max_servers and not self.keep_servers
        if more_prefill and (has_room or (less_decode and decode > 1)):
            return Servers(prefill + 1, decode if has_room else decode - 1)
        if more_decode and (has_room or (less_prefill and prefill > 1)):
            return Servers(prefill if has_room else prefill - 1, decode + 1)
        if self.keep_servers:
            return Servers(prefill, decode)
        return Servers(max(1, prefill - less_prefill), max(1, decode - less_decode))


@dataclass
class Forecast:
    """Chooses servers for a forecast of the load, as Dynamo's SLA planner does. The forecast continues the change
    between the last two intervals.
    """

    prefill_token_rate_per_s: float
    """Prompt tokens per second that one prefill server can compute within the SLO."""
    decode_requests: float
    """Number of requests that one decode server can run at the same time within the SLO."""
    keep_servers: bool = False
    """True: the policy divides all servers between the roles. No server starts or stops."""
    _last: tuple[float, float] | None = field(default=None, init=False)
    """Load at the last decision: (prompt tokens that arrived per second since the decision before, number of unfinished
    requests on decode). None: there was no decision yet.
    """

    def __post_init__(self) -> None:
        if self.prefill_token_rate_per_s <= 0 or self.decode_requests <= 0:
            raise ValueError(f"needs prefill_token_rate_per_s and decode_requests above 0, found {self}")

    def servers(self, view: ScalingView) -> Servers:
        load = (view.num_arrived_tokens * 1e9 / view.interval_ns, float(view.decode.num_requests))
        before, self._last = self._last or load, load
        tokens_per_s, requests = (max(0.0, 2 * now - last) for now, last in zip(load, before, strict=True))
        return self._shared(view, tokens_per_s / self.prefill_token_rate_per_s, requests / self.decode_requests)

    def _shared(self, view: ScalingView, prefill: float, decode: float) -> Servers:
        """Returns the needed numbers of servers (`prefill`, `decode`), rounded up to at least 1. If their sum exceeds
        view.max_servers, divides view.max_servers in proportion. If keep_servers is set, divides the present servers in
        proportion; without load, returns the present numbers.
        """
        wanted = Servers(max(1, ceil(prefill)), max(1, ceil(decode)))
        total = view.prefill.num_servers + view.decode.num_servers if self.keep_servers else view.max_servers
        if not self.keep_servers and sum(wanted) <= total:
            return wanted
        if not prefill + decode:
            return Servers(view.prefill.num_servers, view.decode.num_servers)
        part = min(total - 1, max(1, round(total * prefill / (prefill + decode))))
        return Servers(part, total - part)
