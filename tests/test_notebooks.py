"""Each notebook runs, with small loads; what GitHub shows of it is made from its source."""

import jupytext
import pytest

from notebooks.execute import execute, read_source, sources
from tests.markdown import ROOT

SOURCES = sources()


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_is_current(path):
    """Else: make notebooks."""
    shown = jupytext.read(path.with_suffix(".ipynb"))
    assert cells(shown) == cells(read_source(path))
    assert all(cell.outputs for cell in shown.cells if "plt." in cell.get("source", "") and "figure" in cell.source)


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs_and_has_a_figure(path, monkeypatch):
    monkeypatch.setenv("PDSIM_FAST", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outputs = [output for cell in execute(path).cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
