"""Equal requests of a closed loop part, or stay together, as those of real servers do."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def together():
    spec = spec_from_file_location("together", ROOT / "experiments" / "sglang-llama" / "together.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_groups_are_as_large_as_measured_ones(together):
    """A forward takes eight prompts; an aggregated server keeps nearly all of 32 together."""
    page = (ROOT / "experiments" / "sglang-llama" / "README.md").read_text()
    for study, arm, clients in together.ARMS:
        measured, simulated = (found(study, arm, clients) for found in (together.measured, together.simulated))
        assert sum(measured) == sum(simulated)
        cells = [f"{len(sizes)}, {fmean(sizes):.1f}, {max(sizes)}" for sizes in (measured, simulated)]
        assert f"| {study} {arm} | {' | '.join(cells)} |" in page
        if arm.startswith("agg"):
            assert min(max(measured), max(simulated)) > 0.8 * clients
        else:
            assert max(*measured, *simulated) <= 8
            assert fmean(simulated) == pytest.approx(fmean(measured), rel=0.41 if arm == "llama_c32" else 0.4)
