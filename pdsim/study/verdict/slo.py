"""Service level objectives: "ttft p99 < 2 s, tpot p99 < 50 ms", or "ttft < 2 s and tpot < 50 ms for 95 %".

Runs, plans, answers, sweeps and the web page all judge by these classes, and print the numbers that they find.

- `pNN` is the percentile that clients of servers print: numpy's, linear between two order statistics.
- `itl_p50`, `itl_p90`, `itl_p95`, `itl_p99` are percentiles of gaps between a request's own tokens, `itl_max` is the
  longest: "itl_p99 p95 < 60 ms" limits the p95, over requests, of each request's own p99.
- `for NN %` counts requests that are within all limits named.
- A request that fails counts as endless. A request of a single token has no TPOT and no gaps: percentiles leave it
  out, counts take it as within.
- Several runs of one cluster (seeds) are judged by the mean of their numbers.

Classes of requests have limits of their own: "chat: ttft p99 < 1 s; batch: e2e p95 < 60 s".
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from math import ceil, floor, inf
from statistics import fmean
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.metrics.own_gaps import OWN_ITL
from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary import e2e_ms, tpot_ms, ttft_ms
from pdsim.metrics.summary_rows import significant
from pdsim.scenario.sections.fields import DURATION
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.study.verdict.readings import (
    OF_GAPS,
    Attainment,
    Reading,
    Times,
    attainment_of,
    mean_attainment,
    mean_reading,
    own_itl_ms,
    time_limit,
)
from pdsim.workload.request_spec import RequestSpec, classes_of

DEFAULT_SLO = "ttft p99 < 2 s, tpot p99 < 50 ms"

_METRICS: Mapping[str, Callable[[RequestRecord], float]] = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms} | {
    metric: partial(own_itl_ms, metric) for metric in OWN_ITL
}


@dataclass(frozen=True)
class Term:
    """One condition of an SLO: a percentile of a metric is below a limit, or a share of the requests is within several
    limits.
    """

    limits_ms: tuple[tuple[str, float], ...]
    """Pairs of a metric and its limit in ms. Metrics are ttft, tpot, e2e, and those of the gaps between a request's own
    tokens, such as itl_p99.
    """
    percentile: float
    """The percentile that is limited. For a share: the percentage of requests that must be within the limits."""
    request_class: str = ""
    """Class of the requests to which the term applies. Empty: all requests."""
    is_share: bool = False
    """True: the term asks for a share of requests within limits. False: the term limits a percentile."""

    def __str__(self) -> str:
        return f"{self._prefix}{self.name_in_class}"

    @property
    def goal(self) -> str:
        return f"{self._prefix}{self.goal_in_class}"

    @property
    def goal_in_class(self) -> str:
        if self.is_share:
            return f"{self.limits} for {self.percentile:g} %"
        return f"{self.name_in_class} < {time_limit(self._limit_ms)}"

    @property
    def name_in_class(self) -> str:
        names = " and ".join(metric.upper() for metric, _ in self.limits_ms)
        return f"within {names}" if self.is_share else f"{names} p{self.percentile:g}"

    @property
    def limits(self) -> str:
        return " and ".join(f"{metric.upper()} < {time_limit(limit_ms)}" for metric, limit_ms in self.limits_ms)

    @property
    def missed(self) -> str:
        """Text that says that this term is missed, without a value: "TTFT p99 is above 2 s"."""
        if not self.is_share:
            return f"{self} is above {time_limit(self._limit_ms)}"
        requests = f" of {self.request_class}" if self.request_class else ""
        return f"fewer than {self.percentile:g} %{requests} have {self.limits}"

    def lack(self, value: float) -> str:
        """Says how the term is missed. value: a latency in ms or, for a term that asks for a share, a share in %."""
        if self.is_share:
            of_class = f"of class {self.request_class} " if self.request_class else ""
            return f"{significant(value)} % of the requests {of_class}have {self.limits} ({self.percentile:g} % asked)"
        if value == inf:
            return self.missed
        reading = Reading(str(self), value, self._limit_ms, is_share=False)
        return f"{self} is {reading.value_text} (limit {reading.limit_text})"

    @property
    def _prefix(self) -> str:
        return f"{self.request_class} " if self.request_class else ""

    @property
    def _limit_ms(self) -> float:
        return self.limits_ms[0][1]

    def covers(self, request_class: str) -> bool:
        return self.request_class in ("", request_class)

    def is_about(self, num_output_tokens: int) -> bool:
        """False if the term limits a percentile of TPOT or ITL, and the request has one output token (no gaps). A term
        that asks for a share applies to all requests.
        """
        return num_output_tokens > 1 or not self._is_of_gaps

    @cached_property
    def _is_of_gaps(self) -> bool:
        return not self.is_share and self.limits_ms[0][0] in OF_GAPS

    def is_missed(self, request: RequestRecord) -> bool:
        """True if an ended request failed, or exceeds one of the term's limits (limits_ms)."""
        if request.outcome != "finished":
            return True
        if not self.is_about(request.num_output_tokens):
            return False
        return any(_time_ms(metric, request) > limit_ms for metric, limit_ms in self.limits_ms)

    def reading(self, times: Times) -> Reading:
        covered = self._covered(times)
        if not self.is_share:
            ((metric, limit_ms),) = self.limits_ms
            value = covered.percentile(metric, self.percentile)
            return Reading(str(self), value, limit_ms, is_share=False, request_class=self.request_class)
        within = int(covered.within(self.limits_ms).sum())
        share = 100 * within / covered.num_sent if covered.num_sent else 100.0
        return Reading(str(self), share, self.percentile, is_share=True, request_class=self.request_class)

    def readings_of_limits(self, times: Times) -> list[Reading]:
        """Returns the metrics of a term that asks for a share, each at the percentile that equals the share. For
        example, "ttft < 2 s and tpot < 50 ms for 90 %" gives TTFT p90 and TPOT p90.
        """
        covered = self._covered(times)
        return [
            Reading(
                f"{self._prefix}{metric.upper()} p{self.percentile:g}",
                covered.percentile(metric, self.percentile),
                limit_ms,
                is_share=False,
                request_class=self.request_class,
            )
            for metric, limit_ms in self.limits_ms
        ]

    def ratio(self, times: Times) -> float:
        """The value divided by its limit; above 1, the term is missed. Infinite: too many requests failed.

        For a share of N percent: each request has a largest ratio of a time to its limit, and the result is the
        percentile N of these ratios.
        """
        if not self.is_share:
            reading = self.reading(times)
            return reading.value / reading.limit
        import numpy as np  # noqa: PLC0415

        covered = self._covered(times)
        values = np.max([covered.by_metric[metric] / limit_ms for metric, limit_ms in self.limits_ms], axis=0)
        ranked = sorted(values.tolist()) + [inf] * covered.num_lost
        return ranked[_num_needed(self.percentile, len(ranked)) - 1] if ranked else 0.0

    def _covered(self, times: Times) -> Times:
        return times.of_class(self.request_class) if self.request_class else times

    def num_allowed(self, num_requests: int) -> int:
        """Maximum number of requests that may exceed the term's limit. If more requests exceed it, the term is
        certainly missed.
        """
        if self.is_share:
            return num_requests - _num_needed(self.percentile, num_requests)
        return num_requests - 1 - floor(_position(self.percentile, num_requests))

    def num_lost_allowed(self, num_requests: int) -> int:
        """Maximum number of requests that may fail or not end if the term is to be met. Times of these requests count
        as infinite. A percentile that lies between the last finite and the first infinite time counts as infinite, too.
        """
        if self.is_share:
            return self.num_allowed(num_requests)
        return num_requests - 1 - ceil(_position(self.percentile, num_requests))


def _position(percentile: float, num_requests: int) -> float:
    """Position of a percentile among sorted values, from 0, as numpy defines it. Positions may lie between two
    values.
    """
    return max(0, num_requests - 1) * percentile / 100


def _num_needed(percent: float, num_requests: int) -> int:
    """Smallest number of requests that makes up at least this percentage of num_requests."""
    return ceil(round(percent / 100 * num_requests, 6))


def _time_ms(metric: str, request: RequestRecord) -> float:
    """Value of a metric of a request in ms. TPOT and ITL percentiles of a request with one output token are 0."""
    return 0.0 if metric in OF_GAPS and request.num_output_tokens < 2 else _METRICS[metric](request)  # noqa: PLR2004


@dataclass(frozen=True)
class Judgement:
    """The means of the numbers that an SLO limits, over one cluster's runs. attained: requests within all limits."""

    readings: Mapping[Term, Reading]
    ratios: Mapping[Term, float]
    """For each term of the SLO: the value divided by its limit."""
    details: tuple[Reading, ...]
    """For each term on a share of requests, in order: its metrics, each at the percentile that equals the share."""
    attained: Attainment

    @property
    def meets(self) -> bool:
        return all(reading.is_met for reading in self.readings.values())

    @property
    def listed(self) -> list[Reading]:
        """The numbers that the SLO limits. For a term such as "ttft < 2 s for 90 %": first TTFT p90, then the share."""
        return [one for term, found in self.readings.items() for one in (*self.details_of(term), found)]

    @property
    def missed(self) -> list[Term]:
        return [term for term, reading in self.readings.items() if not reading.is_met]

    @property
    def lacks(self) -> list[str]:
        """A text for each missed term, with the value and the limit."""
        return [term.lack(self.readings[term].value) for term in self.missed]

    @property
    def worst(self) -> Term:
        """The term furthest above its limit. If all limits are kept: the term nearest to its limit."""
        return max(self.ratios, key=self.ratios.__getitem__)

    @property
    def worst_percentile(self) -> Term:
        """The term `worst` as one percentile limit. From a term such as "ttft < 2 s and tpot < 50 ms for 90 %", takes
        the p90 limit of the metric whose value is furthest above its limit, or nearest below.
        """
        worst = self.worst
        if not worst.is_share:
            return worst
        own = self.details_of(worst)
        place = max(range(len(own)), key=lambda i: own[i].value / own[i].limit)
        return Term((worst.limits_ms[place],), worst.percentile, worst.request_class)

    def details_of(self, wanted: Term) -> list[Reading]:
        """For a term on a share: a reading of each metric at that share's percentile. Empty for other terms."""
        skipped = 0
        for term in self.readings:
            if term == wanted:
                return list(self.details[skipped : skipped + len(term.limits_ms)]) if term.is_share else []
            skipped += len(term.limits_ms) if term.is_share else 0
        raise KeyError(wanted)

    def tail_ms(self, metric: str) -> float | None:
        """The metric in ms at the percentile of the first term that limits the metric. None: no term limits it."""
        for term, reading in self.readings.items():
            names = [name for name, _ in term.limits_ms]
            if metric in names:
                return self.details_of(term)[names.index(metric)].value if term.is_share else reading.value
        return None


def mean_judgement(runs: Sequence[Judgement]) -> Judgement:
    """The judgement with the mean of each number over several runs of one cluster."""
    first = runs[0]
    return Judgement(
        readings={term: mean_reading([one.readings[term] for one in runs]) for term in first.readings},
        ratios={term: fmean(one.ratios[term] for one in runs) for term in first.ratios},
        details=tuple(mean_reading(readings) for readings in zip(*(one.details for one in runs), strict=True)),
        attained=mean_attainment([one.attained for one in runs]),
    )


@dataclass(frozen=True)
class Slo:
    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return "; ".join(
            (f"{name}: " if name else "") + ", ".join(term.goal_in_class for term in terms)
            for name, terms in groupby(self.terms, key=lambda term: term.request_class)
        )

    def judge(self, runs: Sequence[Times]) -> Judgement:
        """Judges the runs of one cluster, one run per seed, by the mean of each number over the runs."""
        return mean_judgement([self._judge(times) for times in runs])

    def _judge(self, times: Times) -> Judgement:
        return Judgement(
            readings={term: term.reading(times) for term in self.terms},
            ratios={term: term.ratio(times) for term in self.terms},
            details=tuple(one for term in self.terms if term.is_share for one in term.readings_of_limits(times)),
            attained=attainment_of(int(self.kept(times).sum()), times.num_sent, times.duration_s),
        )

    def judge_requests(self, requests: Sequence[RequestRecord]) -> Judgement:
        return self.judge([Times.of_requests(requests)])

    def kept(self, times: Times) -> Any:
        """Array of truth values: which finished requests keep all limits that apply to them."""
        kept = times.has_tpot | True
        for term in self.terms:
            within = times.within(term.limits_ms)
            kept = kept & (within | ~times.is_of_class(term.request_class))
        return kept

    def attained(self, times: Times, request_class: str) -> Attainment:
        """How many requests of the class meet the SLO. request_class: empty: requests without a class."""
        is_of = times.classes == request_class
        num_kept = int((self.kept(times) & is_of[: len(times.has_tpot)]).sum())
        return attainment_of(num_kept, int(is_of.sum()), times.duration_s)

    def limit_ms(self, metric: str, request_class: str = "") -> float | None:
        """The lowest limit of a metric in ms, for requests of the class. request_class: empty: only limits for all
        requests count. None: no such term limits the metric.
        """
        found = [
            ms for term in self.terms if term.covers(request_class) for name, ms in term.limits_ms if name == metric
        ]
        return min(found, default=None)

    def percentile_of(self, metric: str) -> float:
        """The percentile at which the first term on a metric limits it. 99: no term limits the metric."""
        found = (term.percentile for term in self.terms if metric in dict(term.limits_ms))
        return next(found, 99.0)

    @property
    def needs_own_itl(self) -> bool:
        """True if a term limits the gaps between a request's own tokens. Runs record these gaps only on demand."""
        return any(name in OWN_ITL for term in self.terms for name, _ in term.limits_ms)

    @property
    def share(self) -> float:
        """Largest share of requests (0 to 1) that must meet the limits of any term. A p99 counts as 0.99."""
        return max(term.percentile for term in self.terms) / 100

    def require_classes(self, requests: Sequence[RequestSpec]) -> None:
        """Raises ConfigError if the SLO names a class that no request has."""
        known = dict.fromkeys(classes_of(requests).values())
        for name in dict.fromkeys(term.request_class for term in self.terms):
            if name and name not in known:
                found = f"there are {', '.join(known)}" if known else "they have no classes"
                raise ConfigError(f"--slo: no request of class {name!r}{did_you_mean(name, known)}; {found}")

    @classmethod
    def parse(cls, text: str, where: str = "--slo") -> "Slo":
        """Reads an SLO from text. Raises ConfigError, whose message begins with `where`."""
        try:
            return cls.of_text(text)
        except ValueError as wrong:
            raise ConfigError(f"{where} {text!r}: {wrong}") from None

    @classmethod
    def of_text(cls, text: str) -> "Slo":
        """Reads an SLO from text. Raises ValueError, whose message says what is wrong."""
        terms = tuple(term for group in text.split(";") for term in _terms(group))
        names = [f"{term}" for term in terms]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"{twice} is given twice")
        return cls(terms)


_PERCENTILE = re.compile(r"(?P<metric>\w+?)(?:\s+|_)p(?P<percentile>[\d.]+)\s*<=?\s*(?P<limit>.+)", re.IGNORECASE)
_PERCENTILE_FIRST = re.compile(r"p(?P<percentile>[\d.]+)\s+(?P<metric>\w+)\s*<=?\s*(?P<limit>.+)", re.IGNORECASE)
_SHARE = re.compile(r"(?P<limits>.+?)\s+for\s+(?P<percentile>[\d.]+)\s*%")
_OWN_GAPS = re.compile(r"(?P<metric>itl[ _](p50|p90|p95|p99|max))\s*<=?\s*(?P<limit>.+)", re.IGNORECASE)
_LIMIT = re.compile(r"(?P<metric>\w+)\s*<=?\s*(?P<limit>.+)")
_FORMS = "'ttft p99 < 2 s', or 'ttft < 2 s and tpot < 50 ms for 95 %'"


def _terms(group: str) -> list[Term]:
    """Reads the terms of one class, such as "chat: ttft p99 < 2 s, tpot p99 < 50 ms". Without "chat:" the terms apply
    to all requests.
    """
    name, colon, terms = group.partition(":") if ":" in group else ("", "", group)
    if colon and not name.strip():
        raise ValueError(f"{group.strip()!r} has no class before its colon")
    found = (term for part in terms.split(",") for term in _terms_of_part(part.strip()))
    return [replace(term, request_class=name.strip()) for term in found]


def _terms_of_part(part: str) -> list[Term]:
    """Reads a comma-separated part of an SLO: a share of requests within limits, or percentiles joined by "and"."""
    if twice := next((piece for piece in part.split(" and ") if piece.count("<") > 1), ""):
        between = "a comma between them, or 'and' if a share of requests must keep both, as in 'for 95 %'"
        raise ValueError(f"{twice.strip()!r} has two limits: write {between}")
    if count := _SHARE.fullmatch(part):
        return [_count(part, count)]
    return [_percentile_term(piece.strip()) for piece in part.split(" and ")]


def _count(part: str, count: re.Match[str]) -> Term:
    limits = [_LIMIT.fullmatch(limit.strip()) for limit in count["limits"].split(" and ")]
    if None in limits:
        raise ValueError(f"{part!r} is no limit: write {_FORMS}")
    found = [_limit(limit) for limit in limits if limit is not None]
    if len(dict(found)) < len(found):
        raise ValueError(f"{part!r} limits one metric twice; give one limit")
    return Term(tuple(found), _percentile(count), is_share=True)


def _percentile_term(part: str) -> Term:
    if own := _OWN_GAPS.fullmatch(part):
        metric = own["metric"].lower().replace(" ", "_")
        raise ValueError(
            f"{part!r} limits the gaps of each request: say for how many requests, as '{metric} p95 < {own['limit']}'"
        )
    if found := _PERCENTILE.fullmatch(part) or _PERCENTILE_FIRST.fullmatch(part):
        return Term((_limit(found),), _percentile(found))
    lack = "has no percentile" if _LIMIT.fullmatch(part) else "is no limit"
    raise ValueError(f"{part!r} {lack}: write {_FORMS}")


def _percentile(found: re.Match[str]) -> float:
    try:
        percentile = float(found["percentile"])
    except ValueError:
        raise ValueError(f"p{found['percentile']} is no percentile, above 0 and at most 100") from None
    if not 0 < percentile <= 100:  # noqa: PLR2004
        raise ValueError(f"p{percentile:g} is no percentile, above 0 and at most 100")
    return percentile


def _limit(found: re.Match[str]) -> tuple[str, float]:
    metric = found["metric"].lower()
    if metric not in _METRICS:
        known = ", ".join(_METRICS)
        raise ValueError(f"no latency {metric!r}{did_you_mean(metric, _METRICS)}; there are {known}")
    limit_ns = DURATION.parse(found["limit"])
    if limit_ns <= 0:
        raise ValueError("a limit is above 0")
    return metric, limit_ns / 1e6
