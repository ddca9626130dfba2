"""Routes requests to servers that choose among their own data-parallel ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdsim.core import messages as m
from pdsim.core.routing.role_router import REMEMBERED, MemorySize, RoleRouter
from pdsim.policy.protocols import RoutingPolicy
from pdsim.policy.views import InstanceLoad, TokenSequence


class RankedRouter(RoleRouter):
    """The servers of one role. The routing policy chooses a server, and the server's own policy chooses one of its
    ranks.
    """

    def __init__(
        self,
        ranks: Mapping[str, Sequence[str]],
        policy: RoutingPolicy,
        rank_policies: Mapping[str, RoutingPolicy],
        role: str = "aggregated",
        memory: MemorySize = REMEMBERED,
    ) -> None:
        """ranks: for each server, the instance ids of its ranks. policy: chooses a server. rank_policies: for each
        server, the policy that chooses one of its ranks. role: role of the servers. memory: size of the router's memory
        of prompts.
        """
        super().__init__(list(ranks), policy, role, memory)
        self._ranks = {server: RoleRouter(ids, rank_policies[server]) for server, ids in ranks.items()}
        self._server_of = {instance_id: server for server, ids in ranks.items() for instance_id in ids}
        self._emptied: dict[str, set[str]] = {server: set() for server in ranks}
        """Ranks of each server that have failed since the server's prompts were last forgotten."""

    @property
    def instance_ids(self) -> list[str]:
        return list(self._server_of)

    def see(self, cached: Sequence[m.CachedTokens]) -> None:
        """Stores how many first tokens of the next prompt each server has cached, if the policy has `reads_caches =
        True`. A server counts like its rank with most of these tokens in GPU and host memory together. cached: how
        many of these tokens each rank has cached.
        """
        best: dict[str, m.CachedTokens] = {}
        for one in cached:
            if (server := self._server_of.get(one.instance_id)) is not None:
                here = one._replace(instance_id=server)
                best[server] = max(best.get(server, here), here, key=lambda seen: (sum(seen[1:]), seen[1]))
        super().see(list(best.values()))

    def pick(
        self,
        prompt: TokenSequence,
        now_ns: int,
        avoid: str = "",
        request_id: int = 0,
        session: int = -1,
        agent: int = 0,
    ) -> str:
        """Picks a server, then one of the server's ranks that is not down. Returns the rank's instance id. avoid: rank
        that is picked only if no other is up. session, agent: those of the request; session -1: none.
        """
        server = super().pick(prompt, now_ns, self._server_of.get(avoid, ""), request_id, session, agent)
        return self._ranks[server].pick(prompt, now_ns, avoid)

    def release(self, instance_id: str, num_tokens: int, request_id: int = 0, now_ns: int = 0) -> None:
        server = self._server_of[instance_id]
        super().release(server, num_tokens, request_id, now_ns)
        self._ranks[server].release(instance_id, num_tokens)

    def count(self, instance_id: str, num_requests: int, num_tokens: int) -> None:
        super().count(self._server_of[instance_id], num_requests, num_tokens)

    def load_of(self, instance_id: str) -> InstanceLoad:
        return self._ranks[self._server_of[instance_id]].load_of(instance_id)

    def note(self, message: m.Serve | m.Drain | m.PeerUp | m.PeerDown) -> None:
        """Handles a message that a rank accepts requests, or that it accepts none from now on. A server accepts
        requests as long as one of its ranks does. A server's cache counts as empty when each of its ranks has failed.
        """
        server = self._server_of.get(message.instance_id)
        if server is None:
            return
        ranks = self._ranks[server]
        was_down = ranks.all_down
        ranks.note(message)
        emptied = self._emptied[server]
        if isinstance(message, m.PeerDown):
            emptied.add(message.instance_id)
        if is_empty := len(emptied) == len(ranks.loads):
            emptied.clear()
        if ranks.all_down != was_down:
            super().note(replace(message, instance_id=server))
        elif is_empty:
            super().note(m.PeerDown(server, has_restarted=True))

    def read(self, metrics: Sequence[m.InstanceMetrics]) -> None:
        """Reads metrics of ranks. A server's queue is the sum of its ranks' queues; its page use is their mean."""
        of_servers: dict[str, list[m.InstanceMetrics]] = {}
        for one in metrics:
            if (server := self._server_of.get(one.instance_id)) is not None:
                of_servers.setdefault(server, []).append(one)
        means = [
            m.InstanceMetrics(
                server, sum(one.num_queued for one in ones), sum(one.page_use for one in ones) / len(ones)
            )
            for server, ones in of_servers.items()
        ]
        super().read(means)

    def forget(self) -> list[m.Command]:
        super().forget()
        return [command for ranks in self._ranks.values() for command in ranks.forget()]
