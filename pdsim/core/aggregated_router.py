"""Chooses an aggregated instance for each request."""

from pdsim.core.messages import Arrival, Command, FlushCache, Message, NewRequest, Outcome, Send
from pdsim.core.router import RoleRouter


class AggregatedRouter:
    instance_id = "router"

    def __init__(self, instances: RoleRouter) -> None:
        self.instances = instances
        self._routed: dict[int, NewRequest] = {}

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        if isinstance(message, Arrival):
            return [self._route(message, now_ns)]
        if isinstance(message, FlushCache):
            return self.instances.forget()
        if not isinstance(message, Outcome):
            raise TypeError(f"a router does not take {message}")
        new = self._routed.pop(message.request_id)
        self.instances.release(new.prefill_id, len(new.prompt))
        return []

    def _route(self, arrival: Arrival, now_ns: int) -> Send:
        """One instance stands for both of a pair."""
        request_id, prompt, max_output_tokens = arrival
        to = self.instances.pick(prompt, now_ns)
        self._routed[request_id] = new = NewRequest(request_id, now_ns, prompt, max_output_tokens, to, to)
        return Send(to, new)
