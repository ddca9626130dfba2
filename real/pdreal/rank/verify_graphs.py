"""Decode steps that verify drafts, as CUDA graphs: one graph has the forwards of draft and target of a step."""

from collections.abc import Sequence

from torch import Tensor

from pdreal.control.tasks import DecodeBatch
from pdreal.memory.paged_kv import PagedKv
from pdreal.model.attention import KernelDecode
from pdreal.rank.drafting import Drafter, columns_of, rows_of
from pdreal.rank.graphs import DecodeGraphs

_NUM_COLUMNS = 4
"""Number of the lists of columns_of before those of `taught`: one for each of the first four fields of VerifyRows."""


class VerifyGraphs(DecodeGraphs):
    """CUDA graphs of decode steps that verify drafts. A step returns for each sequence of the batch, one after another:
    its drafts, the target's choices, and for each draft 1 if its score is at most one step of bf16 below the choice's,
    else 0.
    """

    def __init__(self, drafter: Drafter, kv: PagedKv, max_running_requests: int) -> None:
        self._drafter = drafter
        super().__init__(
            drafter.head.target,
            kv,
            max_running_requests,
            num_columns=_NUM_COLUMNS + drafter.num_verified - 1,
            num_ahead_tokens=2 * drafter.num_verified,
        )

    def _launch(self, batch: DecodeBatch) -> Tensor:
        assert batch.drafts is not None
        self._drafter.plant(batch.drafts.seeds)
        return super()._launch(batch).flatten()

    def _columns(self, batch: DecodeBatch) -> Sequence[Sequence[int]]:
        return columns_of(batch, self._drafter.num_verified)

    def _forward(self, size: int) -> None:
        columns, page_tables = self._device_inputs.columns[:, :size], self._device_inputs.page_tables[:size]
        rows, head = rows_of(columns), self._drafter.head
        num_verified = self._drafter.num_verified
        attend_all = KernelDecode(self._kv, head.target, rows.positions, page_tables, num_verified)
        self._best[size] = self._hidden[size] = self._drafter.step(
            rows, lambda at: KernelDecode(self._kv, head.layer, at, page_tables), attend_all
        )
