"""A question as a notebook: it asks what its flags ask, and both of its formats are one notebook."""

import ast

import jupytext
import pytest

from pdsim.cli import main
from pdsim.study.questions.study import Study
from tests.questions.test_questions import SCENARIO


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Study, "run", None)
    (tmp_path / "base.yaml").write_text(SCENARIO)


def write(path, *flags, exit_code=0):
    with pytest.raises(SystemExit) as ended:
        main(["ask", "routing", *flags, "--notebook", path])
    assert ended.value.code == exit_code


def calls_of(path):
    """Name, scenario and options, and what the first call of ask has beside them."""
    tree = ast.parse(path.read_text())
    found = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id in {"name", "scenario", "options"}
    }
    first = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func.id == "ask")
    beside = {word.arg: ast.literal_eval(word.value) for word in first.keywords if word.arg}
    return found["name"], found["scenario"], found["options"], beside


def test_flags_become_arguments(tmp_path):
    write(
        "routing.py",
        *["--ttft-ms", "500", "--set", "page_size=16", "--set", "router=random", "--seeds", "2", "--jobs", "1"],
    )
    wanted = {"ttft_ms": 500.0, "seeds": 2, "jobs": 1, "changes": ["page_size=16", "router=random"]}
    assert calls_of(tmp_path / "routing.py") == ("routing", None, wanted, {})


def test_defaults_need_no_arguments(tmp_path):
    write("routing.py", "--seeds", "3")
    assert calls_of(tmp_path / "routing.py") == ("routing", None, {}, {})


def test_files_are_seen_from_the_notebook(tmp_path):
    """Its folder is where Jupyter runs it."""
    write("a/b/routing.py", "base.yaml", "--out", "runs/routing")
    assert calls_of(tmp_path / "a" / "b" / "routing.py") == (
        "routing",
        "../../base.yaml",
        {},
        {"out": "../../runs/routing"},
    )


def test_both_formats_are_one_notebook(tmp_path):
    for suffix in ("py", "ipynb"):
        write(f"routing.{suffix}", "--set", "prefill.instances=8")
    percent, shown = (jupytext.read(tmp_path / f"routing.{suffix}") for suffix in ("py", "ipynb"))
    assert [(cell.cell_type, cell.source) for cell in percent.cells] == [
        (cell.cell_type, cell.source) for cell in shown.cells
    ]
    assert len(shown.cells) > 10


def test_a_notebook_that_is_there_is_kept(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("# changed by hand")
    write("mine.py", exit_code=2)
    assert "--notebook mine.py: is there already" in capsys.readouterr().err
    assert (tmp_path / "mine.py").read_text() == "# changed by hand"
