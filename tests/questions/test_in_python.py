"""An answer as Python has it: what the command prints, as a table, and as a figure."""

import json
from math import isnan

import pytest

from pdsim import ask, simulate
from pdsim.cli import main
from pdsim.study.base import ROUTERS

CHANGES = [
    "model=qwen3-0.6b",
    "page_size=16",
    "cost=roofline",
    "workload.num_requests=60",
    "workload.input_tokens={use: uniform, low: 3200, high: 4800}",
    "workload.output_tokens={use: uniform, low: 20, high: 40}",
    "client={use: open_loop, arrivals: {use: poisson, rate: 120/s}}",
]
"""More than 1P3D can take."""


@pytest.fixture(scope="module")
def made():
    return ask("pd-ratio", changes=CHANGES, seeds=2, jobs=1)


def test_python_and_the_command_give_the_same_answer(made, capsys):
    sets = [word for change in CHANGES for word in ("--set", change)]
    with pytest.raises(SystemExit):
        main(["ask", "pd-ratio", *sets, "--seeds", "2", "--jobs", "1", "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(made.to_json()))


def test_the_table_has_the_means(made):
    pytest.importorskip("pandas")
    assert list(made.table.columns) == [*made.titles[1:-1], "remark"]
    for row in made.rows:
        found = made.table.loc[row.arm]
        assert found["remark"] == row.remark
        for name, value in row.estimates.items():
            mean = found[made.title(name)]
            assert isnan(mean) if value is None else mean == value.mean
    arms = {f"{split}, {router}": split == "1P3D" for split in ("1P3D", "2P2D", "3P1D") for router in ROUTERS}
    assert made.table.isna().any(axis=1).to_dict() == arms


def test_the_figure_has_a_panel_for_each_number_and_a_mark_for_each_arm(made):
    panels = made.figure.axes
    assert [panel.get_title() for panel in panels] == made.titles[1:-1]
    for panel in panels:
        filled = [one.lines[0].get_markerfacecolor() != "white" for one in panel.containers]
        written = len(panel.texts)
        assert len(filled) + written == len(made.rows)
        assert sum(filled) == 1


def test_jupyter_shows_what_the_page_says_without_a_figure_that_it_does_not_have(made):
    shown = made._repr_markdown_()
    assert made.to_markdown().startswith(f"# {made.asks}\n\n{shown}")
    assert "answer.png" not in shown
    assert {made.load, f"**{made.text}**"} <= set(shown.split("\n\n"))
    assert all(remark in shown for remark in made.remarks())


def test_the_run_of_an_answer_is_that_of_its_recommended_arm(made):
    (winner,) = [row for row in made.rows if row.arm == made.winner]
    ran = made.run.scenario
    router = winner.changes["router"]
    assert f"{ran.prefill.instances}P{ran.decode.instances}D, {router}" == winner.arm
    assert type(ran.router.prefill).__name__ == router.title().replace("_", "")
    assert made.run.records.levels
    assert simulate(made.run.scenario).summary()["mean_ttft_ms"] == made.run.summary()["mean_ttft_ms"]
