"""An SLO has one meaning: runs, plans, sweeps, answers and the web page find the same number and the same verdict."""

import json
from contextlib import closing

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pdsim
from pdsim.cli import main
from pdsim.metrics.records import RequestRecord, RunRecords
from pdsim.metrics.summary import summarize
from pdsim.scenario.building.cluster import requests_of
from pdsim.study.base import AskOptions, base_of
from pdsim.study.points.engine import InProcessEngine, Work
from pdsim.study.points.store import Store
from pdsim.study.sweeping.sweep import sweep
from pdsim.study.trials import Trials
from pdsim.study.verdict.outcome import SATURATED
from pdsim.study.verdict.readings import Times
from pdsim.study.verdict.slo import Slo, Term
from pdsim.study.verdict.tally import MissedError, Tally
from pdsim.web.board import Board
from pdsim.workload.request_spec import RequestSpec
from tests.sweep_files import SCENARIO

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9, 100.0)


def record(number: int, ttft_us: int, decode_us: int, num_tokens: int, *, fails: bool) -> RequestRecord:
    found = RequestRecord(number, 10, num_tokens, 1000 * number)
    found.outcome = "failed" if fails else "finished"
    found.first_token_ns = found.arrival_ns + 1000 * ttft_us
    found.end_ns = found.first_token_ns + (1000 * decode_us if num_tokens > 1 else 0)
    return found


requests = st.lists(
    st.tuples(st.integers(1, 10**7), st.integers(0, 10**7), st.integers(1, 50), st.booleans()), min_size=1, max_size=60
).map(lambda rows: [record(i, a, b, n, fails=fails and i % 3 == 0) for i, (a, b, n, fails) in enumerate(rows)])
terms = st.one_of(
    st.builds(
        lambda metric, limit_ms, percentile: Term(((metric, limit_ms),), percentile),
        st.sampled_from(["ttft", "tpot", "e2e"]),
        st.floats(0.01, 2e4),
        st.sampled_from(PERCENTILES),
    ),
    st.builds(
        lambda ttft_ms, tpot_ms, percentile: Term((("ttft", ttft_ms), ("tpot", tpot_ms)), percentile, is_share=True),
        st.floats(1, 1e4),
        st.floats(0.01, 1e3),
        st.sampled_from(PERCENTILES),
    ),
)


@given(requests, st.sampled_from((90, 95, 99)))
@example([record(0, 1000, 2000, 2, fails=False)], 90)  # two tokens have one gap
def test_a_percentile_is_the_one_that_a_run_prints_unless_requests_fail(made, percent):
    times, summary = Times.of_requests(made), summarize(RunRecords(requests=made))
    for metric in ("ttft", "tpot"):
        found, printed = times.percentile(metric, percent), summary[f"p{percent}_{metric}_ms"] or 0.0
        assert found >= printed if times.num_lost else found == printed
    if not times.num_lost:
        e2e_ms = [(r.end_ns - r.arrival_ns) / 1e6 for r in made]
        assert times.percentile("e2e", percent) == pytest.approx(np.percentile(e2e_ms, percent), rel=1e-12)


@given(requests, terms)
def test_requests_that_fail_are_as_if_they_took_for_ever(made, term):
    slow = [
        record(r.request_id, 10**14, 10**16, max(2, r.num_output_tokens), fails=False) if r.outcome == "failed" else r
        for r in made
    ]
    failed, late = (Slo((term,)).judge_requests(some) for some in (made, slow))
    assert failed.meets == late.meets


@given(requests, st.floats(1, 1e4), st.floats(0.01, 1e3), st.sampled_from(PERCENTILES))
def test_a_count_is_of_requests(made, ttft_ms, tpot_ms, percentile):
    """The order statistic that clusters are ranked by gives the same verdict."""
    term = Term((("ttft", ttft_ms), ("tpot", tpot_ms)), percentile, is_share=True)
    times = Times.of_requests(made)
    within = sum(not term.is_missed(one) for one in made)
    assert term.reading(times).value == 100 * within / len(made)
    assert term.reading(times).is_met == (term.ratio(times) <= 1)


@given(requests, terms)
def test_a_run_that_is_ended_early_misses_it(made, term):
    slo = Slo((term,))
    tally = Tally(slo, [RequestSpec(r.request_id, r.arrival_ns, range(10), range(r.num_output_tokens)) for r in made])
    try:
        for one in made:
            tally(one)
    except MissedError:
        assert not slo.judge_requests(made).meets


def test_none_may_miss_a_p99_of_few_requests_by_much():
    """99 requests of 1 ms and one of 200 ms: p99 is 2.99 ms, everywhere."""
    made = [record(i, 1000 if i else 200_000, 0, 1, fails=False) for i in range(100)]
    for limit_ms, meets in ((2.98, False), (3.0, True)):
        assert Slo.parse(f"ttft p99 < {limit_ms} ms").judge_requests(made).meets == meets
    assert Slo.parse("ttft < 2 ms for 99 %").judge_requests(made).meets


def printed(capsys, *arguments: str) -> str:
    """Output of a command, of whose requests some may fail."""
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(list(arguments))
    return capsys.readouterr().out


LIMITS = "ttft < {} ms and tpot < {} ms for 90 %, ttft p95 < {} ms, itl_p99 p95 < {} ms"


@pytest.mark.parametrize(
    "changes", [(), ("router.shedding={use: queue_limit, max_queued_requests: 1}",), ("client.arrivals.rate=4000 /s",)]
)
def test_commands_agree(changes, tmp_path, capsys):
    """For limits on each side of what is found: the same number and verdict from each of them."""
    path = tmp_path / "base.yaml"
    path.write_text(SCENARIO)
    set_ = [word for change in (*changes, "seed=1") for word in ("--set", change)]
    summary = json.loads(printed(capsys, "run", str(path), *set_, "--json"))
    p95 = summary["p95_ttft_ms"]
    for factor in (0.999, 1.001):
        slo = LIMITS.format(p95 * factor, summary["p95_tpot_ms"], p95 * factor, summary["p99_itl_ms"])
        ran = json.loads(printed(capsys, "run", str(path), *set_, "--slo", slo, "--json"))["pdsim"]["slo"]
        found = [(term["name"], term["value"], term["met"]) for term in ran["terms"]]
        (tmp_path / "sweep.yaml").write_text(
            f"scenario: base.yaml\nseeds: [1]\npoints: [{{page_size: 4}}]\nslos: {{a: '{slo}'}}\n"
        )
        swept = sweep(tmp_path / "sweep.yaml", out=tmp_path / "swept", changes=changes, engine="here")
        (point,) = swept.to_json()["points"]
        assert [(t["name"], t["value"], t["met"]) for t in point["slos"]["a"]["terms"]] == found
        assert point["slos"]["a"]["meets"] == ran["meets"]
        base = base_of(path, AskOptions(), changes, folder=tmp_path, starter={})
        with closing(InProcessEngine()) as engine:
            work = Work(Store(tmp_path / "plan"), engine)
            trials = Trials(base, Slo.parse(slo), 1, work)
            (planned,) = trials.whole([{}])
            assert [(t["name"], t["value"], t["met"]) for t in planned.to_json()["terms"]] == found
            assert (planned.meets, planned.reason == SATURATED) == (ran["meets"], ran["reason"] == SATURATED)
            (early,) = trials.outcomes([{}])
            assert early.meets == ran["meets"]
            server = {"gpu": "h100", "tp": 1, "instances": 1}
            asked = {"kind": "separate", "model": "qwen3-0.6b", "prefill": server, "decode": server}
            num_requests = len(requests_of(base.scenario))
            chosen = {**asked, "router": None, "radix": False, "slo": slo, "first": 1, "count": num_requests}
            shown = Board(base, work, Slo.parse(slo), {}, num_requests).answer(chosen)["slo"]
            assert [(t["values"][0], t["met"][0]) for t in shown] == [(value, met) for _, value, met in found]
        answer = pdsim.ask("routing", path, slo=slo, seeds=1, jobs=1, changes=[*changes, "seed=1"])
        assert answer.percentiles == {"ttft": "p90", "tpot": "p90"}


@pytest.mark.parametrize("text", ["ttft_p99<2s", "TTFT P99 < 2000 ms", "p99 ttft < 2 s", "ttft p99 <= 2 s"])
def test_people_spell_one_percentile_in_many_ways(text: str) -> None:
    assert Slo.of_text(text) == Slo.of_text("ttft p99 < 2 s")


@pytest.mark.parametrize("text", ["ttft p99 < 2 s tpot p99 < 50 ms", "ttft < 2 s tpot < 50 ms for 95 %"])
def test_limits_without_a_comma_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="has two limits: write a comma between them"):
        Slo.of_text(text)


def test_a_percentile_of_a_metric_that_is_itself_a_percentile() -> None:
    assert Slo.of_text("itl_p99 p90 < 30 ms").terms == (Term((("itl_p99", 30.0),), 90.0),)
