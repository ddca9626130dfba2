"""Chooses an aggregated instance for each request."""

from pdsim.core.messages import Arrival, Cancel, Command, Failed, FlushCache, Message, NewRequest, Outcome, Send
from pdsim.core.router import RoleRouter


class AggregatedRouter:
    instance_id = "router"

    def __init__(self, instances: RoleRouter) -> None:
        self.instances = instances
        self._routed: dict[int, NewRequest] = {}

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        if isinstance(message, Arrival):
            new = self.route(message, now_ns)
            return [Send(to, new) for to in new.instance_ids]
        if isinstance(message, FlushCache):
            return self.instances.forget()
        if isinstance(message, Cancel):
            return self._cancel(message)
        if not isinstance(message, Outcome):
            raise TypeError(f"a router does not take {message}")
        self.leave(message.request_id)
        return []

    @property
    def roles(self) -> dict[str, RoleRouter]:
        return {"aggregated": self.instances}

    def route(self, arrival: Arrival, now_ns: int, avoid: tuple[str, str] = ("", "")) -> NewRequest:
        """One instance stands for both of a pair."""
        request_id, prompt, max_output_tokens = arrival
        to = self.instances.pick(prompt, now_ns, avoid[0])
        self._routed[request_id] = new = NewRequest(request_id, now_ns, prompt, max_output_tokens, to, to)
        return new

    def lose(self, instance_id: str) -> tuple[list[int], list[NewRequest]]:
        """Nobody waits for an answer of prefill; all that an instance had is lost with it."""
        return [], [new for new in self._routed.values() if new.decode_id == instance_id]

    def _cancel(self, cancel: Cancel) -> list[Command]:
        """Nothing if it has ended: its outcome was on the way."""
        new = self._routed.get(cancel.request_id)
        if new is None:
            return []
        self.leave(cancel.request_id)
        return [Send(new.decode_id, cancel), Failed(*cancel)]

    def leave(self, request_id: int) -> None:
        if new := self._routed.pop(request_id, None):
            self.instances.release(new.prefill_id, len(new.prompt))
