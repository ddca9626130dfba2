"""A closed loop's warm-up is left out of what is judged, and of nothing else; equal requests leave lock-step."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim import simulate
from pdsim.cli.obtaining import obtain_runs
from pdsim.cli.runner import run_scenario
from pdsim.metrics.explanation.explain import stage_times
from pdsim.scenario.loading import parse_scenario
from pdsim.show.html.run import ReportedRun, run_page
from pdsim.study.verdict.outcome import outcome_of_run
from pdsim.study.verdict.slo import Slo
from pdsim.study.verdict.tally import MissedError, Tally
from pdsim.workload.client import ClosedLoop, OpenLoop, warm_up_requests
from pdsim.workload.request_spec import RequestSpec
from tests.laws.test_slo import record, requests, terms


def scenario(*, concurrency: int, requests: int, warm_up: int, tokens: int = 1024):
    data = {
        "model": "llama-3.1-8b",
        "prefill": {"gpu": "h100"},
        "decode": {"gpu": "h100"},
        "front_end": {},
        "workload": {"use": "random_lengths", "num_requests": requests, "input_tokens": tokens, "output_tokens": 128},
        "client": {"use": "closed_loop", "concurrency": concurrency, "warm_up_requests": warm_up},
    }
    return parse_scenario(data, base=Path(), where="test")


@given(concurrency=st.integers(1, 12), rounds=st.integers(2, 3), share=st.floats(0, 1))
@settings(max_examples=10)
def test_the_first_requests_are_judged_by_nothing(concurrency, rounds, share):
    warm_up, requests = round(share * concurrency), concurrency * rounds  # no more than half of them
    found = simulate(scenario(concurrency=concurrency, requests=requests, warm_up=warm_up, tokens=256))
    everything = simulate(scenario(concurrency=concurrency, requests=requests, warm_up=0, tokens=256))
    assert found.records.requests == everything.records.requests
    assert found.summary()["completed"] == requests - warm_up
    assert found.summary()["pdsim"].get("warm_up_requests", 0) == warm_up
    first = sorted(everything.records.requests, key=lambda one: (one.arrival_ns, one.request_id))[warm_up:]
    slo = Slo.parse("ttft p99 < 1 s")
    judged = outcome_of_run(found.judged.requests, found.scenario.client, slo)
    assert judged.to_json() == outcome_of_run(first, found.scenario.client, slo).to_json()


@given(st.none() | st.integers(0, 200), st.integers(1, 100), st.integers(0, 400))
def test_by_default_the_first_round_is_left_out_where_there_is_a_second(given_number, concurrency, num_requests):
    found = warm_up_requests(ClosedLoop(concurrency, given_number), num_requests)
    if given_number is not None:
        assert found == min(given_number, num_requests // 2)
    elif concurrency > 1 and num_requests >= 2 * concurrency:
        assert found == concurrency
    else:
        assert found == 0
    assert warm_up_requests(OpenLoop(), num_requests) == 0


@given(requests, terms, st.integers(0, 20), st.randoms())
def test_a_run_that_is_ended_early_misses_it_without_its_warm_up(made, term, num_left_out, random):
    """In whatever order requests end."""
    slo = Slo((term,))
    tally = Tally(slo, [RequestSpec(r.request_id, 0, range(9), range(r.num_output_tokens)) for r in made], num_left_out)
    judged = made[num_left_out:]
    ended = random.sample(made, len(made))
    try:
        for one in ended:
            tally(one)
    except MissedError:
        assert not slo.judge_requests(judged).meets


def test_a_run_is_ended_as_soon_as_a_request_behind_the_warm_up_misses():
    slo = Slo.parse("ttft < 2 ms for 100 %")
    made = [record(i, 9000, 0, 1, fails=False) for i in range(40)]
    tally = Tally(slo, [RequestSpec(r.request_id, 0, range(9), range(1)) for r in made], 16)
    for one in made[:16]:
        tally(one)
    with pytest.raises(MissedError):
        tally(made[16])


def test_pages_and_folders_leave_out_what_the_summary_leaves_out(tmp_path):
    kept = tmp_path / "kept"
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: kept\nmodel: qwen3-0.6b\nprefill: {gpu: h100}\ndecode: {gpu: h100}\n"
        "workload: {use: random_lengths, num_requests: 40, input_tokens: 4000, output_tokens: 20}\n"
        "client: {use: closed_loop, concurrency: 10}\n"
    )
    finished = run_scenario(file, (), kept, quiet=True)
    assert finished.summary["pdsim"]["warm_up_requests"] == 10
    (stored,) = obtain_runs((kept,), (), None, quiet=True)
    latency_ms = finished.summary["mean_e2e_latency_ms"]
    for one in (finished, stored):
        assert len(one.records.requests) == 40
        assert len(one.judged.requests) == finished.summary["completed"] == 30
        assert sum(stage.mean_ms for stage in stage_times(one.judged)) == pytest.approx(latency_ms)
    assert "10 left out as warm-up" in run_page([ReportedRun("kept", stored.summary, stored.records)]).subtitle


@given(concurrency=st.integers(1, 12), ramp_ms=st.integers(1, 3000))
@settings(max_examples=8)
def test_sessions_in_flight_rise_by_one_in_equal_steps(concurrency, ramp_ms):
    """At each time as many are in flight as have begun, none more, until too few requests are left."""
    made = scenario(concurrency=concurrency, requests=3 * concurrency, warm_up=0, tokens=256)
    client = ClosedLoop(concurrency, 0, ramp_ns=ramp_ms * 1_000_000)
    done = simulate(made.model_copy(update={"client": client})).records.requests
    step_ns = client.ramp_ns / max(1, concurrency - 1)
    begins = [round(i * step_ns) for i in range(concurrency)]
    sent = sorted(one.arrival_ns for one in done)
    at_end = [one.end_ns for one in done]
    assert len(sent) == 3 * concurrency
    for place, time_ns in enumerate(sent):
        num_open = sum(begin_ns <= time_ns for begin_ns in begins)
        num_ended = sum(end_ns <= time_ns for end_ns in at_end)
        assert place < num_open + num_ended
    for place, begin_ns in enumerate(begins):
        num_ended = sum(end_ns < begin_ns for end_ns in at_end)
        assert sum(time_ns <= begin_ns for time_ns in sent) >= min(len(sent), place + 1 + num_ended) - 1


@pytest.mark.parametrize("concurrency", [32, 64])
def test_equal_requests_are_not_sent_together_for_long(concurrency):
    """A real SGLang pair had groups of 1 to 8 requests from its second round on; at first all were sent at once."""
    found = simulate(scenario(concurrency=concurrency, requests=6 * concurrency, warm_up=0))
    arrivals = sorted(request.arrival_ns for request in found.records.requests)[concurrency:]
    groups, size = [], 1
    for earlier, later in pairwise(arrivals):
        if later - earlier < 4_000_000:
            size += 1
        else:
            groups.append(size)
            size = 1
    assert max(groups) <= 8
