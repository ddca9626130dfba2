"""An SLO of percentiles, as "ttft p99 < 2 s, tpot p99 < 50 ms", and the end of a run that can no longer meet it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from pdsim.metrics.distribution import Samples
from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary import e2e_ms, tpot_ms, ttft_ms
from pdsim.scenario.fields import DURATION
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.workload.request_spec import RequestSpec

_METRICS: Mapping[str, Callable[[RequestRecord], float]] = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}
_TERM = re.compile(r"(?P<metric>\w+)\s+p(?P<percentile>[\d.]+)\s*<=?\s*(?P<limit>.+)")
_EXAMPLE = "ttft p99 < 2 s, tpot p99 < 50 ms"


@dataclass(frozen=True)
class Term:
    """The percentile of one latency, and its limit. Requests that fail miss it; TPOT is of two tokens and more."""

    metric: str
    percentile: float
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric.upper()} p{self.percentile:g}"

    def is_missed(self, request: RequestRecord) -> bool:
        """Of a request that has ended."""
        if request.outcome != "finished":
            return True
        if self.metric == "tpot" and request.num_output_tokens < 2:  # noqa: PLR2004
            return False
        return _METRICS[self.metric](request) > self.limit_ms

    def num_allowed(self, num_requests: int) -> int:
        """Requests that may miss it."""
        return num_requests - ceil(round(self.percentile / 100 * num_requests, 6))

    def of(self, requests: Sequence[RequestRecord]) -> float:
        """The percentile of those that finished, in ms."""
        times = [
            _METRICS[self.metric](request)
            for request in requests
            if request.outcome == "finished" and (self.metric != "tpot" or request.num_output_tokens > 1)
        ]
        return Samples(times).percentile(self.percentile)

    def tail_ms(self, row: Mapping[str, Any]) -> float:
        """The percentile in a shard's row, the smallest value that so many requests are within; infinite: failures."""
        ttft_ns, e2e_ns, tokens = (np.asarray(row[name], float) for name in ("ttft_ns", "e2e_ns", "output_tokens"))
        if self.metric == "tpot":
            several = tokens > 1
            values = (e2e_ns - ttft_ns)[several] / (tokens[several] - 1)
        else:
            values = ttft_ns if self.metric == "ttft" else e2e_ns
        values = np.append(values, np.full(int(row["failed"] + row["unfinished"]), np.inf))
        if not len(values):
            return 0.0
        return float(np.sort(values)[len(values) - 1 - self.num_allowed(len(values))] / 1e6)


class MissedError(Exception):
    """A run that no longer meets its SLO, whatever its other requests do."""

    def __init__(self, term: Term, num_ended: int) -> None:
        super().__init__(f"{term} is above {term.limit_ms:g} ms")
        self.num_ended = num_ended


class Tally:
    """Called with each request that has ended. Raises MissedError as soon as too many miss a term."""

    def __init__(self, slo: "Slo", requests: Sequence[RequestSpec]) -> None:
        several = sum(len(spec.output) > 1 for spec in requests)
        self._left = {term: term.num_allowed(several if term.metric == "tpot" else len(requests)) for term in slo.terms}
        self._num_ended = 0

    def __call__(self, request: RequestRecord) -> None:
        self._num_ended += 1
        for term in self._left:
            if term.is_missed(request):
                self._left[term] -= 1
                if self._left[term] < 0:
                    raise MissedError(term, self._num_ended)


@dataclass(frozen=True)
class Slo:
    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return ", ".join(f"{term} < {term.limit_ms:g} ms" for term in self.terms)

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Raises ConfigError."""
        terms = tuple(_term(part.strip(), text) for part in text.split(","))
        names = [f"{term}" for term in terms]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(f"--slo {text!r}: {twice} stands there twice")
        return cls(terms)


def _term(part: str, text: str) -> Term:
    found = _TERM.fullmatch(part)
    if found is None:
        raise ConfigError(f"--slo {text!r}: {part!r} is no METRIC pNN < DURATION, such as {_EXAMPLE!r}")
    metric, percentile = found["metric"].lower(), float(found["percentile"])
    if metric not in _METRICS:
        known = ", ".join(_METRICS)
        raise ConfigError(f"--slo: no latency {metric!r}{did_you_mean(metric, _METRICS)}; there are {known}")
    if not 0 < percentile <= 100:  # noqa: PLR2004
        raise ConfigError(f"--slo {text!r}: p{percentile:g} is no percentile, above 0 and at most 100")
    try:
        limit_ns = DURATION.parse(found["limit"])
    except ValueError as wrong:
        raise ConfigError(f"--slo {text!r}: {wrong}") from None
    if limit_ns <= 0:
        raise ConfigError(f"--slo {text!r}: a limit is above 0")
    return Term(metric, percentile, limit_ns / 1e6)
