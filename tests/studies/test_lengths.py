"""Forwards of prompts whose length is not round take longer than rows of round lengths say."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

STUDY = Path(__file__).parents[2] / "experiments" / "sglang-llama"


SPEC = spec_from_file_location("lengths", STUDY / "lengths.py")
lengths = module_from_spec(SPEC)
SPEC.loader.exec_module(lengths)


def test_the_page_has_the_forwards_of_the_load():
    page = (STUDY / "README.md").read_text()
    for first, number, found_ms, row_ms in lengths.by_length():
        assert f"| {first + 1:,} to {first + lengths.BIN_TOKENS:,} | {number} | {found_ms:.1f} | {row_ms:.1f} |" in page
        assert 1.05 < found_ms / row_ms < 1.35


def test_the_page_has_the_forwards_by_place():
    page = (STUDY / "README.md").read_text()
    for name, number, beyond_ms in lengths.by_place():
        assert f"| {name} | {number} | {beyond_ms:.1f} |" in page
