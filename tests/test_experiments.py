"""The studies: each scenario can be built, and arms in files of their own differ only where they should."""

from pathlib import Path

import pytest

from pdsim.scenario.build import build
from pdsim.scenario.loading import load_scenario

FOLDER = Path(__file__).parent.parent / "experiments"
SCENARIOS = [*FOLDER.glob("*/scenario.yaml"), *FOLDER.glob("demo/*.yaml")]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_scenario_can_be_built(path):
    assert build(load_scenario(path)).requests


def test_the_arms_of_the_demo_differ_in_the_decode_radix_cache():
    off, on = (load_scenario(FOLDER / "demo" / f"radix-{arm}.yaml").model_dump() for arm in ("off", "on"))
    assert (off["decode"].pop("radix_cache"), on["decode"].pop("radix_cache")) == (False, True)
    assert {key for key in off if off[key] != on[key]} == {"name", "description"}
