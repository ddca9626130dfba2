"""A run that has ended, simulated or real, and the folder that it leaves."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdsim import __version__
from pdsim.cli.progress import saying
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.records import RunRecords
from pdsim.metrics.run_folder import SCENARIO, write_records
from pdsim.metrics.timeline import write_timeline
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import to_yaml


@dataclass
class FinishedRun:
    name: str
    summary: dict[str, Any]
    records: RunRecords
    stall: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def is_observed(self) -> bool:
        """A run of ours: another tool's result is a summary and no more."""
        return "pdsim" in self.summary

    @property
    def warnings(self) -> list[str]:
        return list(self.summary.get("pdsim", {}).get("warnings", ()))


def write_run(folder: Path, scenario: Scenario, run: FinishedRun, *, quiet: bool) -> None:
    """All but the journal."""
    with saying(f"writing {folder} ...", quiet=quiet), garbage_collection_paused():
        write_records(folder, run.summary, run.records)
        write_scenario(scenario, folder)
        write_timeline(folder / "timeline.json.gz", run.records)
        _write_overview(folder, run.records)


def write_scenario(scenario: Scenario, folder: Path) -> None:
    """Resolved, with the version of the code that ran it."""
    head = f"# resolved by pdsim {__version__}\n"
    given = {name: value for name, value in scenario.model_dump().items() if value is not None}
    (folder / SCENARIO).write_text(head + to_yaml(given), encoding="utf-8")


def _write_overview(out: Path, records: RunRecords) -> None:
    from pdsim.metrics.plots import overview

    if any(request.outcome == "finished" for request in records.requests):
        overview(records).savefig(out / "overview.png", dpi=110)
