"""Examines a cluster that a plan or an answer names: how requests fare alone, and what to measure."""

from collections.abc import Callable, Sequence

from pdsim.metrics.records import RequestRecord
from pdsim.scenario.loading import Changes
from pdsim.sim.simulation import simulate
from pdsim.study.measurement import Measurement, measurement
from pdsim.study.trials import Trials


def requests_alone(trials: Trials, changes: Changes) -> Sequence[RequestRecord]:
    """Records of the same requests, sent one at a time, so that no request waits for another."""
    return simulate(trials.scenario(trials.base.one_at_a_time(changes))).records.requests


def deciding_measurement(
    trials: Trials, changes: Changes, holds: Callable[[Sequence[Changes]], bool]
) -> Measurement | None:
    """The measurement of those step times on which the finding depends; of all unmeasured ones if none decides alone.

    holds: Says whether the finding is the same under each of the changes to the two ends of one group of times.
    None: all step times were measured on a server.
    """
    base = trials.base
    deciding = [group for group, ends in base.alone.items() if not holds(ends)]
    return measurement(deciding or base.scenario.uncertain, base.scenario, trials.sizes(changes))
