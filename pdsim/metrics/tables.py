"""The records of a run as Arrow tables in memory, and as Parquet files in a run folder."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from pdsim.core.instance import Levels
from pdsim.inputs import InputError, shown
from pdsim.metrics.arrow import arrow_array, read_table
from pdsim.metrics.records import (
    LevelRecord,
    LevelRows,
    Records,
    RequestRecord,
    RunRecords,
    StepRecord,
    TransferRecord,
)

Record = TypeVar("Record")


class RunFolderError(InputError):
    """Raised if a folder has no run, or an incomplete run, or if a run cannot be written to it."""


class Kind(NamedTuple):
    """A kind of table: columns, the type of each column (hints), and a function that makes a record from the values of
    a row.
    """

    columns: Sequence[str]
    values: Sequence[str]
    """For each column: path of the record's attribute that the column contains."""
    hints: Mapping[str, Any]
    make: Callable[..., Any]
    """Makes a record from the values of a row."""

    def column(self, name: str, rows: Iterable[Any]) -> Sequence[Any]:
        """The values of a column, one for each record."""
        if isinstance(rows, LevelRows):
            return rows.column(name)
        return list(map(attrgetter(self.values[self.columns.index(name)]), rows))


def _kind(of: type[Any]) -> Kind:
    columns = [field.name for field in fields(of) if field.metadata.get("in_table", True)]
    # `type` is all that a compiled record keeps of a union, and it has no other.
    hints = {name: int | None if hint is type else hint for name, hint in get_type_hints(of).items()}
    return Kind(columns, columns, hints, of)


def _level(instance_id: str, time_ns: int, *levels: Any, **named: Any) -> LevelRecord:
    return LevelRecord(instance_id, time_ns, Levels(*levels, **named))


KINDS = {
    "requests": _kind(RequestRecord),
    "steps": _kind(StepRecord),
    "transfers": _kind(TransferRecord),
    "levels": Kind(
        ["instance_id", "time_ns", *Levels._fields],
        ["instance_id", "time_ns", *(f"levels.{name}" for name in Levels._fields)],
        {"instance_id": str, "time_ns": int, **get_type_hints(Levels)},
        _level,
    ),
}
TABLES = tuple(KINDS)


def arrow_table(records: Records, name: str) -> Any:
    """Arrow table with a row for each record, in order. name: one of TABLES."""
    import pyarrow as pa  # noqa: PLC0415  only runs that are kept pay for it

    if name not in KINDS:
        raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
    kind, rows = KINDS[name], getattr(records, name)
    return pa.table({column: arrow_array(kind.column(column, rows)) for column in kind.columns})


def write_tables(folder: Path, records: Records) -> None:
    for name in TABLES:
        _write_table(arrow_table(records, name), folder / f"{name}.parquet")


def _write_table(table: Any, path: Path) -> None:
    """Writes a table to a Parquet file. Integers are stored as differences between rows, which takes two thirds of the
    bytes and half of the time.
    """
    from pyarrow import parquet, types  # noqa: PLC0415

    integers = [field.name for field in table.schema if types.is_integer(field.type)]
    others = [name for name in table.column_names if name not in integers]
    encodings = dict.fromkeys(integers, "DELTA_BINARY_PACKED")
    parquet.write_table(table, path, compression="zstd", use_dictionary=others, column_encoding=encodings)


def stored_table(folder: Path, name: str) -> Any:
    """Reads a table of a run folder. Raises RunFolderError if the table is missing or damaged."""
    import pyarrow as pa  # noqa: PLC0415

    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise RunFolderError(f"{folder} has no {path.name}")
    try:
        table = read_table(path)
        table.validate(full=True)  # texts are UTF-8
        _ = table.column_names  # so are names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as broken:
        raise RunFolderError(f"{path}: damaged, or no table of a run: {broken}") from None
    return table


def stored_records(folder: Path) -> RunRecords:
    """Reads the records of a run folder. Raises RunFolderError if a table is missing or damaged, or if its columns are
    not those of a run.
    """
    return RunRecords(**{name: records_in(folder, name, checked_table(folder, name)) for name in TABLES})


def checked_table(folder: Path, name: str) -> Any:
    """Reads a table of a run folder, one of TABLES. Raises RunFolderError if the table is missing or damaged, or if a
    column does not have the type of its field, lacks values that every record has, or has a word outside _WORDS.
    """
    table = stored_table(folder, name)
    for column in table.schema:
        _require_column(folder / f"{name}.parquet", table, column, KINDS[name].hints.get(column.name))
    return table


def records_in(folder: Path, name: str, table: Any) -> list[Any]:
    """Makes a record of each row of an Arrow table. folder: the run folder. name: name of the table, which selects the
    kind of record. Raises RunFolderError if the table has columns that the record lacks, or lacks columns that every
    record needs.
    """
    kind, names = KINDS[name], table.column_names
    rows = zip(*map(_values, table.columns), strict=True)
    try:
        if names == list(kind.columns[: len(names)]):
            return [kind.make(*row) for row in rows]
        return [kind.make(**dict(zip(names, row, strict=True))) for row in rows]
    except (TypeError, ValueError) as broken:  # of columns that no record has
        raise RunFolderError(f"{folder / name}.parquet: damaged, or no table of a run: {broken}") from None


def _values(column: Any) -> Iterator[Any]:
    """The values of a column. Equal texts become one object, because a column has few different texts."""
    from pyarrow import types  # noqa: PLC0415

    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        return iter(column.to_pylist())
    texts: dict[str, str] = {}
    return (texts.setdefault(text, text) for text in column.to_pylist())


_WORDS = {
    ("steps", "kind"): {"prefill", "decode", "encode"},
    ("requests", "outcome"): {"unfinished", "finished", "failed"},
}
"""Words that a column of texts may have, by table and column."""


def _require_column(path: Path, table: Any, column: Any, hint: Any) -> None:
    """Raises RunFolderError if a column does not have the type of its field, lacks values that every record has, or has
    a word outside _WORDS. A table without rows is not checked. path: file of the table. hint: type of the field; None:
    the field is unknown, and nothing is checked.
    """
    from pyarrow import types  # noqa: PLC0415

    values, kinds = table.column(column.name), get_args(hint) or (hint,)
    holds = {
        int: types.is_integer,
        float: lambda kind: types.is_floating(kind) or types.is_integer(kind),
        str: lambda kind: types.is_string(kind) or types.is_large_string(kind),
        bool: types.is_boolean,
        NoneType: types.is_null,
    }
    if hint is None or not len(values):
        return
    expected = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
    if not any(holds[kind](column.type) for kind in kinds):
        raise RunFolderError(f"{path}: column {column.name} is of type {column.type}, expected {expected}")
    if values.null_count and NoneType not in kinds:
        raise RunFolderError(f"{path}: column {column.name} is null in {values.null_count} rows, expected {expected}")
    words = _WORDS.get((path.stem, column.name))
    if words and (foreign := set(values.unique().to_pylist()) - words):
        raise RunFolderError(
            f"{path}: column {column.name} has {shown(min(foreign))}, expected {' or '.join(sorted(words))}"
        )
