"""An extension of Sphinx that shows a tree of pages beside every page: the sections of docs/README.md, then the
studies.
"""

# ruff: noqa: INP001  an extension of Sphinx

import posixpath
import re
from collections.abc import Iterator

from sphinx.application import Sphinx

INDEX = "docs/README"
STUDIES = "experiments/README"
"""The page with the tables of all studies. The front page lists this page on the same level as the studies."""


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_tree)


def _add_tree(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds the whole tree to the front page, and to a folder's README the pages of that folder. source: a list with the
    page's text, which is changed.
    """
    pages = sorted(app.env.found_docs)
    if page == app.config.root_doc:
        index = app.env.doc2path(INDEX).read_text(encoding="utf-8")
        studies = [name for name in pages if re.fullmatch("experiments/([^/]+/README|demo/TRACE)", name)]
        trees = [("", [INDEX]), *_sections(index), ("Studies", [STUDIES, *studies])]
        source[0] += "".join(_tree(caption, members) for caption, members in trees)
    elif page.endswith("/README") and page not in (INDEX, STUDIES):
        folder = page.removesuffix("README")
        source[0] += _tree("", [name for name in pages if name.startswith(folder) and name != page])


def _sections(index: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each section's title in the text `index`, with the pages that the section links. Links to headings do not
    count.
    """
    _, *parts = re.split(r"^## (.+)$", index, flags=re.MULTILINE)
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        links = re.findall(r"\]\(([^)\s]+)\.md\)", text)
        yield title, [posixpath.normpath(posixpath.join(posixpath.dirname(INDEX), link)) for link in links]


def _tree(caption: str, pages: list[str]) -> str:
    if not pages:
        return ""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *(f"/{page}" for page in pages), "```", ""])
