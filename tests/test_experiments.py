"""The studies: each scenario can be built, and arms in files of their own differ only where they should."""

from pathlib import Path

import pytest

from pdsim.scenario.build import build
from pdsim.scenario.loading import load_scenario
from pdsim.sweeps.design import designed_points
from pdsim.sweeps.sweep_file import load_sweep

FOLDER = Path(__file__).parent.parent / "experiments"
SCENARIOS = list(FOLDER.glob("*/scenario.yaml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_scenario_can_be_built(path):
    assert build(load_scenario(path)).requests


def test_the_points_of_the_demo_split_the_same_gpus():
    points = designed_points(load_sweep(FOLDER / "demo" / "split.yaml"))
    assert {point["prefill.instances"] + point["decode.instances"] for point in points} == {6}


def test_the_sweep_of_the_whole_trace_has_96_points():
    points = designed_points(load_sweep(FOLDER / "sweep-mooncake" / "sweep.yaml"))
    assert len(points) == 96
    assert {point["prefill.instances"] + point["decode.instances"] for point in points} == {8}
