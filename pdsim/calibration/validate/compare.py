"""Errors of simulated metrics against measured ones."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdsim.calibration.validate.case import Arm, Case
from pdsim.metrics.summary import by_client
from pdsim.scenario.schema import Scenario

Simulate = Callable[[Scenario], Mapping[str, Any]]
"""Runs a scenario and returns its summary: the driver's part, which this room does not see."""


@dataclass(frozen=True)
class MetricError:
    measured: float
    simulated: float
    within: float | None
    """Asked for by the study."""

    @property
    def error(self) -> float:
        """Relative; positive where the simulation is too high."""
        return self.simulated / self.measured - 1 if self.measured else float(self.simulated != self.measured)

    @property
    def is_met(self) -> bool:
        return self.within is None or abs(self.error) <= self.within


@dataclass(frozen=True)
class ArmErrors:
    case: str
    arm: str
    fitted: bool
    metrics: dict[str, MetricError]

    def to_json(self) -> dict[str, Any]:
        metrics = {
            name: {"measured": m.measured, "simulated": m.simulated, "error": m.error}
            for name, m in self.metrics.items()
        }
        return {"case": self.case, "arm": self.arm, "fitted": self.fitted, "metrics": metrics}


def compare_case(case: Case, simulate: Simulate) -> Iterable[ArmErrors]:
    for arm in case.arms:
        simulated = simulated_metrics(case, arm, simulate)
        metrics = {
            name: MetricError(value, simulated[name], arm.within.get(name)) for name, value in arm.measured.items()
        }
        yield ArmErrors(case.name, arm.name, arm.fitted, metrics)


def simulated_metrics(case: Case, arm: Arm, simulate: Simulate, changes: tuple[str, ...] = ()) -> dict[str, float]:
    """Means over the case's seeds, of the metrics that the arm reports."""
    summaries = [by_client(simulate(case.scenario(arm, seed, changes)), case.client) for seed in case.seeds]
    return {name: sum(_value(s, name, case) for s in summaries) / len(summaries) for name in arm.measured}


def _value(summary: Mapping[str, Any], name: str, case: Case) -> float:
    value = summary[name] if name in summary else summary["pdsim"].get(name)
    if value is None:
        raise KeyError(f"case {case.name} measures {name}, which no summary has")
    return float(value)
