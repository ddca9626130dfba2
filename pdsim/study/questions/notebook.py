"""A question as a notebook, which asks it and looks at what is recommended."""

import json
from collections.abc import Sequence
from importlib.resources import files
from os.path import relpath
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.answering import begin
from pdsim.study.questions.base import NUM_SEEDS, AskOptions

_WIDTH = 116
"""Width of prose, behind the sign of a comment."""


def write_notebook(path: Path, name: str, scenario: Path | None = None, /, **given: Any) -> None:
    """A notebook that asks a question, .ipynb or .py (percent format). It is not run.

    What is given are arguments of ask, which the notebook calls with them. Files among them are written as seen from
    the notebook's folder. Raises ConfigError for another suffix, for a file that is there, without jupytext, and for
    what cannot be asked.

    """
    if path.suffix not in {".ipynb", ".py"}:
        raise ConfigError(f"--notebook {path}: expected a name that ends in .ipynb or .py")
    if path.exists():
        raise ConfigError(f"--notebook {path}: is there already, perhaps with changes; delete it, or name another")
    source = _source(path.parent, name, scenario, **given)
    text = source if path.suffix == ".py" else _jupytext().writes(notebook_of(source), fmt="ipynb")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def notebook_of(source: str) -> Any:
    """A notebook from text in percent format. Cells are numbered, so that it is the same whenever it is made."""
    notebook = _jupytext().reads(source, fmt="py:percent")
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def _source(
    folder: Path,
    name: str,
    scenario: Path | None,
    /,
    *,
    changes: Sequence[str] = (),
    seeds: int = NUM_SEEDS,
    jobs: int | None = None,
    out: Path | str | None = None,
    **options: Any,
) -> str:
    """The template with the question's words, and the arguments that are not their defaults."""
    about = AskOptions(**options)
    with TemporaryDirectory() as scratch:
        found, _ = begin(name, scenario, about, changes, folder=Path(scratch), seeds=seeds, jobs=jobs)
    given = about.given()
    given |= {key: relpath(value, folder) for key, value in given.items() if isinstance(value, Path)}
    given |= {"changes": list(changes)} if changes else {}
    given |= {"seeds": seeds} if seeds != NUM_SEEDS else {}
    given |= {"jobs": jobs} if jobs is not None else {}
    template = Template((files("pdsim.study.questions") / "notebook.template").read_text(encoding="utf-8"))
    return template.substitute(
        name=name,
        asks=found.asks,
        compared=fill(f"**Compared.** {found.varies}", _WIDTH).replace("\n", "\n# "),
        scenario=None if scenario is None else json.dumps(relpath(scenario, folder)),
        options=_literal(given),
        out="" if out is None else f", out={json.dumps(relpath(out, folder))}",
    )


def _literal(given: dict[str, Any]) -> str:
    lines = [f"    {json.dumps(name)}: {json.dumps(value)},\n" for name, value in given.items()]
    return f"{{\n{''.join(lines)}}}" if lines else "{}"


def _jupytext() -> Any:
    try:
        import jupytext  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError("a notebook (.ipynb) needs jupytext: pip install 'pdsim[notebook]'; .py needs none") from None
    return jupytext
