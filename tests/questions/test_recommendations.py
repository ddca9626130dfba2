"""What is recommended meets the SLO, and what an answer shows is about that SLO and all of the load."""

import json
import re
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdsim
from pdsim.cli import main
from pdsim.metrics.summary import tpot_ms, ttft_ms
from pdsim.scenario import starter
from pdsim.show.terminal.studies import EXAMPLE, print_answer
from pdsim.study import base
from pdsim.study.points.estimate import Estimate
from pdsim.study.questions import load
from pdsim.study.questions.study import QUESTIONS, Study
from tests.questions.test_questions import SCENARIO

BURSTY = SCENARIO.replace(
    "client: {use: closed_loop, concurrency: 8}",
    "client: {use: open_loop, arrivals: {use: gamma, rate: 20/s, burstiness: 0.2}}",
).replace("num_requests: 24", "num_requests: 60")


@pytest.fixture
def ask(tmp_path):
    path = tmp_path / "bursty.yaml"
    path.write_text(BURSTY)

    def asked(name, *changes, seeds=1, ttft_ms=2000, tpot_ms=50, percent=99, **options):
        slo = f"ttft < {ttft_ms} ms and tpot < {tpot_ms} ms for {percent} %"
        return pdsim.ask(name, path, changes=changes, seeds=seeds, jobs=1, slo=slo, **options)

    return asked


def attained(made):
    """By arm of the question's own load."""
    rows = [row for row in made.rows if row.estimates.get("attained") and "," not in row.arm]
    return {row.arm: row.estimates["attained"].mean / 100 for row in rows}


OF_OWN_SCENARIOS = {"priorities", "local-prefill", "elastic"}
"""They need classes of requests, vLLM's instances, or time for changes."""


@pytest.mark.parametrize(
    ("name", "ttft_ms"),
    [*zip([n for n in QUESTIONS if n not in OF_OWN_SCENARIOS], cycle([60, 150])), ("capacity", 10), ("capacity", 150)],
)
def test_nothing_that_misses_the_slo_is_recommended(ask, name, ttft_ms):
    made = ask(name, ttft_ms=ttft_ms)
    (winner,) = [row for row in made.rows if row.arm == made.winner]
    if made.is_recommended:
        assert attained(made)[made.winner] >= 0.99
        assert winner.remark == ""
    elif name == "explain-ttft":
        assert made.to_json()["recommendation"] is None
        assert any("misses the SLO" in note for note in made.notes) == (attained(made)[made.winner] < 0.99)
    else:
        nothing = f"Nothing here meets the SLO. The nearest is '{made.winner}': "
        assert made.text.startswith("The cluster misses the SLO even at the low" if name == "capacity" else nothing)
        assert made.to_json()["recommendation"] is None
        assert max(attained(made).values()) < 0.99 or name == "transport", "links are another series"
        assert made.limit is not None, "it says because of what"


@pytest.mark.parametrize(
    "arrivals", ["gamma, rate: 20/s, burstiness: 0.2", "bursts, rate: 20/s, burst_factor: 4", "poisson, rate: 20/s"]
)
def test_capacity_changes_the_rate_alone(tmp_path, arrivals):
    path = tmp_path / "scenario.yaml"
    path.write_text(
        SCENARIO.replace("use: closed_loop, concurrency: 8", f"use: open_loop, arrivals: {{use: {arrivals}}}")
    )
    asked = base.base_of(path, base.AskOptions(), (), folder=tmp_path, starter={})
    study = SimpleNamespace(arms=[], base=asked, mean=lambda *_: 10.0)
    first = asked.changed(load.rates(study)[0].changes)
    assert first.client.arrivals == replace(asked.scenario.client.arrivals, rate_per_s=5.0)


class Told(Study):
    """Of arms whose numbers are made up."""

    def __init__(self, arms):
        self.told = arms

    def __getitem__(self, label):
        return SimpleNamespace(is_saturated=False, num_gpus=1)

    def meets(self, label):
        return self.attained(label) >= 0.9

    def attained(self, label):
        return self.told[label][0]

    def goodput(self, label):
        return self.told[label][1]

    def metric(self, label, name):
        return Estimate(self.told[label][2], None)

    def failed_share(self, label):
        return 0.0


SHARES = st.floats(0, 1)


@given(st.lists(st.tuples(SHARES, SHARES, SHARES), min_size=1, max_size=5))
def test_the_best_meets_the_slo_if_any_does_and_else_is_the_nearest(arms):
    study = Told(dict(enumerate(arms)))
    best = study.best(study.told)
    if any(map(study.meets, study.told)):
        assert study.meets(best)
        assert all(study.goodput(best) >= 0.98 * study.goodput(arm) for arm in study.told if study.meets(arm))
    else:
        assert study.attained(best) == max(map(study.attained, study.told))


def between_tails(made, left, right):
    """A TTFT that one of two arms attains."""
    return sum(row.estimates["tail_ttft"].mean for row in made.rows if row.arm in {left, right}) / 2


def test_one_of_two_that_meets_the_slo_is_not_the_same(ask):
    """More prefill instances are as good in goodput, and in the tail they are not."""
    loose = ask("pd-ratio")
    ttft_ms = between_tails(loose, "2P2D", "3P1D")
    strict = ask("pd-ratio", ttft_ms=ttft_ms)
    assert strict.winner == "3P1D"
    assert "no other ratio meets the SLO" in strict.text
    loose = ask("pd-or-not")
    arms = {row.arm: row.estimates["tail_ttft"].mean for row in loose.rows if "," not in row.arm}
    first, second = sorted(arms, key=arms.get)[:2]
    strict = ask("pd-or-not", ttft_ms=(arms[first] + arms[second]) / 2)
    assert strict.winner == first
    assert "same goodput" not in strict.text
    assert f"{first} meets the SLO with" in strict.text


def test_a_miss_says_by_how_much(ask):
    made = ask("pd-ratio", ttft_ms=10)
    tail = next(row.estimates["tail_ttft"].mean for row in made.rows if row.arm == made.winner)
    (told,) = re.findall(r"TTFT p99 is ([\d.]+) ms \(limit 10 ms\)", made.text)
    assert float(told) == pytest.approx(tail, rel=0.01)
    assert "(99 % asked)" in made.text


def test_the_percentile_and_the_share_of_the_slo_are_shown(ask):
    made = ask("pd-ratio", percent=95, ttft_ms=60, tpot_ms=5.2)
    assert {"TTFT, p95, ms", "TPOT, p95, ms", "meet SLO, %"} <= set(made.titles)
    requests = made.run.records.requests
    (row,) = [row for row in made.rows if row.arm == made.winner]
    for column, time in (("tail_ttft", ttft_ms), ("tail_tpot", tpot_ms)):
        assert row.estimates[column].mean == pytest.approx(np.percentile([time(r) for r in requests], 95))
    met = sum(ttft_ms(r) <= 60 and tpot_ms(r) <= 5.2 for r in requests)
    assert row.estimates["attained"].mean == pytest.approx(100 * met / 60)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("arrival_s,in_tokens,out_tokens\n" + "".join(f"{i / 10},500,20\n" for i in range(60)))
    return path


def test_a_trace_is_used_whole_or_the_first_line_says_what_was_used(trace, monkeypatch):
    def load(*changes):
        small = ("model=qwen3-0.6b", "prefill.instances=1", "decode.instances=1")
        return pdsim.ask("pd-ratio", trace=trace, changes=(*small, *changes), seeds=1, jobs=1).load

    assert "; 60 requests of 500 tokens in" in load()
    assert "; the first 20 requests of a trace of 60 lines, of 500 tokens in" in load("workload.num_requests=20")
    assert starter._NUM_OF_TRACE >= 3000
    monkeypatch.setattr(starter, "_NUM_OF_TRACE", 50)
    assert "; the first 50 requests of a trace of 60 lines, of" in load()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["pd-ratio", "staging-ring", "explain-ttft"])
def test_an_answer_fits_the_terminal(ask, name, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    made = ask(name, seeds=2)
    print_answer(made)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for row in made.rows:
        (line,) = [line for line in lines if line.strip().startswith(f"{row.arm}  ")]
        assert line.rstrip().endswith(row.remark)
        assert all(cell.partition(" ±")[0] in line for cell in made.cells(row)[1:5]), "four numbers, or more"


def test_ask_alone_lists_the_questions_and_an_example_that_can_be_asked(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["ask"])
    out = capsys.readouterr().out
    assert all(name in out for name in QUESTIONS)
    assert max(map(len, out.splitlines())) <= 80
    assert f"For example: {EXAMPLE}\n" in out
    with pytest.raises(SystemExit) as stop:
        main([*EXAMPLE.split()[1:], "--set", "workload.num_requests=100", "--seeds", "1", "--jobs", "1", "--json"])
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out)["recommendation"]
