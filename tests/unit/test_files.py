"""Folders whose writers were killed or interrupted leave nothing, and nobody else's files are removed."""

import shutil
import signal

import pytest

from pdsim.files import LOCK, ForeignFileError, files_replaced, temporary_folder, write_new

OWN = ("table", "summary")


def write_run(folder):
    with files_replaced(folder, OWN, last="summary") as new:
        for name in OWN:
            (new / name).write_text("new")


def abandoned(folder, *names):
    new = folder / ".new-killed"
    new.mkdir(parents=True)
    for name in (LOCK, *names):
        (new / name).touch()
    return new


def test_a_run_removes_what_a_killed_run_left(tmp_path):
    abandoned(tmp_path, "table", ".summary.7.partial")
    write_run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(OWN)


def test_a_folder_with_files_of_others_stays(tmp_path):
    left = abandoned(tmp_path, "table", "thesis.tex")
    write_run(tmp_path)
    assert {path.name for path in left.iterdir()} == {LOCK, "table", "thesis.tex"}


def test_a_folder_whose_writer_lives_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("pdsim.files.gettempdir", lambda: str(tmp_path))
    with temporary_folder("pdsim-") as first, temporary_folder("pdsim-"):
        assert first.is_dir()


def test_a_second_writer_is_refused_while_the_first_writes(tmp_path):
    with files_replaced(tmp_path, OWN, last="summary") as first:
        with pytest.raises(ForeignFileError, match="another command is writing there; wait"):
            write_run(tmp_path)
        for name in OWN:
            (first / name).write_text("first")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(OWN, "first")
    write_run(tmp_path)


def test_repeated_signals_leave_no_folder(tmp_path, monkeypatch):
    remove = shutil.rmtree

    def impatient(folder, **how):
        signal.raise_signal(signal.SIGINT)
        remove(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", impatient)
    with pytest.raises(KeyboardInterrupt), files_replaced(tmp_path / "run", OWN, last="summary"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_signal_does_not_interrupt_the_replacing(tmp_path, monkeypatch):
    replace = type(tmp_path).replace

    def interrupted(path, target):
        signal.raise_signal(signal.SIGINT)
        return replace(path, target)

    monkeypatch.setattr(type(tmp_path), "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_run(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(OWN, "new")


def test_a_new_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_new(tmp_path / "sub" / "new", "all")
    assert (tmp_path / "sub" / "new").read_text() == "all"
    with pytest.raises(ForeignFileError, match="new: exists already"):
        write_new(tmp_path / "sub" / "new", "again")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pdsim.files.write_whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_new(tmp_path / "sub" / "other", "half")
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["new"]
