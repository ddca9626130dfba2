"""The tables of a run as NumPy columns, so that an analysis of 100,000 requests takes milliseconds."""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from pdsim.metrics.arrow import arrow_array, mask, numpy_array
from pdsim.metrics.records import LevelRecord, Records, RequestRecord, StepRecord, TransferRecord
from pdsim.metrics.tables import KINDS, checked_table, records_in

NEVER = -1
"""Stands for None in columns of integers."""

Array = NDArray[Any]


class Columns:
    """The columns of a table, as NumPy arrays. Each array is made when it is first used. numbers: makes a column of
    numbers from its name. words: makes a column of texts from its name: for each row the index of its text, and the
    list of the different texts.
    """

    def __init__(self, numbers: Callable[[str], Array], words: Callable[[str], tuple[Array, list[str]]]) -> None:
        self._numbers, self._words = numbers, words
        self._made: dict[str, Array] = {}
        self._made_words: dict[str, tuple[Array, list[str]]] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._made:
            self._made[name] = self._numbers(name)
        return self._made[name]

    def words(self, name: str) -> tuple[Array, list[str]]:
        """A column of texts, as two values: for each row the index of its text, and the list of the different texts."""
        if name not in self._made_words:
            self._made_words[name] = self._words(name)
        return self._made_words[name]

    def having(self, name: str, word: str) -> Array:
        """Mask of the rows whose text in column `name` is `word`."""
        codes, words = self.words(name)
        found: Array = codes == (words.index(word) if word in words else NEVER)
        return found

    def are_same(self, name: str, other: str) -> Array:
        """Mask of the rows that have the same text in columns `name` and `other`."""
        (codes, words), (other_codes, other_words) = self.words(name), self.words(other)
        numbers = [words.index(word) if word in words else NEVER for word in other_words]
        found: Array = codes == np.array(numbers, dtype=np.int64)[other_codes]
        return found

    def where(self, rows: Array) -> "Columns":
        """Returns columns that have only the given rows. rows: a mask, or row numbers in ascending order."""

        def words(name: str) -> tuple[Array, list[str]]:
            codes, known = self.words(name)
            return codes[rows], known

        return Columns(lambda name: self[name][rows], words)


class StoredRecords:
    """Records of a run folder. A table is read as a list of records, or as columns, when an analysis first uses it."""

    def __init__(self, folder: Path, tables: Mapping[str, Any] | None = None) -> None:
        """tables: Arrow tables of the folder by name, if they are already read. Raises RunFolderError if a table is
        missing or damaged, or if its columns are not those of a run.
        """
        self._folder = folder
        self._tables = {name: checked_table(folder, name) for name in KINDS} if tables is None else tables
        for name, table in self._tables.items():
            records_in(folder, name, table[:1])
        self._columns = {name: _stored(name, table) for name, table in self._tables.items()}

    @cached_property
    def requests(self) -> list[RequestRecord]:
        return records_in(self._folder, "requests", self._tables["requests"])

    @cached_property
    def steps(self) -> list[StepRecord]:
        return records_in(self._folder, "steps", self._tables["steps"])

    @cached_property
    def transfers(self) -> list[TransferRecord]:
        return records_in(self._folder, "transfers", self._tables["transfers"])

    @cached_property
    def levels(self) -> list[LevelRecord]:
        return records_in(self._folder, "levels", self._tables["levels"])

    def without_first(self, num_requests: int) -> "StoredRecords":
        """The records without the num_requests requests that arrived first. Steps and transfers stay those of the whole
        run.
        """
        sent = self._tables["requests"].sort_by([("arrival_ns", "ascending"), ("request_id", "ascending")])
        return StoredRecords(self._folder, {**self._tables, "requests": sent.slice(num_requests)})

    def request(self, request_id: int) -> RequestRecord | None:
        table = self._tables["requests"]
        rows = table.filter(mask(self.columns("requests")["request_id"] == request_id))
        return next(iter(records_in(self._folder, "requests", rows)), None)

    def requests_at(self, rows: Array) -> list[RequestRecord]:
        """The records of these rows of the table of requests, in the order of `rows`. rows: row numbers from 0."""
        return records_in(self._folder, "requests", self._tables["requests"].take(arrow_array(rows.tolist())))

    def columns(self, name: str) -> Columns:
        """The columns of a table. name: one of TABLES."""
        return self._columns[name]


def requests_at(records: Records, rows: Array) -> list[RequestRecord]:
    """The records of these rows of the table of requests, in the order of `rows`. rows: row numbers from 0."""
    if isinstance(records, StoredRecords):
        return records.requests_at(rows)
    return [records.requests[row] for row in rows.tolist()]


def columns(records: Records, name: str) -> Columns:
    """The columns of a table of these records. name: one of TABLES."""
    return records.columns(name) if isinstance(records, StoredRecords) else columns_of(name, getattr(records, name))


def columns_of(name: str, rows: Collection[Any]) -> Columns:
    """The columns of the records `rows`, as the table `name` has them. name: one of TABLES."""
    kind = KINDS[name]

    def numbers(column: str) -> Array:
        values = kind.column(column, rows)
        if None in values:
            values = [NEVER if value is None else value for value in values]
        return np.array(values) if values else np.zeros(0, dtype=np.int64)

    def words(column: str) -> tuple[Array, list[str]]:
        numbered: dict[str, int] = {}
        codes = [numbered.setdefault(text, len(numbered)) for text in kind.column(column, rows)]
        return np.array(codes, dtype=np.int64), list(numbered)

    return Columns(numbers, words)


def _stored(name: str, table: Any) -> Columns:
    import pyarrow.compute as pc  # noqa: PLC0415  only runs that are kept pay for it
    from pyarrow import types  # noqa: PLC0415

    def numbers(column: str) -> Array:
        if column not in table.column_names:  # of an earlier release
            default = NEVER if NoneType in get_args(KINDS[name].hints[column]) else 0
            return np.full(len(table), default)
        values = table[column]
        if types.is_null(values.type):
            return np.full(len(table), NEVER)
        whole = pc.fill_null(values, arrow_array([NEVER])[0]) if values.null_count else values
        return numpy_array(_joined(whole))

    def words(column: str) -> tuple[Array, list[str]]:
        if column not in table.column_names:
            return np.zeros(len(table), dtype=np.int64), [""]
        encoded = _joined(table[column]).dictionary_encode()
        return numpy_array(encoded.indices), encoded.dictionary.to_pylist()

    return Columns(numbers, words)


def _joined(chunked: Any) -> Any:
    """The values of a table's column as one Arrow array. The values are copied only if they are in several chunks."""
    return chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
