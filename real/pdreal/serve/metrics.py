"""Metrics of the server as Prometheus text. They have SGLang's names, so that SGLang's dashboards show them."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from pdsim.core.instance import Levels

_ENGINE_TYPES = {"prefill": "prefill", "decode": "decode", "aggregated": "unified"}
"""SGLang's names of roles, by pdsim's names."""
_REQUESTS: Mapping[str, Mapping[str, str]] = {
    "prefill": {
        "num_queue_reqs": "num_queued",
        "num_running_reqs": "num_running",
        "num_prefill_inflight_queue_reqs": "num_transferring",
    },
    "decode": {
        "num_queue_reqs": "num_ready",
        "num_running_reqs": "num_running",
        "num_decode_prealloc_queue_reqs": "num_queued",
        "num_decode_transfer_queue_reqs": "num_transferring",
        "num_retracted_reqs": "num_retracted",
    },
    "aggregated": {
        "num_queue_reqs": "num_queued",
        "num_running_reqs": "num_running",
        "num_retracted_reqs": "num_retracted",
    },
}
"""For each role: SGLang's metrics, each with the field of Levels that has its value."""


class Gauge(NamedTuple):
    name: str
    """Name of the metric without the prefix, such as num_queue_reqs."""
    instance_id: str
    engine_type: str
    """SGLang's name of the role: prefill, decode or unified."""
    value: float


def gauges(load: Mapping[str, Levels], page_size: int) -> Iterator[Gauge]:
    """Yields the gauges of each instance that reported its levels. page_size: number of tokens per page, because
    SGLang's gauges count KV in tokens. load: levels (numbers of requests and pages), by instance id.
    """
    for instance_id, levels in load.items():
        role = instance_id.rpartition("-")[0]
        pages = levels.num_used_pages, levels.num_evictable_pages, levels.num_free_pages
        values: dict[str, float] = {name: getattr(levels, ours) for name, ours in _REQUESTS[role].items()}
        values["kv_used_tokens"], values["kv_evictable_tokens"], values["kv_available_tokens"] = (
            page_size * num_pages for num_pages in pages
        )
        values["token_usage"] = levels.num_used_pages / sum(pages)
        values["max_total_num_tokens"] = page_size * sum(pages)
        for name, value in values.items():
            yield Gauge(name, instance_id, _ENGINE_TYPES[role], value)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_WHOLE_S = (*_FIRST_TOKEN_S, 600, 1200, 1800, 2400)
_BETWEEN_TOKENS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
"""Upper bounds in s of the buckets for times between tokens, and for a request's mean time per output token (TPOT), as
in SGLang 0.5.23.
"""


class Histogram:
    """A histogram: for each upper bound, the number of values that do not exceed it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """Counters and histograms of one server. The gauges are an argument of `text`: levels that instances reported last
    (Launcher.load).
    """

    def __init__(self, model_name: str) -> None:
        self._labels = f'model_name="{_escaped(model_name)}"'
        self.num_requests = 0
        self.num_aborted_requests = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in prefix caches, of requests that have their first token."""
        self.num_generation_tokens = 0
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(_BETWEEN_TOKENS_S)
        self.per_output_token_s = Histogram(_BETWEEN_TOKENS_S)
        self.whole_s = Histogram(_WHOLE_S)

    def text(self, gauges: Iterable[Gauge]) -> str:
        return "\n".join([*self._gauge_lines(gauges), *self._own_lines(), ""])

    def _gauge_lines(self, gauges: Iterable[Gauge]) -> Iterator[str]:
        by_name = groupby(sorted(gauges), key=lambda gauge: gauge.name)
        for name, same in by_name:
            yield f"# TYPE sglang:{name} gauge"
            for gauge in same:
                labels = f'{self._labels},engine_type="{gauge.engine_type}",instance="{gauge.instance_id}"'
                yield f"sglang:{name}{{{labels}}} {gauge.value}"

    def _own_lines(self) -> Iterator[str]:
        counters = {
            "num_requests_total": self.num_requests,
            "num_aborted_requests_total": self.num_aborted_requests,
            "prompt_tokens_total": self.num_prompt_tokens,
            "cached_tokens_total": self.num_cached_tokens,
            "generation_tokens_total": self.num_generation_tokens,
        }
        for name, value in counters.items():
            yield from (f"# TYPE sglang:{name} counter", f"sglang:{name}{{{self._labels}}} {value}")
        histograms = {
            "time_to_first_token_seconds": self.first_token_s,
            "inter_token_latency_seconds": self.between_tokens_s,
            "request_time_per_output_token_seconds": self.per_output_token_s,
            "e2e_request_latency_seconds": self.whole_s,
        }
        for name, histogram in histograms.items():
            yield f"# TYPE sglang:{name} histogram"
            yield from histogram.lines(f"sglang:{name}", self._labels)


class Meter:
    """Adds one request's times and tokens to the metrics."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._num_tokens = 0
        self._began_s = self._first_s = self._last_s = time.monotonic()
        metrics.num_requests += 1
        metrics.num_prompt_tokens += num_prompt_tokens

    def add_tokens(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Adds tokens that arrived together. num_cached_tokens: number of the request's prompt tokens that were
        cached.
        """
        now_s, metrics = time.monotonic(), self._metrics
        if self._num_tokens == 0:
            self._first_s = now_s
            metrics.first_token_s.add(now_s - self._began_s)
            metrics.num_cached_tokens += num_cached_tokens
        else:
            metrics.between_tokens_s.add((now_s - self._last_s) / num_tokens, num_tokens)
        self._last_s = now_s
        self._num_tokens += num_tokens
        metrics.num_generation_tokens += num_tokens

    def end(self, *, is_complete: bool) -> None:
        metrics = self._metrics
        if not is_complete:
            metrics.num_aborted_requests += 1
            return
        metrics.whole_s.add(time.monotonic() - self._began_s)
        if self._num_tokens > 1:
            metrics.per_output_token_s.add((self._last_s - self._first_s) / (self._num_tokens - 1))


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
