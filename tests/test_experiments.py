"""The studies: each scenario can be built, and arms in files of their own differ only where they should."""

from pathlib import Path
from statistics import fmean

import pytest

from pdsim import simulate
from pdsim.calibration.validate.case import MEASURED, load_case
from pdsim.scenario.building.cluster import build
from pdsim.scenario.loading import load_cost, load_scenario
from pdsim.scenario.yaml_file import read_yaml
from pdsim.study.sweeping.sweep_file import designed_points, load_sweep
from pdsim.system.catalog import names, searched

FOLDER = Path(__file__).parent.parent / "experiments"
SCENARIOS = [*FOLDER.glob("*/scenario.yaml"), FOLDER / "host-cache" / "retraction.yaml"]


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


PROFILES = [path for path in sorted(FOLDER.glob("*/*.yaml")) if "provenance" in path.read_text()]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_profile_says_what_it_was_measured_on(path):
    measured = load_cost(path).measured
    if "stated" in read_yaml(path)["provenance"]:  # rates of kernels of many sources, of no one setup
        assert measured is None
    else:
        assert measured.model in names("models")
        assert measured.prefill_new_tokens


@pytest.mark.parametrize("study", [path.parent.name for path in sorted(FOLDER.glob(f"*/{MEASURED}"))])
def test_a_fitted_arm_has_the_setup_of_its_profile(study):
    case = load_case(FOLDER / study)
    for arm in case.arms:
        if arm.fitted:
            assert case.scenario(arm, case.seeds[0]).foreign_setup == []


@pytest.mark.parametrize("overlaps", ["false", "true"])
def test_an_exchange_slows_kv_on_its_nics(overlaps):
    study = FOLDER / "kv-beside-exchange"
    changes = ["workload.num_requests=32", "network.bandwidth=11 GB/s", f"prefill.two_batch_overlap={overlaps}"]
    means = []
    with searched(study / "catalog"):
        for transport in ("own-nics", "mooncake-rdma"):
            found = simulate(load_scenario(study / "scenario.yaml", [*changes, f"network.transport={transport}"]))
            means.append(fmean(sent.end_ns - sent.start_ns for sent in found.records.transfers))
    assert means[1] > 1.1 * means[0]
