"""Reads the fenced blocks, tables, links and headings of the documentation."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """Name of the file that the block shows, if its first line is a comment with the name. Empty: the block shows
        no file.
        """
        found = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return found[1] if found else ""


def pages() -> list[Path]:
    folders = [ROOT, *(ROOT / "docs").glob("**/"), *(ROOT / "experiments").glob("*/")]
    return sorted(path for folder in folders for path in folder.glob("*.md"))


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    made = [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in found]
    return [block for block in made if block.language in languages]


def commands(page: Path) -> list[str]:
    """The commands of pdsim in the page's shell blocks."""
    lines = [line for block in blocks(page, "sh") for line in block.text.replace("\\\n", "").splitlines()]
    return [line for line in lines if line.startswith("pdsim ")]


def prose(page: Path) -> str:
    """The page's text without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def sections(page: Path) -> dict[str, str]:
    """The page's texts by heading. A text goes up to the next heading of any level."""
    parts = re.split(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table(text: str) -> list[list[str]]:
    """The cells of all tables in the text, row by row, without the tables' heads."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    rules = {i for i, row in enumerate(cells) if all(set(cell) <= {"-", ":"} and cell for cell in row)}
    return [row for i, row in enumerate(cells) if i not in rules and i + 1 not in rules]


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def plain(cell: str) -> str:
    return cell.replace("`", "")


NUMBER = re.compile(r"[+\N{MINUS SIGN}]?\d[\d,]*\.?\d*")


def without_numbers(text: str) -> str:
    return NUMBER.sub("#", text)


def numbers(text: str) -> list[float]:
    return [float(found.replace("\N{MINUS SIGN}", "-").replace(",", "")) for found in NUMBER.findall(text)]


def has_row(page: str, row: str) -> bool:
    """True if a line of the page is the row, but for 1 % of each number and one point of each percentage: a fit ends a
    little elsewhere on another CPU.
    """
    alike = [line for line in page.splitlines() if without_numbers(line) == without_numbers(row)]
    return any(all(map(_are_near, line.split("|"), row.split("|"))) for line in alike)


def _are_near(cell: str, current: str) -> bool:
    near = {"abs": 1.0} if "%" in cell else {"rel": 1e-2}
    return numbers(cell) == pytest.approx(numbers(current), **near)
