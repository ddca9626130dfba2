"""One arm against the others, in words."""

from collections.abc import Sequence

from pdsim.study.questions.study import Study
from pdsim.study.questions.words import is_told_apart, times


def others_against(study: Study, best: str, others: Sequence[str], field: str, what: str) -> list[str]:
    """Which of the others cannot be told apart from the best, and how many times as much each other one has.

    One that misses the SLO, which the best meets, is told apart by that.
    """
    steady = study.steady(others)
    ratios = {label: study.ratio(label, best, field) for label in steady if best in study.steady([best])}
    equal = [label for label in ratios if not is_told_apart(ratios[label]) and study.meets(label) == study.meets(best)]
    found = [f"{' and '.join(equal)} cannot be told apart from it"] if equal else []
    found += [f"with {label} {what} is {times(ratios[label])} that" for label in ratios if label not in equal]
    return found + [f"{label} is saturated" for label in others if label not in steady]
