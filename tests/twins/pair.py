"""A simulator of prefill/decode disaggregation in one file: one prefill and one decode instance, with room for all.

The methods of Pair follow a request through its life:

arrive     a client sends the request, and the router tells decode
grant      decode reserves pages for the request's KV and tells prefill
prefill    a forward begins with the prompt or a chunk of it, beside chunks of other prompts
compute    the forward has ended, and the chunk is computed
transfer   the pages of each chunk cross the link
merge      all pages have arrived: decode takes the request into its batch, and gives it the first token
step       a decode step gives every request of the batch a token; a request ends with its last

pdsim also has limits of memory, caches, policies, more instances, real costs and faults. Where none of these matters,
pdsim gives every request the same times to the nanosecond, as tests/laws/test_pair.py checks.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import ceil
from typing import Any

KV_TOKEN_BYTES = 114_688  # Qwen3-0.6B in bf16: keys and values of 28 layers with 8 heads of 128


@dataclass(frozen=True)
class Settings:
    page_tokens: int = 4
    chunk_tokens: int = 64  # of one forward; whole pages
    message_ns: int = 1_000_000  # between router, prefill and decode
    setup_ns: int = 1_000_000  # of each transfer, before its first byte
    bandwidth: float = 100e9  # bytes per second
    prefill_token_ns: int = 1_000_000
    decode_step_ns: int = 10_000_000

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


@dataclass(eq=False)
class Request:
    request_id: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int = 0  # of the prompt
    sent_pages: int = 0  # across the link, or queued for it
    made_tokens: int = 0  # of the output
    times_ns: dict[str, int] = field(default_factory=dict)


class Pair:
    def __init__(self, requests: list[Request], settings: Settings) -> None:
        self.settings = settings
        self.now_ns = 0
        self.events: list[Any] = []  # (time, serial number, method, arguments)
        self.serial = count()
        self.queued: deque[Request] = deque()  # on decode: without pages
        self.granted: list[Request] = []  # on prefill: not computed, or in part
        self.link_free_ns = 0  # when all that is queued for it has crossed
        self.arrived: deque[Request] = deque()  # on decode: all KV is there
        self.batch: list[Request] = []  # on decode: running
        self.prefill_is_busy = self.decode_is_busy = False
        for request in requests:
            self.at(request.arrival_ns, self.arrive, request)

    def at(self, time_ns: int, happen, *args) -> None:
        heappush(self.events, (time_ns, next(self.serial), happen, args))

    def run(self) -> None:
        while self.events:
            self.now_ns, _, happen, args = heappop(self.events)
            happen(*args)
            if not self.events or self.events[0][0] > self.now_ns:
                self.choose()

    def choose(self) -> None:
        """Lets idle instances choose what to do next. Called when all events of this instant have happened."""
        if not self.prefill_is_busy:
            self.prefill()
        if not self.decode_is_busy:
            self.decode()

    def arrive(self, request: Request) -> None:
        self.at(self.now_ns + self.settings.message_ns, self.queued.append, request)

    def grant(self, request: Request) -> None:
        request.times_ns["admitted"] = self.now_ns
        self.at(self.now_ns + self.settings.message_ns, self.granted.append, request)

    def prefill(self) -> None:
        """Fills a forward with the prompts that wait, first come, first served. The last prompt may be cut at the end
        of a page.
        """
        room, chunks = self.settings.chunk_tokens, []
        for request in self.granted:
            if num_tokens := min(request.prompt_tokens - request.computed_tokens, room):
                chunks.append((request, num_tokens))
                room -= self.budgeted_tokens(num_tokens)
                if not request.computed_tokens:
                    self.begin(request)
        if chunks:
            self.prefill_is_busy = True
            duration_ns = self.settings.prefill_token_ns * sum(num_tokens for _, num_tokens in chunks)
            self.at(self.now_ns + duration_ns, self.compute, chunks)

    def budgeted_tokens(self, num_tokens: int) -> int:
        """Number of tokens by which a chunk reduces the forward's budget. SGLang counts whole pages."""
        return self.settings.num_pages(num_tokens) * self.settings.page_tokens

    def begin(self, request: Request) -> None:
        request.times_ns["prefill_start"] = self.now_ns

    def compute(self, chunks: list[tuple[Request, int]]) -> None:
        self.prefill_is_busy = False
        for request, num_tokens in chunks:
            request.computed_tokens += num_tokens
            if is_last := request.computed_tokens == request.prompt_tokens:
                request.times_ns["prefill_end"] = self.now_ns
                self.granted.remove(request)
            self.transfer(request, is_last)

    def transfer(self, request: Request, is_last: bool) -> None:
        """Sends the pages that are computed and not sent yet. One transfer crosses the link at a time."""
        num_pages = self.settings.num_pages(request.computed_tokens) - request.sent_pages
        num_bytes = num_pages * self.settings.page_tokens * KV_TOKEN_BYTES
        start_ns = max(self.now_ns, self.link_free_ns)
        self.link_free_ns = start_ns + self.settings.setup_ns + ceil(num_bytes / self.settings.bandwidth * 1e9)
        request.sent_pages += num_pages
        request.times_ns.setdefault("transfer_start", start_ns)
        if is_last:
            request.times_ns["transfer_end"] = self.link_free_ns
            self.at(self.link_free_ns + self.settings.message_ns, self.arrived.append, request)

    def decode(self) -> None:
        """Grants pages, merges requests whose KV has arrived, and begins the next step. Called between two steps."""
        while self.queued:
            self.grant(self.queued.popleft())
        while self.arrived:
            self.merge(self.arrived.popleft())
        if self.batch:
            self.decode_is_busy = True
            self.at(self.now_ns + self.settings.decode_step_ns, self.step)

    def merge(self, request: Request) -> None:
        request.times_ns["first_token"] = self.now_ns
        self.batch.append(request)
        self.give_token(request)

    def step(self) -> None:
        self.decode_is_busy = False
        for request in list(self.batch):
            self.give_token(request)

    def give_token(self, request: Request) -> None:
        request.made_tokens += 1
        if request.made_tokens == request.output_tokens:
            request.times_ns["end"] = self.now_ns
            self.batch.remove(request)
