"""Each notebook runs, with small loads; what GitHub shows of it is made from its source."""

import re

import jupytext
import pytest

from notebooks.execute import execute, read_source, sources
from pdsim.study.questions.notebook import write_notebook
from pdsim.study.questions.question import NAMES
from tests.markdown import ROOT

SOURCES = sources()
ASK = ROOT / "notebooks" / "ask.py"


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def has_figure(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return any("image/png" in output.get("data", ()) for output in outputs)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_is_current(path):
    """Else: make notebooks."""
    shown = jupytext.read(path.with_suffix(".ipynb"))
    assert cells(shown) == cells(read_source(path))
    assert has_figure(shown)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted({*SOURCES} - {ASK}), ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    """And its reading holds, which its last cell asserts."""
    monkeypatch.setenv("PDSIM_FAST", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert has_figure(execute(path))


def test_the_notebook_of_questions_is_what_the_command_writes(tmp_path):
    """Else: pdsim ask pd-ratio --notebook notebooks/ask.py, and make notebooks."""
    write_notebook(tmp_path / "made.py", "pd-ratio")
    assert ASK.read_text() == (tmp_path / "made.py").read_text()


MARKS = {"pd-ratio": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.nightly)) for name in NAMES])
def test_the_notebook_of_a_question_runs(name, tmp_path, monkeypatch):
    """With a small load."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_notebook(tmp_path / "made.py", name, changes=["workload.num_requests=16"], seeds=1, jobs=1)
    assert has_figure(execute(tmp_path / "made.py"))
