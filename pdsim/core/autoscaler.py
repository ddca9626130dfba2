"""The autoscaler: starts servers, stops them and changes their roles, as a scaling policy decides.

state      meaning                                        left when
off        the server holds no GPUs                       the policy wants more servers -> starting
starting   it holds GPUs, and serves no requests yet      its start-up time is over -> Serve
serving    the router sends it requests                   the policy wants fewer of its role -> Drain
draining   it finishes its requests                       it is empty -> FlushCache; then off, or starting again

Server k is the instance prefill-k or decode-k. As in SGLang's mini_lb (pull request 28403), a server drains before it
changes its role, keeps weights and KV pool, and drops its prefix cache. A server that is not empty in time goes on
serving in its old role.
"""

from collections.abc import Sequence
from typing import ClassVar

from pdsim.core import messages as m
from pdsim.core.instance import PolicyError
from pdsim.core.messages import ClusterSeen, Command, InstanceSeen, Message
from pdsim.dataclass import dataclass
from pdsim.policy.protocols import ScalingPolicy, Servers

OFF, STARTING, SERVING, DRAINING = "off", "starting", "serving", "draining"
ROLES = ("prefill", "decode")


NOTHING = InstanceSeen("", 0, 0, 0.0, True)


@dataclass(frozen=True, kw_only=True)
class ScalingTimes:
    interval_ns: int
    """Time in ns between two decisions."""
    start_up_ns: int
    """Time in ns that a server needs to start, from the decision until it serves."""
    switch_ns: int
    """Time in ns that a server without requests needs to change its role, until it serves again."""
    drain_timeout_ns: int | None = None
    """Maximum time in ns that a server drains. A server that still has requests then keeps its old role. None: no
    limit."""
    poll_ns: int = 1_000_000_000
    """Time in ns between two checks of draining servers."""


@dataclass(slots=True)
class ElasticServer:
    index: int
    role: str
    """Role of the server: prefill or decode. Empty: the server is off."""
    state: str
    next_role: str = ""
    """The role that a draining server takes next. Empty: the server stops."""
    due_ns: int = 0
    """Server that starts: time in ns at which it begins to serve. Server that drains: time in ns at which it gives up
    draining if it still has requests."""

    @property
    def instance_id(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def goal(self) -> str:
        return self.next_role if self.state == DRAINING else self.role


@dataclass(slots=True)
class Role:
    """The servers of one role, as a scaling policy sees them."""

    num_servers: int
    """Number of servers that serve in the role, start in it, or drain in order to change to it."""
    num_requests: int = 0
    """Number of unfinished requests of the serving and draining servers."""
    num_queued: int = 0
    """Number of requests that wait in the queues of the serving and draining servers."""
    page_use: float = 0.0
    """Mean share of pages that requests hold, over the serving and draining servers."""
    num_serving: int = 0
    """Number of servers that compute requests: serving and draining servers."""


class Autoscaler:
    instance_id: ClassVar[str] = "autoscaler"

    def __init__(
        self, *, initial: Servers, max_servers: int, times: ScalingTimes, policy: ScalingPolicy, router_id: str
    ) -> None:
        roles = ["prefill"] * initial.prefill + ["decode"] * initial.decode
        roles += [""] * (max_servers - len(roles))
        self.servers = [ElasticServer(i, role, SERVING if role else OFF) for i, role in enumerate(roles)]
        self.max_servers = max_servers
        self.interval_ns = times.interval_ns
        self.now_ns = 0
        self.prefill = self.decode = Role(0)
        self._times = times
        self._policy = policy
        self._router_id = router_id
        self._decides_ns = times.interval_ns
        self.num_arrived = self.num_arrived_tokens = self.num_finished = self.num_output_tokens = 0
        self.mean_ttft_ns = self.mean_tpot_ns = 0.0
        self._before = ClusterSeen((), 0, 0, 0, 0, 0, 0)
        """State of the cluster at the last decision."""

    # What a driver calls.

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        """Handles a ClusterSeen message, and returns commands. The last command tells when the autoscaler needs the
        next ClusterSeen. Raises TypeError for other messages.
        """
        if not isinstance(message, ClusterSeen):
            raise TypeError(f"an autoscaler does not take {message}")
        self.now_ns = now_ns
        seen = {f"{role}-{i}": NOTHING for role in ROLES for i in range(self.max_servers)}
        seen |= {instance.instance_id: instance for instance in message.instances}
        commands: list[Command] = []
        for server in self.servers:
            if server.state == DRAINING:
                self._look_at_draining(server, seen, commands)
            if server.state == STARTING and server.due_ns <= now_ns:
                server.state = SERVING
                commands.append(m.Send(self._router_id, m.Serve(server.instance_id)))
        if now_ns >= self._decides_ns:
            self._decides_ns += self.interval_ns
            self._count_since(self._before, message)
            self._before = message
            self._decide(seen, commands)
        return [*commands, m.WakeAt(self.instance_id, self._next_look_ns())]

    def _next_look_ns(self) -> int:
        looks = [self._decides_ns, *(server.due_ns for server in self.servers if server.state == STARTING)]
        if any(server.state == DRAINING for server in self.servers):
            looks.append(self.now_ns + self._times.poll_ns)
        return min(looks)

    def _look_at_draining(self, server: ElasticServer, seen: dict[str, InstanceSeen], commands: list[Command]) -> None:
        if seen[server.instance_id].is_empty:
            commands.append(m.Send(server.instance_id, m.FlushCache()))
            self._begin(server, server.next_role, self._times.switch_ns)
        elif self._times.drain_timeout_ns is not None and server.due_ns <= self.now_ns:
            server.state, server.next_role = SERVING, ""
            commands.append(m.Send(self._router_id, m.Serve(server.instance_id)))

    def _begin(self, server: ElasticServer, role: str, after_ns: int) -> None:
        server.role, server.next_role = role, ""
        server.state, server.due_ns = (STARTING if role else OFF), self.now_ns + after_ns

    # Deciding.

    def _count_since(self, before: ClusterSeen, now: ClusterSeen) -> None:
        self.num_arrived = now.num_arrived - before.num_arrived
        self.num_arrived_tokens = now.num_arrived_tokens - before.num_arrived_tokens
        self.num_finished = now.num_finished - before.num_finished
        self.num_output_tokens = now.num_output_tokens - before.num_output_tokens
        self.mean_ttft_ns = (now.ttft_ns - before.ttft_ns) / max(1, self.num_finished)
        self.mean_tpot_ns = (now.tpot_ns - before.tpot_ns) / max(1, self.num_finished)

    def _decide(self, seen: dict[str, InstanceSeen], commands: list[Command]) -> None:
        self.prefill, self.decode = (self._role(role, seen) for role in ROLES)
        wanted = self._policy.servers(self)
        if min(wanted) < 1 or sum(wanted) > self.max_servers:
            raise PolicyError(
                f"{self._policy}: wants {wanted}; needs at least one server per role, at most {self.max_servers} in all"
            )
        missing = {
            role: count - have.num_servers
            for role, count, have in zip(ROLES, wanted, (self.prefill, self.decode), strict=True)
        }
        for role, other in (ROLES, ROLES[::-1]):
            for server in self._spare(role, -missing[role], seen):
                switches = missing[other] > 0
                missing[other] -= switches
                server.state, server.next_role = DRAINING, other if switches else ""
                server.due_ns = self.now_ns + (self._times.drain_timeout_ns or 0)
                commands.append(m.Send(self._router_id, m.Drain(server.instance_id)))
        for role in ROLES:
            for server in [server for server in self.servers if server.state == OFF][: max(0, missing[role])]:
                self._begin(server, role, self._times.start_up_ns)

    def _spare(self, role: str, count: int, seen: dict[str, InstanceSeen]) -> Sequence[ElasticServer]:
        """Returns at most `count` serving servers of a role, those with the fewest requests first. At least one server
        keeps serving in the role. seen: state of each instance, by id.
        """
        serving = [server for server in self.servers if server.state == SERVING and server.role == role]
        serving.sort(key=lambda server: (seen[server.instance_id].num_requests, -server.index))
        return serving[: max(0, min(count, len(serving) - 1))]

    def _role(self, role: str, seen: dict[str, InstanceSeen]) -> Role:
        there = [s for s in self.servers if s.role == role and s.state in (SERVING, DRAINING)]
        instances = [seen[server.instance_id] for server in there]
        return Role(
            sum(server.goal == role for server in self.servers),
            sum(instance.num_requests for instance in instances),
            sum(instance.num_queued for instance in instances),
            sum(instance.page_use for instance in instances) / max(1, len(instances)),
            len(instances),
        )
