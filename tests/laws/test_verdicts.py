"""What counts in a verdict: each request, each run, and each growth of the load on the way."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.study.planning.search import headroom
from pdsim.study.points.result import PointResult, Replication
from pdsim.study.verdict.outcome import SATURATED, Outcome, outcome_of
from pdsim.study.verdict.readings import Times
from pdsim.study.verdict.slo import Slo, Term
from pdsim.study.verdict.tally import MissedError, Tally
from pdsim.workload.request_spec import RequestSpec
from tests.laws.test_slo import record

MS = 10**6


@given(
    st.integers(1, 130) | st.just(100),
    st.integers(1, 1000) | st.integers(1, 100).map(lambda n: 10 * n),
    st.integers(-1, 1),
)
def test_a_share_is_kept_by_no_request_less(num_requests, per_mille, more):
    """In whole numbers: 60 requests at 99 % are all, at 98.3 % are 59. A run ends early exactly if it misses."""
    num_missing = min(num_requests, max(0, num_requests - num_requests * per_mille // 1000 + more))
    made = [record(i, 2000 if i < num_missing else 1, 0, 1, fails=False) for i in range(num_requests)]
    slo = Slo((Term((("ttft", 1.0),), per_mille / 10, is_share=True),))
    meets = 1000 * (num_requests - num_missing) >= per_mille * num_requests
    assert slo.judge_requests(made).meets == meets
    tally, ends_early = Tally(slo, [RequestSpec(r.request_id, r.arrival_ns, range(1), range(1)) for r in made]), False
    try:
        for one in made:
            tally(one)
    except MissedError:
        ends_early = True
    assert ends_early == (not meets)


times = st.tuples(
    st.integers(1, 50),
    st.integers(0, 50),
    st.integers(1, 10),
    st.sampled_from(["finished"] * 5 + ["failed", "unfinished"]),
)


@given(st.lists(times, min_size=1, max_size=40), st.integers(1, 50), st.integers(1, 10), st.sampled_from([50, 95, 100]))
def test_goodput_and_attainment_count_requests_within_both_limits(rows, ttft_ms, tpot_ms, percent):
    """Of a run's records and of its row alike. What failed or has no end is not within them."""
    made = [
        record(i, 1000 * ttft, 1000 * decode, tokens, fails=False) for i, (ttft, decode, tokens, _) in enumerate(rows)
    ]
    for one, (*_, outcome) in zip(made, rows, strict=True):
        one.outcome = outcome
    done = [one for one in made if one.outcome == "finished"]
    end_ns, start_ns = max((one.end_ns for one in done), default=0), min(one.arrival_ns for one in made)
    within = [
        one
        for one in done
        if one.first_token_ns - one.arrival_ns <= ttft_ms * MS
        and one.end_ns - one.first_token_ns <= tpot_ms * MS * (one.num_output_tokens - 1)
    ]
    row = {
        "ttft_ns": [one.first_token_ns - one.arrival_ns for one in done],
        "e2e_ns": [one.end_ns - one.arrival_ns for one in done],
        "output_tokens": [one.num_output_tokens for one in done],
        **{outcome: sum(one.outcome == outcome for one in made) for outcome in ("failed", "unfinished")},
        "classes": None,
        "duration": (end_ns - start_ns) / 1e9 if done else 0.0,
    }
    slo = Slo((Term((("ttft", ttft_ms), ("tpot", tpot_ms)), percent, is_share=True),))
    judged = slo.judge_requests(made)
    assert judged.attained.num_requests == len(made)
    assert judged.attained.share == len(within) / len(made)
    assert judged.attained.goodput_per_s == pytest.approx(len(within) * 1e9 / (end_ns - start_ns) if done else 0)
    assert judged.meets == (100 * len(within) >= percent * len(made))
    assert slo.judge([Times.of_row(row)]) == judged


ROW = {"status": "ok", "completed": 1, "ttft_ns": [1], "e2e_ns": [1], "output_tokens": [1], "failures": ""}
ROW |= {"failed": 0, "unfinished": 0, "classes": None, "duration": 1.0}


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_one_run_that_cannot_take_the_load_is_enough(saturated):
    slo = Slo.parse("ttft p99 < 1 h")
    rows = [{**ROW, "saturated": one} for one in saturated]
    outcome = outcome_of(rows, slo)
    assert (outcome.meets, outcome.reason == SATURATED) == (not any(saturated), any(saturated))
    judged = [Replication(row, {"a": slo.judge([Times.of_row(row)])}) for row in rows]
    assert PointResult(0, {}, judged).meets("a") == outcome.meets


@given(st.integers(0, 20))
def test_failures_are_a_reason_only_where_the_limits_are_missed(num_failed):
    """An SLO of 90 % allows one of ten to fail."""
    times = {name: [1] * 90 for name in ("ttft_ns", "e2e_ns", "output_tokens")}
    row = {**ROW, **times, "completed": 90, "failed": num_failed, "failures": "some failed", "saturated": False}
    outcome = outcome_of([row], Slo.parse("ttft < 1 h and tpot < 1 h for 90 %"))
    assert outcome.meets == (9 * (90 + num_failed) <= 90 * 10)
    assert ("some failed" in outcome.reason) == (not outcome.meets)


@given(st.lists(st.booleans(), max_size=9))
def test_a_load_is_kept_if_all_smaller_ones_are(meets):
    """That a larger one happens to be kept does not count."""
    grown = {
        1 + i / 10: Outcome(meets=one, reason="" if one else "too slow", num_ended=0) for i, one in enumerate(meets, 1)
    }
    kept, breaks = headroom(grown)
    missed = [factor for factor, outcome in grown.items() if not outcome.meets]
    first = min(missed, default=inf)
    assert kept == max((factor for factor in grown if factor < first), default=1.0)
    assert breaks == (f"not {first:g} x" if missed else "")
