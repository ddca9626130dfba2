"""Binds sessions to instances, so that a routing policy can send all requests of a session to one instance while pauses
between requests are shorter than a limit.
"""

from pdsim.dataclass import dataclass
from pdsim.policy.protocols import Scope

_AGENTS = 1 << 32
"""With scope "agent", agent k of session s has session number s + k * _AGENTS (see session_of for other scopes).
Clients' session numbers are smaller than _AGENTS."""


def session_of(scope: Scope, session: int, agent: int) -> int:
    """Returns the number of the session to which a request belongs; -1: none. session and agent are those that the
    client names. scope: requests of `session` that stay together. "run": all. "agent": those of each agent. "siblings":
    those of agent 0, and those of all other agents.
    """
    if session < 0 or scope == "run":
        return session
    return session + _AGENTS * (agent if scope == "agent" else min(agent, 1))


@dataclass(slots=True)
class _Binding:
    session: int
    instance_id: str
    num_requests: int = 0
    """Number of the session's unfinished requests at the instance."""
    idle_since_ns: int = 0


class SessionBindings:
    """Instances to which sessions are bound. A binding lasts while the session has requests at the instance, and for a
    time (the argument ttl_ns of `instance_of`) after the last request has ended.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, _Binding] = {}
        self._requests: dict[int, _Binding] = {}
        self._idle: dict[int, _Binding] = {}
        """Bindings of sessions without unfinished requests, in the order in which their last requests ended."""

    def instance_of(self, session: int, ttl_ns: int, now_ns: int) -> str:
        """Returns the instance to which a session is bound. Empty: the session is new, or was idle for at least
        `ttl_ns`. Removes the bindings of all sessions that were idle for so long.
        """
        while self._idle:
            first = next(iter(self._idle.values()))
            if now_ns < first.idle_since_ns + ttl_ns:
                break
            del self._idle[first.session], self._sessions[first.session]
        binding = self._sessions.get(session)
        return "" if binding is None else binding.instance_id

    def add(self, request_id: int, session: int, instance_id: str) -> None:
        """Binds a session to the instance to which one of its requests goes."""
        binding = self._sessions.get(session)
        if binding is None or binding.instance_id != instance_id:
            binding = self._sessions[session] = _Binding(session, instance_id)
        binding.num_requests += 1
        self._idle.pop(session, None)
        self._requests[request_id] = binding

    def remove(self, request_id: int, now_ns: int) -> int:
        """Notes that a request has ended, and returns its session. -1: the request has no session."""
        binding = self._requests.pop(request_id, None)
        if binding is None:
            return -1
        binding.num_requests -= 1
        if not binding.num_requests and self._sessions.get(binding.session) is binding:  # else it has moved
            binding.idle_since_ns = now_ns
            self._idle[binding.session] = binding
        return binding.session
