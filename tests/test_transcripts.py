"""README, tutorial and plan as a reader follows them: each block in order, in a clone, with what pip installed.

What commands print is compared with what the page shows, which
`pytest tests/test_transcripts.py --update-golden` writes anew.
"""

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.markdown import ROOT, blocks

LEFT_OUT = {
    "make test": "runs this test",
    "pip install": "needs a network: this environment stands for it, without what the block does not install",
    "python3 -m venv": "the same",
    "pdreal serve": "serves until it is interrupted",
}
"""Beginnings of commands that are not run, and why."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCKER = """\
import os, sys
from importlib.machinery import PathFinder
ABSENT = set(os.environ["ABSENT"].split())
class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Present
"""
"""Hides what a reader has not installed."""


@pytest.fixture
def clone(tmp_path):
    """A copy of what git tracks, with the programs of an environment that `make demo` made."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout: nothing says what a clone has")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    clone = tmp_path / "clone"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    programs = clone / ".venv" / "bin"
    programs.mkdir(parents=True)
    calls = {
        name: f"-c 'from {entry.partition(':')[0]} import main; main()'" for name, entry in PROJECT["scripts"].items()
    }
    for name, call in {"python": "", "python3": "", **calls}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
        (programs / name).chmod(0o755)
    for mark in ("made-by-python3", "demo"):  # so that make installs nothing
        (clone / ".venv" / mark).touch()
    (clone / ".venv" / "sitecustomize.py").write_text(BLOCKER)
    yield clone
    shutil.rmtree(clone)


@pytest.mark.pages
def test_readme_can_be_followed_word_for_word(clone, request):
    follow("README.md", clone, update=request.config.getoption("--update-golden"))
    demo = json.loads((clone / "runs" / "demo" / "plan.json").read_text())
    assert demo["plan"]["price_per_h"] < demo["own"]["price_per_h"], "the demo saves something"
    assert (clone / "runs" / "demo" / "report.html").is_file()


@pytest.mark.pages
def test_the_tutorial_can_be_followed_word_for_word(clone, request):
    follow("docs/tutorial.md", clone, update=request.config.getoption("--update-golden"))


@pytest.mark.pages
def test_the_page_on_plans_can_be_followed_word_for_word(clone, request):
    follow("docs/plan.md", clone, update=request.config.getoption("--update-golden"))


def follow(page, clone, *, update):
    command, printed = "", ""
    for block in blocks(ROOT / page, "sh", "yaml", "python", "text"):
        if block.language == "text":
            shown = shown_of(printed, block.text) if update else block.text
            if update:
                path = ROOT / page
                path.write_text(path.read_text().replace(f"```text\n{block.text}```", f"```text\n{shown}```"))
            assert_shown(printed, shown, command)
        elif block.name:
            (clone / block.name).write_text(block.text)
        elif block.language == "python":
            done(clone, ["python", "-c", block.text], installed_by(""))
        elif (installed := installed_by(block.text)) is not None:
            command = "\n".join(line for line in block.text.splitlines() if not line.startswith(tuple(LEFT_OUT)))
            printed = done(clone, ["bash", "-ec", command], installed)


def done(clone, words, installed):
    """What it printed. It ended well."""
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not installed & set(map(canonicalize_name, owners))
    ]
    paths = (clone / ".venv", clone, clone / "real", clone / "kernels")
    changes = {
        "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(map(str, paths)),
        "ABSENT": " ".join(absent),
        "COLUMNS": "80",
    }
    ended = subprocess.run(words, cwd=clone, env={**os.environ, **changes}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{words[-1]}\n{ended.stdout}{ended.stderr}"
    assert "Traceback" not in ended.stderr, f"{words[-1]}\n{ended.stderr}"
    return ended.stdout


def installed_by(text):
    """Names of all distributions that pip has installed when the block is run; None: some are missing here."""
    words = [
        word.strip('"')
        for line in text.splitlines()
        if "pip install" in line
        for word in line.split("pip install")[1].split()
    ]
    extras = {extra for word in words if word.startswith(".[") for extra in word[2:-1].split(",")}
    wanted = [*PROJECT["dependencies"], *(need for extra in extras for need in PROJECT["optional-dependencies"][extra])]
    wanted += [word for word in words if not word.startswith(("-", "."))]
    found = {"pdsim"}
    try:
        for need in wanted:
            add_needs(Requirement(need), found)
    except PackageNotFoundError:
        return None
    return found


def add_needs(need, found):
    name = canonicalize_name(need.name)
    if name in found and not need.extras:
        return
    found.add(name)
    for text in requires(name) or ():
        other = Requirement(text)
        if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in ("", *need.extras)):
            add_needs(other, found)


def assert_shown(printed, shown, command):
    """Whatever the width of the terminal. Of an answer its recommendation: tests/questions has the rest."""
    expected, lines = lines_of(shown), lines_of(printed)
    if command.startswith("pdsim ask"):
        expected, lines = [expected[0].partition(":")[0]], [line.partition(":")[0] for line in lines]
    assert expected[0] in lines, f"{command}\n{printed}"
    start = lines.index(expected[0])
    assert lines[start : start + len(expected)] == expected, command


def lines_of(output):
    """Without rules of a table and empty lines."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return [line for line in lines if line.strip("\u2500 ")]


def shown_of(printed, shown):
    """The printed lines from the one most like the first shown to the one most like the last."""
    lines = [line.rstrip() for line in printed.splitlines()]
    first, last = (most_like(line, lines) for line in (shown.splitlines()[0], shown.splitlines()[-1]))
    kept = re.sub(r"\n{2,}", "\n\n", "\n".join(lines[first : last + 1]))
    return kept + "\n"


def most_like(line, lines):
    return max(range(len(lines)), key=lambda i: difflib.SequenceMatcher(None, line, lines[i]).ratio())
