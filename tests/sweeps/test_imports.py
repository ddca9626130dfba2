"""What a sweep does without."""

import subprocess
import sys

import pytest

from tests.sweep_files import write_sweep


@pytest.mark.parametrize("module", ["pandas", "pyarrow"])
def test_a_sweep_needs_neither_pandas_nor_arrow(tmp_path, module):
    """Their imports take as long as many points."""
    command = ["sweep", str(write_sweep(tmp_path)), "--out", str(tmp_path / "out"), "--engine", "here", "--json"]
    code = (
        "import sys\n"
        "from pdsim.cli import main\n"
        "try:\n"
        f"    main({command!r})\n"
        "finally:\n"
        f"    sys.exit({module!r} in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert (tmp_path / "out" / "plan.jsonl").exists()
