"""Each notebook runs, with small loads; what GitHub shows of it is made from its source."""

import re

import pytest

from notebooks.execute import execute, read_source, sources
from pdsim.study.questions.study import QUESTIONS
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
    shown = pytest.importorskip("jupytext").read(path.with_suffix(".ipynb"))
    assert cells(shown) == cells(read_source(path))
    assert has_figure(shown)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.pages
@pytest.mark.parametrize("path", sorted({*SOURCES} - {ASK}), ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    """And its reading holds, which its last cell asserts."""
    monkeypatch.setenv("PDSIM_FAST", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert has_figure(execute(path))


MARKS = {"pd-ratio": pytest.mark.pages}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.nightly)) for name in QUESTIONS])
def test_the_notebook_of_a_question_runs(name, tmp_path, monkeypatch):
    """With a small load."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = {"changes": ["workload.num_requests=16"], "seeds": 1, "jobs": 1}
    source = ASK.read_text().replace('"pd-ratio"', f'"{name}"').replace("options = {}", f"options = {options}")
    (tmp_path / "made.py").write_text(source)
    assert has_figure(execute(tmp_path / "made.py"))
