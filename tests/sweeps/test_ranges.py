"""The best points of a sweep are simulated at both ends of the times that nobody measured."""

import pytest

import pdsim
from pdsim.scenario.loading import load_scenario
from pdsim.sim.simulation import simulate
from pdsim.study.sweeping.sweep import read_sweep, sweep
from tests.cli.test_commands import output, output_json
from tests.sweep_files import SCENARIO, SWEEP, write_sweep

UNMEASURED = SCENARIO.replace("cost: roofline\n", "")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranges")
    path = write_sweep(folder, scenario=UNMEASURED)
    return path, sweep(path, out=folder / "out", jobs=1, engine="here", ranges=2)


def test_the_best_points_have_a_range_and_lie_inside(swept):
    _, result = swept
    best = result.best("chat")[:2]
    assert [point.number for point in result.points if point.ranges] == sorted(point.number for point in best)
    for point in best:
        for name, (least, most) in point.ranges.items():
            assert least <= point.metric(name).mean <= most
        assert point.ranges["mean_ttft_ms"][0] < point.ranges["mean_ttft_ms"][1]


def test_a_range_is_that_of_the_same_runs_at_their_ends(swept):
    path, result = swept
    point = result.leading(1)[0]
    changes = [f"{name}={value}" for name, value in point.changes.items()]
    slow = [
        simulate(load_scenario(path.parent / "base.yaml", [*changes, f"seed={seed}", "corner=slowest"])).summary()
        for seed in (1, 2)
    ]
    assert point.ranges["mean_tpot_ms"][1] == pytest.approx(sum(one["mean_tpot_ms"] for one in slow) / 2)


def test_a_folder_has_the_ranges_and_they_are_not_computed_again(swept):
    path, result = swept
    assert [point.ranges for point in read_sweep(result.folder).points] == [point.ranges for point in result.points]
    again = sweep(path, out=result.folder, jobs=1, engine="here", ranges=2)
    assert (again.num_computed, again.num_kept) == (0, result.num_computed)
    assert len(read_sweep(result.folder).table) == 8


def test_who_wants_none_has_none_and_a_measured_cost_has_none(tmp_path):
    path = write_sweep(tmp_path, scenario=UNMEASURED)
    for changes, ranges in (([], 0), (["cost=roofline"], 3)):
        result = pdsim.sweep(path, out=tmp_path / f"out{ranges}", changes=changes, jobs=1, engine="here", ranges=ranges)
        assert result.num_computed == 8
        assert not any(point.ranges for point in result.points)


def test_ranges_are_printed(swept, capsys):
    path, result = swept
    shown = output(capsys, "sweep", path, "--out", result.folder, "--ranges", 2)
    assert "between the fastest and the slowest" in shown
    found = output_json(capsys, "sweep", path, "--out", result.folder, "--ranges", 2)
    assert sum("ranges" in point for point in found["points"]) == 2


def test_without_an_slo_the_most_requests_have_a_range(tmp_path):
    path = write_sweep(tmp_path, SWEEP.replace("slos: {chat: ttft < 1 s for 90 %}\n", ""), UNMEASURED)
    result = sweep(path, out=tmp_path / "out", jobs=1, engine="here", ranges=1)
    (ranged,) = (point for point in result.points if point.ranges)
    assert ranged.metric("request_throughput").mean == max(p.metric("request_throughput").mean for p in result.points)
