"""A simulation of an aggregated server near its limit, and the rule of the kernels that the server compiled."""

from collections import Counter
from csv import DictReader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.markdown import has_row

STUDY = Path(__file__).parents[2] / "experiments" / "sglang-aggregated-h200"
PAGE = (STUDY / "README.md").read_text()
SPEC = spec_from_file_location("loads", STUDY / "loads.py")
loads = module_from_spec(SPEC)
SPEC.loader.exec_module(loads)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_page_has_the_measured_loads(dtype):
    for load in loads.LOADS:
        stamps = loads.measured(dtype, load)
        for part, kept in loads.parts_of(dtype, load, stamps[0]).items():
            assert loads.row(part, "measured", loads.load_of(stamps[:, kept])) in PAGE


@pytest.mark.parametrize(("dtype", "most"), [("fp8", 0.075), ("bf16", 0.055)])
def test_own_rows_predict_loads_near_the_limit_as_the_page_says(dtype, most):
    for load, stamps in loads.own(dtype).items():
        real, found = loads.load_of(loads.measured(dtype, load)), loads.load_of(stamps)
        assert has_row(PAGE, loads.row("", "own rows", found, real))
        if load.startswith("hi"):
            assert found == pytest.approx(real, rel=most)


def test_a_server_without_triton_cache_compiled_two_kernels_for_each_power_of_two():
    """At most two: not every variant was needed."""
    with (STUDY / "data" / "slow_phases.csv").open() as file:
        rows = [row for row in DictReader(file) if row["dtype"] == "fp8" and row["kernel"].startswith("alloc")]
    compiled = Counter((row["role"], 1 << (int(row["requests"]) - 1).bit_length()) for row in rows)
    powers = {"prefill": (1, 2, 4, 8), "decode": (1, 2, 4, 8, 16, 32, 64, 128)}
    assert compiled == {(role, power): 2 for role in powers for power in powers[role]} | {("prefill", 8): 1}
    assert len(rows) == 23
