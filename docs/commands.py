"""Writes docs/cli.md from the commands themselves: python docs/commands.py. A test compares the two."""

# ruff: noqa: INP001  a script

import re
from collections import Counter
from pathlib import Path

from cyclopts import App
from pdreal.cli import app as pdreal

from pdsim.cli.app import app as pdsim

PAGE = Path(__file__).parent / "cli.md"
HEAD = """\
# Commands

The text of `--help`; `python docs/commands.py` writes this page. [Metrics](metrics.md#json-of-commands) has the JSON
that commands print, [scenario files](scenario.md#errors) the exit codes.

"""
SHARED_BY = 2
"""Flags with the same text in this many commands or more are listed once."""


def page() -> str:
    texts = [_reference(app) for app in (pdsim, pdreal)]
    counts = Counter(re.findall(r"^\* `--.*\n", "".join(texts), re.MULTILINE))
    shared = [line for line, count in counts.items() if count >= SHARED_BY]
    for line in shared:
        texts = [text.replace(line, "") for text in texts]
    texts = [re.sub(r"\*\*(Arguments|Parameters)\*\*:\n\n", "", text) for text in texts]
    texts = [re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for text in texts]
    parts = [HEAD, "Flags of several commands:\n\n", *shared, "\n", "\n".join(texts)]
    return "".join(parts).replace(" *[default: False]*", "")


def _reference(app: App) -> str:
    """Descriptions and flags. The list of commands repeats their descriptions, and usage repeats their names."""
    text = app.generate_docs(output_format="markdown", heading_level=2) + "\n"
    text = re.sub(r"^#+ Table of Contents\n.*?(?=^\*\*Commands)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\*\*Commands\*\*:\n\n(?:\*.*\n)+\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^```console\n.*?^```\n\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
