"""The answers to users' questions, against what the page shows."""

import subprocess
import sys

import pytest

from tests.markdown import ROOT

STUDY = ROOT / "experiments" / "user-questions"


@pytest.mark.pages
def test_the_page_shows_what_the_commands_say(request):
    command = [sys.executable, str(STUDY / "questions.py")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = (STUDY / "README.md").read_text()
    before, _, rest = page.partition("<!-- answers -->\n")
    shown, _, after = rest.partition("<!-- answers end -->")
    if request.config.getoption("--update-golden"):
        (STUDY / "README.md").write_text(f"{before}<!-- answers -->\n{printed}<!-- answers end -->{after}")
    else:
        assert shown == printed
