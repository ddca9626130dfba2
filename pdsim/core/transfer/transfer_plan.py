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

from pdsim.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class RankPairLayout:
    """Layout of the KV that one prefill rank sends to one decode rank."""

    page_size: int
    page_bytes: int
    """KV bytes of one page, over all layers, that one prefill rank sends to one decode rank."""
    num_planes: int
    """Number of arrays that a page is spread over. Each layer has K and V, or its latent and the key of its indexer."""
    planes_per_layer: int = 1
    num_writers: int = 1
    """Number of prefill ranks that write to one decode rank."""
    num_targets: int = 1
    """Number of decode ranks that one prefill rank writes to."""
    num_pairs: int = 1
    """Number of pairs of a prefill rank and a decode rank between which KV is sent."""
    num_absent_layers: int = 0
    """Number of layers that a smaller pipeline stage lacks in comparison with the largest stage, summed over all pairs
    of ranks."""
    slices: bool = False
    """True: prefill and decode divide KV heads differently, so each token of each array needs its own descriptor."""
    coalesces: bool = True
    """True: the engine joins pages that are contiguous on both sides into one descriptor (Mooncake does, NIXL does
    not)."""
    num_shares: int = 1
    """Number of decode ranks that divide the tokens of a page. A page of decode then has this many times the tokens of
    a prefill page. page_bytes is one decode rank's share of a prefill page."""
    pushes: bool = False
    """True: a GPU kernel writes all pages of a unit into decode's memory. The unit counts as one descriptor."""
    state_bytes: int = 0
    """Bytes of a request's linear-attention state. The state is sent after the last page."""
    num_state_planes: int = 0
    window_tokens: int = 0
    """Size of the sliding window in tokens. In layers with a window, only KV of the prompt's last tokens is sent, after
    the last page. page_bytes and num_planes do not include these layers."""
    window_page_bytes: int = 0
    """KV bytes of one page, over all layers with a sliding window, that one prefill rank sends to one decode rank."""
    num_window_planes: int = 0

    def size(
        self, source: tuple[int, ...], target: tuple[int, ...], sent: range | None = None, *, with_state: bool = True
    ) -> "TransferSize":
        """Returns bytes and descriptors of a transfer of these pages. sent: if these pages are the prompt's last, the
        range of all tokens that decode lacked; the transfer then includes KV of layers with a window. with_state:
        includes the request's state, too.
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
        """Number of pages with KV of the window at the prompt's end. sent: range of all tokens that decode lacked."""
        first = max(sent.start, sent.stop - self.window_tokens) // self.page_size
        return -(-sent.stop // self.page_size) - first

    def _windows(self, sent: range) -> "TransferSize":
        """Bytes and descriptors of KV in layers with a window, for the last tokens of a prompt (SGLang 0.5.23,
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
        """Number of layers whose KV one pair of ranks sends."""
        return self.num_planes // self.planes_per_layer

    def total(self, amount: int) -> int:
        """Sums an amount over all pairs of ranks. amount: amount of one pair."""
        whole = amount * self.num_pairs
        return whole - amount * self.num_absent_layers // self.num_layers if self.num_absent_layers else whole

    def part(self, size: "TransferSize", group: int, num_groups: int) -> "TransferSize":
        """Returns the bytes and descriptors that one layer group sends. Layers with state or a window are assumed to be
        spread evenly.
        """
        if self.num_state_planes or self.num_window_planes:
            return size.share(range(group, group + 1), num_groups)
        return size.share(layers_of_group(self.num_layers, group, num_groups), self.num_layers)


def layers_of_group(num_layers: int, group: int, num_groups: int) -> range:
    """Returns the layers of one group. Sizes of groups differ by at most one layer."""
    return range(num_layers * group // num_groups, num_layers * (group + 1) // num_groups)


class TransferSize(NamedTuple):
    """Bytes and descriptors that one pair of ranks transfers. A descriptor is one contiguous piece of memory."""

    num_bytes: int
    num_descriptors: int

    def share(self, parts: range, num_parts: int) -> "TransferSize":
        """Divides this size into num_parts nearly equal parts, and returns the sum of the given consecutive parts."""
        return TransferSize(*(n * parts.stop // num_parts - n * parts.start // num_parts for n in self))


def num_runs(source: tuple[int, ...], target: tuple[int, ...]) -> int:
    """Number of runs of consecutive page ids. Ids of a run are consecutive in source and in target."""
    count = min(1, len(source))
    for i in range(1, len(source)):
        if source[i] - source[i - 1] != 1 or target[i] - target[i - 1] != 1:
            count += 1
    return count


@dataclass(frozen=True, slots=True)
class TransferUnit:
    """Command to send a part of a prompt's KV from prefill to decode. The unit queues behind earlier units of these two
    instances.

    source_pages and target_pages are page ids. num_bytes and num_descriptors count one pair of ranks.
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
    """True: the first token, which the last unit carries, is also the request's last token."""
    cell: int | None = None
    """Number of the request's staging cell. None: the unit is not staged."""
    after_layers: tuple[int, int] | None = None
    """Step id and layer group that must be computed before the unit is sent. None: the KV is computed already."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Page ids that one unit moves on both sides, and the number of their staging cell."""

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
        """Number of pages of each cell, from the first page to send to the prompt's end."""
        total, cell = len(self._target_pages), self._cell_pages or len(self._target_pages)
        return [min(cell, total - start) for start in range(0, total, cell)] if total else []

    def advance(self, end_tokens: int, table: Sequence[int], *, is_last: bool) -> list[Piece]:
        """Returns the next pieces, up to end_tokens of the prompt. Empty: nothing can be sent yet. table: the request's
        page ids on prefill.
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
"""Cursor of a request to which decode has not granted pages. This object never changes."""
