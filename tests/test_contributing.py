"""The examples of CONTRIBUTING.md run as they stand."""

import shlex
import subprocess
import sys
from contextlib import suppress

import pytest

from pdsim import load_scenario, simulate
from pdsim.cli import main
from pdsim.scenario.yaml_file import parse_yaml, to_yaml
from pdsim.system.catalog import GpuSpec
from tests.markdown import ROOT, blocks, commands

PAGE = ROOT / "CONTRIBUTING.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with the files that the page shows."""
    for block in blocks(PAGE, "python", "yaml"):
        if block.name and "/" not in block.name:
            (tmp_path / block.name).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", blocks(PAGE, "python"), ids=lambda block: block.name)
def test_an_example_is_short_and_says_its_file(block):
    assert block.name
    assert block.text.count("\n") <= 40


def test_a_policy_runs_compares_and_replays(folder, capsys):
    for line in commands(PAGE):
        with suppress(SystemExit):
            main(shlex.split(line)[1:])
        assert capsys.readouterr().err == "", line
    assert {"mine", "theirs"} <= {path.name for path in (folder / "runs").iterdir()}


def test_the_check_of_a_policy_passes(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout


def test_a_workload_is_named_by_import_path(folder):
    (shown,) = (block for block in blocks(PAGE, "yaml") if block.text.startswith("workload:"))
    scenario = parse_yaml((folder / "mine.yaml").read_text(), "mine.yaml") | parse_yaml(shown.text, "the page")
    (folder / "bursts.yaml").write_text(to_yaml(scenario))
    result = simulate(load_scenario("bursts.yaml"))
    assert [r.arrival_ns // 10**9 for r in result.records.requests] == [0] * 20 + [5] * 20 + [10] * 20
    assert result.summary()["completed"] == 60


def test_the_gpu_has_the_catalogs_fields():
    (shown,) = (block for block in blocks(PAGE, "yaml") if "/gpus/" in block.name)
    gpu = GpuSpec(name="shown", **parse_yaml(shown.text, "the page"))
    assert gpu.flops_for("fp4") == gpu.flops_for("bf16")
