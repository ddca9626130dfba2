"""Converts Python values to Arrow arrays, and Arrow arrays to NumPy arrays.

The conversions of pyarrow, and its reader of tables, import pandas if it is installed. This import takes longer than
writing and reading the tables of a thousand requests, so this module does without pandas.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def read_table(path: Path) -> Any:
    """Reads a Parquet file as an Arrow table, without pandas."""
    from pyarrow import parquet  # noqa: PLC0415  slow to import

    with parquet.ParquetFile(path) as file:
        return file.read()


def arrow_array(values: Sequence[Any]) -> Any:
    """Arrow array of integers, floats, texts or truth values. Any value may be None, except in an array("q")."""
    import pyarrow as pa  # noqa: PLC0415

    if isinstance(values, array):
        return _numbers(pa.int64(), values, None)
    kinds = set(map(type, values))
    has_none = NoneType in kinds
    kinds.discard(NoneType)
    if not kinds:
        return pa.nulls(len(values))
    present = _bits([value is not None for value in values]) if has_none else None
    if kinds == {int}:
        return _numbers(pa.int64(), array("q", _filled(values, 0) if has_none else values), present)
    if kinds <= {int, float}:
        return _numbers(pa.float64(), array("d", _filled(values, 0) if has_none else values), present)
    if kinds == {str}:
        return _texts(_filled(values, "") if has_none else values, present)
    if kinds == {bool}:
        return pa.Array.from_buffers(pa.bool_(), len(values), [present, _bits(values)])
    return pa.array(values)


def numpy_array(values: Any) -> "NDArray[Any]":
    """NumPy array of an Arrow array's numbers or truth values. The array must not have nulls."""
    import numpy as np  # noqa: PLC0415  slow to import
    from pyarrow import types, uint8  # noqa: PLC0415

    if types.is_boolean(values.type):
        return np.from_dlpack(values.cast(uint8())).astype(np.bool_)
    return np.from_dlpack(values)


def mask(rows: "NDArray[np.bool_]") -> Any:
    """Arrow array of truth values, with which rows of a table are selected."""
    import pyarrow as pa  # noqa: PLC0415

    return pa.Array.from_buffers(pa.bool_(), len(rows), [None, _bits(rows)])


def _filled(values: Sequence[Any], default: Any) -> list[Any]:
    return [default if value is None else value for value in values]


def _numbers(kind: Any, numbers: "array[Any]", present: Any) -> Any:
    import pyarrow as pa  # noqa: PLC0415

    return pa.Array.from_buffers(kind, len(numbers), [present, pa.py_buffer(numbers)])


def _texts(texts: Sequence[str], present: Any) -> Any:
    """Arrow array of texts, made of two buffers: the UTF-8 bytes of all texts, and the positions at which texts end.
    present: Arrow buffer with one bit for each text; a bit of 0 makes the text null. None: no text is null.
    """
    import pyarrow as pa  # noqa: PLC0415

    joined = "".join(texts)
    data = joined.encode()
    lengths = map(len, texts) if len(data) == len(joined) else [len(text.encode()) for text in texts]
    ends = array("i", accumulate(lengths, initial=0))
    return pa.Array.from_buffers(pa.string(), len(texts), [present, pa.py_buffer(ends), pa.py_buffer(data)])


def _bits(truths: Any) -> Any:
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    return pa.py_buffer(np.packbits(np.asarray(truths, dtype=np.bool_), bitorder="little"))
