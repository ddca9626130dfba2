"""Session affinity: all requests of a session go to one instance.

Dynamo 1.6.1: --router-session-affinity-ttl-secs, lib/kv-router/src/services/selection/affinity.rs at 0a2aa91 (mode
hard). llm-d has the same as session-affinity-filter with session_id_header and 600 s.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.protocols import RoutingPolicy
from pdsim.policy.views import RoutingView, TokenSequence

_SECOND_NS = 1_000_000_000


@dataclass
class SessionAffinity:
    """Picks the instance that serves the request's session, if it accepts requests. Otherwise another policy picks an
    instance.

    Requests of one conversation or agent run form a session, and so do requests that a trace records as a session. A
    session keeps its instance while it has unfinished requests, and for ttl_ns after its last request has ended.
    """

    ttl_ns: int = 600 * _SECOND_NS
    """Time for which a session without unfinished requests keeps its instance."""
    otherwise: RoutingPolicy = field(default_factory=DynamoKv)
    """Policy that picks an instance for the first request of a session."""
    reads_sessions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ttl_ns < 0:
            raise ValueError(f"ttl is at least 0, found {self.ttl_ns} ns")
        if isinstance(self.otherwise, SessionAffinity):
            raise ValueError("otherwise: name a policy other than session_affinity")

    @property
    def is_kv_aware(self) -> bool:
        return getattr(self.otherwise, "is_kv_aware", False)

    @property
    def metrics_interval_ns(self) -> int:
        return getattr(self.otherwise, "metrics_interval_ns", 0)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        bound = view.session_instance(self.ttl_ns)
        if bound and any(load.instance_id == bound for load in view.instances):
            return bound
        return self.otherwise.pick(prompt, view)
