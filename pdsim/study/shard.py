"""A point's row as a Parquet file. All shards have one schema, so that any tool reads a folder of them as one table."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from pdsim.metrics.explain import STAGES, stage_times
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
}
"""Of each request that finished, so that other SLOs need no new run; and what the key is a digest of."""


@cache
def metrics() -> dict[str, Any]:
    """The numbers of a summary, ours too, the mean of each stage and descriptors, and their types."""
    summary = summarize(RunRecords(), extra={"events": 0})
    numbers = summary | summary.pop("pdsim")
    found = {name: pa.int64() if isinstance(value, int) else pa.float64() for name, value in numbers.items()}
    return {**found, "descriptors": pa.int64(), **{f"mean_{stage}_ms": pa.float64() for stage in STAGES}}


def means(records: RunRecords) -> dict[str, Any]:
    """Where the time of a run's requests went, and what their transfers were cut into."""
    stages = {f"mean_{stage.stage}_ms": stage.mean_ms for stage in stage_times(records.requests)}
    return {**stages, "descriptors": sum(transfer.num_descriptors for transfer in records.transfers)}


def to_shard(row: Mapping[str, Any]) -> bytes:
    """What the row does not have is null."""
    schema = pa.schema({**_HEAD, **metrics(), **_TAIL})
    sink = pa.BufferOutputStream()
    table = pa.table([pa.array([row.get(field.name)], field.type) for field in schema], schema=schema)
    parquet.write_table(table, sink, compression="zstd", use_dictionary=False, write_statistics=False)
    shard: bytes = sink.getvalue().to_pybytes()
    return shard
