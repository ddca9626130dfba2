"""Turns a sweep file into the fields that each point changes."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.sweep_file import Sample, SweepFile, fields_of
from pdsim.study.values import Range, Values, pick
from pdsim.workload.request_spec import Streams

Changes = dict[str, Any]
"""Field paths and the values that a point has there."""


def designed_points(file: SweepFile) -> list[Changes]:
    """Points of all designs but the search, in the order of the file. Raises ConfigError if an extra is missing."""
    made: list[Changes] = [*_grid(file.grid or {}), *map(dict, file.points or ())]
    if file.random is not None:
        made += _random(file.random)
    if file.sobol is not None:
        made += _sobol(file.sobol)
    return made


def num_points(file: SweepFile) -> int:
    """Number of points of all designs, the search too; of the grid perhaps a few less."""
    grid = [v.num_values if isinstance(v, Range) else len(v) for v in (file.grid or {}).values()]
    samples = [sample.count for sample in (file.random, file.sobol) if sample is not None]
    searched = 0 if file.search is None else file.search.trials
    return (prod(grid) if grid else 0) + len(file.points or ()) + sum(samples) + searched


def assigned(values: Mapping[str, Any]) -> Changes:
    """Values by field: a key of several fields has a list of theirs."""
    changes: Changes = {}
    for key, value in values.items():
        names = fields_of(key)
        changes |= {names[0]: value} if len(names) == 1 else dict(zip(names, value, strict=True))
    return changes


def _grid(fields: Mapping[str, Values]) -> Iterator[Changes]:
    if fields:
        lists = [values.values() if isinstance(values, Range) else values for values in fields.values()]
        for combination in product(*lists):
            yield assigned(dict(zip(fields, combination, strict=True)))


def _random(sample: Sample) -> Iterable[Changes]:
    """Each field draws from a stream of its own, so that one more field moves no other."""
    streams = {key: Streams(sample.seed).named(key) for key in sample.fields_}
    for _ in range(sample.count):
        yield assigned({key: pick(values, streams[key].random()) for key, values in sample.fields_.items()})


def _sobol(sample: Sample) -> Iterable[Changes]:
    try:
        from scipy.stats import qmc  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError("sobol needs SciPy, which is not installed: pip install 'pdsim[sweep]'") from None
    sequence = qmc.Sobol(len(sample.fields_), seed=sample.seed)
    for shares in sequence.random_base2(sample.count.bit_length() - 1):
        yield assigned(
            {key: pick(values, share) for (key, values), share in zip(sample.fields_.items(), shares, strict=True)}
        )
