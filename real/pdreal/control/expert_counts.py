"""Numbers of tokens that each expert of each layer computes in a step. This module counts the tokens, stores the counts
in a run folder, and summarises how unevenly the experts' ranks are loaded (skew).
"""

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdsim.scenario.yaml_file import ConfigError

TABLE = "experts.parquet"
"""File of the run folder with one row per step. A row has the numbers of tokens of all experts as bytes: little-endian
uint32, [layers, experts]. Layers without experts are left out. Older files have uint16, and no column bytes_per_count.
"""
ExpertCounts = NDArray[np.uint32]
_WIRE = np.dtype("<u4")
_OLD_BYTES_PER_COUNT = 2


def count(choices: NDArray[np.integer], num_experts: int) -> ExpertCounts:
    """Returns the number of tokens of each expert, [layers, experts], from the experts that tokens chose, [layers,
    tokens, experts per token].
    """
    num_layers = len(choices)
    numbered = choices + num_experts * np.arange(num_layers)[:, None, None]
    counts = np.bincount(numbered.reshape(-1), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts).astype(np.uint32)


class CountedStep(NamedTuple):
    """A step, with the number of tokens that each expert of each layer computed."""

    instance_id: str
    """Name of the instance that computed the step."""
    kind: str
    """Kind of the step: prefill or decode."""
    end_ns: int
    """End of the step in ns, in the run's time."""
    counts: ExpertCounts
    """Number of tokens of each expert, [layers, experts]."""

    def to_line(self) -> str:
        packed = base64.b64encode(zlib.compress(self.counts.astype(_WIRE).tobytes(), 1)).decode()
        return json.dumps([self.instance_id, self.kind, self.end_ns, len(self.counts), packed]) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "CountedStep":
        instance_id, kind, end_ns, num_layers, packed = json.loads(line)
        return cls(instance_id, kind, end_ns, _counts(zlib.decompress(base64.b64decode(packed)), num_layers))


def _counts(raw: bytes, num_layers: int, bytes_per_count: int = _WIRE.itemsize) -> ExpertCounts:
    return np.frombuffer(raw, f"<u{bytes_per_count}").reshape(num_layers, -1).astype(np.uint32)


def write_counts(folder: Path, steps: Sequence[CountedStep]) -> None:
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    columns = {
        "instance_id": [step.instance_id for step in steps],
        "kind": [step.kind for step in steps],
        "end_ns": [step.end_ns for step in steps],
        "num_layers": [len(step.counts) for step in steps],
        "bytes_per_count": [_WIRE.itemsize] * len(steps),
        "counts": [step.counts.astype(_WIRE).tobytes() for step in steps],
    }
    parquet.write_table(pa.table(columns), folder / TABLE, compression="zstd")


def read_counts(folder: Path) -> list[CountedStep]:
    """Reads, from a run folder, how many tokens each expert computed in each step. Raises ConfigError if the folder has
    no such table.
    """
    from pyarrow import parquet  # noqa: PLC0415

    path = folder / TABLE
    if not path.is_file():
        made = f"pdreal run --record-experts --out {folder} makes it"
        raise ConfigError(f"{path} does not exist: {made}, if the model has experts")
    rows = parquet.read_table(path).to_pylist()
    return [
        CountedStep(
            row["instance_id"],
            row["kind"],
            row["end_ns"],
            _counts(row["counts"], row["num_layers"], row.get("bytes_per_count", _OLD_BYTES_PER_COUNT)),
        )
        for row in rows
    ]


class Skew(NamedTuple):
    """Load of expert-parallel ranks in one kind of steps, if each rank holds a block of neighbouring experts."""

    kind: str
    """Kind of the steps: prefill or decode."""
    num_steps: int
    """Number of recorded steps of this kind."""
    tokens_per_step: float
    """Mean number of expert choices per step and layer: tokens times experts per token."""
    step_skew: float
    """Load of the busiest rank relative to the mean load of ranks, minus 1. In each step and layer, the rank that is
    busiest there counts. The field `cost.expert_skew` takes this value.
    """
    lasting_skew: float
    """Load of the busiest rank relative to the mean load of ranks, minus 1. In each layer, the rank that is busiest
    over the whole run counts for all steps. Another placement of experts could remove this part of the skew.
    """
    shares: tuple[float, ...]
    """For each rank, the number of choices of its experts over all steps and layers, divided by the mean of the ranks.
    A token counts once for each expert that it chose."""


def skews(steps: Sequence[CountedStep], ep: int) -> Iterator[Skew]:
    """Yields the skew of prefill steps and of decode steps. Raises ConfigError if ep ranks cannot share the experts
    evenly.
    """
    by_kind = sorted(steps, key=attrgetter("kind"))
    for kind, group in groupby(by_kind, key=attrgetter("kind")):
        counts = np.stack([step.counts for step in group]).astype(np.int64)
        num_steps, num_layers, num_experts = counts.shape
        if ep < 1 or num_experts % ep:
            raise ConfigError(f"--ep: expected a divisor of the {num_experts} experts, found {ep}")
        loads = counts.reshape(num_steps, num_layers, ep, -1).sum(-1)
        of_ranks = loads.sum((0, 1))
        yield Skew(
            kind,
            num_steps,
            float(loads.sum() / (num_steps * num_layers)),
            _beyond_mean(loads),
            _beyond_mean(loads.sum(0)),
            tuple((of_ranks / of_ranks.mean()).tolist()),
        )


def _beyond_mean(loads: NDArray[np.int64]) -> float:
    """Returns the summed loads of the busiest ranks divided by the summed mean loads of ranks, minus 1. loads: [...,
    ranks]. There is one busiest rank, and one mean, for each index of the axes before the last.
    """
    return float(loads.max(-1).sum() / loads.mean(-1).sum() - 1)
