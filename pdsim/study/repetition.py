"""Repeats two runs that are compared, to find the differences that are not due to chance. A random load is drawn again
with the seeds that follow the scenario's seed, so runs with equal seeds have equal loads. A trace with recorded sending
times is sent again with slightly faster and slower messages.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import field
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.metrics.records import Records
from pdsim.metrics.summary_rows import SummaryRow
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.study.base import is_sample, jittered_messages
from pdsim.study.points.engine import Progress, Work, open_engine
from pdsim.study.points.store import POINTS, Store
from pdsim.study.points.tasks import Planner

NUM_REPEATS = 4
MOST_REQUESTS = 5_000
"""If a run has more finished requests than this, the compared runs are repeated only if the user asks for it."""
_KEPT = "repeats"
"""Name of the sub-folder of a run folder that keeps the repetitions of the run."""
_VISIBLE = 0.005
"""Differences below this count as none: absolute differences of shares, and relative differences of other numbers."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ComparedRun:
    name: str
    summary: Mapping[str, Any]
    """The run's summary: numbers by field, as in summary.json."""
    records: Records
    """Records of the run's requests, steps and transfers, without warm-up requests. Empty: another tool made the run.
    """
    scenario: Scenario | None
    """The run's scenario. None: another tool made the run."""
    repeated: Sequence[Row] = field(default=(), repr=False)
    """The rows of results of the run's repetitions, one per repetition: values by column. Empty: no compared run was
    repeated, because one of them was measured or interrupted or has too many requests, because there is only one, or
    because the user wants no repetitions.
    """

    @property
    def is_sample(self) -> bool:
        """True if the workload is a recorded trace whose requests are sent at the recorded times."""
        return self.scenario is not None and is_sample(self.scenario)


def kept_repetitions(run: Path) -> Path | None:
    """The folder for repetitions, inside the run's folder. None: the run is not a folder that can be written to, or a
    symbolic link leads out of it.
    """
    folder = run / _KEPT
    leads_out = folder.is_symlink() or (folder / POINTS).is_symlink()
    return folder if run.is_dir() and os.access(run, os.W_OK) and not leads_out else None


def repeat(path: Path, changes: Sequence[str], count: int, folder: Path, progress: Progress | None) -> list[Row]:
    """Simulates a scenario `count` times with other seeds or, if the load is a trace with recorded sending times, up to
    four times with other message latencies (JITTERS). Returns the row of results of each run. Results are kept in
    `folder`, so that a later call computes none of them again. changes: of the scenario, in the notation of --set.
    Raises ConfigError if the scenario is wrong.
    """
    scenario = load_scenario(path, changes)
    seeds = None if is_sample(scenario) else [scenario.seed + i for i in range(1, count + 1)]
    planner = Planner(str(path), path, changes=changes, seeds=seeds)
    points = planner.plan([{}] if seeds else jittered_messages(scenario)[:count])
    num_processes = os.cpu_count() or 1
    with closing(open_engine("here" if num_processes == 1 else "pool", num_processes)) as engine:
        work = Work(Store(folder), engine, progress)
        work.compute(points)
        return [row for point in points for row in work.rows(point)]


@dataclass(frozen=True)
class Change:
    """Difference of a number between two runs: absolute for shares, otherwise relative to the first run. own:
    difference between the two runs themselves. least, most: smallest and largest difference, if each pair of
    repetitions of the two runs is compared, too.
    """

    own: float
    least: float
    most: float

    @property
    def is_certain(self) -> bool:
        """True if the number changes in the same direction between the two runs and between each pair of their
        repetitions, each time by at least 0.5 % (shares: 0.5 percentage points).
        """
        return self.least * self.most > 0 and min(abs(self.least), abs(self.most), abs(self.own)) >= _VISIBLE


def change(row: SummaryRow, runs: Sequence[tuple[float | None, float | None]]) -> Change | None:
    """The difference of the number that `row` of the summary shows, between two runs. Shares: the absolute difference.
    Other numbers: relative to the first run. None: the number is unknown in one of the runs or repetitions, or the
    difference is relative and the first number of a pair is 0.

    runs: pairs of the number in the first and in the second run. The first pair is of the runs themselves, all further
    pairs are of their repetitions.
    """
    if any(one is None or other is None for one, other in runs):
        return None
    pairs = [(one, other) for one, other in runs if one is not None and other is not None]
    if row.kind == "share":
        found = [other - one for one, other in pairs]
    elif all(one for one, _ in pairs):
        found = [other / one - 1 for one, other in pairs]
    else:
        return None
    return Change(found[0], min(found), max(found))


def value_in(row: SummaryRow, repeated: Row) -> float | None:
    """The value of one number of the summary in one repetition. row: the summary's row, which names the number.
    repeated: row of results of the repetition. None: the repetition failed, no request has such a time (for example a
    TPOT), or rows of results have no column for the number (for example tokens from host memory).
    """
    value = repeated.get(row.field.removeprefix("pdsim."))
    return None if value is None else float(value)
