"""Session affinity: requests of a session go to one instance.

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
    """The instance of the request's session, if the session has one that is offered; else another policy's choice.

    Requests that wait for each other are a session, as are those that a trace records as one. A session keeps its
    instance while one of its requests is in the cluster, and for ttl after the last request.
    """

    ttl_ns: int = 600 * _SECOND_NS
    """How long a session without requests keeps its instance."""
    otherwise: RoutingPolicy = field(default_factory=DynamoKv)
    """Policy that chooses for the first request of a session."""
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
