"""Reports of a run of 2,000 requests and of a sweep, opened in a browser: drawn, sortable, small and quick."""

import pytest

from pdsim.cli import main
from tests.report.browser import CHROMIUM, open_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium"),
]

SCENARIO = """\
name: browser
model: qwen3-0.6b
page_size: 16
prefill: {gpu: h100, instances: 2}
decode: {gpu: h100}
workload:
  use: random_lengths
  num_requests: 2000
  input_tokens: {use: uniform, low: 100, high: 4000}
  output_tokens: 50
client: {use: open_loop, arrivals: {use: poisson, rate: 60/s}}
"""
SWEEP = """\
scenario: browser.yaml
seeds: [1, 2]
grid: {prefill.instances: [1, 2], page_size: [1, 16], client.arrivals.rate: [20/s, 40/s]}
slos: {chat: ttft < 1 s for 99 %}
"""
MEGABYTE = 1e6


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert not stop.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    (folder / "browser.yaml").write_text(SCENARIO)
    (folder / "points.yaml").write_text(SWEEP)
    return folder


@pytest.fixture(scope="module")
def run_folder(folder):
    call("run", folder / "browser.yaml", "--out", folder / "run", "--keep", "timeline")
    call("report", folder / "run", "--out", folder / "run.html")
    return folder


@pytest.fixture(scope="module")
def run_seen(run_folder):
    return open_page(run_folder / "run.html", run_folder)


@pytest.fixture(scope="module")
def sweep_seen(folder):
    call(
        "sweep", folder / "points.yaml", "--out", folder / "points", "--jobs", "1", "--set", "workload.num_requests=60"
    )
    call("report", folder / "points", "--out", folder / "points.html")
    return open_page(folder / "points.html", folder)


def test_a_run_of_2000_requests_is_small_on_disk(run_folder):
    sizes = {
        path.name: path.stat().st_size for path in (run_folder / "run.html", run_folder / "run" / "timeline.json.gz")
    }
    print(*(f"{name}: {size / MEGABYTE:.2f} MB" for name, size in sizes.items()), sep=", ")
    assert max(sizes.values()) < 10 * MEGABYTE


def test_it_opens_in_less_than_three_seconds(run_seen):
    print(f"opened in {run_seen['opened_ms']:.0f} ms")
    assert 0 < run_seen["opened_ms"] < 3000


@pytest.mark.parametrize("name", ["run_seen", "sweep_seen"])
def test_what_is_opened_is_drawn(name, request):
    seen = request.getfixturevalue(name)
    assert len(seen["figures"]) >= 5
    for figure, (width, height) in seen["figures"].items():
        assert width > 300, figure
        assert height > 60, figure
    assert seen["texts"] > 20
    assert all(width > 0 for width in seen["images"])
    assert seen["overflow"] == 0, "nothing sticks out on a laptop"
    assert seen["requests"] == 0, "nothing is loaded"
    assert len(set(seen["backgrounds"])) == 2, "light and dark"


@pytest.mark.parametrize("name", ["run_seen", "sweep_seen"])
def test_a_click_sorts_a_table_and_another_turns_it(name, request):
    sorted_ = request.getfixturevalue(name)["sorted"]
    assert len(sorted_) >= 5
    assert any(down != up for down, up, _ in sorted_)
    for down, up, state in sorted_:
        assert down == sorted(down, reverse=True)
        assert up == sorted(up)
        assert state == "ascending"
