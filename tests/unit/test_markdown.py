"""Text in Markdown tables is shown as it is, whatever stands in it."""

import re
from html import unescape

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pdsim.metrics.summary_rows import markdown_table

RENDER = MarkdownIt("commonmark", {"html": True}).enable("table")
TAGS = {"table", "thead", "tbody", "tr", "th", "td", "em", "strong"}
cells = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]) | st.sampled_from("|<>`[]()\\&\n"), min_size=1)


@given(cells)
@example("<script>alert(1)</script>")
@example("a | b\n| c")
@example("[x](javascript:alert(1)) `code` <!-- &lt;")
def test_a_cell_adds_neither_tags_nor_cells(text):
    html = RENDER.render(markdown_table(["title", "other"], [[f"x{text}x", "last"]]))
    assert {tag.lower() for tag in re.findall(r"</?([A-Za-z]+)", html)} <= TAGS
    assert html.count("<td") == 2
    shown = unescape(re.sub(r"<[^>]*>", "", re.findall(r"<td[^>]*>(.*?)</td>", html, re.DOTALL)[0]))
    assert re.sub(r"[*_\s]", "", shown) == re.sub(r"[*_\s]", "", f"x{text}x")
