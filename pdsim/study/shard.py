"""The result of one task as a Parquet file of one row."""

from collections.abc import Mapping, Sequence
from functools import cache
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


def to_shard(row: Mapping[str, Any]) -> bytes:
    """Encodes a row. What it does not have is null."""
    kind = pa.struct([*_HEAD.items(), *metrics().items(), *_TAIL.items()])
    table = pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array([row], kind))])
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="snappy", use_dictionary=False, write_statistics=False)
    shard: bytes = sink.getvalue().to_pybytes()
    return shard


def read_shard(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a shard without threads and data sets, which take longer than one row."""
    with parquet.ParquetFile(path) as file:
        return file.read(columns, use_threads=False)
