"""Tasks that a leader gives to the ranks of its instance, as plain values that can be pickled."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pdreal.control.requests import Draw
from pdsim.core.messages import LoadBack, Scatter, TransferUnit, WriteBackup


class StateUse(NamedTuple):
    """Slots of linear-attention states that a chunk reads and writes."""

    source: int
    """Slot of the state from which the chunk continues. 0: the chunk begins its sequence."""
    own: int
    """Slot for the state after the chunk."""
    tracked: int = 0
    """Slot in which the forward also saves the state after only the first tracked_tokens tokens of the chunk. 0: the
    forward saves no second state.
    """
    tracked_tokens: int = 0
    """Number of tokens of the chunk, from its first, after which the state is saved in the slot `tracked`."""


class PrefillInput(NamedTuple):
    """Compute `tokens` of a sequence, which follow num_context_tokens tokens whose KV is in the sequence's pages."""

    request_id: int
    tokens: Sequence[int]
    """Ids of the tokens to compute."""
    num_context_tokens: int
    page_table: Sequence[int]
    """Ids of the sequence's pages, in the order of its tokens."""
    draw: Draw | None = None
    """Rule for choosing the next token. None: the likeliest token is chosen, or no token is needed."""
    next_token: int | None = None
    """Token after the chunk, which the draft model needs. None: the token that the forward chooses."""
    state: StateUse | None = None
    """Slots of the linear-attention states that the chunk reads and writes. None: the model has no linear attention."""

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens with KV after the computation."""
        return self.num_context_tokens + len(self.tokens)


class PrefillBatch(NamedTuple):
    chunks: tuple[PrefillInput, ...]
    """The parts of prompts that one forward computes."""


class PageTableChange(NamedTuple):
    """New pages of one sequence of the decode batch, from index `start` of its page table on. Pages before that index
    stay.
    """

    row: int
    """Index of the sequence in the batch."""
    start: int
    pages: Sequence[int]
    """Ids of the new pages."""


class Seed(NamedTuple):
    """Start of drafting for a sequence: the draft model's first proposal, and the draft model's hidden state at the
    last token with KV. SGLang sends both from prefill to decode (0.5.23, disaggregation/utils.py:468 and 474).
    """

    token: int
    """Id of the token that the draft model proposed first."""
    hidden: str
    """The draft model's hidden state at the last token with KV: its bytes in base64, because the control channel sends
    plain JSON.
    """


class DraftRows(NamedTuple):
    """Drafts of a decode step that verifies several tokens of each sequence of the batch. The fields but `seeds` have
    one entry for each sequence.
    """

    slots: tuple[int, ...]
    """For each sequence: index, from 1, of the entry in which ranks keep its draft state. A sequence keeps its entry
    while it runs."""
    num_accepted: tuple[int, ...]
    """For each sequence: number of tokens that this step is to give to it, which are accepted drafts and the target's
    next token. The scenario's random stream prescribes the number before the step.
    """
    taught: tuple[tuple[int, ...], ...]
    """For each sequence: tokens to verify instead of the draft head's first proposals, from the output of a run without
    drafts. An empty tuple: the proposals themselves are verified."""
    seeds: tuple[tuple[int, Seed | None], ...]
    """Pairs (slot, seed) of sequences that joined with this step, with slots as in `slots`. Seed None: the sequence was
    retracted, and its draft state begins with zeros.
    """


class DecodeBatch(NamedTuple):
    """A decode step over a batch of sequences. The step computes the last token of each sequence, and num_kv_tokens
    tokens precede that token.
    """

    tokens: tuple[int, ...]
    """For each sequence of the batch: id of its last token."""
    num_kv_tokens: tuple[int, ...]
    """For each sequence of the batch: number of tokens that have KV already."""
    changes: tuple[PageTableChange, ...] = ()
    """Changes of page tables since the last batch; ranks remember the tables. After the changes each table has room for
    the new tokens."""
    draws: tuple[Draw | None, ...] = ()
    """Rules for choosing the next tokens, one per sequence of the batch. None for a sequence: its likeliest token is
    chosen. Empty: the likeliest token of every sequence is chosen."""
    drafts: DraftRows | None = None
    """Drafts that the step verifies. None: the step computes one token of each sequence."""
    states: tuple[tuple[int, int], ...] = ()
    """For each sequence of the batch: slot of its linear-attention state, and slot for a copy of the new state (0:
    none). Empty: the model has no such layers."""


def whole_tables(page_tables: Iterable[Sequence[int]]) -> tuple[PageTableChange, ...]:
    """Returns changes that set the whole page table of each sequence of the batch."""
    return tuple(PageTableChange(row, 0, pages) for row, pages in enumerate(page_tables))


class SaveKv(NamedTuple):
    """Copy the KV of a sequence to host memory, and its linear-attention state if state_slot is not 0."""

    request_id: int
    num_kv_tokens: int
    """Number of tokens of the sequence that have KV."""
    page_table: Sequence[int]
    """Ids of the sequence's pages, in the order of its tokens."""
    state_slot: int = 0


class RestoreKv(NamedTuple):
    """Copy the saved KV of a sequence into these pages, and its state into its slot. Drop the saved copy."""

    request_id: int
    page_table: Sequence[int]
    """Ids of the pages that the sequence has now, in the order of its tokens."""
    state_slot: int = 0
    """Slot of the linear-attention state. 0: no state was saved."""


class ForgetKv(NamedTuple):
    """Drop the saved KV of a sequence."""

    request_id: int


Work = PrefillBatch | DecodeBatch | SaveKv | RestoreKv | ForgetKv | WriteBackup | LoadBack


class Compute(NamedTuple):
    """A task for the model: a forward or a copy of KV (`work` is one of the types of Work). Ranks compute these tasks
    in the order in which they get them.
    """

    work: Any
    step_id: int | None = None
    """Id of the step that the task computes. Transfer units may wait for layers of this step. None: the task is no
    step, such as a copy of KV."""


class Windows(NamedTuple):
    """The last pages of a prompt, which hold the tokens of its sliding window: their ids on prefill (source_pages) and
    on decode (target_pages), in the same order.
    """

    source_pages: Sequence[int]
    target_pages: Sequence[int]


class StateMove(NamedTuple):
    """Slots between which a request's linear-attention state moves: on prefill and on decode."""

    source: int
    """Slot on prefill."""
    target: int
    """Slot on decode."""


class SendUnit(NamedTuple):
    """Transfer worker `worker` of a rank sends a unit, after the rank has computed the layers that the unit contains.
    staging_offset_bytes: where the unit begins in decode's staging ring; None: the unit is sent without staging.
    """

    worker: int
    unit: TransferUnit
    """The part of a request's KV to send."""
    staging_offset_bytes: int | None
    windows: Windows | None = None
    """Pages of sliding-window layers whose KV is sent with the unit. None: no such KV is sent."""
    state: StateMove | None = None
    """Slots of the request's linear-attention state, which is sent with the request's last unit. None: no state is
    sent.
    """


class ScatterCell(NamedTuple):
    """Copy a cell of the staging ring into pages. Cells are copied in the order of these tasks."""

    command: Scatter
    """The command of the core that names the cell."""
    pages: Sequence[int]
    """Ids of the pages, in the order of their tokens."""


class DigestSent(NamedTuple):
    """Compute fingerprints of a request's KV that prefill has sent. The worker computes them when its earlier transfers
    are done.
    """

    worker: int
    """Index of the transfer worker that sent the KV."""
    pages: Sequence[int]
    """Ids of the pages on prefill whose KV was sent, in the order of the request's tokens."""
    num_tokens: int
    """Number of tokens whose KV the rank reads, from the first token of `pages` on."""
    state_slot: int = 0
    """Slot of the request's linear-attention state. 0: none."""


class DigestArrived(NamedTuple):
    pages: Sequence[int]
    """Ids of the pages on decode into which the KV was sent, in the order of the request's tokens."""
    num_tokens: int
    """Number of tokens to read from the pages, counted from the first token of the first page."""
    state_slot: int = 0
    """Slot of the request's linear-attention state. 0: none."""


class LookUpPages(NamedTuple):
    """Look up in storage how many of the pages with these hashes are there, counted up to the first page that storage
    lacks.
    """

    hashes: Sequence[str]
    """Hashes of the pages (`page_hashes`), in the order of their tokens."""


class ReadPages(NamedTuple):
    """Read pages from storage into host memory. hashes: hashes of the pages (`page_hashes`). host_pages: ids of the
    host pages that are filled, in the same order.
    """

    hashes: Sequence[str]
    host_pages: Sequence[int]


class StorePages(NamedTuple):
    """Write those host-memory pages to storage that storage does not have yet. hashes: hashes of the pages
    (`page_hashes`), in the order of host_pages. host_pages: ids of the pages in host memory.
    """

    hashes: Sequence[str]
    host_pages: Sequence[int]


StorageTask = LookUpPages | ReadPages | StorePages
Task = Compute | SendUnit | ScatterCell | DigestSent | DigestArrived | StorageTask
