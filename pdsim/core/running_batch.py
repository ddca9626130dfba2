"""The requests that one decode instance runs, advanced a step at a time or many at once.

All run the same number of steps, so nothing is kept per request and step: a request remembers what it had when it
joined, and its phase, which says in which steps it opens a new page:
  it needs one before step s  <=>  its KV then fills whole pages  <=>  s mod page_size == phase
"""

from dataclasses import dataclass, field

from pdsim.core.kv_cache import Lease
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
    lease: Lease = field(default_factory=Lease)
    joined_at_step: int = 0

    @property
    def num_kv_tokens(self) -> int:
        """The last output token has no KV yet: the next step computes it."""
        return self.num_prompt_tokens + max(self.num_output_tokens - 1, 0)


class RunningBatch:
    def __init__(self, page_size: int) -> None:
        self.num_steps = 0
        self.num_kv_tokens = 0
        """Of all requests together."""
        self._page_size = page_size
        self._requests: dict[int, DecodeRequest] = {}
        self._by_phase: dict[int, dict[int, DecodeRequest]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[DecodeRequest]:
        """In the order in which they joined, their lengths up to date."""
        for request in self._requests.values():
            self._update(request)
        return list(self._requests.values())

    def join(self, request: DecodeRequest) -> None:
        request.joined_at_step = self.num_steps
        self._requests[request.request_id] = request
        self.num_kv_tokens += request.num_kv_tokens
        self._by_phase.setdefault(self._phase(request), {})[request.request_id] = request

    def leave(self, request_id: int) -> DecodeRequest:
        request = self._requests.pop(request_id)
        phase = self._phase(request)
        self._update(request)
        self.num_kv_tokens -= request.num_kv_tokens
        bucket = self._by_phase[phase]
        del bucket[request_id]
        if not bucket:
            del self._by_phase[phase]
        return request

    def advance(self, num_steps: int) -> None:
        self.num_steps += num_steps
        self.num_kv_tokens += num_steps * len(self._requests)

    def num_pages_due(self) -> int:
        """Pages to open before the next step."""
        return len(self._by_phase.get(self.num_steps % self._page_size, ()))

    def due(self, skip_steps: int, num_steps: int) -> list[DecodeRequest]:
        """Who opens a page, in order, in num_steps <= page_size steps after the next skip_steps."""
        first = self.num_steps + skip_steps
        buckets = [self._by_phase.get(step % self._page_size) for step in range(first, first + num_steps)]
        return [request for bucket in buckets if bucket for request in bucket.values()]

    def _phase(self, request: DecodeRequest) -> int:
        """Valid as long as joined_at_step and num_output_tokens belong together."""
        return (request.joined_at_step - request.num_kv_tokens) % self._page_size

    def _update(self, request: DecodeRequest) -> None:
        request.num_output_tokens += self.num_steps - request.joined_at_step
        request.joined_at_step = self.num_steps
