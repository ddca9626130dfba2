"""A study with measurements: `measured.yaml` in the folder of a scenario.

scenario: scenario.yaml
source: origin of the numbers
client: aiperf             client whose definitions the metrics follow
engine: SGLang 0.5.12      measured engine and release, if known
front_end: dynamo          kind of front end before the engine; arms may have an engine and a front_end of their own
seeds: [1, 2, 3]           simulated values are means over these
arms:
  baseline:
    set: [decode.radix_cache=false]
    fitted: true           the profile was fitted to this arm; arms without this line are predictions
    skip: 16               the first requests to arrive are left out of both sides
    runs: [{id: "12486", request_throughput: 1.2433, ...}, ...]
    within: {request_throughput: 3 %}    accepted errors, if the study has any

Cost settings can be fitted to the metrics of one arm, with the `calibrate` extra (scipy).
"""

from collections.abc import Callable, Iterable, Mapping
from math import exp, log
from pathlib import Path
from typing import Any, get_args

from pdsim.dataclass import dataclass
from pdsim.inputs import finite, shown
from pdsim.metrics.summary import Client, by_client
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.cost import reached
from pdsim.scenario.sections.profile import origin
from pdsim.scenario.yaml_file import ConfigError, did_you_mean, read_yaml, to_yaml

MEASURED = "measured.yaml"


@dataclass(frozen=True)
class MeasuredArm:
    name: str
    """Name of the measured configuration."""
    changes: tuple[str, ...]
    """Changes of the scenario that make the configuration, in the notation of --set."""
    fitted: bool
    """True: the arm's profile was fitted to the arm's own measurements. False: the simulation predicts the
    measurements.
    """
    runs: tuple[dict[str, float], ...]
    """The metrics of repeated measurements of the same configuration, one mapping per run."""
    within: dict[str, float]
    """Largest relative error that the study accepts, by metric; 0.03 is 3 %. A metric that is missing may have any
    error.
    """
    skip: int = 0
    """Number of requests, the first to arrive, that measured and simulated metrics leave out."""
    engine: str = ""
    """Name and release of the engine that was measured."""
    front_end: str = "engine"
    """Kind of the front end through which clients reached the measured server. "engine": the study names none."""

    @property
    def measured(self) -> dict[str, float]:
        """For each metric: its mean over the runs that report it."""
        names = dict.fromkeys(name for run in self.runs for name in run)
        values = {name: [run[name] for run in self.runs if name in run] for name in names}
        return {name: sum(v) / len(v) for name, v in values.items()}


@dataclass(frozen=True)
class MeasuredCase:
    name: str
    """Name of the case: its folder's name."""
    scenario_path: Path
    """Path of the scenario file. Each measured configuration (arm) may change this scenario."""
    client: Client
    """Benchmark client whose definitions the measured metrics follow. Simulated metrics follow the same definitions."""
    seeds: tuple[int, ...]
    """Seeds of random numbers. Each configuration is simulated once with each seed. Its simulated values are means over
    the seeds.
    """
    arms: tuple[MeasuredArm, ...]
    """The measured configurations."""

    def scenario(self, arm: MeasuredArm, seed: int, changes: tuple[str, ...] = ()) -> Scenario:
        return load_scenario(self.scenario_path, (*arm.changes, *changes, f"seed={seed}"))


def find_cases(names: tuple[str, ...], experiments: Path) -> list[MeasuredCase]:
    """The cases with these names, each a folder in `experiments` or a path. Without names: all cases in
    `experiments`.
    """
    known = sorted(path.parent for path in experiments.glob(f"*/{MEASURED}"))
    if not names:
        if not known:
            raise ConfigError(f"no case in {experiments}/, a folder of pdsim's repository: a case has a {MEASURED}")
        return [load_case(folder) for folder in known]
    return [load_case(_folder(name, experiments, [path.name for path in known])) for name in names]


def load_case(folder: Path) -> MeasuredCase:
    path = folder / MEASURED
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping, found {type(data).__name__}")
    for field in ("scenario", "source", "arms"):
        if field not in data:
            raise ConfigError(f"{path}: {field} is missing")
    client = data.get("client", "sglang")
    if client not in get_args(Client):
        known = get_args(Client)
        raise ConfigError(
            f"{path}: no client {client!r}{did_you_mean(str(client), known)}; there are {', '.join(known)}"
        )
    if not isinstance(data["scenario"], str) or not isinstance(data["arms"], dict) or not data["arms"]:
        raise ConfigError(
            f"{path}: expected scenario, a path, and arms, a mapping of names to what was measured; "
            f"found {shown(data['scenario'])} and {shown(data['arms'])}"
        )
    seeds = data.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(f"{path}: seeds: expected a list of whole numbers from 0 on, found {shown(seeds)}")
    return MeasuredCase(
        folder.resolve().name,
        folder / data["scenario"],
        client,
        tuple(seeds),
        tuple(_arm(name, arm, path, data) for name, arm in data["arms"].items()),
    )


def _arm(name: str, data: dict[str, Any], path: Path, case: Mapping[str, Any]) -> MeasuredArm:
    if not isinstance(data, dict) or not data.get("runs"):
        raise ConfigError(f"{path}: arm {name!r} has no runs")
    runs = tuple(_run(run, f"{path}: arm {name!r}: runs[{i}]") for i, run in enumerate(_listed(data, "runs", path)))
    within = data.get("within", {})
    if not isinstance(within, dict):
        raise ConfigError(f"{path}: arm {name!r}: within: expected percentages by metric, found {shown(within)}")
    within = {metric: percent(value, f"{path}: within: ") for metric, value in within.items()}
    changes = tuple(map(str, _listed(data, "set", path)))
    skip = data.get("skip", 0)
    if not isinstance(skip, int) or skip < 0:
        raise ConfigError(f"{path}: arm {name!r}: skip is a number of requests, found {skip!r}")
    engine, front_end = (
        str(data.get(field, case.get(field, unknown))) for field, unknown in (("engine", ""), ("front_end", "engine"))
    )
    return MeasuredArm(name, changes, bool(data.get("fitted", False)), runs, within, skip, engine, front_end)


def _listed(data: Mapping[str, Any], field: str, path: Path) -> list[Any]:
    found = data.get(field, [])
    if not isinstance(found, list):
        raise ConfigError(f"{path}: {field}: expected a list, found {shown(found)}")
    return found


def _run(run: Any, where: str) -> dict[str, float]:
    """The metrics of one measured run. where: names the run in messages. Raises ConfigError for a value that is no
    number.
    """
    if not isinstance(run, dict):
        raise ConfigError(f"{where}: expected metrics by name, found {shown(run)}")
    metrics = {}
    for name, value in run.items():
        if name not in {"id", "note"}:
            try:
                metrics[str(name)] = finite(value)
            except ValueError:
                raise ConfigError(f"{where}: {name}: expected a number, found {shown(value)}") from None
    return metrics


def percent(value: Any, where: str = "") -> float:
    """Reads a percentage as a fraction: '15 %' becomes 0.15. where: begins the message of an error. Raises ConfigError
    for any other text.
    """
    text = str(value)
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float("")
    except ValueError:
        raise ConfigError(f"{where}expected a percentage such as '15 %', found {value!r}") from None


def _folder(name: str, experiments: Path, known: list[str]) -> Path:
    for folder in (experiments / name, Path(name)):
        if (folder / MEASURED).is_file():
            return folder
    raise ConfigError(f"no case {name!r}{did_you_mean(name, known)}; {named_cases(known, experiments)}")


def named_cases(known: list[str], experiments: Path) -> str:
    """End of a message about an unknown name: the folder `experiments`, in which cases and matrices are looked up by
    name, and the names `known` that are there. If there are none: where the folder can be found.
    """
    if known:
        return f"{experiments}/ has {', '.join(known)}"
    return f"names are those of {experiments}/ in a copy of pdsim's repository: go there, or give a folder"


Simulate = Callable[..., Mapping[str, Any]]
"""Simulates a scenario and returns its summary. If a second argument n is given, the summary leaves out the n requests
that arrive first. Callers pass this function in, because this package must not import the simulator.
"""


@dataclass(frozen=True)
class MetricError:
    measured: float
    """The measured value."""
    simulated: float
    """The simulated value, in the same unit."""
    within: float | None
    """Largest relative error that the study accepts. None: the study names none."""

    @property
    def error(self) -> float:
        """Relative error of the simulation. Positive: the simulated value is too high. If the measured value is 0: 0 if
        the simulated value is 0, too, otherwise 1.
        """
        return self.simulated / self.measured - 1 if self.measured else float(self.simulated != self.measured)

    @property
    def is_met(self) -> bool:
        return self.within is None or abs(self.error) <= self.within

    def to_json(self) -> dict[str, float]:
        return {"measured": self.measured, "simulated": self.simulated, "error": self.error}


@dataclass(frozen=True)
class ArmErrors:
    case: str
    """Name of the case."""
    arm: str
    """Name of the measured configuration."""
    fitted: bool
    """True: the profile was fitted to these measurements. False: the simulation predicts the measurements."""
    metrics: dict[str, MetricError]
    """The errors, by metric."""

    def to_json(self) -> dict[str, Any]:
        metrics = {name: one.to_json() for name, one in self.metrics.items()}
        return {"case": self.case, "arm": self.arm, "fitted": self.fitted, "metrics": metrics}


def compare_case(case: MeasuredCase, simulate: Simulate) -> Iterable[ArmErrors]:
    for arm in case.arms:
        simulated = simulated_metrics(case, arm, simulate)
        metrics = {
            name: MetricError(value, simulated[name], arm.within.get(name)) for name, value in arm.measured.items()
        }
        yield ArmErrors(case.name, arm.name, arm.fitted, metrics)


def simulated_metrics(
    case: MeasuredCase, arm: MeasuredArm, simulate: Simulate, changes: tuple[str, ...] = ()
) -> dict[str, float]:
    """For each metric that was measured: its simulated mean over the seeds of the case. changes: further changes of the
    scenario, as for --set. Raises ConfigError if a measured metric is no number of a summary.
    """
    skip = (arm.skip,) if arm.skip else ()
    summaries = [by_client(simulate(case.scenario(arm, seed, changes), *skip), case.client) for seed in case.seeds]
    return {name: sum(_value(s, name, case) for s in summaries) / len(summaries) for name in arm.measured}


def _value(summary: Mapping[str, Any], name: str, case: MeasuredCase) -> float:
    value = summary[name] if name in summary else summary["pdsim"].get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"case {case.name} measures {name}, which is no number of a summary")
    return float(value)


DEFAULT_WITHIN = 0.1

Settings = Callable[[Mapping[str, float]], tuple[str, ...]]
"""Function from the values of the fitted parameters, by name, to changes of the scenario in the notation of --set."""


@dataclass(frozen=True)
class Fit:
    values: dict[str, float]
    """The fitted values, by the name of the fitted parameter."""
    cost: float
    """Remaining error of the fit: half the sum of the squared relative errors of the fitted metrics. Each error is
    divided by the error that the study accepts, or by DEFAULT_WITHIN if the study names none.
    """
    num_simulations: int
    """Number of simulations of the fit."""
    metrics: tuple[str, ...]
    """Names of the metrics that were fitted."""


def fit_arm(
    case: MeasuredCase,
    arm: MeasuredArm,
    start: Mapping[str, float],
    settings: Settings,
    simulate: Simulate,
    *,
    skip: tuple[str, ...] = (),
) -> Fit:
    """Fits parameters to a measured configuration, by least squares of relative errors. The fit works on logarithms, so
    that parameters stay positive.

    start: first values of the parameters. skip: metrics that follow from other metrics and would count twice.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415  an extra

    measured = {name: value for name, value in arm.measured.items() if name not in skip}
    num_simulations = 0

    def values(logs: Any) -> dict[str, float]:
        return {name: exp(x) for name, x in zip(start, logs, strict=True)}

    def residuals(logs: Any) -> list[float]:
        nonlocal num_simulations
        num_simulations += len(case.seeds)
        simulated = simulated_metrics(case, arm, simulate, settings(values(logs)))
        return [(simulated[n] / v - 1) / arm.within.get(n, DEFAULT_WITHIN) for n, v in measured.items()]

    # A run is a step function of its parameters: differences are taken over steps wide enough to see a slope.
    found = least_squares(residuals, [log(x) for x in start.values()], diff_step=0.06, xtol=1e-3, max_nfev=20)
    return Fit(values(found.x), float(found.cost), num_simulations, tuple(measured))


def fitted_profile(
    name: str,
    case: MeasuredCase,
    arm: MeasuredArm,
    fit: Fit,
    cost: Mapping[str, Any],
    command: str,
    *,
    run: Callable[[Scenario], Any],
) -> dict[str, Any]:
    """The content of a profile: the fitted cost, the setup of the measurement, the ranges of step sizes, and where the
    profile comes from.

    name: name of the profile. cost: the fitted cost, as files have it. command: the command that made the profile. run:
    simulates a scenario. The step sizes come from these simulations, one per seed, because the measurement has means
    over requests, but no steps.
    """
    scenarios = [case.scenario(arm, seed, (f"cost={to_yaml(cost)}",)) for seed in case.seeds]
    sizes = reached(step for scenario in scenarios for step in run(scenario).records.steps)
    ranges = {name: list(extremes) for name, extremes in sizes.items()}
    measured = {**scenarios[0].setup.model_dump(mode="json"), **ranges}
    return {
        "name": name,
        "cost": {**cost, "measured": measured},
        "provenance": {
            "fitted_on": f"{case.name}, arm {arm.name}: {', '.join(fit.metrics)}",
            "seeds": list(case.seeds),
            "cost_of_fit": round(fit.cost, 4),
            "simulations": fit.num_simulations,
            **origin(command),
        },
    }
