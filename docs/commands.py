"""Writes docs/cli.md from the commands themselves: python docs/commands.py. A test compares the two."""

# ruff: noqa: INP001  a script

import re
from pathlib import Path

from cyclopts import App
from pdreal.cli import app as pdreal

from pdsim.cli.app import app as pdsim

PAGE = Path(__file__).parent / "cli.md"
HEAD = """\
# Commands

What `--help` says, of every command; `python docs/commands.py` writes this page. What commands print as JSON:
[metrics](metrics.md#json-of-commands). Exit codes: [scenario files](scenario.md#errors), [sweeps](sweeps.md).

"""


def page() -> str:
    return HEAD + "\n".join(_reference(app) for app in (pdsim, pdreal))


def _reference(app: App) -> str:
    """Without the table of contents, which repeats the list of commands, and usage, which names who runs this."""
    text = app.generate_docs(output_format="markdown", heading_level=2)
    text = re.sub(r"^#+ Table of Contents\n.*?(?=^\*\*Commands)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```console\n.*?^```\n\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
