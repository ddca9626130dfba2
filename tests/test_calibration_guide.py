"""docs/calibration.md, command by command."""

import json
import shlex
import sys
from contextlib import suppress
from runpy import run_path

import pytest

from pdsim.cli import main
from pdsim.scenario.yaml_file import read_yaml
from tests.cli.test_imported import SGLANG
from tests.markdown import ROOT, blocks

PAGE = ROOT / "docs" / "calibration.md"


@pytest.mark.pages
def test_every_command_works_and_finds_the_profile_of_the_study(capsys, tmp_path, monkeypatch):
    """The study fits the same rows by its own code; its GPU clock and waves are what the general form lacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "sglang-h200"))
    (tmp_path / "pair.yaml").write_text(next(block.text for block in blocks(PAGE, "yaml") if block.name == "pair.yaml"))
    (tmp_path / "pair.jsonl").write_text(json.dumps(SGLANG))
    shown, *_ = blocks(PAGE, "sh")
    for line in shown.text.splitlines():
        program, *words = shlex.split(line, comments=True)
        if program == "python":
            monkeypatch.setattr(sys, "argv", words)
            run_path(str(ROOT / words[0]), run_name="__main__")
            continue
        with suppress(SystemExit):
            main(words)
        captured = capsys.readouterr()
        said = captured.err.splitlines()
        assert [text for text in said if not text.startswith("pdsim: profile ")] == [], line
        assert len(said) == ("--profile" in words), line
        assert captured.out, line
        assert "…" not in captured.out, line
        assert "does not say what it was measured on" not in captured.out, line
    fitted = read_yaml(tmp_path / "profile.yaml")["provenance"]["fitted"]
    decode = {name: float(value.split(",")[0]) for name, value in fitted["decode"]["parameters_ns"].items()}
    assert decode == pytest.approx({"base": 5.157e6, "per_request": 6290, "per_context_token": 37.38}, rel=0.01)
    errors = {kind: float(told["held_out_error"].split("%")[0]) for kind, told in fitted.items()}
    assert errors == pytest.approx({"prefill": 5.2, "decode": 2.6}, abs=0.4)  # the optimum depends on the CPU
