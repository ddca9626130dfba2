"""A simulator of a pair with tensor-parallel sizes 2 and 1, whose KV passes through a staging ring on decode.

A prompt is sent in cells, each as long as a whole chunk:

lend       when the prompt begins, decode lends a place in its ring for every cell; the place may still be in use
transfer   a computed cell crosses the link when its place is free; the first token follows the last cell
scatter    decode copies a cell from the ring into pages, one cell at a time
free       decode's loop gives places back between two steps, and tells prefill up to where the ring is free
"""

from dataclasses import dataclass
from math import ceil

from tests.twins.pair import KV_TOKEN_BYTES, Pair, Request, Settings

GATHER_BANDWIDTH, SCATTER_BANDWIDTH = 0.65 * 3.35e12, 0.40 * 3.35e12  # bytes per second on an H100
GATHER_HOST_NS, SCATTER_HOST_NS = 840_000, 678_000
NUM_WRITERS = 2  # prefill ranks, each with half of the KV

Cell = tuple[Request, int]


class Ring:
    """The staging ring. Its bytes are numbered without end, lap after lap; byte n lies at the place n % num_bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.head = 0
        self.lent: dict[Cell, int] = {}  # first bytes of places in use, in the order in which they were lent

    def lend(self, cell: Cell, num_bytes: int) -> int:
        """Lends a place to a cell. Returns the number of the byte up to which the ring must be free before the cell may
        be written.
        """
        if self.head % self.num_bytes + num_bytes > self.num_bytes:
            self.begin_lap()
        self.lent[cell] = self.head
        self.head += num_bytes
        return self.head - self.num_bytes

    def free(self, cell: Cell) -> int:
        """Frees the place of a cell. Returns the number of the byte up to which the ring is free."""
        del self.lent[cell]
        if not self.lent:
            self.begin_lap()
        return min(self.lent.values(), default=self.head)

    def begin_lap(self) -> None:
        self.head = ceil(self.head / self.num_bytes) * self.num_bytes


@dataclass(eq=False)
class StagedRequest(Request):
    sent_cells: int = 0  # crossed, or queued for it
    scattered_cells: int = 0
    is_sent: bool = False


class StagedPair(Pair):
    def __init__(self, requests: list[Request], settings: Settings, ring_bytes: int) -> None:
        super().__init__(requests, settings)
        self.ring = Ring(ring_bytes)
        self.needs: dict[Cell, int] = {}  # prefill: up to where the ring must be free for a cell
        self.free_until = 0  # prefill: up to where it is known to be free
        self.units: list[Cell] = []  # prefill: computed, not sent
        self.is_sending = False
        self.scatter_free_ns = 0
        self.scattered: list[Cell] = []  # decode: their places are still lent

    def num_cells(self, request: StagedRequest) -> int:
        return -(-request.prompt_tokens // self.settings.chunk_tokens)

    def num_bytes(self, cell: Cell) -> int:
        """Size of a cell in bytes, over all writers. 0 for the unit after the last cell, which has only the first
        token.
        """
        request, index = cell
        num_tokens = min(self.settings.chunk_tokens, request.prompt_tokens - index * self.settings.chunk_tokens)
        return self.settings.num_pages(max(0, num_tokens)) * self.settings.page_tokens * KV_TOKEN_BYTES

    def begin(self, request: StagedRequest) -> None:
        super().begin(request)
        self.at(self.now_ns + self.settings.message_ns, self.lend, request)

    def lend(self, request: StagedRequest) -> None:
        cells = [(request, index) for index in range(self.num_cells(request))]
        needs = {cell: self.ring.lend(cell, self.num_bytes(cell)) for cell in cells}
        self.at(self.now_ns + self.settings.message_ns, self.on_lent, needs)

    def on_lent(self, needs: dict[Cell, int]) -> None:
        self.needs |= needs
        self.send_next()

    def transfer(self, request: StagedRequest, is_last: bool) -> None:
        """Queues the cells that are complete. At the end of the prompt: also the rest, and the first token."""
        stop = self.num_cells(request) + 1 if is_last else request.computed_tokens // self.settings.chunk_tokens
        self.units += [(request, index) for index in range(request.sent_cells, stop)]
        request.sent_cells = stop
        self.send_next()

    def send_next(self) -> None:
        """Sends the first unit whose place is free. A unit never passes an earlier unit of its request."""
        held_up = set()
        for unit in [] if self.is_sending else self.units:
            if unit[0] not in held_up and self.may_go(unit):
                self.units.remove(unit)
                self.send(unit)
                return
            held_up.add(unit[0])

    def may_go(self, unit: Cell) -> bool:
        is_token = unit[1] == self.num_cells(unit[0])
        return is_token or (unit in self.needs and self.needs[unit] <= self.free_until)

    def send(self, unit: Cell) -> None:
        self.is_sending = True
        unit[0].times_ns.setdefault("transfer_start", self.now_ns)
        num_bytes, duration_ns = self.num_bytes(unit), self.settings.setup_ns
        if num_bytes:
            duration_ns += GATHER_HOST_NS + round(2e9 * num_bytes / NUM_WRITERS / GATHER_BANDWIDTH)
        self.at(self.now_ns + duration_ns + ceil(num_bytes / self.settings.bandwidth * 1e9), self.end_transfer, unit)

    def end_transfer(self, unit: Cell) -> None:
        self.is_sending = False
        if self.num_bytes(unit):
            self.at(self.now_ns + self.settings.message_ns, self.scatter, unit)
        else:
            unit[0].times_ns["transfer_end"] = self.now_ns
            self.at(self.now_ns + self.settings.message_ns, self.on_token, unit[0])
        self.send_next()

    def scatter(self, cell: Cell) -> None:
        duration_ns = SCATTER_HOST_NS + round(2e9 * self.num_bytes(cell) / SCATTER_BANDWIDTH)
        self.scatter_free_ns = max(self.now_ns, self.scatter_free_ns) + duration_ns
        self.at(self.scatter_free_ns, self.on_scattered, cell)

    def on_scattered(self, cell: Cell) -> None:
        self.scattered.append(cell)
        cell[0].scattered_cells += 1
        self.complete(cell[0])

    def on_token(self, request: StagedRequest) -> None:
        request.is_sent = True
        self.complete(request)

    def complete(self, request: StagedRequest) -> None:
        if request.is_sent and request.scattered_cells == self.num_cells(request):
            self.arrived.append(request)

    def decode(self) -> None:
        free_until = [self.ring.free(cell) for cell in self.scattered]
        if self.scattered:
            self.at(self.now_ns + self.settings.message_ns, self.on_free, free_until[-1])
        self.scattered = []
        super().decode()

    def on_free(self, free_until: int) -> None:
        self.free_until = free_until
        self.send_next()
