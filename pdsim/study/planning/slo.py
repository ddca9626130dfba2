"""An SLO, as "ttft p99 < 2 s, tpot p99 < 50 ms", and the end of a run that can no longer meet it.

Classes of requests have limits of their own: "chat: ttft p99 < 1 s; batch: e2e p95 < 60 s".
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import ceil, inf, isfinite
from typing import Any

from pdsim.metrics.distribution import Samples
from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary import e2e_ms, tpot_ms, ttft_ms
from pdsim.metrics.summary_rows import significant
from pdsim.scenario.fields import DURATION
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.workload.request_spec import RequestSpec, classes_of

DEFAULT_SLO = "ttft p99 < 2 s, tpot p99 < 50 ms"

_METRICS: Mapping[str, Callable[[RequestRecord], float]] = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}
_ONE = re.compile(r"(?P<metric>\w+)\s+p(?P<percentile>[\d.]+)\s*<=?\s*(?P<limit>.+)")
_SHARE = re.compile(r"(?P<limits>.+?)\s+for\s+(?P<percentile>[\d.]+)\s*%")
_LIMIT = re.compile(r"(?P<metric>\w+)\s*<=?\s*(?P<limit>.+)")
_EXAMPLE = "METRIC pNN < DURATION, such as 'ttft p99 < 2 s', nor 'ttft < 2 s and tpot < 50 ms for 95 %'"


@dataclass(frozen=True)
class Term:
    """A share of the requests, in percent, that must be within all of these limits.

    Requests that fail miss it. TPOT is of two tokens and more.
    """

    limits_ms: tuple[tuple[str, float], ...]
    """Limits by metric: ttft, tpot or e2e."""
    percentile: float
    request_class: str = ""
    """The class of the requests; empty: all requests."""

    def __str__(self) -> str:
        return f"{self._prefix}{self.name_in_class}"

    @property
    def goal(self) -> str:
        return f"{self._prefix}{self.goal_in_class}"

    @property
    def goal_in_class(self) -> str:
        if not self.is_joint:
            return f"{self.name_in_class} < {self._limit_ms:g} ms"
        return f"{self._limits} for {self.percentile:g} %"

    @property
    def missed(self) -> str:
        """Words for requests that miss it."""
        if not self.is_joint:
            return f"{self} is above {self._limit_ms:g} ms"
        requests = f" of {self.request_class}" if self.request_class else ""
        return f"fewer than {self.percentile:g} %{requests} have {self._limits}"

    def lack(self, strain: float) -> str:
        """Words for requests that miss it, and how far."""
        if not isfinite(strain):
            return self.missed
        if self.is_joint:
            return f"{self.missed}; so many have {self.number(strain)} % of them"
        return f"{self} is {significant(strain * self._limit_ms)} ms where {self._limit_ms:g} are asked"

    @property
    def _prefix(self) -> str:
        return f"{self.request_class} " if self.request_class else ""

    @property
    def name_in_class(self) -> str:
        return f"{' and '.join(metric.upper() for metric, _ in self.limits_ms)} p{self.percentile:g}"

    @cached_property
    def is_joint(self) -> bool:
        return len(self.limits_ms) > 1

    @property
    def _limits(self) -> str:
        return " and ".join(f"{metric.upper()} < {limit_ms:g} ms" for metric, limit_ms in self.limits_ms)

    @property
    def _limit_ms(self) -> float:
        return self.limits_ms[0][1]

    # A percentile over its limit, of requests that may each be nearest to another limit.

    @property
    def unit(self) -> str:
        return "% of limits" if self.is_joint else "ms"

    @property
    def limit(self) -> float:
        """The limit in its unit."""
        return 100.0 if self.is_joint else self._limit_ms

    def number(self, strain: float) -> str:
        """The measured number in its unit."""
        return f"{strain * self.limit:,.0f}"

    def covers(self, request_class: str) -> bool:
        return self.request_class in ("", request_class)

    def is_missed(self, request: RequestRecord) -> bool:
        """True if a request that has ended misses it."""
        if request.outcome != "finished":
            return True
        if not self.is_about(request.num_output_tokens):
            return False
        return any(_time_ms(metric, request) > limit_ms for metric, limit_ms in self.limits_ms)

    def num_allowed(self, num_requests: int) -> int:
        """Requests that may miss it, of so many that it is about."""
        return num_requests - ceil(round(self.percentile / 100 * num_requests, 6))

    def is_about(self, num_output_tokens: int) -> bool:
        """A single token has no TPOT."""
        return num_output_tokens > 1 or not self._is_of_tpot

    @cached_property
    def _is_of_tpot(self) -> bool:
        return not self.is_joint and self.limits_ms[0][0] == "tpot"

    def strain(self, requests: Sequence[RequestRecord]) -> float:
        """The percentile of those that finished, over its limit. requests: all that it covers."""
        return Samples(
            [
                max(_time_ms(metric, request) / limit_ms for metric, limit_ms in self.limits_ms)
                for request in requests
                if request.outcome == "finished" and self.is_about(request.num_output_tokens)
            ]
        ).percentile(self.percentile)

    def strain_of_row(self, row: Mapping[str, Any]) -> float:
        """Strain in a shard: the smallest value that so many requests are within; infinite: failures."""
        import numpy as np  # noqa: PLC0415  slow to import, and workers do without

        times_ns = _times_ns(row)
        values = np.max([times_ns[metric] / (limit_ms * 1e6) for metric, limit_ms in self.limits_ms], axis=0)
        num_missed = int(row["failed"] + row["unfinished"])
        is_about = np.full(len(values), fill_value=True)
        if self.request_class:
            covered = np.asarray(row["classes"], str) == self.request_class
            is_about, num_missed = covered[: len(values)], int(sum(covered[len(values) :]))
        if self._is_of_tpot:
            is_about &= np.asarray(row["output_tokens"]) > 1
        values = np.append(values[is_about], np.full(num_missed, inf))
        if not len(values):
            return 0.0
        return float(np.sort(values)[len(values) - 1 - self.num_allowed(len(values))])


def _time_ms(metric: str, request: RequestRecord) -> float:
    """A single token has no TPOT."""
    return 0.0 if metric == "tpot" and request.num_output_tokens < 2 else _METRICS[metric](request)  # noqa: PLR2004


def _times_ns(row: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415

    ttft_ns, e2e_ns, tokens = (np.asarray(row[name], float) for name in ("ttft_ns", "e2e_ns", "output_tokens"))
    return {"ttft": ttft_ns, "e2e": e2e_ns, "tpot": (e2e_ns - ttft_ns) / np.maximum(tokens - 1, 1)}


class MissedError(Exception):
    """A run that no longer meets its SLO, whatever its other requests do."""

    def __init__(self, term: Term, num_ended: int) -> None:
        super().__init__(term.missed)
        self.num_ended = num_ended


class Tally:
    """Called with each request that has ended. Raises MissedError as soon as too many miss a term."""

    def __init__(self, slo: "Slo", requests: Sequence[RequestSpec]) -> None:
        self._left = {}
        for term in slo.terms:
            about = [s for s in requests if term.covers(s.request_class) and term.is_about(len(s.output))]
            self._left[term] = term.num_allowed(len(about))
        self._classes = classes_of(requests)
        self._num_ended = 0

    def __call__(self, request: RequestRecord) -> None:
        self._num_ended += 1
        request_class = self._classes.get(request.request_id, "")
        for term in self._left:
            if term.covers(request_class) and term.is_missed(request):
                self._left[term] -= 1
                if self._left[term] < 0:
                    raise MissedError(term, self._num_ended)


@dataclass(frozen=True)
class Slo:
    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return "; ".join(
            (f"{name}: " if name else "") + ", ".join(term.goal_in_class for term in terms)
            for name, terms in groupby(self.terms, key=lambda term: term.request_class)
        )

    def kept(self, row: Mapping[str, Any]) -> Any:
        """A mask of a shard's finished requests: true where all limits that cover one are kept."""
        import numpy as np  # noqa: PLC0415

        times_ns = _times_ns(row)
        kept = np.full(len(times_ns["e2e"]), fill_value=True)
        for term in self.terms:
            about = np.full(len(kept), fill_value=True)
            if term.request_class:
                about = np.asarray(row["classes"], str)[: len(kept)] == term.request_class
            for metric, limit_ms in term.limits_ms:
                kept &= ~about | (times_ns[metric] <= limit_ms * 1e6)
        return kept

    def require_classes(self, requests: Sequence[RequestSpec]) -> None:
        """Raises ConfigError if no request has one of its classes."""
        known = dict.fromkeys(classes_of(requests).values())
        for name in dict.fromkeys(term.request_class for term in self.terms):
            if name and name not in known:
                found = f"there are {', '.join(known)}" if known else "they have no classes"
                raise ConfigError(f"--slo: no request of class {name!r}{did_you_mean(name, known)}; {found}")

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Raises ConfigError."""
        terms = tuple(term for group in text.split(";") for term in _terms(group, text))
        names = [f"{term}" for term in terms]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(f"--slo {text!r}: {twice} stands there twice")
        return cls(terms)


def _terms(group: str, text: str) -> list[Term]:
    """Terms of "chat: ttft p99 < 2 s, tpot p99 < 50 ms", or of the same without a class."""
    name, colon, terms = group.partition(":") if ":" in group else ("", "", group)
    if colon and not name.strip():
        raise ConfigError(f"--slo {text!r}: {group.strip()!r} has no class before its colon")
    return [replace(_term(part.strip(), text), request_class=name.strip()) for part in terms.split(",")]


def _term(part: str, text: str) -> Term:
    if (one := _ONE.fullmatch(part)) is not None:
        return Term((_limit(one, text),), _percentile(one, text))
    share = _SHARE.fullmatch(part)
    limits = [_LIMIT.fullmatch(limit.strip()) for limit in share["limits"].split(" and ")] if share else [None]
    if share is None or None in limits:
        raise ConfigError(f"--slo {text!r}: {part!r} is no {_EXAMPLE}")
    found = [_limit(limit, text) for limit in limits if limit is not None]
    if len(dict(found)) < len(found):
        raise ConfigError(f"--slo {text!r}: {part!r} has two limits of one metric")
    return Term(tuple(found), _percentile(share, text))


def _percentile(found: re.Match[str], text: str) -> float:
    percentile = float(found["percentile"])
    if not 0 < percentile <= 100:  # noqa: PLR2004
        raise ConfigError(f"--slo {text!r}: p{percentile:g} is no percentile, above 0 and at most 100")
    return percentile


def _limit(found: re.Match[str], text: str) -> tuple[str, float]:
    metric = found["metric"].lower()
    if metric not in _METRICS:
        known = ", ".join(_METRICS)
        raise ConfigError(f"--slo: no latency {metric!r}{did_you_mean(metric, _METRICS)}; there are {known}")
    try:
        limit_ns = DURATION.parse(found["limit"])
    except ValueError as wrong:
        raise ConfigError(f"--slo {text!r}: {wrong}") from None
    if limit_ns <= 0:
        raise ConfigError(f"--slo {text!r}: a limit is above 0")
    return metric, limit_ns / 1e6
