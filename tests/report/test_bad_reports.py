"""What cannot be reported on is said in one message."""

import pytest

from pdsim.cli import main


@pytest.fixture
def _folders(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "plan.jsonl").touch()
    (tmp_path / "begun" / "points").mkdir(parents=True)


@pytest.mark.usefixtures("_folders")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "report needs a run folder, a scenario file, or the folder of a sweep"),
        (["nowhere"], "nowhere does not exist"),
        (["SWEEP", "SWEEP"], "is a sweep: report one at a time"),
        (["SWEEP", "--tornado"], "--tornado needs a run"),
        (["BEGUN"], "begun: an unfinished plan or answer"),
        (["SWEEP"], "has no sweep.json: start its sweep again"),
    ],
)
def test_a_wrong_report_is_one_message_and_exit_code_2(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["report", *(word if word.islower() else str(tmp_path / word.lower()) for word in words)])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
