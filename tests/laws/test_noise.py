"""No change within a run's band is called a cause, whatever the numbers are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdsim
from pdsim import simulate
from pdsim.scenario.loading import load_scenario
from pdsim.show.terminal.studies import print_sweep
from pdsim.sim.uncertainty.noise import JITTERS, Band, bands
from pdsim.sim.uncertainty.sensitivity import Sensitivity, limits, sensitivities
from pdsim.study.points.estimate import Estimate
from pdsim.study.points.result import PointResult, Replication
from pdsim.study.questions.study import Study
from pdsim.study.sweeping.sweep import read_sweep, sweep
from tests.support import small

METRIC = "p99_ttft_ms"
TIMES = st.floats(1, 1e4)


def point(value):
    return PointResult(1, {}, [Replication({"status": "ok", METRIC: value}, {})])


@given(TIMES, st.lists(TIMES, min_size=1, max_size=5))
def test_a_band_holds_the_run_and_each_repetition(base, repeated):
    band = bands({METRIC: base}, [{METRIC: value} for value in repeated])[METRIC]
    assert band.least == min(base, *repeated)
    assert band.most == max(base, *repeated)


@given(TIMES, st.lists(TIMES, min_size=4, max_size=4), st.lists(TIMES, min_size=1, max_size=6))
def test_a_limit_is_never_within_the_band(base, repeated, changed):
    noise = bands({METRIC: base}, [{METRIC: value} for value in repeated])
    found = [Sensitivity(f"resource {i}", {METRIC: value / base - 1}, "", noise) for i, value in enumerate(changed)]
    (limit,) = limits(found)
    if limit.resource:
        assert abs(limit.change) > noise[METRIC].width
    if noise[METRIC].is_unstable:
        assert str(noise[METRIC]) in limit.unstable
        assert limit.resource or "unstable" in str(limit)


@given(TIMES, st.lists(TIMES, min_size=4, max_size=4), TIMES, st.lists(TIMES, min_size=4, max_size=4))
def test_runs_are_told_apart_only_if_each_repetition_agrees(one, ones, two, twos):
    points = [
        point(value).repeated([point(other) for other in repeated]) for value, repeated in ((one, ones), (two, twos))
    ]
    for found, values in zip(points, ((one, *ones), (two, *twos)), strict=True):
        number = found.metric(METRIC)
        assert number.mean == values[0]
        assert number.half_width == pytest.approx(max(abs(value - values[0]) for value in values))
    study = Study.__new__(Study)
    study._results = dict(zip("ab", points, strict=True))
    if study.ratio("a", "b", METRIC).is_told_apart:
        assert len({a > b for a, b in zip((one, *ones), (two, *twos), strict=True)}) == 1


@pytest.fixture
def recorded(tmp_path):
    """A scenario of 60 requests with their own times."""
    rows = [f"{i * 0.03},{400 + 37 * (i % 11)},{5 + i % 7}" for i in range(60)]
    (tmp_path / "load.csv").write_text("\n".join(["arrival_s,in_tokens,out_tokens", *rows]) + "\n")
    file = tmp_path / "recorded.yaml"
    file.write_text(
        "name: recorded\nmodel: qwen3-0.6b\nprefill: {gpu: h100, instances: 2}\ndecode: {gpu: h100, instances: 2}\n"
        "cost: roofline\nworkload: {use: request_table, path: load.csv}\nclient: open_loop\n"
    )
    return file


def band_of(file, changes):
    """Mean TTFT of a run, and its largest change as messages take up to 10 % more or less."""
    given = [f"{name}={value}" for name, value in changes.items()]
    latencies = [[], *([f"network.message_latency={round(50_000 * (1 + one))} ns"] for one in JITTERS)]
    found = [simulate(load_scenario(file, [*given, *one])).summary()["mean_ttft_ms"] for one in latencies]
    return found[0], max(abs(value - found[0]) for value in found)


def test_an_answer_on_a_recorded_load_has_the_band_of_its_repetitions(recorded):
    made = pdsim.ask("routing", recorded, jobs=1)
    assert "4 with messages up to 10% faster or slower for ±" in made.load
    for row in made.rows:
        assert tuple(row.estimates["ttft"]) == pytest.approx(band_of(recorded, row.changes))


def test_the_best_points_of_a_sweep_over_a_recorded_load_have_the_band_of_their_repetitions(recorded, capsys):
    file = recorded.parent / "sweep.yaml"
    file.write_text(
        "scenario: recorded.yaml\ngrid: {router: [cache_aware, round_robin, least_loaded, random]}\n"
        "slos: {any: 'ttft < 9 s for 90 %'}\n"
    )
    made = sweep(file, out=recorded.parent / "out", engine="here")
    repeated = [point for point in made.points if point.repeats]
    assert len(repeated) == 3
    for one in (made, read_sweep(recorded.parent / "out")):
        for point in one.points:
            found = band_of(recorded, point.changes)
            expected = found if point.number in {best.number for best in repeated} else (found[0], None)
            assert tuple(point.metric("mean_ttft_ms")) == pytest.approx(expected)
    assert not sweep(file, out=recorded.parent / "out", engine="here").num_computed
    print_sweep(made)
    told = " ".join(capsys.readouterr().out.split())
    assert "the largest change in 4 runs with messages up to 10% faster or slower" in told
    assert (f"as good as point {made.best('any')[0].number}" in told) == bool(made.as_good("any"))


@given(TIMES, st.lists(TIMES, min_size=4, max_size=4), st.lists(TIMES, min_size=1, max_size=6))
def test_where_no_resource_limits_the_nearest_is_said(base, repeated, changed):
    noise = bands({METRIC: base}, [{METRIC: value} for value in repeated])
    found = [Sensitivity(f"resource {i}", {METRIC: value / base - 1}, "", noise) for i, value in enumerate(changed)]
    (limit,) = limits(found)
    assert limit.noise == noise[METRIC].width
    if limit.most:
        assert not limit.resource
        assert limit.change == min(one.changes[METRIC] for one in found)
        assert abs(limit.change) <= limit.noise
        assert limit.most in str(limit) or limit.unstable


def test_what_no_digit_shows_is_no_band():
    assert Estimate(1.17, 2.4e-08).times == "1.17 times"
    assert Estimate(2101, 533).spread() == "2,101 ± 533"
    assert Estimate(0.0, 0.5).spread() == "0 ± 0.50"


def test_one_lucky_run_has_no_cause_and_is_told():
    """2,101 ms, where messages that take 1 % more or less give 2,610."""
    noise = {METRIC: Band(2101, 2101, 2634)}
    (limit,) = limits([Sensitivity("messages", {METRIC: -0.05}, "network.message_latency", noise)])
    assert not limit.resource
    assert "unstable: 2,101 to 2,634 ms" in str(limit)


def test_each_sensitivity_has_the_noise_of_its_run():
    load = {"use": "random_lengths", "num_requests": 30, "input_tokens": 200, "output_tokens": 2}
    found = sensitivities(small(workload=load, client={"use": "closed_loop", "concurrency": 3}))
    assert len(JITTERS) > 1
    assert all(one.noise.keys() == one.changes.keys() for one in found)
    assert not any(band.is_unstable for band in found[0].noise.values()), "one instance of each role is steady"
