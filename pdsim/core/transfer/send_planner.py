"""Plans which KV a prefill instance sends: how ranks divide KV, the units that carry it, and a cursor for each request.

All ranks of an instance do the same at the same time, so one pair of a prefill rank and a decode rank stands for all
pairs. The KV that a pair moves depends on the tensor-parallel sizes (SGLang 0.5.23, common/conn.py:
_resolve_rank_mapping, staging_buffer.py):

decode has       transfers                                                  sent as
as many ranks    each rank sends all its KV heads to its counterpart        whole pages
fewer ranks      several prefill ranks write to each decode rank            a slice of each token's heads, or staging
more ranks       each prefill rank writes to several, one after another     a slice of each token's heads, or staging
latent KV        every rank holds all KV: one writer per decode rank        whole pages
divided latents  every rank gets its share of the tokens from one writer    gathered tokens, or vLLM's blocks

With pipeline stages on prefill, each rank sends the layers of its stage. A pair of the stage with most layers stands
for all pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pdsim.core.instance import PolicyError, Request
from pdsim.core.messages import AskStaging, Command, KvGranted, PrefillChunk, Send, TransferUnit, receiver_of
from pdsim.core.transfer.staging_ring import StagingPlan
from pdsim.dataclass import dataclass
from pdsim.policy.protocols import TransferPolicy


@dataclass(frozen=True, kw_only=True)
class RankPairLayout:
    """Layout of the KV that one prefill rank sends to one decode rank."""

    page_size: int
    page_bytes: int
    """KV bytes of one page, over all layers, that one prefill rank sends to one decode rank."""
    num_planes: int
    """Number of arrays with parts of a page: keys and values of each layer, or latents and the indexer's keys."""
    planes_per_layer: int = 1
    num_writers: int = 1
    """Number of prefill ranks that write to one decode rank."""
    num_targets: int = 1
    """Number of decode ranks that one prefill rank writes to."""
    num_pairs: int = 1
    """Number of pairs of a prefill rank and a decode rank between which KV is sent."""
    num_absent_layers: int = 0
    """For pairs whose prefill rank is in a pipeline stage with fewer layers than the largest stage: number of missing
    layers, summed over all pairs of a prefill rank and a decode rank."""
    slices: bool = False
    """True: prefill and decode divide KV heads differently, so each token of each array needs its own descriptor,
    unless KV is staged or pushed. With vLLM always False: one rank's heads are one piece of a block."""
    coalesces: bool = True
    """True: the engine joins pages that are contiguous on both sides into one descriptor (Transport.coalesces)."""
    num_shares: int = 1
    """Number n of decode ranks that divide the tokens of a page: a decode page has n times the tokens of a prefill
    page. page_bytes is one decode rank's share of a prefill page."""
    pushes: bool = False
    """True: a GPU kernel writes a TransferUnit's pages into decode's memory. The unit counts as one descriptor."""
    state_bytes: int = 0
    """Bytes of a request's linear-attention state that one prefill rank sends one decode rank after the last page."""
    num_state_planes: int = 0
    """Number of arrays over which a request's linear-attention state is spread."""
    window_tokens: int = 0
    """Size of the sliding window in tokens. Layers with a window send KV of the prompt's last tokens only, after the
    last page of all other layers. page_bytes and num_planes do not include these layers."""
    window_page_bytes: int = 0
    """KV bytes of one page, over all layers with a sliding window, that one prefill rank sends to one decode rank."""
    num_window_planes: int = 0
    """Number of arrays with parts of a page in layers with a sliding window (see num_planes)."""

    def size(
        self, source: tuple[int, ...], target: tuple[int, ...], sent: range | None = None, *, with_state: bool = True
    ) -> "TransferSize":
        """Returns bytes and descriptors of a transfer of pages. source and target: page ids on sender and receiver.

        sent: range of all tokens that are sent of a prompt, if these are the prompt's last pages. The result then
        includes KV of layers with a window and, if with_state is True, the request's state. None: the result covers
        these pages only.
        """
        num_pages = len(source)
        if self.pushes:
            num_descriptors = min(1, num_pages)
        elif self.slices:
            num_descriptors = num_pages * self.page_size * self.num_planes
        elif self.num_shares > 1:
            num_descriptors = (num_runs(target, target) if self.coalesces else len(target)) * self.num_planes
        else:
            num_descriptors = (num_runs(source, target) if self.coalesces else num_pages) * self.num_planes
        num_bytes = num_pages * self.page_bytes
        if sent is not None and self.num_window_planes:
            windows = self._windows(sent)
            num_bytes += windows.num_bytes
            num_descriptors += windows.num_descriptors
        if sent is not None and with_state:
            num_bytes += self.state_bytes
            num_descriptors += self.num_state_planes
        return TransferSize(num_bytes, num_descriptors)

    def num_window_pages(self, sent: range) -> int:
        """Number of pages with KV of the window at the prompt's end. sent: indices of the tokens that decode lacked."""
        first = max(sent.start, sent.stop - self.window_tokens) // self.page_size
        return -(-sent.stop // self.page_size) - first

    def _windows(self, sent: range) -> "TransferSize":
        """Bytes and descriptors of KV in layers with a window, for a prompt's last window_tokens tokens (SGLang 0.5.23,
        disaggregation/prefill.py:1588). sent: indices of the prompt's tokens that decode lacked.

        The pages of a window count as contiguous.
        """
        num_pages = self.num_window_pages(sent)
        pieces = num_pages * self.page_size if self.slices else 1 if self.coalesces else num_pages
        if self.pushes or not num_pages:
            pieces = 0
        return TransferSize(num_pages * self.window_page_bytes, pieces * self.num_window_planes)

    @property
    def num_layers(self) -> int:
        """Number of layers with arrays in num_planes, whose KV one pair of ranks sends."""
        return self.num_planes // self.planes_per_layer

    def total(self, amount: int) -> int:
        """Sum of bytes or of descriptors over all pairs of ranks. amount: that of a pair of the stage with most layers.
        Pairs with fewer layers count less.
        """
        whole = amount * self.num_pairs
        return whole - amount * self.num_absent_layers // self.num_layers if self.num_absent_layers else whole

    def part(self, size: "TransferSize", group: int, num_groups: int) -> "TransferSize":
        """Returns the share of `size` that the layer group with index `group` sends. Layers with state or a window are
        assumed to be spread evenly over the num_groups groups.
        """
        if self.num_state_planes or self.num_window_planes:
            return size.share(range(group, group + 1), num_groups)
        return size.share(layers_of_group(self.num_layers, group, num_groups), self.num_layers)


def layers_of_group(num_layers: int, group: int, num_groups: int) -> range:
    """Returns the indices of the layers in the group with index `group`. Groups differ by at most one layer."""
    return range(num_layers * group // num_groups, num_layers * (group + 1) // num_groups)


class TransferSize(NamedTuple):
    """Bytes and descriptors that one pair of ranks transfers. A descriptor is one contiguous piece of memory."""

    num_bytes: int
    num_descriptors: int

    def share(self, parts: range, num_parts: int) -> "TransferSize":
        """Divides this size into num_parts nearly equal parts. Returns the sum of the parts whose indices are in the
        range.
        """
        return TransferSize(*(n * parts.stop // num_parts - n * parts.start // num_parts for n in self))


def num_runs(source: tuple[int, ...], target: tuple[int, ...]) -> int:
    """Number of runs of consecutive page ids. Ids of a run are consecutive in source and in target."""
    assert len(source) == len(target)
    count, next_read, next_written = 0, -1, -1
    for read, written in zip(source, target):  # noqa: B905  mypyc compiles zip if it has no keyword
        if read != next_read or written != next_written:
            count += 1
        next_read, next_written = read + 1, written + 1
    return count


@dataclass(frozen=True, slots=True)
class Piece:
    """Page ids of one unit on prefill and on decode, and the index of its staging cell; 0 without staging."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    cell: int


class SendCursor:
    """Cuts one request's KV into pieces. Tokens before num_sent_tokens were sent already, or decode had them cached.

    The pages to send are divided into cells, counted from the first page to send. Each piece ends where a cell ends,
    and is not empty. The last piece may end anywhere and may be empty, because it carries the first token. With
    staging, a piece lies within one cell. Without staging, a cell is one page, and a piece may have several cells.

    A target page may hold several source pages. Two pieces that meet within a target page both contain the target page.
    """

    __slots__ = (
        "_cell_pages",
        "_page_size",
        "_span",
        "_start_pages",
        "_target_pages",
        "num_sent_tokens",
        "start_tokens",
    )

    def __init__(
        self,
        num_cached_tokens: int,
        target_pages: tuple[int, ...],
        page_size: int,
        cell_pages: int | None = None,
        span: int = 1,
    ) -> None:
        """num_cached_tokens: tokens that decode has cached. target_pages: pages that decode granted. cell_pages: pages
        of a staging cell; None: no staging. span: number of source pages per target page.
        """
        self.num_sent_tokens = self.start_tokens = num_cached_tokens
        self._start_pages = num_cached_tokens // page_size
        self._target_pages = target_pages
        self._page_size = page_size
        self._cell_pages = cell_pages
        self._span = span

    @property
    def is_staged(self) -> bool:
        return self._cell_pages is not None

    def cell_sizes(self) -> list[int]:
        """Number of pages of each cell, from the first page to send to the prompt's end."""
        total, cell = len(self._target_pages), self._cell_pages or len(self._target_pages)
        return [min(cell, total - start) for start in range(0, total, cell)] if total else []

    def advance(self, end_tokens: int, table: Sequence[int], *, is_last: bool) -> list[Piece]:
        """Returns the next pieces, up to end_tokens of the prompt. Empty: nothing can be sent yet. table: the request's
        page ids on prefill. is_last: True: the prompt ends at end_tokens.
        """
        page_size, base = self._page_size, self._start_pages
        if not is_last:
            cell_tokens = page_size * (self._cell_pages or 1)
            end_tokens -= (end_tokens - base * page_size) % cell_tokens
            if end_tokens <= self.num_sent_tokens:
                return []
        stop = -(-end_tokens // page_size)
        first = self.num_sent_tokens // page_size if end_tokens > self.num_sent_tokens else stop
        self.num_sent_tokens = end_tokens
        if self._cell_pages is None or first >= stop:
            return [self._piece(first, stop, table, 0)]
        cells = range((first - base) // self._cell_pages, -(-(stop - base) // self._cell_pages))
        bounds = [(base + cell * self._cell_pages, cell) for cell in cells]
        return [
            self._piece(max(first, start), min(stop, start + self._cell_pages), table, cell) for start, cell in bounds
        ]

    def _piece(self, first: int, stop: int, table: Sequence[int], cell: int) -> Piece:
        first_target, last_target = first - self._start_pages, stop - self._start_pages
        if self._span > 1 and stop > first:
            first_target, last_target = first_target // self._span, -(-last_target // self._span)
        target, source = self._target_pages[first_target:last_target], tuple(table[first:stop])
        assert len(target) == last_target - first_target
        return Piece(source, target, cell)


UNGRANTED = SendCursor(0, (), 1)
"""SendCursor of all requests to which decode has not granted pages. This object never changes."""


@dataclass(slots=True, kw_only=True)
class PrefillRequest(Request):
    decode_id: str
    cursor: SendCursor = UNGRANTED
    given_up: bool = False
    gives_way: bool = False
    """True: the prompt was begun without a grant, and loses its pages to granted prompts when its present forward
    ends."""
    num_attempts: int = 0
    """Number of the current attempt to compute the prompt, if prefill need not wait for decode's grant of pages. 0:
    prefill waits for the grant."""
    ends_with_first_token: bool = False
    """True: the first token is also the request's last. Set only if the prompt was computed before its grant came."""
    has_fixed_output: bool = False

    @property
    def ignores_eos(self) -> bool:
        return self.has_fixed_output

    @property
    def max_output_tokens(self) -> int:
        """Maximum number of output tokens on prefill: 1, the first token."""
        return 1

    @property
    def num_output_tokens(self) -> int:
        return 0

    @property
    def is_optimistic(self) -> bool:
        """True if prefill may begin the prompt, or has begun it, before decode has granted pages."""
        return self.num_attempts > 0

    @property
    def is_granted(self) -> bool:
        return self.cursor is not UNGRANTED

    @property
    def is_in_forward(self) -> bool:
        return self.num_computed_tokens < self.num_scheduled_tokens

    @property
    def num_sent_tokens(self) -> int:
        return self.cursor.num_sent_tokens


class SendPlanner:
    """Plans the transfer units of one prefill instance."""

    def __init__(
        self,
        prefill_id: str,
        layout: RankPairLayout,
        policy: TransferPolicy,
        *,
        staging: StagingPlan | None = None,
        layer_groups: int = 0,
    ) -> None:
        """layer_groups: number of groups of layers. The KV of a group is sent while the forward computes later groups.
        0: KV is sent after the forward. staging: None: KV is sent without staging memory.
        """
        self._prefill_id = prefill_id
        self._layout = layout
        self._policy = policy
        self._staging = staging
        self._layer_groups = layer_groups
        self.sends_layers = layer_groups > 0

    def cursor(self, grant: KvGranted) -> SendCursor | None:
        """Returns a cursor over the granted pages. None: the KV cannot be sent, because a staged cell is larger than
        the whole ring.
        """
        cell_pages = None
        if self._staging is not None and self._layout.slices:
            cell_pages = self._staging.cell_pages
            cell_bytes = min(cell_pages, len(grant.pages)) * self._layout.page_bytes
            if self.largest_cell_bytes(len(grant.pages)) > self._staging.ring_bytes:
                return None
            if self._staging.buffer_bytes is not None and cell_bytes > self._staging.buffer_bytes:
                cell_pages = None
        layout = self._layout
        return SendCursor(grant.num_cached_tokens, grant.pages, layout.page_size, cell_pages, layout.num_shares)

    def largest_cell_bytes(self, num_pages: int) -> int:
        """Bytes of a decode rank's ring that the largest staging cell of a request takes, with the parts of all prefill
        ranks that write to this cell. num_pages: pages that the request sends. Returns 0 if KV is not staged.
        """
        if self._staging is None or not self._layout.slices:
            return 0
        return min(self._staging.cell_pages, num_pages) * self._layout.page_bytes * self._layout.num_writers

    def with_cached(self, request: PrefillRequest, now_ns: int) -> list[Command]:
        """Returns commands that send the KV of a prompt's cached prefix, when the prompt's first chunk begins."""
        if request.num_cached_tokens <= request.cursor.num_sent_tokens:
            return []
        num_loading_tokens = request.lease.num_loaded * self._layout.page_size
        return self._units(request, self._send_until(request) - num_loading_tokens, now_ns)

    def with_chunk(self, request: PrefillRequest, chunk: PrefillChunk, step_id: int, now_ns: int) -> list[Command]:
        """Returns units that send a chunk's KV while the chunk is computed. Empty without layer groups."""
        return self._layers(request, chunk, step_id, now_ns) if self._layer_groups else []

    def ask_staging(self, request: PrefillRequest) -> list[Command]:
        """Returns a message that asks for the request's staging cells in the ring. Empty if nothing is staged."""
        if not request.cursor.is_staged:
            return []
        page_bytes = self._layout.page_bytes * self._layout.num_writers
        cells = tuple(pages * page_bytes for pages in request.cursor.cell_sizes())
        ask = AskStaging(request.request_id, self._prefill_id, cells)
        return [Send(receiver_of(request.decode_id), ask)] if cells else []

    def _send_until(self, request: PrefillRequest) -> int:
        end = self._policy.send_until(request)
        if end > max(request.num_computed_tokens, request.cursor.num_sent_tokens):
            raise PolicyError(f"{self._policy}: send_until returned {end}, more tokens than are computed of {request}")
        return end

    def after_chunk(self, request: PrefillRequest, is_last: bool, first_token_ends: bool, now_ns: int) -> list[Command]:
        """Returns units that send KV after a computed chunk. With layer groups, only the first token remains to be
        sent. is_last: True: the prompt's last chunk. first_token_ends: True: the first token is also the request's
        last.
        """
        end = request.num_prompt_tokens if is_last else self._send_until(request)
        return self._units(request, end, now_ns, is_last=is_last, first_token_ends=first_token_ends)

    def _units(
        self, request: PrefillRequest, end: int, now_ns: int, *, is_last: bool = False, first_token_ends: bool = False
    ) -> list[Command]:
        pieces = request.cursor.advance(end, request.lease.table, is_last=is_last)
        if request.cursor.is_staged:
            return self._cells(request, pieces, is_last, first_token_ends, now_ns)
        units: list[Command] = []
        for piece in pieces:
            ends = is_last and piece is pieces[-1]
            sent = _sent(request) if ends and not self._layer_groups else None
            size = self._layout.size(piece.source, piece.target, sent)
            units.append(self._unit(request, piece, size, now_ns, ends, ends and first_token_ends))
        return units

    def _cells(
        self, request: PrefillRequest, pieces: list[Piece], is_last: bool, first_token_ends: bool, now_ns: int
    ) -> list[Command]:
        """Returns one unit per staged piece, with one descriptor each. is_last: True: adds a unit with the first token
        and all that is not staged: state, and KV of layers with a window. first_token_ends: True: no token follows.
        """
        units: list[Command] = []
        for piece in pieces:
            if piece.source:
                size = TransferSize(len(piece.source) * self._layout.page_bytes, 1)
                units.append(self._unit(request, piece, size, now_ns, cell=piece.cell))
        if is_last:
            rest = Piece((), (), 0)
            state = self._layout.size((), (), _sent(request))
            units.append(self._unit(request, rest, state, now_ns, is_last, first_token_ends))
        return units

    def _layers(self, request: PrefillRequest, chunk: PrefillChunk, step_id: int, now_ns: int) -> list[Command]:
        """Returns one unit per layer group of a chunk, to send when the group is computed. Empty: no new whole page."""
        units: list[Command] = []
        end = chunk.num_context_tokens + chunk.num_tokens
        for piece in request.cursor.advance(end, request.lease.table, is_last=chunk.is_last):
            size = self._layout.size(piece.source, piece.target, _sent(request) if chunk.is_last else None)
            for group in range(self._layer_groups):
                part = self._layout.part(size, group, self._layer_groups)
                units.append(self._unit(request, piece, part, now_ns, after_layers=(step_id, group)))
        return units

    def _unit(
        self,
        request: PrefillRequest,
        piece: Piece,
        size: TransferSize,
        now_ns: int,
        is_last: bool = False,
        first_token_ends: bool = False,
        cell: int | None = None,
        after_layers: tuple[int, int] | None = None,
    ) -> TransferUnit:
        return TransferUnit(
            request.request_id,
            self._prefill_id,
            request.decode_id,
            piece.source,
            piece.target,
            size.num_bytes,
            size.num_descriptors,
            now_ns,
            is_last,
            first_token_ends,
            cell,
            after_layers,
        )


def _sent(request: PrefillRequest) -> range:
    """Range of the prompt's tokens that decode had not cached."""
    return range(request.cursor.start_tokens, request.num_prompt_tokens)
