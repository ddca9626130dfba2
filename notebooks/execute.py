"""Runs notebooks, and writes each with its figures beside its source: python notebooks/execute.py [NAME ...]

The percent files (.py) are the sources. An .ipynb is made from one, and is what GitHub shows.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HELPERS = {"execute", "setting"}
MINUTES = 10


def sources() -> list[Path]:
    return sorted(path for path in HERE.rglob("*.py") if path.stem not in HELPERS)


def read_source(path: Path) -> Any:
    """A notebook without outputs. Cells are numbered, so that it is the same whenever it is made."""
    import jupytext  # noqa: PLC0415  who asks for sources does without

    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def execute(path: Path) -> Any:
    """The notebook with its outputs. Raises CellExecutionError if a cell fails."""
    from nbclient import NotebookClient  # noqa: PLC0415  the same

    notebook = read_source(path)
    NotebookClient(notebook, timeout=60 * MINUTES, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
    notebook.metadata.pop("language_info")  # of the Python that ran it
    return notebook


def main(names: list[str]) -> None:
    import jupytext  # noqa: PLC0415  the same

    for path in sources():
        if not names or path.stem in names:
            print(path.stem, flush=True)
            jupytext.write(execute(path), path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
