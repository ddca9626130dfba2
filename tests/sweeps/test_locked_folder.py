"""A folder of a sweep has one writer at a time."""

import pytest

from pdsim import RunFolderError
from pdsim.cli import main
from pdsim.study.points.store import locked_folder
from tests.sweep_files import SCENARIO

COMMANDS = {
    "sweep": ["sweep", "sweep.yaml"],
    "plan": ["plan", "scenario.yaml", "--slo", "ttft p99 < 1 s", "--max-gpus", "2"],
    "ask": ["ask", "pd-ratio", "scenario.yaml"],
}


def test_a_second_command_is_told_of_the_first(tmp_path):
    other = pytest.raises(RunFolderError, match="another pdsim command is writing there")
    with locked_folder(tmp_path / "out"), other, locked_folder(tmp_path / "out"):
        raise AssertionError
    with locked_folder(tmp_path / "out") as folder:
        assert folder == tmp_path / "out"


@pytest.mark.parametrize("name", COMMANDS)
def test_two_commands_write_into_no_folder_at_once(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "sweep.yaml").write_text("scenario: scenario.yaml\ngrid: {page_size: [4, 8]}\n")
    with locked_folder(tmp_path / "out"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main([*COMMANDS[name], "--out", "out"])
        assert sorted(tmp_path.rglob("*")) == before
    assert ended.value.code == 2
    assert "another pdsim command is writing there" in " ".join(capsys.readouterr().err.split())
