"""Arrow arrays without pandas."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.metrics.arrow import arrow_array, mask, numpy_array

INTEGERS, FLOATS = st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)
COLUMNS = st.sampled_from([INTEGERS, FLOATS, st.text(), st.booleans()]).flatmap(
    lambda kind: st.lists(kind) | st.lists(kind | st.none())
)


@given(COLUMNS)
def test_arrays_are_those_of_pyarrow(values):
    made = arrow_array(values)
    made.validate(full=True)
    assert made.equals(pa.array(values))
    assert made.to_pylist() == values


def test_integers_among_floats_are_floats():
    assert arrow_array([1, 2.5, None]).equals(pa.array([1.0, 2.5, None]))


@pytest.mark.parametrize("values", [[1, -7], [0.5, 2.0], [True, False, True], []])
def test_numbers_come_back(values):
    assert numpy_array(pa.array(values, type=None if values else pa.int64())).tolist() == values


@given(st.lists(st.booleans()))
def test_masks_pick_rows(rows):
    table = pa.table({"row": pa.array(range(len(rows)), type=pa.int64())})
    assert table.filter(mask(np.array(rows, dtype=bool)))["row"].to_pylist() == np.flatnonzero(rows).tolist()


COMMANDS = """
import sys
from pdsim.cli import main
for command in sys.argv[2:]:
    try:
        main([*command.split(), sys.argv[1]])
    except SystemExit as end:
        assert not end.code, command
    assert "pandas" not in sys.modules, command
"""


def test_commands_import_no_pandas(tmp_path):
    run = "run experiments/speed/scenario.yaml --set workload.num_requests=20 --out"
    commands = [run, "explain", "explain --request 1"]
    subprocess.run([sys.executable, "-c", COMMANDS, str(tmp_path / "run"), *commands], check=True, capture_output=True)
