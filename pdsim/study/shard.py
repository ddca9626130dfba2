"""The result of one task: a JSON file with one object, the task's row."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pdsim.metrics.explain import STAGES
from pdsim.metrics.records import RunRecords
from pdsim.metrics.summary import summarize

_HEAD = ("key", "status", "message", "saturated", "gpus", "warnings")
_TAIL = ("ttft_ns", "e2e_ns", "output_tokens", "identity", "classes")
"""Lists over the requests that finished, so that other SLOs need no new run; what the key is a digest of; and the
classes of all requests, if there are any: those that finished come first.
"""


@cache
def metrics() -> dict[str, type]:
    """The numbers of a summary, ours too, the mean of each stage and descriptors, and their types."""
    summary = summarize(RunRecords(), extra={"events": 0})
    numbers = summary | summary.pop("pdsim")
    found: dict[str, type] = {name: int if isinstance(value, int) else float for name, value in numbers.items()}
    found["gpu_hours"] = float
    return {**found, "descriptors": int, **{f"mean_{stage}_ms": float for stage in STAGES}}


@cache
def _columns() -> dict[str, type]:
    return {**dict.fromkeys(_HEAD, object), **metrics(), **dict.fromkeys(_TAIL, object)}


def with_all_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with None for the columns that it does not have, and columns of floats as floats."""
    found: dict[str, Any] = {}
    for name, kind in _columns().items():
        value = row.get(name)
        found[name] = float(value) if value is not None and kind is float else value
    return found


def to_shard(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row) + "\n").encode()


def read_shard(path: Path) -> dict[str, Any]:
    """Raises ValueError if it is damaged."""
    row: dict[str, Any] = json.loads(path.read_bytes())
    return row
