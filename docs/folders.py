"""An extension of Sphinx for links to folders. A link leads to the folder's README, or to a page that this module makes
and that lists the folder's files.
"""

# ruff: noqa: INP001  an extension of Sphinx

import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

_LISTED = "listed_folders"  # by page, in what Sphinx keeps of it
_CACHES = shutil.ignore_patterns("__pycache__", ".*")


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _resolve_folders)
    app.connect("html-collect-pages", _listings)


def _resolve_folders(app: Sphinx, page: nodes.document) -> None:
    for link in list(page.findall(pending_xref)):
        folder = Path(app.srcdir, app.env.docname).parent / link["reftarget"]
        if link["refdomain"] or not folder.is_dir():
            continue
        name = folder.resolve().relative_to(app.srcdir).as_posix()
        if f"{name}/README" in app.env.found_docs:
            link.attributes.update(refdomain="doc", reftarget=f"{name}/README", reftargetid=None)
        else:
            app.env.metadata[app.env.docname].setdefault(_LISTED, []).append(name)
            uri = app.builder.get_relative_uri(app.env.docname, f"{name}/index")
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))


def _listings(app: Sphinx) -> Iterator[tuple[str, dict[str, str], str]]:
    for name in sorted({name for kept in app.env.metadata.values() for name in kept.get(_LISTED, [])}):
        copied = Path(app.outdir, name)
        shutil.copytree(Path(app.srcdir, name), copied, ignore=_CACHES, dirs_exist_ok=True)
        files = [escape(file.relative_to(copied).as_posix()) for file in sorted(copied.rglob("*")) if file.is_file()]
        rows = "".join(f'<li><a href="{file}"><code>{file}</code></a></li>' for file in files)
        yield f"{name}/index", {"title": name, "body": f"<h1>{escape(name)}</h1><ul>{rows}</ul>"}, "page.html"
