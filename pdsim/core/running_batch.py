"""The requests that one decode instance runs, advanced a step at a time or many at once.

All run the same number of steps, so nothing is kept per request and step: a request remembers what it had when it
joined, and its phase, which says in which steps it opens a new page:
  it needs one before step s  <=>  its KV then fills whole pages  <=>  s mod page_size == phase
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from pdsim.core.kv_cache import NO_LEASE, Lease
from pdsim.policy.views import TokenSequence


@dataclass(slots=True)
class DecodeRequest:
    request_id: int
    arrival_ns: int
    prompt: TokenSequence
    num_prompt_tokens: int
    max_output_tokens: int
    prefill_id: str
    num_output_tokens: int = 0
    """Brought up to date when it leaves the batch, and for a policy that looks."""
    ends_with_first_token: bool = False
    lease: Lease = field(default_factory=lambda: NO_LEASE)
    joined_at_step: int = 0
    join_number: int = 0

    @property
    def num_kv_tokens(self) -> int:
        """The last output token has no KV yet: the next step computes it."""
        return self.num_prompt_tokens + max(self.num_output_tokens - 1, 0)


class RunningBatch:
    def __init__(self, page_size: int) -> None:
        self.num_steps = 0
        self.num_requests = 0
        self.num_kv_tokens = 0
        """Of all requests together."""
        self.num_shared_pages = 0
        """Pages of the prefix cache that they read, counted once for each of them."""
        self._page_size = page_size
        self._requests: dict[int, DecodeRequest] = {}
        self._by_phase: list[tuple[int, int, Lease]] = []
        """(phase, number of the join, lease), sorted: the order in which pages are opened."""
        self._num_joins = 0

    def requests(self) -> list[DecodeRequest]:
        """In the order in which they joined, their lengths up to date."""
        for request in self._requests.values():
            self._update(request)
        return list(self._requests.values())

    def has(self, request_id: int) -> bool:
        return request_id in self._requests

    def join(self, request: DecodeRequest) -> None:
        request.joined_at_step = self.num_steps
        self._num_joins += 1
        request.join_number = self._num_joins
        self._requests[request.request_id] = request
        self.num_requests += 1
        self.num_kv_tokens += request.num_kv_tokens
        self.num_shared_pages += request.lease.num_shared
        insort(self._by_phase, (self._phase(request), self._num_joins, request.lease))

    def leave(self, request_id: int) -> DecodeRequest:
        request = self._requests.pop(request_id)
        del self._by_phase[bisect_left(self._by_phase, (self._phase(request), request.join_number))]
        self._update(request)
        self.num_requests -= 1
        self.num_kv_tokens -= request.num_kv_tokens
        self.num_shared_pages -= request.lease.num_shared
        return request

    def advance(self, num_steps: int) -> None:
        self.num_steps += num_steps
        self.num_kv_tokens += num_steps * self.num_requests

    def due(self, skip_steps: int, num_steps: int) -> list[Lease]:
        """Leases that open a page, in order, in num_steps <= page_size steps after the next skip_steps."""
        ordered = self._by_phase
        start = (self.num_steps + skip_steps) % self._page_size
        stop = start + num_steps
        first = bisect_left(ordered, (start,))
        if stop <= self._page_size:
            entries = ordered[first : bisect_left(ordered, (stop,))]
        else:
            entries = ordered[first:] + ordered[: bisect_left(ordered, (stop - self._page_size,))]
        return [entry[2] for entry in entries]

    def _phase(self, request: DecodeRequest) -> int:
        """The same whenever joined_at_step and num_output_tokens belong together."""
        return (request.joined_at_step - request.num_kv_tokens) % self._page_size

    def _update(self, request: DecodeRequest) -> None:
        request.num_output_tokens += self.num_steps - request.joined_at_step
        request.joined_at_step = self.num_steps
