"""An extension of Sphinx that adds the text of --help of all commands to the page of commands."""

# ruff: noqa: INP001  an extension of Sphinx

import re
from collections import Counter
from typing import TYPE_CHECKING

from cyclopts import App
from pdreal.cli import app as pdreal

from pdsim.cli import app as pdsim

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE = "docs/cli"
SHARED_BY = 2
"""Flags that have the same text in at least this many commands are listed once."""


def setup(app: "Sphinx") -> None:
    app.connect("source-read", _add_reference)


def _add_reference(_: "Sphinx", page: str, source: list[str]) -> None:
    if page == PAGE:
        source[0] += reference()


def reference() -> str:
    texts = [_reference(app) for app in (pdsim, pdreal)]
    counts = Counter(re.findall(r"^\* `--.*\n", "".join(texts), re.MULTILINE))
    shared = [line for line, count in counts.items() if count >= SHARED_BY]
    for line in shared:
        texts = [text.replace(line, "") for text in texts]
    texts = [re.sub(r"\*\*(Arguments|Parameters)\*\*:\n\n", "", text) for text in texts]
    texts = [re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for text in texts]
    parts = ["\nFlags of several commands:\n\n", *shared, "\n", "\n".join(texts)]
    return "".join(parts).replace(" *[default: False]*", "")


def _reference(app: App) -> str:
    """Markdown with the description and the flags of each command. Leaves out the usage and the list of commands, which
    repeat names and descriptions.
    """
    text = app.generate_docs(output_format="markdown", heading_level=2) + "\n"
    text = re.sub(r"^#+ Table of Contents\n.*?(?=^\*\*Commands)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\*\*Commands\*\*:\n\n(?:\*.*\n)+\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^```console\n.*?^```\n\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
