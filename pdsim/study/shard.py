"""The result of one task as a Parquet file of one row."""

from array import array
from collections.abc import Mapping, Sequence, Sized
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from pdsim.metrics.explain import STAGES
from pdsim.metrics.records import RunRecords
from pdsim.metrics.summary import summarize

_HEAD = {
    "key": pa.string(),
    "status": pa.string(),
    "message": pa.string(),
    "saturated": pa.bool_(),
    "gpus": pa.int64(),
    "warnings": pa.list_(pa.string()),
}
_TAIL = {
    "ttft_ns": pa.list_(pa.int64()),
    "e2e_ns": pa.list_(pa.int64()),
    "output_tokens": pa.list_(pa.int64()),
    "identity": pa.string(),
    "classes": pa.list_(pa.string()),
}
"""Columns of each request that finished, so that other SLOs need no new run; what the key is a digest of; and the
classes of all requests, if there are any: those that finished come first.
"""


@cache
def metrics() -> dict[str, Any]:
    """The numbers of a summary, ours too, the mean of each stage and descriptors, and their types."""
    summary = summarize(RunRecords(), extra={"events": 0})
    numbers = summary | summary.pop("pdsim")
    found = {name: pa.int64() if isinstance(value, int) else pa.float64() for name, value in numbers.items()}
    found["gpu_hours"] = pa.float64()
    return {**found, "descriptors": pa.int64(), **{f"mean_{stage}_ms": pa.float64() for stage in STAGES}}


@cache
def _columns() -> dict[str, Any]:
    return {**_HEAD, **metrics(), **_TAIL}


def as_read(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as its shard gives it back: with all columns, and None for those that it does not have."""
    found: dict[str, Any] = {}
    for name, kind in _columns().items():
        value = row.get(name)
        found[name] = float(value) if value is not None and kind == pa.float64() else value
    return found


def to_shard(row: Mapping[str, Any]) -> bytes:
    """Encodes a row that has all columns."""
    found: dict[str, Any] = {}
    for kind, names in _names_by_kind():
        together = arrow_array(kind, [row[name] for name in names])
        found |= {name: together.slice(i, 1) for i, name in enumerate(names)}
    table = pa.Table.from_arrays([found[name] for name in _columns()], list(_columns()))
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="snappy", use_dictionary=False, write_statistics=False)
    shard: bytes = sink.getvalue().to_pybytes()
    return shard


@cache
def _names_by_kind() -> list[tuple[Any, list[str]]]:
    columns = _columns()
    return [(kind, [name for name, one in columns.items() if one == kind]) for kind in set(columns.values())]


_TYPE_CODES = {pa.int64(): "q", pa.float64(): "d"}


def arrow_array(kind: Any, values: Sequence[Any]) -> Any:
    """The same as pa.array, without its import of pandas, which takes as long as twenty points of a sweep."""
    if all(value is None for value in values):
        return pa.nulls(len(values), kind)
    known, children = [value is not None for value in values], []
    buffers = [None if all(known) else pa.py_buffer(_bits(known))]
    if kind == pa.bool_():
        buffers.append(pa.py_buffer(_bits(values)))
    elif kind == pa.string():
        texts = [(value or "").encode() for value in values]
        buffers += [_ends(texts), pa.py_buffer(b"".join(texts))]
    elif pa.types.is_list(kind):
        lists = [value or () for value in values]
        buffers.append(_ends(lists))
        children.append(arrow_array(kind.value_type, list(chain.from_iterable(lists))))
    else:
        buffers.append(pa.py_buffer(array(_TYPE_CODES[kind], [value or 0 for value in values])))
    return pa.Array.from_buffers(kind, len(values), buffers, children=children or None)


def _ends(values: Sequence[Sized]) -> Any:
    """The ends of values that lie one behind the other."""
    return pa.py_buffer(array("i", accumulate(map(len, values), initial=0)))


def _bits(flags: Sequence[Any]) -> bytes:
    """The first is the lowest bit."""
    bits = "".join("1" if flag else "0" for flag in reversed(flags))
    return int(bits, 2).to_bytes(-(-len(flags) // 8), "little")


def read_shard(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a shard without threads and data sets, which take longer than one row."""
    with parquet.ParquetFile(path) as file:
        return file.read(columns, use_threads=False)
