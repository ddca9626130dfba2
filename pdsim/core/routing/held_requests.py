"""Requests that the router holds back while all instances that compute prompts are busy (QueuePolicy)."""

from heapq import heappop, heappush

from pdsim.core.messages import Arrival
from pdsim.core.routing.role_router import RoleRouter
from pdsim.policy.protocols import QueuePolicy


class HeldRequests:
    """The queue in the router. An arriving request joins the queue if other requests wait there or all instances that
    compute prompts are busy, as in Dynamo's should_queue.
    """

    def __init__(self, policy: QueuePolicy, instances: RoleRouter, forward_tokens: int) -> None:
        """policy: decides whether all instances are busy, and in which order requests leave the queue. instances: those
        of the role that computes prompts. forward_tokens: maximum number of prompt tokens in one forward of one rank,
        by which the policy measures how busy an instance is.
        """
        self._policy = policy
        self._instances = instances
        self._forward_tokens = forward_tokens
        self._order: list[tuple[float, int, int]] = []
        """Heap of (policy's rank, number of the entry, request id). Entries of withdrawn requests have no effect."""
        self._entries: dict[int, int] = {}
        """By request id: number of the waiting request's entry in `_order`."""
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entries)

    def must_wait(self) -> bool:
        """True if an arriving request joins the queue."""
        return len(self._entries) > 0 or self._are_busy()

    def add(self, arrival: Arrival, now_ns: int) -> None:
        self._instances.now_ns = now_ns
        self._num_entries += 1
        self._entries[arrival.request_id] = self._num_entries
        rank = self._policy.rank(arrival, self._instances.offering())
        heappush(self._order, (rank, self._num_entries, arrival.request_id))

    def withdraw(self, request_id: int) -> None:
        """Removes a request that was cancelled. No effect if the request does not wait."""
        self._entries.pop(request_id, None)

    def take(self, *, anyway: bool = False) -> int | None:
        """Removes the request to which the policy gave the lowest rank, and returns its id. None: no request waits, or
        all instances are busy. anyway: True: takes the request even if all instances are busy.
        """
        while self._order and self._entries.get(self._order[0][2]) != self._order[0][1]:
            heappop(self._order)
        if not self._order or (not anyway and self._are_busy()):
            return None
        request_id = heappop(self._order)[2]
        del self._entries[request_id]
        return request_id

    def _are_busy(self) -> bool:
        return self._policy.all_busy(self._instances.offering(), self._forward_tokens)
