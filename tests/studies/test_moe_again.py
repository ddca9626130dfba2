"""Decode steps of a model of experts, measured before prefill, predict the runs of the same machine."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

STUDY = Path(__file__).parents[2] / "experiments" / "moe-h200"


def test_every_error_is_small_and_on_the_page():
    spec = spec_from_file_location("again", STUDY / "again.py")
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    page = (STUDY / "README.md").read_text()
    for name, values in again.errors().items():
        cells = " | ".join(f"{run:.4g} | {found:.4g} | {found / run - 1:+.1%}" for run, found in values)
        assert f"| `{name}` | {cells} |" in page
        assert max(abs(found / run - 1) for run, found in values) < 0.07
