"""A folder of a sweep has one writer at a time."""

import pytest

from pdsim import RunFolderError
from pdsim.study.points.store import locked_folder


def test_a_second_command_is_told_of_the_first(tmp_path):
    other = pytest.raises(RunFolderError, match="another pdsim command is writing there")
    with locked_folder(tmp_path / "out"), other, locked_folder(tmp_path / "out"):
        raise AssertionError
    with locked_folder(tmp_path / "out") as folder:
        assert folder == tmp_path / "out"
