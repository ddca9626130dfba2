"""Stored runs. Laws are tested elsewhere; these show that nothing moved: `make golden` after a change that should.

Each folder has a scenario.yaml, the digest and summary of its run, and its journal, which must replay.
"""

import json
from pathlib import Path

import pytest

from pdsim.core.invariants import AnyInstance, check
from pdsim.core.journal.lines import digest, from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.metrics.journal_file import journal_writer, read_journal
from pdsim.metrics.run_folder import JOURNAL
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import load_scenario
from tests.support import decisions, run

FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("*/scenario.yaml"))
ON_GPUS = Path("experiments/validation-h200/data/c1")
"""A run of real mode on two H200s."""
FIELDS = (
    "completed",
    "duration",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_itl_ms",
    "median_e2e_latency_ms",
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stored_run_is_still_the_same(folder, request):
    traced = run(load_scenario(folder / "scenario.yaml"), checked=True)
    summary = traced.result.summary()
    assert traced.result.stall == []
    found = {
        "digest": digest(traced.journal),
        **{field: summary[field] for field in FIELDS},
        **{field: summary["pdsim"][field] for field in ("retractions", "transfer_bytes", "decode_steps")},
    }
    expected = folder / "expected.json"
    if request.config.getoption("--update-golden"):
        expected.write_text(json.dumps(found, indent=2) + "\n")
        with journal_writer(folder) as write:
            for entry in traced.journal:
                write(entry)
    stored = json.loads(expected.read_text())
    assert found.pop("digest") == stored.pop("digest")
    assert found == pytest.approx(stored, rel=1e-12)  # Python 3.12 adds floats more exactly


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stored_journal_has_the_calls_of_the_run(folder):
    """Journals of earlier releases may have another text, and so another digest, for the same calls."""
    lines = [to_line(entry) for entry in run(load_scenario(folder / "scenario.yaml")).journal]
    assert list(from_lines(lines)) == list(read_journal(folder))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stored_run_is_the_same_step_by_step(folder):
    scenario = load_scenario(folder / "scenario.yaml")
    many, single = run(scenario), run(scenario, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)


@pytest.mark.parametrize("folder", [*FOLDERS, ON_GPUS], ids=lambda folder: folder.name)
def test_a_stored_journal_replays(folder):
    assert (folder / JOURNAL).stat().st_size > 1000
    machines = state_machines(resolve(load_scenario(folder / "scenario.yaml")))
    assert replay(read_journal(folder), machines) > 100
    for machine in machines.values():
        if isinstance(machine, AnyInstance):
            check(machine)
