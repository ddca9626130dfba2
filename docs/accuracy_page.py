"""An extension of Sphinx that adds all numbers of accuracy.csv to the page on accuracy. Readers filter the numbers in
the browser.
"""

# ruff: noqa: INP001  an extension of Sphinx

import json
from pathlib import Path
from typing import TYPE_CHECKING

from docs.accuracy import KNOWN, Number, coverage, read
from pdsim.metrics.summary_rows import table_of_markdown

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE = "docs/accuracy"
COLUMNS = ["known", "metric", "numbers", "median error", "inside", "half a range"]
SCRIPT = Path(__file__).with_name("accuracy_page.js")


def setup(app: "Sphinx") -> None:
    app.connect("source-read", _add_numbers)


def _add_numbers(_: "Sphinx", page: str, source: list[str]) -> None:
    if page == PAGE:
        source[0] += sections(read())


def sections(numbers: list[Number]) -> str:
    """Markdown with a table of coverage, and an empty element that accuracy_page.js fills with filters, curves and
    rows.
    """
    data = json.dumps([_row(number) for number in numbers]).replace("</", "<\\/")
    script = SCRIPT.read_text(encoding="utf-8")
    return (
        f"\n## Coverage\n\n{table_of_markdown(COLUMNS, coverage(numbers))}\n\n## Numbers\n\n"
        f'```{{raw}} html\n<div id="accuracy"></div>\n<script>\nconst NUMBERS = {data};\n'
        f"const KNOWN = {json.dumps(KNOWN)};\n{script}</script>\n```\n"
    )


def _row(number: Number) -> dict[str, object]:
    shown = (
        "study",
        "arm",
        "known",
        "fitted",
        "engine",
        "model",
        "gpu",
        "layout",
        "load",
        "metric",
        "measured",
        "predicted",
    )
    return {
        **{name: getattr(number, name) for name in shown},
        "low": number.low,
        "high": number.high,
        "inside": number.is_inside,
        "error": number.error,
    }
