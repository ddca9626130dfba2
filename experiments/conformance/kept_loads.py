"""Kept loads on a release's own scheduler, and what pdsim's instances make of what it decided.

Each function runs in a process of its own: engines, and the files of the two studies, have modules of the same names.
"""

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STUDIES = {"sglang": HERE / "sglang-cpu", "vllm": HERE / "vllm"}
OLDER = "0.5.12"
"""The release of SGLang that needs a bench of its own (sglang-cpu/older.py)."""


@dataclass(frozen=True)
class LoadOutcome:
    load: str
    num_compared: int
    difference: str
    """The first one; nothing if all decisions agree."""
    is_known: bool
    """The log of the release that the rules were written for differs in the same way."""


def first_loads(engine: str, num_each: int) -> list[str]:
    """The first kept random loads of each kind."""
    names = [path.name.removesuffix(".jsonl.gz") for path in (STUDIES[engine] / "logs").iterdir()]
    drawn = [name for name in names if engine == "vllm" or name.startswith("drawn-")]
    ordered = sorted((name.rpartition("-")[0], int(name.rpartition("-")[2]), name) for name in drawn)
    return [name for _, one in groupby(ordered, key=lambda row: row[0]) for *_, name in [*one][:num_each]]


def drive_sglang(site: str, release: str, logs: Path, loads: list[str]) -> list[LoadOutcome]:
    """A bench of 0.5.12 is told the loads as such, and its decisions are held to the rules of the newest release."""
    compare, step = _modules("sglang", "compare", "step")
    is_older = release.startswith(OLDER)
    known = {load: _outcome(compare, load) for load in loads}
    step.prepare(OLDER if is_older else release, site)
    step.LOGS = compare.LOGS = logs

    def record(load: str) -> None:
        recorded = load.replace("drawn", f"drawn_{OLDER}") if is_older else load
        step.record([recorded])
        (logs / f"{recorded}.jsonl.gz").rename(logs / f"{load}.jsonl.gz")

    return [*_driven(record, lambda load: _outcome(compare, load), known)]


def drive_vllm(site: str, release: str, logs: Path, loads: list[str]) -> list[LoadOutcome]:
    """vLLM has one bench for all releases."""
    del release
    replay, record = _modules("vllm", "replay", "record")
    known = {load: replay.compare(load) for load in loads}
    record.prepare(site)
    record.LOGS = replay.LOGS = logs
    return [*_driven(record.keep, replay.compare, known)]


DRIVES = {"sglang": drive_sglang, "vllm": drive_vllm}


def _modules(engine: str, *names: str) -> list[Any]:
    sys.path.insert(0, str(STUDIES[engine]))
    return [import_module(name) for name in names]


def _outcome(compare: Any, load: str) -> Any:
    """That of the only instance of a drawn load."""
    return next(outcome for _, outcome in compare.compare(load))


def _driven(record: Any, compared: Any, known: dict[str, Any]) -> Iterator[LoadOutcome]:
    for load, before in known.items():
        try:
            with redirect_stdout(sys.stderr):
                record(load)
            outcome = compared(load)
        except Exception as error:  # noqa: BLE001 - whatever a newer release no longer has
            yield LoadOutcome(load, 0, f"it cannot be driven: {type(error).__name__}: {error}", is_known=False)
            continue
        yield LoadOutcome(load, outcome.num_compared, outcome.difference, outcome.difference == before.difference)
