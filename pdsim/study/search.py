"""Goodput search: Optuna's TPE chooses points, batch by batch.

It is seeded and its batches have one size, so a search that is done again asks for the same points: what was computed
is in the folder, and an interrupted search goes on where it was.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.design import Changes, assigned
from pdsim.study.result import PointResult
from pdsim.study.sweep_file import SearchSettings, SloSettings
from pdsim.study.values import Range

_BATCH = 8
"""Trials that are chosen at once. Not the number of workers, on which results must not depend."""

Evaluate = Callable[[Sequence[Changes]], Sequence[PointResult]]


def search(settings: SearchSettings, slo: str, wanted: SloSettings, evaluate: Evaluate) -> None:
    """Evaluates as many points as there are trials; equal ones cost nothing."""
    optuna = load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=settings.seed))
    for start in range(0, settings.trials, _BATCH):
        trials = [study.ask() for _ in range(min(_BATCH, settings.trials - start))]
        points = evaluate([_changes(trial, settings) for trial in trials])
        for trial, point in zip(trials, points, strict=True):
            if point.error:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, _objective(point, settings, slo, wanted))


def load_optuna() -> Any:
    """Raises ConfigError if it is not installed."""
    try:
        import optuna  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError("search needs Optuna, which is not installed: pip install 'pdsim[sweep]'") from None
    return optuna


def _changes(trial: Any, settings: SearchSettings) -> Changes:
    chosen: dict[str, Any] = {}
    for key, values in settings.fields_.items():
        if isinstance(values, Range):
            chosen[key] = values.at(trial.suggest_float(key, 0.0, 1.0))
        else:
            chosen[key] = values[trial.suggest_categorical(key, list(range(len(values))))]
    return assigned(chosen)


def _objective(point: PointResult, settings: SearchSettings, slo: str, wanted: SloSettings) -> float:
    """Value to maximise. Points whose rate does not count lie below all others, the nearer to the SLO the higher."""
    if settings.maximise == "goodput":
        return point.goodput_per_gpu(slo).mean
    if not point.meets(slo, wanted):
        return point.attainment(slo).mean - 1.0 - point.is_saturated
    return point.metric("request_throughput").mean / point.num_gpus
