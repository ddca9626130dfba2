"""Judges runs by an SLO. If a verdict is close, repetitions of the run are judged, too. The result also has the
verdicts on runs with the fastest and the slowest step times.
"""

from collections.abc import Sequence

from pdsim.cli.finished import progress_over
from pdsim.metrics.explanation.failures import failure_text
from pdsim.scenario.building.cluster import build
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.cost import ENDS
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, Simulation
from pdsim.sim.uncertainty.noise import JITTERS, jittered
from pdsim.study.verdict.confidence import Examined
from pdsim.study.verdict.outcome import Outcome, outcome_of_run
from pdsim.study.verdict.slo import Slo


class Judge:
    """Decides whether runs of one scenario meet an SLO."""

    def __init__(self, slo: Slo, scenario: Scenario) -> None:
        self._slo = slo
        self._scenario = scenario
        self.needs_own_itl = slo.needs_own_itl
        """True: the SLO limits gaps between the tokens of single requests, which runs must then record."""

    def verdict(self, result: RunResult) -> Outcome:
        """Judges a run by the SLO."""
        failure = failure_text(result.summary())
        return outcome_of_run(result.judged.requests, result.scenario.client, self._slo, failure)

    def examined(self, result: RunResult, at_ends: Sequence[Outcome], *, interrupted: bool, quiet: bool) -> Examined:
        """Judges a run. Repeats the run with slightly faster and slower messages if its verdict is close (is_near) and
        the user did not interrupt the run. at_ends: outcomes with the fastest and the slowest step times, in this
        order; empty: there is no range. quiet: True: no progress is shown.
        """
        own = self.verdict(result)
        repeated = self._repeated(quiet=quiet) if own.is_near and not interrupted else []
        return Examined(own, dict(zip(ENDS, at_ends, strict=False)), repeated)

    def _repeated(self, *, quiet: bool) -> list[Outcome]:
        """Outcomes of repeated runs of the scenario, in which messages between instances are slightly faster or slower
        (JITTERS).
        """
        observation = Observation(own_itl=self.needs_own_itl)
        with progress_over("repetitions", len(JITTERS), quiet=quiet) as advance:
            found = []
            for cluster in jittered(lambda: build(self._scenario)):
                found.append(self.verdict(Simulation(cluster, observation).run()))
                advance()
        return found
