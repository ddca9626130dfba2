"""Chooses an instance of one role for each request, by a routing policy. Keeps the data that the policy sees."""

from collections.abc import Collection, Sequence
from dataclasses import field

from pdsim.core import messages as m
from pdsim.core.instance import PolicyError
from pdsim.core.routing.prompt_memory import PAGE_SIZE, PromptMemories
from pdsim.core.routing.routed_work import RoutedWork
from pdsim.core.routing.sessions import SessionBindings, session_of
from pdsim.dataclass import dataclass
from pdsim.policy.protocols import RoutingPolicy, Scope
from pdsim.policy.views import InstanceLoad, TokenSequence


@dataclass(frozen=True, slots=True)
class MemorySize:
    """Size of a router's memory of prompts, per instance: at most num_tokens tokens, in pages of page_size tokens."""

    page_size: int = PAGE_SIZE
    num_tokens: int = 1 << 24


REMEMBERED = MemorySize()


@dataclass(slots=True)
class RoutedLoad:
    """Load of one instance as the router counts it: number of its unfinished requests, of their prompt tokens, and of
    the prompts' whole pages. num_pages: a page that n prompts share counts n times; 0 unless the policy has
    `is_kv_aware = True`. num_queued and page_use: from the instance's last metrics (InstanceMetrics).
    """

    instance_id: str
    num_requests: int = 0
    num_tokens: int = 0
    num_pages: int = 0
    num_queued: int = 0
    page_use: float = 0.0
    sessions: dict[int, int] = field(default_factory=dict)
    """Number of unfinished requests of each session that has any."""

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    def add(self, num_requests: int, num_tokens: int, session: int = -1) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        if session >= 0:
            self.sessions[session] = self.sessions.get(session, 0) + num_requests
            if not self.sessions[session]:
                del self.sessions[session]


class RoleRouter:
    """The instances of one role, and their loads as the router counts them."""

    def __init__(
        self,
        instance_ids: Sequence[str],
        policy: RoutingPolicy,
        role: str = "aggregated",
        memory: MemorySize = REMEMBERED,
    ) -> None:
        self.now_ns = 0
        self.session = -1
        """Session (session_of) of the request for which an instance is being chosen. -1: the request has no session, or
        the role has one instance, or the policy has no `reads_sessions = True`."""
        self.role = role
        self.page_size = memory.page_size
        self._policy = policy
        self._loads = {instance_id: RoutedLoad(instance_id) for instance_id in instance_ids}
        self._only = instance_ids[0] if len(instance_ids) == 1 else ""
        """The only instance. Empty: there are several, and the policy chooses."""
        self.loads = list(self._loads.values())
        self.instances = self.loads
        """Loads of the instances from which the policy may choose."""
        self.counts_streams = False
        """True: loads count only requests whose clients receive tokens, by calls of `count`. False: loads count all
        routed requests until they end."""
        self._down: set[str] = set()
        self._memory = memory
        self._remembered: PromptMemories | None = None
        self.metrics_interval_ns: int = getattr(policy, "metrics_interval_ns", 0)
        self._work = RoutedWork(self._loads, memory.page_size) if getattr(policy, "is_kv_aware", False) else None
        self.reads_sessions: bool = getattr(policy, "reads_sessions", False)
        self._sessions = SessionBindings() if self.reads_sessions and not self._only else None
        self.reads_caches: bool = role != "decode" and getattr(policy, "reads_caches", False)
        self._cached: dict[str, tuple[int, int]] = {}
        """By instance: how many first tokens of the prompt for which an instance is being chosen are cached in GPU
        memory, and how many further tokens behind these in host memory."""
        self._scope: Scope = getattr(policy, "scope", "run")
        self.num_picked_cached_tokens: int | None = None
        """Number of first tokens of the last routed prompt that the router remembers having sent to the same instance
        before (num_cached_tokens). None: no DisaggregationPolicy needs the number."""

    def num_cached_tokens(self, prompt: TokenSequence, instance_id: str) -> int:
        """Number of the prompt's first tokens that the instance has cached as far as the router knows: tokens that were
        sent to the instance in earlier prompts. The router begins to remember prompts at the first call.
        """
        return self._memories().num_tokens(prompt, instance_id)

    def holders(self, prompt: TokenSequence) -> Collection[str]:
        return self._memories().holders(prompt)

    def _memories(self) -> PromptMemories:
        if self._remembered is None:
            self._remembered = PromptMemories(self._loads, self._memory.num_tokens, self.page_size)
        return self._remembered

    @property
    def instance_ids(self) -> list[str]:
        return list(self._loads)

    def see(self, cached: Sequence[m.CachedTokens]) -> None:
        """Stores how many first tokens of the next prompt each instance has cached, if the policy has `reads_caches =
        True`. The next call of `pick` routes this prompt. cached: what the instances' KV events report.
        """
        if self.reads_caches:
            self._cached = {one.instance_id: (one.num_device_tokens, one.num_host_tokens) for one in cached}

    def tier_tokens(self, instance_id: str) -> tuple[int, int]:
        return self._cached.get(instance_id, (0, 0))

    def _num_credited_tokens(self, prompt: TokenSequence, instance_id: str) -> int:
        """Number of the prompt's tokens that the router does not count as work for the instance, because they are
        cached. A policy with `reads_caches = True` computes the number from cached tokens in GPU and host memory.
        Otherwise the number is num_cached_tokens.
        """
        if self.reads_caches:
            credited: int = getattr(self._policy, "num_credited_tokens")(*self.tier_tokens(instance_id))  # noqa: B009
            return min(credited, len(prompt))
        return self.num_cached_tokens(prompt, instance_id)

    def num_uncached_tokens(self, instance_id: str) -> int:
        return self._counted().num_uncached_tokens(instance_id)

    def num_pages_with(self, prompt: TokenSequence, instance_id: str) -> int:
        return self._counted().num_pages_with(prompt, len(prompt) // self.page_size, instance_id)

    def _counted(self) -> RoutedWork:
        if self._work is None:
            raise PolicyError(
                f"{self._policy}: reads uncached tokens or pages of requests, which needs is_kv_aware = True"
            )
        return self._work

    @property
    def hears_first_tokens(self) -> bool:
        """True if the router needs a message of each request's first token, because nothing else tells that an
        aggregated instance has computed the prompt, and the policy counts uncached tokens. Prefill instances send
        PrefillDone instead.
        """
        return self._work is not None and self.role == "aggregated"

    def session_instance(self, ttl_ns: int) -> str:
        return "" if self._sessions is None else self._sessions.instance_of(self.session, ttl_ns, self.now_ns)

    def pick(
        self,
        prompt: TokenSequence,
        now_ns: int,
        avoid: str = "",
        request_id: int = 0,
        session: int = -1,
        agent: int = 0,
    ) -> str:
        """Picks an instance that is not down, and returns its id. The instance `avoid` is picked only if no other is
        up; "": none. If the role has one instance, no policy is asked. session, agent: ids of the request's session
        and of the agent within the session; session -1: the request has no session. Raises PolicyError if the policy
        returns an unknown id.
        """
        self.now_ns = now_ns
        self.session = -1 if self._sessions is None else session_of(self._scope, session, agent)
        instance_id = self._only or self._choose(prompt, avoid)
        if self.num_picked_cached_tokens is not None:
            self.num_picked_cached_tokens = self.num_cached_tokens(prompt, instance_id)
        if not self.counts_streams:
            self._loads[instance_id].add(1, len(prompt), self.session)
        if self._work is not None:
            self._loads[instance_id].num_pages += len(prompt) // self.page_size
            self._work.add(request_id, prompt, instance_id, self._num_credited_tokens(prompt, instance_id))
        if self._sessions is not None and session >= 0:
            self._sessions.add(request_id, self.session, instance_id)
        if self._remembered is not None:
            self._remembered.add(prompt, instance_id)
        return instance_id

    def _choose(self, prompt: TokenSequence, avoid: str) -> str:
        self.instances = self._offered(avoid) if self._down or avoid else self.loads
        instance_id = self._policy.pick(prompt, self)
        if instance_id not in self._loads:
            raise PolicyError(f"{self._policy}: picked {instance_id!r}; there are {', '.join(self._loads)}")
        return instance_id

    def release(self, instance_id: str, num_tokens: int, request_id: int = 0, now_ns: int = 0) -> None:
        session = -1 if self._sessions is None else self._sessions.remove(request_id, now_ns)
        if not self.counts_streams:
            self._loads[instance_id].add(-1, -num_tokens, session)
        if self._work is not None:
            self._loads[instance_id].num_pages -= num_tokens // self.page_size
            self._work.remove(request_id)

    def count(self, instance_id: str, num_requests: int, num_tokens: int) -> None:
        """Adds numbers of requests and of prompt tokens to an instance's load. Negative numbers are subtracted."""
        self._loads[instance_id].add(num_requests, num_tokens)

    def on_computed(self, request_id: int) -> None:
        """Counts the tokens of a request's prompt as computed, if this router counts uncached tokens."""
        if self._work is not None:
            self._work.on_computed(request_id)

    def load_of(self, instance_id: str) -> InstanceLoad:
        return self._loads[instance_id]

    @property
    def all_down(self) -> bool:
        return len(self._down) == len(self._loads)

    def note(self, message: m.Serve | m.Drain | m.PeerUp | m.PeerDown) -> None:
        """Handles a message on the state of an instance. Drain, and PeerDown of an instance that has not restarted,
        mean that it gets no more requests. All other messages mean that it gets requests. After Serve and PeerDown the
        instance's cache counts as empty.
        """
        instance_id = message.instance_id
        if instance_id not in self._loads:
            return
        if isinstance(message, m.Drain) or (isinstance(message, m.PeerDown) and not message.has_restarted):
            self._down.add(instance_id)
        else:
            self._down.discard(instance_id)
        if self._remembered is not None and isinstance(message, m.Serve | m.PeerDown):
            self._remembered.forget(instance_id)

    def read(self, metrics: Sequence[m.InstanceMetrics]) -> None:
        """Notes metrics of this role's instances in their loads, where the policy sees them. metrics: metrics of the
        instances of all roles.
        """
        for one in metrics:
            if (load := self._loads.get(one.instance_id)) is not None:
                load.num_queued, load.page_use = one.num_queued, one.page_use

    def forget(self) -> list[m.Command]:
        """Forgets all prompts, and returns messages that tell the instances to drop their caches."""
        self._remembered = None
        return [m.Send(instance_id, m.FlushCache()) for instance_id in self._loads]

    @property
    def offered(self) -> list[RoutedLoad]:
        """Loads of the instances that accept new requests."""
        return [load for load in self.loads if load.instance_id not in self._down]

    def offering(self) -> "RoleRouter":
        """Returns this router as the view that a policy reads. The view's `instances` are then the loads of those
        instances that accept new requests.
        """
        self.instances = self.offered if self._down else self.loads
        return self

    def _offered(self, avoid: str) -> list[RoutedLoad]:
        return [load for load in self.offered if load.instance_id != avoid] or self.offered
