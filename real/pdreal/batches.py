"""What the leader of an instance has every rank compute: plain values that can be pickled.

Tokens and page tables may be any sequence; an array("i") is pickled and uploaded fastest.
"""

from collections.abc import Sequence
from typing import NamedTuple


class PrefillInput(NamedTuple):
    """Compute these tokens of a sequence behind num_context_tokens whose KV lies in its pages."""

    request_id: int
    tokens: Sequence[int]
    num_context_tokens: int
    page_table: Sequence[int]

    @property
    def num_kv_tokens(self) -> int:
        """When it is computed."""
        return self.num_context_tokens + len(self.tokens)


class PrefillBatch(NamedTuple):
    chunks: tuple[PrefillInput, ...]


class DecodeBatch(NamedTuple):
    """One token for each sequence: feed its last token, whose KV goes behind the num_kv_tokens that it has."""

    tokens: tuple[int, ...]
    num_kv_tokens: tuple[int, ...]
    page_tables: tuple[Sequence[int], ...]
    """With room for the token."""


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
    """Nobody asks for what was saved of a sequence any more."""

    request_id: int


Work = PrefillBatch | DecodeBatch | SaveKv | RestoreKv | ForgetKv
