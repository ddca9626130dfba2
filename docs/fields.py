"""An extension of Sphinx that adds the meanings of all fields of files to the page of fields."""

# ruff: noqa: INP001  an extension of Sphinx

import re
from typing import TYPE_CHECKING

from pdsim.metrics.summary_rows import table_of_markdown
from pdsim.show.reference import ReferenceEntry, entries

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE = "docs/fields"


def setup(app: "Sphinx") -> None:
    app.connect("source-read", _add_fields)


def _add_fields(_: "Sphinx", page: str, source: list[str]) -> None:
    if page == PAGE:
        source[0] += reference()


def reference() -> str:
    """Markdown with the fields of all sections and tables. A section that several roles share is listed once."""
    shown: dict[str, str] = {}
    for entry in entries():
        shown.setdefault(_table(entry), f"\n## {entry.name}\n\n{_prose(entry.about)}\n\n")
    return "".join(title + table for table, title in shown.items())


def _table(entry: ReferenceEntry) -> str:
    rows = ([*map(_code, row[:-1]), _prose(row[-1])] for row in entry.rows)
    return table_of_markdown(entry.columns, ([cell.replace("|", "\\|") for cell in row] for row in rows)) + "\n"


def _prose(meaning: str) -> str:
    """The text, with flags as code, because Sphinx would change their dashes."""
    return re.sub(r"(?<!\w)--[\w-]+", r"`\g<0>`", meaning)


def _code(cell: str) -> str:
    return f"`{cell}`" if cell else ""
