"""The confidence in a verdict on an SLO (high, medium or low) with its reason, and a text on how much of the result is
chance.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pdsim.scenario.schema import Scenario
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.study.verdict.outcome import Outcome
from pdsim.study.verdict.readings import Reading

END = {"fastest": "fast", "slowest": "slow"}
"""Words that texts use for the two ends of the range of step times."""
NOT_MEASURED = "No server of this kind was measured; step times come from single kernels."


class Confidence(NamedTuple):
    word: str
    """high, medium or low."""
    reason: str
    """One or more sentences that say why the confidence is high, medium or low."""


def confidence(
    subject: str,
    runs: Sequence[Outcome],
    ends: Mapping[str, Outcome],
    *,
    foreign_setup: Sequence[str],
    is_measured: bool,
    instead: str = "",
) -> Confidence:
    """Confidence in the verdict on one cluster: high, medium or low, with its reason.

    subject: name of the cluster in the text. runs: outcomes of the cluster's run, and of repetitions with slightly
    faster and slower messages, in this order. ends: outcomes with the fastest and slowest step times, by "fastest" and
    "slowest"; empty if step times were measured on a server, or the range was not simulated. foreign_setup: differences
    between the cluster's servers and the measured server, as texts. is_measured: step times were measured on a server.
    instead: sentence that recommends another choice; the reason ends with this sentence if the verdict differs at an
    end of the range.
    """
    meets = runs[0].meets
    if any(one.meets != meets for one in runs):
        return Confidence("low", f"The verdict depends on chance. {by_chance(runs)}")
    if foreign_setup:
        return _of_setup(foreign_setup)
    if not ends:
        return without_range(is_measured=is_measured)
    says = f"{subject} {'meets' if meets else 'misses'} the SLO"
    others = [end for end, one in ends.items() if one.meets != meets]
    if not others:
        return Confidence("medium", f"{NOT_MEASURED} {says} at both ends of the predicted range.")
    opposite = f"{subject} {'misses' if meets else 'meets'} the SLO"
    where = " and ".join(f"at the {END[end]} end of the range" for end in others)
    return Confidence("low", f"{NOT_MEASURED} {opposite} {where}. {instead}".rstrip())


def confidence_in_numbers(scenario: Scenario, *, has_range: bool = True) -> Confidence:
    """Confidence in the numbers of a run for which the user gave no SLO. has_range: True: the scenario was also
    simulated with the fastest and the slowest step times that measured kernels allow. Step times that were measured on
    a server need no range.
    """
    if scenario.foreign_setup:
        return _of_setup(scenario.foreign_setup)
    if scenario.uncertain and has_range:
        return Confidence(
            "medium", f"{NOT_MEASURED} The range goes from the fastest to the slowest server that these times allow."
        )
    return without_range(is_measured=scenario.cost.measured is not None)


def _of_setup(foreign_setup: Sequence[str]) -> Confidence:
    return Confidence("medium", f"The profile was measured on another setup: {'; '.join(foreign_setup)}.")


def without_range(*, is_measured: bool) -> Confidence:
    """Confidence in a prediction that has no range of step times. is_measured: step times were measured on a server."""
    if is_measured:
        return Confidence("high", "Step times were measured on a server.")
    return Confidence("low", "Step times were not measured on a server, and there is no range.")


def limit_rows(readings: Sequence[Reading], ends: Sequence[Sequence[Reading]]) -> list[list[str]]:
    """Rows of a table of limits: name, limit, and predicted value. readings: a run's values of the numbers that the SLO
    limits. ends: the same numbers with the fastest, and with the slowest step times; if given, each row also has the
    range.
    """
    return [
        [one.name, one.limit_text, one.value_text, *([range_of([end[place] for end in ends])] if ends else [])]
        for place, one in enumerate(readings)
    ]


def by_chance(runs: Sequence[Outcome]) -> str:
    """A sentence on chance: for each number that the SLO limits, the smallest and largest value over the runs of one
    cluster, and how many of these runs meet the SLO. runs: outcomes of the cluster's run, and of its repetitions with
    slightly faster and slower messages.
    """
    names = [one.name for one in runs[0].readings]
    bands = [f"{name} is {band}" for name, band in zip(names, by_chance_each(runs), strict=False)]
    meeting = f"{sum(one.meets for one in runs)} of {len(runs)} runs meet the SLO"
    return f"With messages up to {max(JITTERS):.0%} faster or slower, {', '.join(bands)}: {meeting}."


def by_chance_each(runs: Sequence[Outcome]) -> list[str]:
    """For each number that the SLO limits: a text with the smallest and largest value over the runs. Empty: one of the
    runs failed or ended early.
    """
    same = zip(*(one.readings for one in runs), strict=False)
    return [range_of(sorted(readings, key=lambda one: one.value)) for readings in same]


def range_of(ranked: Sequence[Reading]) -> str:
    """Text from the first to the last of the readings, such as "1.20 s to 1.40 s". Keeps the order of `ranked`. If
    the first and the last have the same text, this text alone.
    """
    first, last = (one.value_text for one in (ranked[0], ranked[-1]))
    return first if first == last else f"{first} to {last}"


class Examined(NamedTuple):
    """A run under an SLO: its outcome, and the other outcomes on which the confidence depends."""

    outcome: Outcome
    """Outcome of the run itself."""
    ends: Mapping[str, Outcome]
    """Outcomes with the fastest and slowest step times, by "fastest" and "slowest". Empty: step times were measured on
    a server, the user wants no range, or the user interrupted the run.
    """
    repeated: Sequence[Outcome]
    """Outcomes with slightly faster and slower messages. Empty: no number is near its limit, or the user interrupted
    the run.
    """

    @property
    def runs(self) -> list[Outcome]:
        return [self.outcome, *self.repeated]

    def confidence(self, scenario: Scenario) -> Confidence:
        foreign, is_measured = scenario.foreign_setup, scenario.cost.measured is not None
        return confidence("The cluster", self.runs, self.ends, foreign_setup=foreign, is_measured=is_measured)

    def to_json(self) -> dict[str, Any]:
        found = {**self.outcome.to_json(), "ends": {end: one.to_json() for end, one in self.ends.items()}}
        if self.repeated:
            found |= {"runs": len(self.runs), "runs_that_meet": sum(one.meets for one in self.runs)}
        return found
