"""Times of the requests of a run, and the numbers that an SLO limits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.metrics.distribution import interpolated
from pdsim.metrics.own_gaps import OWN_ITL
from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary_rows import time_text

OF_GAPS = ("tpot", *OWN_ITL)
"""Metrics of the gaps between a request's tokens. A request with a single output token does not have them."""
_ROUNDING = 1e-9
"""Relative rounding error of the mean of several shares. A mean share that misses its limit by less than this error
counts as within the limit.
"""


def time_limit(limit_ms: float) -> str:
    """Text of a time limit, written as SLOs write limits: "2 s", "50 ms"."""
    return f"{limit_ms / 1e3:.10g} s" if limit_ms >= 1e3 else f"{limit_ms:.10g} ms"  # noqa: PLR2004


def own_itl_ms(metric: str, request: RequestRecord) -> float:
    """A percentile in ms of the gaps between the request's tokens. metric: a name from OWN_ITL. The request must have
    at least two tokens.
    """
    return request.own_itl_ms[OWN_ITL.index(metric)]


@dataclass(frozen=True)
class Times:
    """Times of the requests of one run. Arrays have one entry for each finished request; the array `classes` has
    further entries for the lost requests.
    """

    by_metric: Mapping[str, Any]
    """Arrays by metric, in ms: ttft, tpot, e2e, and percentiles of the gaps between a request's own tokens if they were
    recorded. For a request of one token, which has no gaps, tpot and these percentiles are 0.
    """
    has_tpot: Any
    """Array: True for requests with at least two output tokens, which have a TPOT."""
    num_lost: int
    """Number of requests that failed, or had not ended when the run ended."""
    classes: Any = None
    """Array with the class of each request: finished requests first, then those that failed or did not end. None:
    requests have no classes.
    """
    duration_s: float = 0.0
    """Duration of the run in s, by which numbers of requests become rates. 0: not known, so rates are 0."""

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "Times":
        """Reads the times of a run from the run's row of results."""
        return cls._of(
            row["ttft_ns"],
            row["e2e_ns"],
            row["output_tokens"],
            int(row["failed"] + row["unfinished"]),
            row["classes"] or None,
            row["duration"],
            row.get("own_itl_ms") or None,
        )

    @classmethod
    def of_requests(cls, requests: Sequence[RequestRecord]) -> "Times":
        done = [r for r in requests if r.outcome == "finished"]
        lost = [r for r in requests if r.outcome != "finished"]
        classes = [r.request_class for r in (*done, *lost)]
        start_ns = min((r.arrival_ns for r in requests), default=0)
        return cls._of(
            [(r.first_token_ns or 0) - r.arrival_ns for r in done],
            [(r.end_ns or 0) - r.arrival_ns for r in done],
            [r.num_output_tokens for r in done],
            len(lost),
            classes if any(classes) else None,
            (max((r.end_ns or 0 for r in done), default=start_ns) - start_ns) / 1e9,
            [r.own_itl_ms for r in done] if all(r.own_itl_ms for r in done) else None,
        )

    @classmethod
    def _of(
        cls,
        ttft_ns: Sequence[int],
        e2e_ns: Sequence[int],
        tokens: Sequence[int],
        num_lost: int,
        classes: Sequence[str] | None,
        duration_s: float,
        own_itl: Sequence[Sequence[float]] | None,
    ) -> "Times":
        import numpy as np  # noqa: PLC0415  slow to import, and workers do without

        ttft, e2e, num_tokens = np.asarray(ttft_ns, float) / 1e6, np.asarray(e2e_ns, float) / 1e6, np.asarray(tokens)
        has_tpot = num_tokens > 1
        tpot = np.where(has_tpot, e2e - ttft, 0.0) / np.maximum(num_tokens - 1, 1)
        named = None if classes is None else np.asarray(classes, str)
        columns = () if own_itl is None else np.asarray(own_itl, float).reshape(-1, len(OWN_ITL)).T
        by_metric = {"ttft": ttft, "tpot": tpot, "e2e": e2e, **dict(zip(OWN_ITL, columns, strict=False))}
        return cls(by_metric, has_tpot, num_lost, named, duration_s)

    @property
    def num_sent(self) -> int:
        return len(self.has_tpot) + self.num_lost

    def of_class(self, request_class: str) -> "Times":
        """The times of those requests that belong to the class."""
        lost = [] if self.classes is None else self.classes[len(self.has_tpot) :].tolist()
        return self._where(self.is_of_class(request_class), lost.count(request_class))

    def is_of_class(self, request_class: str) -> Any:
        """Array: True for finished requests of the class. An empty name stands for all requests."""
        if not request_class:
            return self.has_tpot | True
        return self.has_tpot & False if self.classes is None else self.classes[: len(self.has_tpot)] == request_class

    def _where(self, mask: Any, num_lost: int) -> "Times":
        found = {metric: values[mask] for metric, values in self.by_metric.items()}
        return replace(self, by_metric=found, has_tpot=self.has_tpot[mask], num_lost=num_lost, classes=None)

    def percentile(self, metric: str, percent: float) -> float:
        """The percentile of a metric in ms. Requests that did not finish count as infinite. TPOT and ITL leave out
        requests of one token. 0: there are no requests.
        """
        values = self.by_metric[metric]
        if metric in OF_GAPS:
            values = values[self.has_tpot]
        ranked = sorted(values.tolist()) + [inf] * self.num_lost
        return interpolated(percent, len(ranked), ranked.__getitem__) if ranked else 0.0

    def within(self, limits_ms: Sequence[tuple[str, float]]) -> Any:
        """Array with an entry for each finished request: True if the request keeps all limits. limits_ms: pairs of
        (metric, limit in ms).
        """
        kept = self.has_tpot | True
        for metric, limit_ms in limits_ms:
            kept = kept & (self.by_metric[metric] <= limit_ms)
        return kept


@dataclass(frozen=True)
class Reading:
    """A measured or predicted number with its limit. Value and limit have the same unit."""

    name: str
    """Name of the number, such as "TTFT p99" or "requests within TTFT and TPOT"."""
    value: float
    """Value in ms. For a share of requests: in percent. Infinite: so many requests did not finish that the percentile
    has no value.
    """
    limit: float
    """Limit in the unit of `value`. Times must not exceed the limit, and shares must reach it."""
    is_share: bool
    """True: value and limit are shares of requests. False: they are times."""
    request_class: str = ""
    """Class of the requests to which the number applies. Empty: all requests."""

    @property
    def unit(self) -> str:
        return "%" if self.is_share else "ms"

    @property
    def is_met(self) -> bool:
        if self.is_share:
            return self.value >= self.limit * (1 - _ROUNDING)
        return self.value <= self.limit

    @property
    def limit_text(self) -> str:
        return f"{self.limit:g} %" if self.is_share else time_limit(self.limit)

    @property
    def value_text(self) -> str:
        """Text of the value with its unit. "no end": so many requests failed that the percentile has no value."""
        if self.value == inf:
            return "no end"
        text = _text(self.value, is_share=self.is_share)
        if self.is_met or text != _text(self.limit, is_share=self.is_share):
            return text
        return f"{self.value:.7g} {self.unit}"  # rounded it would look as if the limit was kept

    @property
    def short(self) -> str:
        """Text of the value and the limit, for shares of requests: "87.5 %, 90 % asked"."""
        return f"{self.value_text}, {self.limit_text} asked"

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Reading":
        value = inf if found["value"] is None else found["value"]
        return cls(found["name"], value, found["limit"], found["unit"] == "%", found.get("class", ""))

    def to_json(self) -> dict[str, Any]:
        value = self.value if self.value < inf else None
        fields = {"name": self.name, "value": value, "limit": self.limit, "unit": self.unit, "met": self.is_met}
        return {**fields, "class": self.request_class} if self.request_class else fields


def _text(value: float, *, is_share: bool) -> str:
    return f"{value:.1f} %" if is_share else time_text(value)


def mean_reading(readings: Sequence[Reading]) -> Reading:
    """The mean of one number over several runs of one cluster. All readings must have the same limit."""
    return replace(readings[0], value=fmean(reading.value for reading in readings))


@dataclass(frozen=True)
class Attainment:
    """How many requests are within all limits that apply to them, as a share (0 to 1) of all requests, and per second.
    A failed request misses its limits.
    """

    num_requests: int
    """Number of requests that clients sent."""
    share: float
    """Share of the requests that are within all limits, from 0 to 1."""
    goodput_per_s: float
    """Requests per second that are within all limits."""


def attainment_of(num_kept: int, num_sent: int, duration_s: float) -> Attainment:
    return Attainment(num_sent, num_kept / num_sent if num_sent else 0.0, num_kept / duration_s if duration_s else 0.0)


def mean_attainment(runs: Sequence[Attainment]) -> Attainment:
    """The mean share and goodput over several runs of one cluster. num_requests: the sum over the runs."""
    return Attainment(
        sum(one.num_requests for one in runs),
        fmean(one.share for one in runs),
        fmean(one.goodput_per_s for one in runs),
    )
