"""An answer says whether it holds at the ends of times that nobody measured, and if not, what to measure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim import ask
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.sections.cost import GROUPS
from pdsim.study.measurement import Sizes, measurement, rounded
from tests.support import examples

SIZES = ["workload.num_requests=20", "workload.input_tokens=200", "workload.output_tokens=10"]
CHANGES = ["model=qwen3-0.6b", *SIZES]
LOOSE_MS = 1e6


def asked(*changes, ttft_ms=LOOSE_MS, tpot_ms=LOOSE_MS):
    slo = f"ttft < {ttft_ms} ms and tpot < {tpot_ms} ms for 90 %"
    return ask("pd-ratio", changes=[*CHANGES, *changes], seeds=1, jobs=1, slo=slo)


@pytest.mark.parametrize(("cost", "num_told"), [("kernels", 1), ("roofline", 0)])
def test_the_range_is_asked_where_no_server_was_measured(cost, num_told):
    made = asked(f"cost={cost}")
    assert sum("at both ends of the predicted range, too" in note for note in made.notes) == num_told
    assert sum("at both ends of the predicted range: " in remark for remark in made.remarks()) == num_told


def test_every_arm_has_its_range_around_its_numbers():
    for row in asked().rows:
        assert row.ranges["tail_ttft"][0] < row.estimates["tail_ttft"].mean < row.ranges["tail_ttft"][1]


def test_which_layout_is_better_is_not_known_where_ranges_overlap():
    """Splits of prefill's GPUs are other layouts; ratios of instances with one TP size are not."""
    changes = [*CHANGES, "prefill.instances=2", "decode.instances=1"]
    made = ask("prefill-split", changes=changes, seeds=1, jobs=1, slo=f"ttft < {LOOSE_MS} ms for 90 %")
    (note,) = (note for note in made.notes if "overlap: which of the two layouts is better is not known" in note)
    winner, other = (next(row for row in made.rows if row.arm == name) for name in note.split("'")[1:4:2])
    assert winner.arm == made.winner
    assert other.ranges["tail_ttft"][0] < winner.ranges["tail_ttft"][1]
    assert note in made.confidence.reason
    assert not any("overlap" in note for note in asked().notes)


@pytest.mark.parametrize(
    ("group", "time", "factor", "front_end"),
    [("outside", "ttft", 1.5, "dynamo"), ("decode", "tpot", 1.05, "engine")],
)
def test_what_decides_is_named_and_decides(group, time, factor, front_end):
    """The SLO is met at the best known times, and missed at the slowest of one group."""
    tail = f"tail_{time}"
    before = f"front_end={front_end}"
    loose = asked(before)
    best = {row.arm: row.estimates[tail].mean for row in loose.rows}[loose.winner]
    slo = {f"{time}_ms": factor * best}
    made = asked(before, **slo)
    (undecided,) = (note for note in made.notes if note.startswith("The predicted range does not decide"))
    what = {
        "outside": "Measure TTFT of one short prompt: pdsim observe URL (10 minutes).",
        "decode": "Measure decode of ",
    }
    assert what[group] in undecided
    assert made.is_recommended
    for other in GROUPS:
        there = asked(before, f"corner.{other}=slowest", **slo)
        assert there.is_recommended == (other != group)


def scenario(model):
    server = {"gpu": "h200"}
    workload = {"use": "random_lengths", "num_requests": 1, "input_tokens": 1, "output_tokens": 1}
    data = {"model": model, "prefill": server, "decode": server, "workload": workload}
    return parse_scenario(data, base=".", where="test")


def test_a_measurement_has_its_command():
    sizes = Sizes(prompt_tokens=4096, batch=15.6, context_tokens=4200)
    told = measurement(["decode", "prefill"], scenario("qwen3-8b"), sizes)
    assert str(told) == (
        "Measure prefill of 4,100 tokens and decode of 16 requests with 4,200 tokens each: "
        "pdsim observe URL --longest-prompt 4100 --concurrency 16 (10 minutes), "
        "or on a GPU of your own: pdreal measure --model qwen3-8b --only prefill,decode."
    )
    assert not measurement(["prefill"], scenario("gpt-oss-120b"), sizes).own_gpu
    assert measurement([], scenario("qwen3-8b"), sizes) is None


@examples(100)
@given(st.floats(1, 1e6))
def test_a_rounded_size_reaches_what_is_asked(tokens):
    assert tokens <= rounded(tokens) <= 1.2 * tokens + 1
