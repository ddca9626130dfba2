"""A sweep's folder, read without its sweep file."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.design import Changes
from pdsim.study.result import PointResult, SweepResult, replications
from pdsim.study.store import DAMAGED, HEAD, PLAN, Store
from pdsim.study.sweep_file import SloSettings


def is_sweep_folder(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def read_sweep(folder: Path) -> SweepResult:
    """All points whose runs have been computed. Raises ConfigError if there is none, or if the folder is damaged."""
    store = Store(folder)
    if not (folder / HEAD).is_file():
        raise ConfigError(f"{folder} has no {HEAD}: start its sweep again, which keeps what is computed")
    try:
        head = json.loads((folder / HEAD).read_text(encoding="utf-8"))
        slos = {name: SloSettings.model_validate(wanted) for name, wanted in head["slos"].items()}
        rows = parquet.read_table(folder / PLAN).to_pylist()
    except (pa.ArrowException, ValueError, KeyError, TypeError) as broken:
        raise ConfigError(f"{folder}: {HEAD} or {PLAN} is damaged: {broken}; start its sweep again") from None
    keys: dict[int, list[str]] = {}
    changes: dict[int, Changes] = {}
    for row in rows:
        number = row.pop("point")
        keys.setdefault(number, []).append(row.pop("key"))
        changes[number] = _changes(row)
    found = {key: store.status(key) for key in chain.from_iterable(keys.values())}
    computed = [number for number in keys if not {found[key] for key in keys[number]} & {None, DAMAGED}]
    if not computed:
        raise ConfigError(f"{folder} has no point that is computed: start its sweep again")
    points = [PointResult(n, changes[n], replications(store, keys[n], slos)) for n in computed]
    num_damaged = sum(status == DAMAGED for status in found.values())
    return SweepResult(head["name"], folder, points, slos, 0, sum(len(keys[n]) for n in computed), num_damaged)


def _changes(row: Mapping[str, Any]) -> Changes:
    return {field: value for field, value in row.items() if field != "seed" and value is not None}
