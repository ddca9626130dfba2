"""A sweep's folder, read without its sweep file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow import parquet

from pdsim.scenario.yaml_file import ConfigError
from pdsim.sweeps.design import Changes
from pdsim.sweeps.result import PointResult, SweepResult, replications
from pdsim.sweeps.store import HEAD, PLAN, Store
from pdsim.sweeps.sweep_file import SloSettings


def is_sweep_folder(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def read_sweep(folder: Path) -> SweepResult:
    """All points whose runs have been computed. Raises ConfigError if there is none, or no sweep.json."""
    store = Store(folder)
    if not (folder / HEAD).is_file():
        raise ConfigError(f"{folder} has no {HEAD}: start its sweep again, which keeps what is computed")
    head = json.loads((folder / HEAD).read_text(encoding="utf-8"))
    slos = {name: SloSettings.model_validate(wanted) for name, wanted in head["slos"].items()}
    keys: dict[int, list[str]] = {}
    changes: dict[int, Changes] = {}
    for row in parquet.read_table(folder / PLAN).to_pylist():
        number = row.pop("point")
        keys.setdefault(number, []).append(row.pop("key"))
        changes[number] = _changes(row)
    computed = [number for number in keys if all(store.path(key).is_file() for key in keys[number])]
    if not computed:
        raise ConfigError(f"{folder} has no point that is computed: start its sweep again")
    points = [PointResult(n, changes[n], replications(store, keys[n], slos)) for n in computed]
    return SweepResult(head["name"], folder, points, slos, 0, sum(len(keys[n]) for n in computed))


def _changes(row: Mapping[str, Any]) -> Changes:
    return {field: value for field, value in row.items() if field != "seed" and value is not None}
