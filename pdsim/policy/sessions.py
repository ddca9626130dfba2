"""Session affinity: all requests of a session go to one instance.

session_affinity is Dynamo's (1.6.1, --router-session-affinity-ttl-secs,
lib/kv-router/src/services/selection/affinity.rs at 0a2aa91, mode hard); llm-d has the same as session-affinity-filter
with session_id_header and 600 s. manual is that of SGLang's gateway (0.3.2, sgl-model-gateway/src/policies/manual.rs at
1a2ac4f). Conformance: experiments/conformance/dynamo and gateway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pdsim.policy.draws import Draws
from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.protocols import RoutingPolicy, Scope
from pdsim.policy.views import InstanceLoad, RoutingView, TokenSequence

_SECOND_NS = 1_000_000_000


@dataclass
class SessionAffinity:
    """Picks the instance that serves the request's session, if it accepts requests. Otherwise another policy picks an
    instance.

    Requests of one conversation form a session, and so do requests that a trace records as a session. A session keeps
    its instance while it has unfinished requests, and for ttl_ns after its last request has ended.
    """

    ttl_ns: int = 600 * _SECOND_NS
    """Time for which a session without unfinished requests keeps its instance."""
    otherwise: RoutingPolicy = field(default_factory=DynamoKv)
    """Policy that picks an instance for the first request of a session."""
    scope: Scope = "agent"
    """Sessions of an agent run. agent: each agent has a session of its own, as coding agents name their sessions
    (X-Dynamo-Session-ID). siblings: all sub-agents share one session, and the run's own agent has another session
    (subagent_group_affinity_id). run: all agents share one session."""
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
    def reads_caches(self) -> bool:
        return getattr(self.otherwise, "reads_caches", False)

    @property
    def num_credited_tokens(self) -> Callable[[int, int], int]:
        credited: Callable[[int, int], int] = getattr(self.otherwise, "num_credited_tokens")  # noqa: B009
        return credited

    @property
    def metrics_interval_ns(self) -> int:
        return getattr(self.otherwise, "metrics_interval_ns", 0)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        bound = view.session_instance(self.ttl_ns)
        if bound and any(load.instance_id == bound for load in view.instances):
            return bound
        return self.otherwise.pick(prompt, view)


@dataclass(slots=True)
class _Place:
    """The instances to which a session was sent, the older first, and the time of its last request."""

    instance_ids: list[str]
    last_ns: int


@dataclass
class Manual:
    """Picks the instance to which the session was sent before. If this instance accepts no requests, the session gets a
    second instance, and returns to the first when the first accepts requests again. A request without a session goes
    to a random instance.

    A session is the gateway's routing key, which clients send as X-SMG-Routing-Key.
    """

    assignment_mode: Literal["random", "min_load", "min_group"] = "random"
    """Instance of a new session. random: a random instance. min_load: the instance with the fewest requests. min_group:
    the instance with the fewest sessions that have unfinished requests; with router.counts: streams a random instance,
    because the gateway looks for routing keys of streams in answers (routers/http/pd_router.rs,
    create_streaming_response). Ties are broken at random."""
    max_idle_ns: int = 4 * 3600 * _SECOND_NS
    """Time after its last arrival after which a session is forgotten. 0: never."""
    eviction_interval_ns: int = 60 * _SECOND_NS
    """Interval at which the router looks for sessions to forget. 0: never."""
    seed: int = 0
    """Seed of the random choices."""
    reads_sessions: ClassVar[bool] = True
    _places: dict[int, _Place] = field(default_factory=dict, init=False)
    _draws: Draws = field(default_factory=Draws, init=False)

    def __post_init__(self) -> None:
        for name in ("max_idle", "eviction_interval"):
            if (time_ns := getattr(self, f"{name}_ns")) < 0:
                raise ValueError(f"{name} is at least 0, found {time_ns} ns")

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        if view.session < 0:
            return self._drawn(view.instances)
        place = self._place(view.session, view.now_ns)
        up = {load.instance_id for load in view.instances}
        for instance_id in place.instance_ids:
            if instance_id in up:
                return instance_id
        chosen = self._new(view.instances)
        place.instance_ids = [*place.instance_ids[-1:], chosen]
        return chosen

    def _place(self, session: int, now_ns: int) -> _Place:
        """Returns the instances of a session, after noting that the session is used now. No instances: the session is
        new or was forgotten.
        """
        place = self._places.get(session)
        if place is None or self._forgets(place, now_ns):
            place = self._places[session] = _Place([], now_ns)
        place.last_ns = now_ns
        return place

    def _forgets(self, place: _Place, now_ns: int) -> bool:
        if not self.max_idle_ns or not self.eviction_interval_ns:
            return False
        looked_ns = now_ns // self.eviction_interval_ns * self.eviction_interval_ns
        return looked_ns - place.last_ns >= self.max_idle_ns

    def _new(self, loads: Sequence[InstanceLoad]) -> str:
        if self.assignment_mode == "random":
            return self._drawn(loads)
        name = "num_requests" if self.assignment_mode == "min_load" else "num_sessions"
        counts = [getattr(load, name) for load in loads]
        least = min(counts)
        return self._drawn([load for load, count in zip(loads, counts, strict=True) if count == least])

    def _drawn(self, loads: Sequence[InstanceLoad]) -> str:
        return loads[self._draws.below(len(loads), self.seed) if len(loads) > 1 else 0].instance_id
