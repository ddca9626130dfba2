"""Which of the two runs: the files as they are, or compiled."""

import os

import pytest

import pdsim
from compiled import INTERPRETED, ROOT, modules
from pdsim.cli import main


def test_what_runs_is_what_was_asked_for():
    """make test-compiled sets PDSIM_COMPILED."""
    if wanted := os.environ.get("PDSIM_COMPILED"):
        assert pdsim.is_compiled() == bool(int(wanted))


def test_the_version_says_which_runs(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.split() == [
        pdsim.__version__,
        "(compiled)" if pdsim.is_compiled() else "(interpreted)",
    ]


def test_the_core_is_compiled_and_policies_are_not():
    names = modules()
    assert {"pdsim/core/prefill_instance.py", "pdsim/core/decode_instance.py", "pdsim/sim/simulation.py"} <= set(names)
    assert all((ROOT / name).is_file() for name in INTERPRETED)
    assert [name for name in names if name.startswith("pdsim/policy/")] == [
        "pdsim/policy/protocols.py",
        "pdsim/policy/views.py",
    ]
