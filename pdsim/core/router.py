"""Chooses a prefill and a decode instance for each request, from what it routed and what came back."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdsim.core.instance import PolicyError
from pdsim.core.messages import (
    Arrival,
    Cancel,
    Command,
    Failed,
    Finished,
    FlushCache,
    Message,
    NewRequest,
    PrefillDone,
    Send,
)
from pdsim.core.prompt_memory import PromptMemory
from pdsim.policy.protocols import RoutingPolicy
from pdsim.policy.views import TokenSequence


@dataclass(slots=True)
class Load:
    """Requests routed to one instance and not done, and their prompt tokens."""

    instance_id: str
    taken_at_ns: int = 0
    num_requests: int = 0
    num_tokens: int = 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens


class RoleRouter:
    """The instances of one role: their loads as they are, and as they were when the policy's snapshot was taken."""

    def __init__(
        self, instance_ids: Sequence[str], policy: RoutingPolicy, *, snapshot_interval_ns: int, memory_tokens: int
    ) -> None:
        self.now_ns = 0
        self._policy = policy
        self._loads = {instance_id: Load(instance_id) for instance_id in instance_ids}
        self.instances = self._known = list(self._loads.values())
        """What the policy sees, of all that are known."""
        self._down: set[str] = set()
        self._snapshot_interval_ns = snapshot_interval_ns
        self._next_snapshot_ns = 0
        self._memory_tokens = memory_tokens
        self._remembered: dict[str, PromptMemory] = {}

    def num_cached_tokens(self, prompt: TokenSequence, instance_id: str) -> int:
        """Prompts are remembered once a policy has asked: an approximate copy of the instance's cache."""
        if not self._remembered:
            self._remembered = {i: PromptMemory(self._memory_tokens) for i in self._loads}
        return self._remembered[instance_id].num_tokens(prompt)

    def pick(self, prompt: TokenSequence, now_ns: int, avoid: str = "") -> str:
        """One that is not down; not the one to avoid, if there is another."""
        self.now_ns = now_ns
        if now_ns >= self._next_snapshot_ns:
            self._take_snapshot(now_ns)
        self.instances = self._offered(avoid) if self._down or avoid else self._known
        instance_id = self._policy.pick(prompt, self)
        if instance_id not in self._loads:
            raise PolicyError(f"{self._policy}: picked {instance_id!r}; there are {', '.join(self._loads)}")
        self._loads[instance_id].add(1, len(prompt))
        if self._remembered:
            self._remembered[instance_id].add(prompt)
        return instance_id

    def release(self, instance_id: str, num_tokens: int) -> None:
        self._loads[instance_id].add(-1, -num_tokens)

    @property
    def loads(self) -> Sequence[Load]:
        return list(self._loads.values())

    @property
    def all_down(self) -> bool:
        return len(self._down) == len(self._loads)

    def mark_down(self, instance_id: str) -> None:
        """Also forgets what was in its cache."""
        if instance_id in self._loads:
            self._down.add(instance_id)
            if self._remembered:
                self._remembered[instance_id] = PromptMemory(self._memory_tokens)

    def forget(self) -> list[Command]:
        """What was in the caches; and have them forget it."""
        self._remembered = {}
        return [Send(instance_id, FlushCache()) for instance_id in self._loads]

    def mark_up(self, instance_id: str) -> None:
        self._down.discard(instance_id)

    def _offered(self, avoid: str) -> list[Load]:
        healthy = [load for load in self._known if load.instance_id not in self._down]
        return [load for load in healthy if load.instance_id != avoid] or healthy

    def _take_snapshot(self, now_ns: int) -> None:
        if self._snapshot_interval_ns:
            self._known = [Load(i, now_ns, a.num_requests, a.num_tokens) for i, a in self._loads.items()]
            self._next_snapshot_ns = now_ns + self._snapshot_interval_ns
        else:
            for load in self._known:
                load.taken_at_ns = now_ns


class Router:
    instance_id = "router"

    def __init__(self, *, prefill: RoleRouter, decode: RoleRouter) -> None:
        self.prefill = prefill
        self.decode = decode
        self.at_prefill: dict[int, NewRequest] = {}
        self.at_decode: dict[int, NewRequest] = {}

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        match message:
            case Arrival():
                new = self.route(message, now_ns)
                return [Send(to, new) for to in new.instance_ids]
            case FlushCache():
                return [*self.prefill.forget(), *self.decode.forget()]
            case PrefillDone():
                self.leave_prefill(message.request_id)
            case Finished():
                self.leave_decode(message.request_id)
            case Failed():
                self.leave(message.request_id)
            case Cancel():
                return self._cancel(message)
            case _:
                raise TypeError(f"a router does not take {message}")
        return []

    def route(self, arrival: Arrival, now_ns: int, avoid: tuple[str, str] = ("", "")) -> NewRequest:
        """avoid: a prefill and a decode instance that are taken only if there is no other."""
        request_id, prompt, max_output_tokens = arrival
        prefill_id = self.prefill.pick(prompt, now_ns, avoid[0])
        decode_id = self.decode.pick(prompt, now_ns, avoid[1])
        new = NewRequest(request_id, now_ns, prompt, max_output_tokens, prefill_id, decode_id)
        self.at_prefill[request_id] = self.at_decode[request_id] = new
        return new

    @property
    def roles(self) -> dict[str, RoleRouter]:
        return {"prefill": self.prefill, "decode": self.decode}

    def lose(self, instance_id: str) -> tuple[list[int], list[NewRequest]]:
        """Requests whose prefill answer will not come, and requests that are lost with it.

        Decode instances say what they lost with a prefill instance; nobody but the router says so for decode.
        """
        unanswered = [new.request_id for new in self.at_prefill.values() if new.prefill_id == instance_id]
        for request_id in unanswered:
            self.leave_prefill(request_id)
        return unanswered, [new for new in self.at_decode.values() if new.decode_id == instance_id]

    def _cancel(self, cancel: Cancel) -> list[Command]:
        """Nothing if it has ended: its outcome was on the way."""
        new = self.at_decode.get(cancel.request_id)
        if new is None:
            return []
        self.leave(cancel.request_id)
        return [*(Send(to, cancel) for to in new.instance_ids), Failed(*cancel)]

    def leave(self, request_id: int) -> None:
        self.leave_prefill(request_id)
        self.leave_decode(request_id)

    def leave_prefill(self, request_id: int) -> None:
        if new := self.at_prefill.pop(request_id, None):
            self.prefill.release(new.prefill_id, len(new.prompt))

    def leave_decode(self, request_id: int) -> None:
        if new := self.at_decode.pop(request_id, None):
            self.decode.release(new.decode_id, len(new.prompt))
