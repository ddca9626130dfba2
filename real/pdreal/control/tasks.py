"""Tasks that a leader gives to the ranks of its instance, as plain values that can be pickled."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pdreal.control.requests import Draw
from pdsim.core.messages import LoadBack, Scatter, WriteBackup
from pdsim.core.transfer.transfer_plan import TransferUnit


class PrefillInput(NamedTuple):
    """Compute these tokens of a sequence after num_context_tokens whose KV is in its pages."""

    request_id: int
    tokens: Sequence[int]
    num_context_tokens: int
    page_table: Sequence[int]
    draw: Draw | None = None
    """Rule for the next token. None: the likeliest token, or no token is needed."""

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens with KV after the computation."""
        return self.num_context_tokens + len(self.tokens)


class PrefillBatch(NamedTuple):
    chunks: tuple[PrefillInput, ...]


class PageTableChange(NamedTuple):
    """Pages of one row of the decode batch from `start` on. Earlier pages stay."""

    row: int
    start: int
    pages: Sequence[int]


class DecodeBatch(NamedTuple):
    """A decode step with one token per row. A row feeds the last token of its sequence, whose KV follows the
    num_kv_tokens.
    """

    tokens: tuple[int, ...]
    num_kv_tokens: tuple[int, ...]
    changes: tuple[PageTableChange, ...] = ()
    """Changes since the last batch, which ranks remember. Afterwards each table has room for the new token."""
    draws: tuple[Draw | None, ...] = ()
    """Rules for the next tokens, one per sequence. Empty: the likeliest tokens."""


def whole_tables(page_tables: Iterable[Sequence[int]]) -> tuple[PageTableChange, ...]:
    """Changes that set the page tables of all rows."""
    return tuple(PageTableChange(row, 0, pages) for row, pages in enumerate(page_tables))


class SaveKv(NamedTuple):
    """Copy the KV of a sequence to host memory."""

    request_id: int
    num_kv_tokens: int
    page_table: Sequence[int]


class RestoreKv(NamedTuple):
    """Copy the saved KV of a sequence into these pages, and drop the saved copy."""

    request_id: int
    page_table: Sequence[int]


class ForgetKv(NamedTuple):
    """Drop the saved KV of a sequence."""

    request_id: int


Work = PrefillBatch | DecodeBatch | SaveKv | RestoreKv | ForgetKv | WriteBackup | LoadBack


class Compute(NamedTuple):
    """Work of the model, in order after earlier work."""

    work: Any
    step_id: int | None = None
    """The step that is computed, if transfer units wait for its layers."""


class Windows(NamedTuple):
    """Last pages of a prompt, which hold its window."""

    source_pages: Sequence[int]
    target_pages: Sequence[int]


class SendUnit(NamedTuple):
    """Transfer worker number `worker` sends a unit, after this rank has computed the layers that the unit waits for."""

    worker: int
    unit: TransferUnit
    staging_offset_bytes: int | None
    windows: Windows | None = None
    """KV of sliding-window layers that is sent with the unit."""


class ScatterCell(NamedTuple):
    """Copy a cell from the staging ring into pages, after earlier cells."""

    command: Scatter
    pages: Sequence[int]


class DigestSent(NamedTuple):
    """Compute fingerprints of a request's KV, after the worker's earlier transfers."""

    worker: int
    pages: Sequence[int]
    num_tokens: int


class DigestArrived(NamedTuple):
    pages: Sequence[int]
    num_tokens: int


Task = Compute | SendUnit | ScatterCell | DigestSent | DigestArrived
