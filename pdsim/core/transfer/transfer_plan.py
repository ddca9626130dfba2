"""The KV that a prefill instance sends: how ranks split it, the units that carry it, one cursor per request.

Ranks of one instance do the same at the same time, so one pair of ranks stands for all. The KV that a pair moves
depends on the tensor-parallel sizes (SGLang 0.5.23, common/conn.py: _resolve_rank_mapping, staging_buffer.py):

decode has       transfers                                                  sent as
as many ranks    each rank sends all its KV heads to its counterpart        whole pages
fewer ranks      several prefill ranks write to each decode rank            a slice of each token's heads, or staging
more ranks       each prefill rank writes to several, one after another     a slice of each token's heads, or staging
latent KV        every rank holds all KV: one writer per decode rank        whole pages
divided latents  every rank gets its share of the tokens from one writer    gathered tokens, or vLLM's blocks

Ranks of each pipeline stage of prefill send the layers of their stage. A pair of the largest stage stands for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class RankPairLayout:
    """KV layout between a prefill and a decode instance, for one pair of ranks."""

    page_size: int
    page_bytes: int
    """KV bytes of one page that one prefill rank sends to one decode rank, over all layers."""
    num_planes: int
    """Number of arrays that hold a part of every page: K and V of each layer, or its latent and the key of its
    indexer."""
    planes_per_layer: int = 1
    num_writers: int = 1
    """Number of prefill ranks that write to one decode rank."""
    num_targets: int = 1
    """Number of decode ranks that one prefill rank writes to."""
    num_pairs: int = 1
    """Number of pairs of ranks between which KV is sent."""
    num_absent_layers: int = 0
    """Number of layers that pairs of smaller pipeline stages have less than the largest, summed over these pairs."""
    slices: bool = False
    """True if the two sides divide KV heads differently, so that each token of each plane needs its own descriptor."""
    coalesces: bool = True
    """True: the engine joins pages that are contiguous on both sides (Mooncake does, NIXL does not)."""
    num_shares: int = 1
    """Number of decode ranks that divide each page of decode, which has as many times the tokens of a page of prefill.
    page_bytes are those of one rank's share of prefill's page."""
    pushes: bool = False
    """True if a kernel writes all pages of a unit with one descriptor."""
    state_bytes: int = 0
    """Bytes of linear-attention state per request, sent after the last page."""
    num_state_planes: int = 0
    window_tokens: int = 0
    """Last tokens of a prompt whose KV in layers with a window is sent after the last page. page_bytes and num_planes
    do not include these layers."""
    window_page_bytes: int = 0
    """KV bytes of one page in these layers that one prefill rank sends to one decode rank."""
    num_window_planes: int = 0

    def size(
        self, source: tuple[int, ...], target: tuple[int, ...], sent: range | None = None, *, with_state: bool = True
    ) -> "TransferSize":
        """Bytes and descriptors of these pages. sent: all tokens that the receiver lacks, if these pages are their last
        part. Then the windows of these tokens go with the pages, and with_state the request's state.
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
        size = TransferSize(num_pages * self.page_bytes, num_descriptors)
        if sent is not None:
            windows = self._windows(sent)
            state = TransferSize(self.state_bytes, self.num_state_planes) if with_state else TransferSize(0, 0)
            size = TransferSize(
                size.num_bytes + windows.num_bytes + state.num_bytes,
                size.num_descriptors + windows.num_descriptors + state.num_descriptors,
            )
        return size

    def num_window_pages(self, sent: range) -> int:
        """Number of last pages of these tokens that hold the last token's window. The tokens are all that the receiver
        lacks.
        """
        first = max(sent.start, sent.stop - self.window_tokens) // self.page_size
        return -(-sent.stop // self.page_size) - first

    def _windows(self, sent: range) -> "TransferSize":
        """Size of a prompt's windows, from the page with their first token on (SGLang 0.5.23,
        disaggregation/prefill.py:1588).

        The pages of a window count as contiguous.
        """
        num_pages = self.num_window_pages(sent)
        pieces = num_pages * self.page_size if self.slices else 1 if self.coalesces else num_pages
        if self.pushes or not num_pages:
            pieces = 0
        return TransferSize(num_pages * self.window_page_bytes, pieces * self.num_window_planes)

    @property
    def num_layers(self) -> int:
        """Number of layers whose KV a pair of ranks moves."""
        return self.num_planes // self.planes_per_layer

    def total(self, amount: int) -> int:
        """The sum over all pairs of ranks, from the amount of this pair."""
        whole = amount * self.num_pairs
        return whole - amount * self.num_absent_layers // self.num_layers if self.num_absent_layers else whole

    def part(self, size: "TransferSize", group: int, num_groups: int) -> "TransferSize":
        """The part of a transfer that one layer group sends. Layers with state or windows count as spread evenly."""
        if self.num_state_planes or self.num_window_planes:
            return size.share(range(group, group + 1), num_groups)
        return size.share(layers_of_group(self.num_layers, group, num_groups), self.num_layers)


def layers_of_group(num_layers: int, group: int, num_groups: int) -> range:
    """Layers of one group. The sizes of groups differ by at most one layer."""
    return range(num_layers * group // num_groups, num_layers * (group + 1) // num_groups)


class TransferSize(NamedTuple):
    """Amount that one pair of ranks moves: bytes, and descriptors, which are contiguous pieces of memory."""

    num_bytes: int
    num_descriptors: int

    def share(self, parts: range, num_parts: int) -> "TransferSize":
        """The share of some consecutive parts, if the amount is divided into num_parts nearly equal parts."""
        return TransferSize(*(n * parts.stop // num_parts - n * parts.start // num_parts for n in self))


def num_runs(source: tuple[int, ...], target: tuple[int, ...]) -> int:
    """Number of runs within which the page ids of both sides are consecutive."""
    count = min(1, len(source))
    for i in range(1, len(source)):
        if source[i] - source[i - 1] != 1 or target[i] - target[i - 1] != 1:
            count += 1
    return count


@dataclass(frozen=True, slots=True)
class TransferUnit:
    """Command to move a part of a prompt's KV, queued after earlier units of this pair of instances.

    Pages are ids on both sides. Bytes and descriptors are those of one pair of ranks.
    """

    request_id: int
    source: str
    target: str
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    num_bytes: int
    num_descriptors: int
    planned_ns: int
    is_last: bool
    first_token_ends: bool = False
    """True if the first token, which travels with the last unit, ends the request."""
    cell: int | None = None
    """Number of the cell of the request's grid, if the unit is staged."""
    after_layers: tuple[int, int] | None = None
    """(step_id, group) of the layer group that must be computed first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages that one unit moves, and their staging cell."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    cell: int


class SendCursor:
    """Cuts one request's KV into pieces. Tokens before num_sent_tokens are sent, or were cached on the decode side.

    The request's pages, counted from the first token sent, are divided into cells. A piece that is not the last ends
    where a cell ends, and is never empty; the last is always sent, because it carries the first token. With staging a
    piece lies within one cell. Without, a cell is a page, and a piece may have several.

    A target page may span several of the source's pages. Pieces that meet within a target page have it in common.
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
        """span: number of source pages per target page."""
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
        """Number of pages of each cell, from the first token sent to the prompt's end."""
        total, cell = len(self._target_pages), self._cell_pages or len(self._target_pages)
        return [min(cell, total - start) for start in range(0, total, cell)] if total else []

    def advance(self, end_tokens: int, table: Sequence[int], *, is_last: bool) -> list[Piece]:
        """The next pieces up to end_tokens. Empty: there is nothing to send yet."""
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
"""Cursor of a request without granted pages. This object never moves."""
