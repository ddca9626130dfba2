"""An answer says whether it holds at the ends of a cost that no server was measured for."""

import pytest

from pdsim import ask
from pdsim.study.questions.answering import _held
from pdsim.study.questions.question import Verdict

CHANGES = ["model=qwen3-0.6b", "workload.num_requests=20", "workload.input_tokens=200", "workload.output_tokens=10"]


def verdict(winner: str) -> Verdict:
    return Verdict(winner, f"Use '{winner}'", "", [])


@pytest.mark.parametrize(("cost", "num_told"), [("kernels", 1), ("roofline", 0)])
def test_the_range_is_asked_where_no_server_was_measured(cost, num_told):
    made = ask("pd-ratio", changes=[*CHANGES, f"cost={cost}"], seeds=1, jobs=1)
    assert sum("server that this may be" in note for note in made.notes) == num_told


def test_an_answer_that_holds_and_one_that_does_not():
    (holds,) = _held(verdict("3P1D"), {"fastest": verdict("3P1D"), "slowest": verdict("3P1D")})
    assert holds == "'3P1D' on the fastest and on the slowest server that this may be, too."
    (undecided,) = _held(verdict("3P1D"), {"fastest": verdict("2P2D"), "slowest": verdict("3P1D")})
    assert undecided.startswith("Undecided: it is '2P2D' on the fastest server that this may be.")
    assert _held(verdict("3P1D"), {}) == []
