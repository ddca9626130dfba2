"""The candidates of a question, with their results and texts about them. Each candidate is run once per seed. All
candidates serve the same requests, unless the question varies the load.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import field
from importlib import import_module
from math import inf, isfinite
from typing import NamedTuple

from pdsim.dataclass import dataclass
from pdsim.scenario.loading import Changes
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.study.base import AskOptions, Base
from pdsim.study.points.estimate import Estimate, band, estimate
from pdsim.study.points.result import PointResult, Replication, failures_of_points, warnings_of
from pdsim.study.trials import Trials


class Arm(NamedTuple):
    """A candidate: a label, and the settings that a question compares with those of other candidates."""

    label: str
    """Name of the candidate in tables and texts."""
    changes: Changes
    """Changes of the scenario that make the candidate."""
    x: float | None = None
    """The candidate's position on the figure's axis. None: the candidate has no position."""
    series: str = ""
    """Name of the candidate's group. Only candidates of one group are compared. The empty name is a group, too."""
    axis: str = ""
    """Meaning of the figure's horizontal axis, on which `x` is a position. Empty: the meaning that the question gives
    (Question.axis).
    """


def place_of(arm: Arm) -> float:
    """Sort key that orders candidates by their position. Candidates without a position come first."""
    return arm.x or 0.0


class Verdict(NamedTuple):
    winner: str
    """Label of the candidate that the answer recommends, or is about."""
    advice: str
    """The recommendation as text. Empty: the answer recommends nothing."""
    why: str
    """Text with the numbers that support the recommendation. If `advice` is empty: the whole text of the answer."""
    notes: Sequence[str] = ()
    """Further sentences on the candidates."""
    is_of_classes: bool = False
    """True: the question has judged the winner by the requests of some classes, which alone must meet the SLO."""


@dataclass(frozen=True, kw_only=True)
class Question:
    asks: str
    """The question as a user would ask it."""
    columns: tuple[str, ...]
    """The numbers that table and figure show, by their names in COLUMNS."""
    arms: Callable[[Base], list[Arm]]
    """Makes the candidates that the question compares."""
    verdict: Callable[["Study"], Verdict]
    """Chooses a candidate from the results, and says why."""
    then: Callable[["Study"], list[Arm]] = lambda _study: []
    """Makes further candidates from the results so far. Called again after each set of runs, until it makes none."""
    starter: Changes = field(default_factory=dict)
    """Changes of pdsim's built-in scenario (used if the user gives none) where the question needs a setting that this
    scenario lacks.
    """
    axis: str = ""
    """Meaning of the figure's horizontal axis, with its unit. Empty: candidates have no positions on an axis, and are
    listed one below another.
    """


QUESTIONS = {
    "pd-ratio": "splits",
    "pd-or-not": "splits",
    "explain-ttft": "load",
    "page-and-descriptors": "transfers",
    "staging-ring": "transfers",
    "transport": "transfers",
    "decode-cache": "caches",
    "host-cache": "caches",
    "storage": "caches",
    "routing": "policies",
    "admission": "policies",
    "overlap": "transfers",
    "prefill-split": "splits",
    "capacity": "load",
    "priorities": "policies",
    "local-prefill": "policies",
    "elastic": "splits",
}
"""The module that defines each question, by the question's name. In the module, the constant that holds the question
has the same name in capitals, with _ for -.
"""


def question(name: str) -> Question:
    """The question of this name. Raises ConfigError, which lists the known names, if the name is unknown."""
    if name not in QUESTIONS:
        raise ConfigError(f"no question {name!r}{did_you_mean(name, QUESTIONS)}; there are {', '.join(QUESTIONS)}")
    module = import_module(f"pdsim.study.questions.{QUESTIONS[name]}")
    found: Question = getattr(module, name.replace("-", "_").upper())
    return found


SLO = "asked"
EQUAL = 0.02
"""Candidates count as equal if their numbers differ by at most this share."""


class Study:
    """The candidates of a question, and the results of those that were run."""

    def __init__(self, trials: Trials, options: AskOptions, *, repeats: bool = False) -> None:
        """trials: simulate the candidates. options: load and SLO of the question. repeats: True: the runs of a recorded
        load are repeated with slightly faster and slower messages.
        """
        self.trials = trials
        self._repeats = repeats
        self.base = trials.base
        self.options = options
        self.arms: list[Arm] = []
        self.slo = options.wanted
        self._results: dict[str, PointResult] = {}

    def run(self, arms: Sequence[Arm]) -> None:
        changes = [arm.changes for arm in arms]
        results = self.trials.results(changes)
        if self._repeats and (others := [one.results(changes) for one in self.trials.repetitions]):
            results = [point.repeated(same) for point, *same in zip(results, *others, strict=True)]
        self.arms += arms
        self._results |= zip((arm.label for arm in arms), results, strict=True)

    @property
    def warnings(self) -> list[str]:
        """Warnings about the candidates: a sentence on those of their runs (PointResult.warnings, such as costs that
        were not measured), and one on failed requests.
        """
        points = list(self._results.values())
        return [*warnings_of(points), *failures_of_points(points)]

    def __getitem__(self, label: str) -> PointResult:
        return self._results[label]

    def arm(self, label: str) -> Arm:
        return next(arm for arm in self.arms if arm.label == label)

    def layouts(self, label: str) -> frozenset[object]:
        """GPUs, parallel sizes and all-to-all backends (MoE) of the candidate's servers. If two candidates have equal
        layouts, their predicted step times have the same relative error. The ratio of their results is then more
        certain than each result.
        """
        servers = self.trials.scenario(self.arm(label).changes).servers
        return frozenset((one.gpu, one.split, one.dp, one.resolved_ep, one.moe_a2a_backend) for one in servers)

    def with_result_of(self, label: str, other: "Study") -> "Study":
        """A copy of this study in which the candidate `label` has its result from another study."""
        made = Study(self.trials, self.options)
        made.arms, made._results = self.arms, {**self._results, label: other[label]}
        return made

    def error(self, label: str) -> str:
        """Says why the candidate `label` has no result. Empty: the candidate has a result."""
        point = self[label]
        if not point.error and not any(replication.row["completed"] for replication in point.replications):
            return "every request failed"
        return point.error

    def require_results(self) -> None:
        """Raises ConfigError with the reason if a candidate has no result."""
        if failed := [error for arm in self.arms if (error := self.error(arm.label))]:
            raise ConfigError(failed[0])

    def failed_share(self, label: str) -> float:
        """Share of the candidate's requests that failed, or had not finished when the run ended."""
        rows = [replication.row for replication in self[label].replications]
        failed = sum(row["failed"] + row["unfinished"] for row in rows)
        return float(failed / max(1, failed + sum(row["completed"] for row in rows)))

    def labels(self, series: str | None = None) -> list[str]:
        """Labels of the candidates that have a result. series: only candidates of this group. None: all candidates."""
        return [arm.label for arm in self.arms if series in {None, arm.series} and not self.error(arm.label)]

    def steady(self, labels: Iterable[str]) -> list[str]:
        """Returns the labels whose candidates are not saturated. Latencies of saturated candidates would depend on the
        length of the run.
        """
        return [label for label in labels if not self[label].is_saturated]

    def mean_tokens(self, field: str) -> float:
        """Mean number of tokens per request, in a run of the first candidate that has a result. field:
        total_input_tokens or total_output_tokens.
        """
        row = self[self.labels()[0]].replications[0].row
        return float(row[field] / row["completed"])

    @property
    def mean_prompt_tokens(self) -> float:
        return self.mean_tokens("total_input_tokens")

    def metric(self, label: str, name: str) -> Estimate:
        return self[label].metric(name)

    def mean(self, label: str, name: str) -> float:
        return self.metric(label, name).mean

    def goodput(self, label: str) -> float:
        """Requests within the SLO, per second and GPU, for the candidate `label`."""
        return self[label].goodput_per_gpu(SLO).mean

    def meets(self, label: str) -> bool:
        return self[label].meets(SLO)

    def attained(self, label: str) -> float:
        """Share of the candidate's requests that meet the SLO."""
        return self[label].attainment(SLO).mean

    def attained_by(self, label: str, classes: Collection[str]) -> Estimate:
        """Share of the candidate's requests of these classes that meet the SLO."""

        def attained(run: Replication) -> float:
            covered = [found for name, found in run.classes[SLO].items() if name in classes]
            num_sent = sum(one.num_requests for one in covered)
            return sum(one.num_requests * one.share for one in covered) / max(1, num_sent)

        return self[label].estimated(attained)

    def tail_ms(self, label: str, metric: str) -> Estimate | None:
        """A candidate's `metric` (ttft, tpot or e2e) in ms, at the percentile that the SLO limits. None: the SLO does
        not limit the metric, or too many requests failed.
        """
        point = self[label]
        found = [run.slos[SLO].tail_ms(metric) for run in (*point.replications, *point.repeats)]
        if not all(value is not None and isfinite(value) for value in found):
            return None
        return point.estimated(lambda run: run.slos[SLO].tail_ms(metric) or 0.0)

    def best(self, labels: Iterable[str]) -> str:
        """Label of the best candidate. Among candidates that meet the SLO: the one with the most goodput; among those
        whose goodput is lower by at most the share EQUAL, the one with the lowest mean latency. If no candidate meets
        the SLO: the one in which most requests are within the SLO, preferably without failed requests. If all
        candidates are saturated: the one with most requests per second and GPU.
        """
        labels = list(labels)
        steady = self.steady(labels)
        if not steady:
            return max(labels, key=lambda label: self.mean(label, "request_throughput") / self[label].num_gpus)
        meeting = [label for label in steady if self.meets(label)]
        whole = [label for label in steady if not self.failed_share(label)]
        gain, candidates = (self.goodput, meeting) if meeting else (self.attained, whole or steady)
        enough = (1 - EQUAL if meeting else 1) * max(map(gain, candidates))
        equal = [label for label in candidates if gain(label) >= enough]
        return min(equal, key=lambda label: self.mean(label, "mean_e2e_latency_ms"))

    def as_good(self, label: str, other: str) -> bool:
        """True if the candidate `label` is no worse than `other` in a way that matters. Both must meet the SLO, or both
        miss it; and both are saturated, or neither is. The goodput of `label` may be lower, and its mean latency
        higher, by at most the share EQUAL.
        """
        if self.meets(label) != self.meets(other) or len(self.steady([label, other])) == 1:
            return False
        latency = self.ratio(label, other, "mean_e2e_latency_ms").mean
        return self.goodput(label) >= (1 - EQUAL) * self.goodput(other) and latency <= 1 + EQUAL

    def serves_alike(self, label: str, other: str) -> bool:
        """True if the candidate `label` has at least the throughput and at most the mean TTFT of `other`. Differences
        up to the share EQUAL are ignored. False if only one of the candidates is saturated. If both are saturated, only
        the throughput counts.
        """
        if self[label].is_saturated != self[other].is_saturated:
            return False
        rate = self.ratio(label, other, "request_throughput").mean
        ttft = 1.0 if self[other].is_saturated else self.ratio(label, other, "mean_ttft_ms").mean
        return rate >= 1 - EQUAL and ttft <= 1 + EQUAL

    def best_routed(self, labels: Iterable[str]) -> list[str]:
        """Labels of the best candidate of each cluster. Candidates of one cluster differ only in their router."""
        routed: dict[str, list[str]] = {}
        for label in labels:
            changes = json.dumps(self._changes_but_router(label), sort_keys=True, default=str)
            routed.setdefault(changes, []).append(label)
        return [self.best(same) for same in routed.values()]

    def routers_against(self, best: str) -> list[str]:
        """Sentences on how each other router of the same cluster compares with the candidate `best`, in goodput and
        mean latency. Empty: no candidate with another router has a result.
        """
        cluster = self._changes_but_router(best)
        others = [label for label in self.labels() if label != best and self._changes_but_router(label) == cluster]
        return [
            f"'{label}' gives {self.goodput_ratio(label, best).times} the goodput of '{best}'"
            f" at {self.ratio(label, best, 'mean_e2e_latency_ms').times} its latency."
            for label in others
        ]

    def _changes_but_router(self, label: str) -> Changes:
        """The candidate's changes of the scenario, except those of its router."""
        return {name: value for name, value in self.arm(label).changes.items() if name != "router"}

    def ratio(self, label: str, other: str, name: str) -> Estimate:
        """Ratio of the number in the result column `name` of the candidate `label` to that of the candidate `other`,
        computed seed by seed. Both candidates have the same requests, so common variation cancels.
        """
        return self._ratio(label, other, lambda run: run.row[name])

    def goodput_ratio(self, label: str, other: str) -> Estimate:
        return self._ratio(label, other, _goodput_per_gpu)

    def _ratio(self, label: str, other: str, read: Callable[[Replication], float]) -> Estimate:
        one, two = self[label], self[other]
        found = _ratio((read(a), read(b)) for a, b in zip(one.replications, two.replications, strict=True))
        repeated = [_ratio([(read(a), read(b))]).mean for a, b in zip(one.repeats, two.repeats, strict=False)]
        return band(found.mean, repeated) if repeated and isfinite(found.mean) else found

    def others_against(self, best: str, labels: Iterable[str]) -> list[str]:
        """Sentences that compare the candidates `labels` with the candidate `best`: candidates with an equal mean TTFT
        within chance, the ratio of mean TTFT for each other candidate, and saturated candidates. If `best` meets the
        SLO, a candidate that misses the SLO never counts as equal.
        """
        others = [label for label in labels if label != best]
        steady = self.steady(others) if self.steady([best]) else []
        ratios = {label: self.ratio(label, best, "mean_ttft_ms") for label in steady}
        equal = [label for label in ratios if not ratios[label].is_told_apart and self.meets(label) == self.meets(best)]
        found = [f"mean TTFT is equal within chance with {' and '.join(equal)}"] if equal else []
        found += [f"mean TTFT is {ratios[label].times} as long with {label}" for label in ratios if label not in equal]
        return found + [f"{label} is saturated" for label in others if self[label].is_saturated]


def _goodput_per_gpu(run: Replication) -> float:
    return float(run.slos[SLO].attained.goodput_per_s / run.row["gpus"])


def _ratio(pairs: Iterable[tuple[float, float]]) -> Estimate:
    """Estimate of the ratio of two numbers from pairs (number, divisor). If a divisor is 0, the ratio is infinite if
    any number is above 0, and otherwise 1.
    """
    pairs = list(pairs)
    if all(below for _, below in pairs):
        return estimate([above / below for above, below in pairs])
    return Estimate(inf if any(above for above, _ in pairs) else 1.0, None)
