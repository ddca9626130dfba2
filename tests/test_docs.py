"""The documentation: links that lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")]

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def links(page: Path):
    """Targets of relative links, without the anchor."""
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            yield target.partition("#")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    broken = [target for target in links(page) if not (page.parent / target).exists()]
    assert not broken, f"{page.relative_to(ROOT)} links to {', '.join(broken)}"
