"""Columns of shards and plans, which are made of their buffers."""

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.study.shard import arrow_array
from tests.sweep_files import write_sweep

VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(),
    pa.list_(pa.int64()): st.lists(st.integers(0, 9), max_size=3),
    pa.list_(pa.string()): st.lists(st.text(max_size=3), max_size=3),
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_a_column_of_buffers_is_that_of_its_values(kind):
    @given(st.lists(st.none() | VALUES[kind], max_size=20))
    def check(values):
        made = arrow_array(kind, values)
        made.validate(full=True)
        assert made.equals(pa.array(values, kind))

    check()


def test_a_sweep_needs_no_pandas(tmp_path):
    command = ["sweep", str(write_sweep(tmp_path)), "--out", str(tmp_path / "out"), "--engine", "here", "--json"]
    code = (
        "import sys\n"
        "from pdsim.cli import main\n"
        "try:\n"
        f"    main({command!r})\n"
        "finally:\n"
        "    sys.exit('pandas' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert (tmp_path / "out" / "plan.parquet").exists()
