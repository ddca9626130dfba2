"""What a page holds, whatever it is of; how it looks is for test_browser.py."""

import json
import re
from dataclasses import replace
from shutil import copytree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.metrics.columns import StoredRecords
from pdsim.metrics.records import RunRecords
from pdsim.metrics.summary_rows import ranges
from pdsim.metrics.tables import write_tables
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.yaml_file import ConfigError
from pdsim.show.html.figures import Dot, frontier, to_svg
from pdsim.show.html.page import differences, render
from pdsim.show.html.run import ReportedRun, run_page
from pdsim.show.html.run_figures import latency_distributions
from pdsim.show.html.sweep import sweep_page
from pdsim.sim.uncertainty.sensitivity import Sensitivity
from pdsim.study.points.store import PLAN
from pdsim.study.sweeping.sweep import read_sweep, sweep
from tests.support import run, small, small_aggregated

LOAD = {"use": "random_lengths", "num_requests": 40, "input_tokens": 100, "output_tokens": 20}
CLIENT = {"use": "closed_loop", "concurrency": 8}


def reported(name, make=small, **changes):
    scenario = make(workload=LOAD, client=CLIENT, **changes)
    result = run(scenario, levels=True).result
    return ReportedRun(name, result.summary(), result.records, resolve(scenario))


@pytest.fixture(scope="module")
def one():
    return reported("one")


def names(page):
    return [shown.name for shown in page.figures]


def test_a_page_needs_nothing_else(one):
    html = render(run_page([one]))
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "@import" not in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)), "figures keep their ids apart"


def test_a_stored_run_has_the_same_page_and_its_tables_stay_columns(one, tmp_path, monkeypatch):
    """Records of all rows would take twice the time and memory of a long run's page."""
    write_tables(tmp_path, one.records)
    stored = replace(one, records=StoredRecords(tmp_path))
    for name in ("steps", "transfers", "levels", "requests"):
        monkeypatch.setattr(StoredRecords, name, property(lambda _: pytest.fail("makes a record of each row")))
    assert render(run_page([stored])) == render(run_page([one]))


def test_a_figure_is_the_same_again(one):
    first, again = (latency_distributions({"one": one.records}).figure for _ in range(2))
    assert to_svg(first, "name") == to_svg(again, "name")


def test_a_run_whose_range_is_known_says_it_beside_every_number(one):
    summary = {**one.summary, "pdsim": {**one.summary["pdsim"], "interval": ranges([one.summary])}}
    page = run_page([replace(one, summary=summary)])
    assert all(card.note.count(" to ") == 1 + card.note.count("p99") for card in page.cards)
    assert page.tables[0].columns[-1] == "range"
    both = run_page([replace(one, summary=summary), replace(one, name="two")])
    assert both.tables[0].columns[-1] == "range of one"


def test_a_run_says_where_its_time_goes_before_anything_else(one):
    page = run_page([one])
    assert "% of the latency is prefill_waiting; the 1 % with the largest TTFT" in page.answer
    assert page.detail == "", "what limits is the tornado's to say"
    assert [card.title for card in page.cards] == ["throughput", "output", "TTFT", "TPOT", "latency"]
    assert names(page)[0] == "distributions"
    assert page.tables[0].title == "Summary"


def test_text_from_a_scenario_cannot_break_the_page(one):
    page = run_page([replace(one, name="<script>alert(1)</script>")])
    assert "<script>alert" not in render(replace(page, figures=page.figures[:1]))


def test_classes_of_requests_have_a_table(tmp_path):
    rows = [f"0,{100 + i},20,{'chat' if i % 3 else 'batch'}" for i in range(12)]
    (tmp_path / "classes.csv").write_text("\n".join(["arrival_s,in_tokens,out_tokens,class", *rows]))
    result = run(small(workload={"use": "request_table", "path": str(tmp_path / "classes.csv")}, client=CLIENT)).result
    page = run_page([ReportedRun("classes", result.summary(), result.records)])
    (table,) = [table for table in page.tables if table.title == "Classes of requests"]
    classes = result.summary()["pdsim"]["classes"]
    assert [(row[0].text, row[1].text, row[4].order) for row in table.rows] == [
        (name, str(count), classes[name]["p99_ttft_ms"]) for name, count in (("batch", 4), ("chat", 8))
    ]


def test_an_aggregated_run_has_no_transfers():
    page = run_page([reported("aggregated", small_aggregated)])
    assert "transfers" not in names(page)
    assert "critical-path" in names(page)


def test_a_run_without_a_finished_request_says_so(one):
    requests = [replace(request, outcome="failed") for request in one.records.requests]
    records = replace(one.records, requests=requests)
    page = run_page([replace(one, records=records, summary={**one.summary, "pdsim": {"failed": 40}})])
    assert page.answer == "No request finished."
    assert page.figures == []
    assert page.warnings == ["40 requests failed; latencies leave them out."]
    assert "No request finished." in render(page)


def test_a_tornado_leaves_out_what_changes_nothing_and_says_so(one):
    moves = {"request_throughput": 0.08, "p99_ttft_ms": -0.1, "p99_tpot_ms": 0.0}
    found = [Sensitivity("prefill compute", moves, "prefill.tp"), Sensitivity("link", dict.fromkeys(moves, 0.0), "")]
    page = run_page([replace(one, sensitivities=found)])
    (shown,) = (shown for shown in page.figures if shown.name == "tornado")
    labels = {text.get_text() for ax in shown.figure.axes for text in ax.get_yticklabels()}
    assert labels == {"prefill compute"}
    assert shown.caption.endswith("Less than 0.1%: link.")
    assert "what limits TTFT p99: prefill compute" in page.detail


def test_runs_side_by_side_show_differences_from_the_first(one):
    slow = reported("slow", cost={"use": "affine", "prefill_per_token": "2 ms", "decode_base": "10 ms"})
    page = run_page([one, slow])
    assert page.answer.startswith("Most output: one")
    assert names(page)[:3] == ["pareto", "latency-throughput", "ttft-throughput"]
    rows = {row[0].text: row for row in page.tables[0].rows}
    assert rows["requests/s"][3].tone == "bad"
    render(page)


def test_a_page_says_at_its_top_which_model_ran_on_which_gpus(one):
    page = run_page([one])
    assert page.setup == (
        "qwen3-0.6b (bf16 KV); prefill 1 x TP1 on 1 h100; decode 1 x TP1 on 1 h100; pages of 4 tokens; "
        "steps timed by affine; load random_lengths, closed_loop"
    )
    head = render(page).partition('class="answer"')[0]
    assert page.setup in head


def test_a_comparison_says_at_its_top_in_which_fields_runs_differ(one):
    other = reported("wide", small_aggregated, aggregated__tp=2, page_size=8)
    page = run_page([one, reported("two", prefill__tp=2, model="qwen3-8b"), other])
    assert page.setup.startswith(
        "qwen3-0.6b (bf16 KV) or qwen3-8b (bf16 KV); prefill 1 x TP1 on 1 h100 or prefill 1 x TP2"
    )
    head = render(page).partition('class="answer"')[0]
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in page.differences.rows}
    assert rows["model"] == ["qwen3-0.6b", "qwen3-8b", "qwen3-0.6b"]
    assert rows["prefill.tp"] == ["1", "2", "—"]
    assert all(path in head for path in rows)
    assert run_page([one, replace(one, name="again")]).differences is None


def test_a_zero_is_one_value_however_a_run_folder_writes_it():
    written, read = {"pace": {"share": 0, "spell": "0 ns"}}, {"pace": {"share": 0.0, "spell": "0.0 ns"}}
    assert differences({"written": written, "read": read}) is None
    assert differences({"written": written, "other": {"pace": {"share": 0.05, "spell": "0 ns"}}}) is not None


def test_another_tools_result_has_what_it_reports(one):
    other = ReportedRun("other", {"request_throughput": 3.0, "mean_ttft_ms": 20.0}, RunRecords())
    alone = run_page([other])
    assert alone.answer.startswith("A result of another tool")
    assert [card.title for card in alone.cards] == ["throughput"]
    both = run_page([one, other])
    assert both.answer.endswith(f"Shortest median TTFT: one, {one.summary['median_ttft_ms']:,.1f} ms.")
    assert {row[0].text for row in both.tables[0].rows} >= {"requests/s", "TTFT mean, ms"}


SWEEP = """\
scenario: base.yaml
seeds: [1, 2]
grid:
  prefill.instances, decode.instances: [[1, 2], [2, 1]]
  prefill.pool_tokens: [30000, 60000]
  client.concurrency: [2, 4]
points: [{prefill.instances: 3, decode.instances: 3, client.concurrency: 2, decode.pool_tokens: 64}]
"""
BASE = """\
model: qwen3-0.6b
page_size: 16
prefill: {gpu: h100}
decode: {gpu: h100}
workload: {use: random_lengths, num_requests: 12, input_tokens: 500, output_tokens: 8}
client: {use: closed_loop, concurrency: 2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "base.yaml").write_text(BASE)
    (folder / "points.yaml").write_text(SWEEP + "slos: {chat: ttft < 1 s for 90 %}\n")
    sweep(folder / "points.yaml", out=folder / "out", jobs=1)
    return folder


def test_a_folder_says_what_its_sweep_said(folder):
    again = sweep(folder / "points.yaml", out=folder / "out", jobs=1)
    found = read_sweep(folder / "out")
    assert found.name == again.name
    assert found.slos == again.slos
    assert [point.to_json() for point in found.points] == [point.to_json() for point in again.points]


def test_a_folder_that_lacks_a_run_has_the_other_points(folder, tmp_path):
    copytree(folder / "out", tmp_path / "out")
    plan = list(map(json.loads, (tmp_path / "out" / PLAN).read_text().splitlines()))
    (tmp_path / "out" / "points" / f"{plan[0]['key']}.json").unlink()
    assert len(read_sweep(tmp_path / "out").points) == 8


def test_a_folder_of_an_older_sweep_says_what_to_do(folder, tmp_path):
    copytree(folder / "out", tmp_path / "out")
    (tmp_path / "out" / "sweep.json").unlink()
    with pytest.raises(ConfigError, match=r"has no sweep.json: start its sweep again"):
        read_sweep(tmp_path / "out")


def test_a_sweep_says_what_is_best_and_what_failed(folder):
    page = sweep_page(read_sweep(folder / "out"))
    assert page.answer.startswith("Best for chat: ")
    cost, failed = page.warnings
    assert "only kernels of h100 were measured" in cost
    assert failed.startswith("1 failed: ")
    assert "prefill 1 x TP1 on 1 h100 or prefill 2 x TP1 on 2 h100; decode" in page.setup
    assert [[cell.text for cell in row] for row in page.differences.rows[1:]] == [
        ["decode.instances", "2, 1"],
        ["prefill.pool_tokens", "30000, 60000"],
        ["client.concurrency", "2, 4"],
    ]
    assert names(page) == [
        "pareto",
        "latency-throughput",
        "ttft-throughput",
        "attainment-chat",
        "goodput-chat",
        "map-chat",
        "effects",
        "hits-prefill-pool-tokens",
    ]
    assert len(page.tables[0].rows) == 8
    assert len(page.tables[1].rows) == 3, "the best have a range"
    assert all(" to " in card.note for card in page.cards if card.title != "GPUs")
    render(page)


def test_the_best_point_has_the_requests_of_the_first(folder):
    """Shorter prompts make no cluster better."""
    found = read_sweep(folder / "out")
    best = found.best("chat")[0]
    changed = [
        replace(point, changes={**point.changes, **({"workload.input_tokens": 1} if point is best else {})})
        for point in found.points
    ]
    assert f"point {best.number}" == sweep_page(found).cards[-1].note
    assert f"point {best.number}" != sweep_page(replace(found, points=changed)).cards[-1].note


def test_the_map_hatches_what_has_no_result(folder):
    page = sweep_page(read_sweep(folder / "out"))
    (figure,) = (shown.figure for shown in page.figures if shown.name == "map-chat")
    (ax,) = figure.axes
    assert len(ax.texts) == 2
    assert len([patch for patch in ax.collections if patch.get_hatch()]) == 2


def test_the_map_has_all_results_if_one_of_the_two_numbers_of_servers_varies(folder):
    found = read_sweep(folder / "out")
    points = [replace(one, changes={**one.changes, "decode.instances": 1}) for one in found.points]
    page = sweep_page(replace(found, points=points))
    (shown,) = (shown for shown in page.figures if shown.name == "map-chat")
    (ax,) = shown.figure.axes
    assert shown.title == "Goodput for chat by prefill.pool_tokens and P:D"
    assert len(ax.texts) == 4
    assert not [patch for patch in ax.collections if patch.get_hatch()]


dots = st.lists(st.builds(Dot, st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


@given(dots, st.booleans())
def test_a_frontier_is_what_no_other_point_beats(points, more_x):
    best = frontier(points, more_x=more_x)
    x = 1 if more_x else -1

    def beats(one, other):
        no_worse = x * one.x >= x * other.x and one.y >= other.y
        return no_worse and (one.x, one.y) != (other.x, other.y)

    assert best
    assert not any(beats(one, other) for one in points for other in best)
    assert all(point in best or any(beats(one, point) for one in best) for point in points)
