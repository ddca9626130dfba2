"""Figures: what is drawn, not how it looks."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pdsim.metrics.plots import NUM_BINS, binned, comparison, draw_ttft_cdf, overview, write_figure
from tests.support import run, small


def result(**changes):
    scenario = small(
        workload={"use": "random_lengths", "num_requests": 40, "input_tokens": 100, "output_tokens": 20},
        client={"use": "closed_loop", "concurrency": 8},
        **changes,
    )
    return run(scenario, levels=True).result


@pytest.fixture(scope="module")
def one():
    return result()


def axes(figure):
    """By their labels, those of subfigures included."""
    return {ax.get_xlabel() or ax.get_ylabel() or ax.get_title(): ax for ax in figure.axes}


def test_bins_keep_the_time_average():
    points = [(0, 1.0), (250, 4.0), (255, 0.0), (900, 2.0)]
    times, means = binned(*zip(*points, strict=True), 1000, 10)
    assert times == pytest.approx([(i + 0.5) * 100 / 1e9 for i in range(10)])
    assert means == pytest.approx([1, 1, 0.5 + 0.05 * 4, 0, 0, 0, 0, 0, 0, 2])
    assert sum(means) * 100 == pytest.approx(250 * 1 + 5 * 4 + 100 * 2)


def test_no_points_and_no_time():
    assert binned([], [], 0, 3)[1] == [0, 0, 0]
    assert binned([0], [5.0], 0, 3)[1] == [0, 0, 0]


def test_an_overview_has_few_points_however_long_the_run(one):
    figure = overview(one.records)
    lines = {ax.get_ylabel(): ax.get_lines() for ax in figure.axes}
    for title in ("requests running", "requests waiting", "KV pages in use"):
        assert [len(line.get_xdata()) for line in lines[title]] == [NUM_BINS] * 2
    styles = {(line.get_color(), line.get_linestyle()) for line in lines["requests running"]}
    assert len(styles) == len({style for _, style in styles}) == 2


def test_an_interrupted_write_leaves_the_old_figure(tmp_path, monkeypatch):
    def interrupted(_figure, place, **_how):
        if isinstance(place, Path):
            place.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupted)
    (tmp_path / "f.png").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_figure(tmp_path / "f.png", Figure())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"f.png": "old"}


def test_many_instances_share_a_name_by_role():
    many = result(prefill__instances=5, decode__instances=4)
    running = next(ax for ax in overview(many.records).axes if ax.get_ylabel() == "requests running")
    assert len(running.get_lines()) == 9
    assert running.get_legend_handles_labels()[1] == ["decode", "prefill"]


def test_a_comparison_shows_where_time_went_beside_rates_and_ttft(one):
    slow = result(cost={"use": "affine", "prefill_per_token": "4 ms", "decode_base": "10 ms"})
    runs = {"fast": one, "slow": slow}
    figure = comparison(
        {name: run.summary() for name, run in runs.items()}, {name: run.judged for name, run in runs.items()}
    )
    by_label = axes(figure)
    stages = by_label["mean latency by stage, s"]
    assert [text.get_text() for text in stages.get_yticklabels()] == ["fast", "slow"]
    ends = [
        max(bar.get_x() + bar.get_width() for bar in stages.patches if round(bar.get_y() + 0.3) == i) for i in (0, 1)
    ]
    latencies = [run.summary()["mean_e2e_latency_ms"] / 1e3 for run in runs.values()]
    assert ends == pytest.approx(latencies, rel=0.05), "but for stages too short to see"
    assert {"requests/s", "output tokens/s", "median TTFT, s"} <= by_label.keys()
    ticks = [text.get_text() for text in by_label["TTFT, s"].get_xticklabels()]
    assert ticks
    assert all(float(tick) > 0 for tick in ticks), "plain numbers"
    lines = by_label["TTFT, s"].get_lines()
    assert len({line.get_linestyle() for line in lines}) == 2


def test_runs_without_a_finished_request_are_drawn_empty(one):
    ax = Figure().subplots()
    draw_ttft_cdf(ax, {"none": [], "some": one.records.requests})
    assert [line.get_label() for line in ax.get_lines()] == ["some"]
