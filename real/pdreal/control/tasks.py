"""Tasks of the ranks of an instance, as its leader says: plain values that can be pickled."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pdreal.control.requests import Draw
from pdsim.core.messages import LoadBack, Scatter, WriteBackup
from pdsim.core.transfer.transfer_plan import TransferUnit


class PrefillInput(NamedTuple):
    """Compute these tokens of a sequence behind num_context_tokens whose KV lies in its pages."""

    request_id: int
    tokens: Sequence[int]
    num_context_tokens: int
    page_table: Sequence[int]
    draw: Draw | None = None
    """None: greedily, or for nobody."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens with KV when it is computed."""
        return self.num_context_tokens + len(self.tokens)


class PrefillBatch(NamedTuple):
    chunks: tuple[PrefillInput, ...]


class PageTableChange(NamedTuple):
    """Pages of a row of the decode batch from a place on; what lies before stays."""

    row: int
    start: int
    pages: Sequence[int]


class DecodeBatch(NamedTuple):
    """A token for each row, a sequence: feed its last token, whose KV goes behind the num_kv_tokens that it has."""

    tokens: tuple[int, ...]
    num_kv_tokens: tuple[int, ...]
    changes: tuple[PageTableChange, ...] = ()
    """Changes since the batch before, which ranks remember: each table has room for the token then."""
    draws: tuple[Draw | None, ...] = ()
    """Draws of each sequence; none: all greedily."""


def whole_tables(page_tables: Iterable[Sequence[int]]) -> tuple[PageTableChange, ...]:
    """Page tables of rows of which nothing is known."""
    return tuple(PageTableChange(row, 0, pages) for row, pages in enumerate(page_tables))


class SaveKv(NamedTuple):
    """Copy the KV of a sequence to host memory."""

    request_id: int
    num_kv_tokens: int
    page_table: Sequence[int]


class RestoreKv(NamedTuple):
    """Move what was saved of a sequence into these pages."""

    request_id: int
    page_table: Sequence[int]


class ForgetKv(NamedTuple):
    """Drop what was saved of a sequence."""

    request_id: int


Work = PrefillBatch | DecodeBatch | SaveKv | RestoreKv | ForgetKv | WriteBackup | LoadBack


class Compute(NamedTuple):
    """Work of the model, behind the work before it."""

    work: Any
    step_id: int | None = None
    """The step that is computed, if units of its layers wait for it."""


class Windows(NamedTuple):
    """Last pages of a prompt, which hold its window."""

    source_pages: Sequence[int]
    target_pages: Sequence[int]


class SendUnit(NamedTuple):
    """Transfer worker number `worker` moves a unit, when this rank has computed the layers that it waits for."""

    worker: int
    unit: TransferUnit
    staging_offset_bytes: int | None
    windows: Windows | None = None
    """What of layers with a window goes with the unit."""


class ScatterCell(NamedTuple):
    """Move a cell from the staging ring into pages, behind the cells before it."""

    command: Scatter
    pages: Sequence[int]


class DigestSent(NamedTuple):
    """Fingerprints of a request's KV, behind what the worker sent before."""

    worker: int
    pages: Sequence[int]
    num_tokens: int


class DigestArrived(NamedTuple):
    pages: Sequence[int]
    num_tokens: int


Task = Compute | SendUnit | ScatterCell | DigestSent | DigestArrived
