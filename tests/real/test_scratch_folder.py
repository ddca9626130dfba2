"""Folders below TMPDIR: gone with their owner, or at the next start if it was killed; nobody else's are touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pdreal.hosts.scratch_folder import ScratchFolder

OWNER = """
from time import sleep
from pdreal.hosts.processes import claim_temp_dir
from pdreal.hosts.scratch_folder import ScratchFolder
folder = ScratchFolder()
(folder.path / "0.rows").write_text("kept\\n")
claim_temp_dir()
print(folder.path, flush=True)
sleep(600)
"""


@pytest.fixture
def tmpdir_of_all(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmpdir_of_all):
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        rows = Path(owner.stdout.readline().strip()) / "0.rows"
        with ScratchFolder():
            present = list(tmpdir_of_all.glob("*/*"))
        owner.kill()
    assert rows in present, "its owner lived"
    assert rows.exists()
    assert len(list(tmpdir_of_all.iterdir())) == 2, "one is of multiprocessing"
    with ScratchFolder() as mine:
        assert list(tmpdir_of_all.iterdir()) == [mine]
    assert not list(tmpdir_of_all.iterdir())


def test_a_process_that_ends_leaves_nothing(tmpdir_of_all):
    """Of multiprocessing either, which removes its own first."""
    ending = "from pdreal.hosts.processes import claim_temp_dir; claim_temp_dir()"
    done = subprocess.run([sys.executable, "-c", ending], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert not list(tmpdir_of_all.iterdir())


def test_other_folders_stay(tmpdir_of_all):
    """One of an owner that has not locked it yet or knows no lock, a file, a link to somewhere else."""
    elsewhere = tmpdir_of_all / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (tmpdir_of_all / "pdreal-new").mkdir()
    (tmpdir_of_all / "pdreal-new" / "new.lock").touch()
    (tmpdir_of_all / "pdreal-file").touch()
    (tmpdir_of_all / "pdreal-link").symlink_to(elsewhere)
    before = sorted(tmpdir_of_all.rglob("*"))
    with ScratchFolder():
        pass
    assert sorted(tmpdir_of_all.rglob("*")) == before


def test_a_fifo_of_anybody_holds_up_no_start(tmpdir_of_all):
    (tmpdir_of_all / "pdreal-x").mkdir()
    os.mkfifo(tmpdir_of_all / "pdreal-x" / "owner.lock")
    starting = "from pdreal.hosts.scratch_folder import ScratchFolder; ScratchFolder().cleanup()"
    subprocess.run([sys.executable, "-c", starting], check=True, timeout=60)
    assert (tmpdir_of_all / "pdreal-x" / "owner.lock").is_fifo()
