"""Runs that a folder keeps are reused only by the code that computed them."""

from pathlib import Path

from pdsim.study.points import tasks


def test_the_revision_is_a_digest_of_the_code_that_decides_and_times(monkeypatch):
    read, read_bytes = set(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.add(path.name) or read_bytes(path))
    tasks._revision.__wrapped__()
    assert {"decode_instance.py", "simulation.py", "step_times.py", "wiring.py", "pages.py"} <= read
