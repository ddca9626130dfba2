"""Policies of session affinity, which send all requests of a session to one instance. Each follows a router.

session_affinity: Dynamo 1.6.1 (--router-session-affinity-ttl-secs, lib/kv-router/src/services/selection/affinity.rs at
0a2aa91, mode hard), and llm-d's session-affinity-filter with session_id_header and 600 s. manual: SGLang's gateway
0.3.2 (sgl-model-gateway/src/policies/manual.rs at 1a2ac4f). sticky_least_loaded: vLLM's router 0.1.17
(src/policies/sticky_least_loaded.rs at 335c57e). Conformance: experiments/conformance/dynamo and gateway.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import ClassVar, Literal

from pdsim.dataclass import dataclass
from pdsim.policy.draws import Draws
from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.protocols import RoutingPolicy, Scope
from pdsim.policy.views import InstanceLoad, RoutingView, TokenSequence

_SECOND_NS = 1_000_000_000
_LOOK_NS = 60 * _SECOND_NS
"""Minimum time in ns between two removals of old sessions by vLLM's router (SWEEP_INTERVAL_SECS)."""


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
    """Policy that picks an instance if the session has none that accepts requests, as for the first request of a
    session, and for requests without a session.
    """
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


@dataclass
class BoundSessions:
    """The instance of each session's last request, and the time in ns of this request."""

    places: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By session: (instance id, time in ns of the last request)."""

    def instance_of(self, session: int) -> str:
        """Returns the id of a session's instance. Empty: the session is unknown. session: -1: the request has no
        session.
        """
        return self.places.get(session, ("", 0))[0]

    def bind(self, session: int, instance_id: str, now_ns: int) -> None:
        """Notes that a request goes to an instance. No effect if the request has no session."""
        if session >= 0:
            self.places[session] = instance_id, now_ns

    def with_fewest(self, instance_ids: Sequence[str]) -> list[str]:
        """Returns those of instance_ids whose instances have the fewest sessions, in the given order."""
        counts = Counter(instance_id for instance_id, _ in self.places.values())
        fewest = min(counts[instance_id] for instance_id in instance_ids)
        return [instance_id for instance_id in instance_ids if counts[instance_id] == fewest]

    def forget_before(self, first_ns: int) -> None:
        """Forgets all sessions whose last request came before first_ns."""
        self.places = {session: place for session, place in self.places.items() if place[1] >= first_ns}


@dataclass
class StickyLeastLoaded:
    """Picks the instance of the session's last request. A session that is new, or whose instance accepts no requests,
    goes to the instance with the fewest sessions. Sessions count until they expire, also without unfinished requests.
    Ties are broken at random (in vLLM's router by a hash of the session's name). A request without a session goes to
    the instance with the fewest sessions.
    """

    session_expiration_ns: int = 7200 * _SECOND_NS
    """A session is forgotten if this time has passed since its last request arrived
    (VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S). The router looks for such sessions when a request arrives, at most every
    60 s.
    """
    seed: int = 0
    """Seed of the random choices."""
    reads_sessions: ClassVar[bool] = True
    _bound: BoundSessions = field(default_factory=BoundSessions, init=False)
    _looked_ns: int = field(default=0, init=False)
    """Time in ns when the policy last searched for expired sessions."""
    _draws: Draws = field(default_factory=Draws, init=False)

    def __post_init__(self) -> None:
        if self.session_expiration_ns < 0:
            raise ValueError(f"session_expiration is at least 0, found {self.session_expiration_ns} ns")

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        if view.now_ns - self._looked_ns >= _LOOK_NS:
            self._looked_ns = view.now_ns
            self._bound.forget_before(view.now_ns - self.session_expiration_ns + 1)
        names = [load.instance_id for load in view.instances]
        chosen = self._bound.instance_of(view.session)
        if chosen not in names:
            equal = self._bound.with_fewest(names)
            chosen = self._draws.one_of(equal, self.seed)
        self._bound.bind(view.session, chosen, view.now_ns)
        return chosen


@dataclass(slots=True)
class _Place:
    """The last instances that were chosen for a session, at most two, the older choice first; and the time of the
    session's last request.
    """

    instance_ids: list[str]
    last_ns: int
    """Time in ns at which the session's last request was routed."""


@dataclass
class Manual:
    """Picks the instance to which the session was sent before. If this instance accepts no requests, the session gets a
    second instance, until the first accepts requests again. A request without a session goes to a random instance.

    A session is the gateway's routing key, which clients send as X-SMG-Routing-Key.
    """

    assignment_mode: Literal["random", "min_load", "min_group"] = "random"
    """Instance of a new session. random: a random instance. min_load: the instance with the fewest requests. min_group:
    the instance with the fewest sessions that have unfinished requests. If router.counts is streams, min_group also
    picks a random instance, because the gateway looks for routing keys of streams in answers
    (routers/http/pd_router.rs, create_streaming_response). Ties are broken at random.
    """
    max_idle_ns: int = 4 * 3600 * _SECOND_NS
    """A session is forgotten if this time has passed since its last request arrived. 0: never."""
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
        names = [load.instance_id for load in view.instances]
        if view.session < 0:
            return self._draws.one_of(names, self.seed)
        place = self._place(view.session, view.now_ns)
        for instance_id in place.instance_ids:
            if instance_id in names:
                return instance_id
        chosen = self._new(view.instances)
        place.instance_ids = [*place.instance_ids[-1:], chosen]
        return chosen

    def _place(self, session: int, now_ns: int) -> _Place:
        """Returns the _Place of a session (its instances), and sets its last_ns to now_ns. If the session is new or was
        forgotten, returns a new _Place without instances.
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
        counts = {
            "random": [0 for _ in loads],
            "min_load": [load.num_requests for load in loads],
            "min_group": [load.num_sessions for load in loads],
        }[self.assignment_mode]
        least = min(counts)
        equal = [load.instance_id for load, count in zip(loads, counts, strict=True) if count == least]
        return self._draws.one_of(equal, self.seed)
