"""Reads saved pages of metrics and of server info from SGLang, vLLM and Dynamo, and gives a quantity the same name for
every engine.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pdsim.dataclass import dataclass
from pdsim.inputs import finite, parse_json, read_text
from pdsim.scenario.yaml_file import ConfigError


class Quantity(NamedTuple):
    what: str
    """Name of the quantity in tables."""
    names: tuple[str, ...]
    """Names under which engines report the quantity, without `_total`. If a page has several of these metrics, the
    first in this list is read.
    """
    factor: float = 1.0
    """Factor from the unit of the metrics to the unit of the shown number."""
    is_mean: bool = False
    """True: the mean over servers or ranks is taken. False: the sum."""


QUANTITIES = {
    "running": Quantity(
        "requests running",
        ("vllm:num_requests_running", "sglang:num_running_reqs", "dynamo_component_inflight_requests",
         "dynamo_frontend_inflight_requests", "dynamo_frontend_active_requests"),
    ),
    "waiting": Quantity(
        "requests waiting", ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "dynamo_frontend_queued_requests")
    ),
    "cache_usage": Quantity(
        "share of the pool in use",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage",
         "dynamo_component_kvstats_gpu_cache_usage_percent", "dynamo_component_gpu_cache_usage_percent"),
        is_mean=True,
    ),
    "hit_tokens": Quantity(
        "tokens found in the prefix cache",
        ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens",
         "dynamo_frontend_cached_tokens_sum"),
    ),
    "queried_tokens": Quantity(
        "tokens looked up there", ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries", "sglang:prompt_tokens")
    ),
    "hit_share": Quantity(
        "share of hits", ("sglang:cache_hit_rate", "dynamo_component_kvstats_gpu_prefix_cache_hit_rate"), is_mean=True
    ),
    "pool_tokens": Quantity("tokens of the pool", ("sglang:max_total_num_tokens",)),
    "prompt_tokens": Quantity(
        "prompt tokens", ("vllm:prompt_tokens", "sglang:prompt_tokens", "dynamo_frontend_input_sequence_tokens_sum")
    ),
    "output_tokens": Quantity(
        "answer tokens",
        ("vllm:generation_tokens", "sglang:generation_tokens", "dynamo_frontend_output_tokens",
         "dynamo_frontend_output_sequence_tokens_sum"),
    ),
    "requests": Quantity(
        "requests", ("vllm:request_success", "sglang:num_requests", "dynamo_frontend_requests",
                     "dynamo_component_requests")
    ),
    "preemptions": Quantity("preemptions", ("vllm:num_preemptions", "sglang:num_retracted_requests")),
    **{
        f"{time}_{part}": Quantity(f"{what}, {part}", tuple(f"{name}_{part}" for name in names), factor)
        for time, what, names in (
            ("ttft", "TTFT", ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds",
                              "dynamo_frontend_time_to_first_token_seconds")),
            ("tpot", "TPOT", ("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds",
                              "sglang:request_time_per_output_token_seconds", "sglang:time_per_output_token_seconds")),
            ("itl", "ITL", ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds",
                            "dynamo_frontend_inter_token_latency_seconds")),
            ("e2e_latency", "latency", ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds",
                                        "dynamo_frontend_request_duration_seconds",
                                        "dynamo_component_request_duration_seconds")),
        )
        for part, factor in (("sum", 1e3), ("count", 1.0))
    },
}  # fmt: skip
"""The quantities that are read from pages of metrics, by pdsim's names. Sums of times are in ms."""
COUNTERS = (
    "requests", "prompt_tokens", "output_tokens", "hit_tokens", "queried_tokens", "preemptions",
    *(f"{time}_{part}" for time in ("ttft", "tpot", "itl", "e2e_latency") for part in ("sum", "count")),
)  # fmt: skip
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+(-?\d+))?\s*$")
_OF_RAY = re.compile(r"^(?:ray_)?(vllm|sglang)[:_]")
"""Matches the engine's name at the beginning of a metric's name, even if Ray has changed it: Ray puts ray_ before the
name, and some stores replace the colon. So ray_vllm_num_requests_running stands for vllm:num_requests_running.
"""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    name: str
    """Name of the metric as in Quantity.names: without `_total`, and without changes by Ray."""
    labels: dict[str, str]
    """Labels of the sample on the metrics page, such as model_name: value by name."""
    value: float


@dataclass
class Page:
    """The numbers of one saved page: Prometheus metrics of a server or frontend, or the JSON of SGLang's server info.
    values: numbers by name. Names are those of QUANTITIES, page_tokens, and after `between` the rates of RATES.
    """

    path: Path
    values: dict[str, float] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    """Model, version, parallel sizes and options of the server, by the names in SGLang's server info. Empty for pages
    of metrics.
    """


def read_page(path: Path) -> Page:
    """Reads a saved page of a server or frontend: Prometheus metrics, or the JSON of SGLang's server info. Raises
    ConfigError if the file has neither, and InputError if the file is no text or broken JSON.
    """
    text = read_text(path, "text")
    if text.lstrip().startswith(("{", "[")):
        return _of_info(path, parse_json(text, str(path), has_infinity=True))
    page = Page(path, _values(list(samples(text))))
    if not page.values:
        raise ConfigError(f"{path} has no metrics of SGLang, vLLM or Dynamo, such as vllm:num_requests_running")
    return page


def samples(text: str) -> Iterator[Sample]:
    """Yields the samples of a text in Prometheus's format. Skips other lines, samples without a finite value, samples
    of ranks that repeat the numbers of rank 0, and samples of Dynamo endpoints other than `generate`.
    """
    for line in text.splitlines():
        found = _SAMPLE.match(line.strip())
        if found is None or line.startswith("#"):
            continue
        name, labels, value, _ = found.groups()
        own = dict(_LABEL.findall(labels or ""))
        if own.get("tp_rank", "0") != "0" or own.get("pp_rank", "0") != "0":
            continue
        if own.get("dynamo_endpoint", "generate") != "generate":
            continue
        try:
            yield Sample(_OF_RAY.sub(r"\1:", name).removesuffix("_total"), own, finite(value))
        except ValueError:  # NaN, of a gauge that has no value yet
            continue


def _values(found: Iterable[Sample]) -> dict[str, float]:
    by_name: dict[str, list[Sample]] = {}
    for sample in found:
        by_name.setdefault(sample.name, []).append(sample)
    values: dict[str, float] = {}
    for key, quantity in QUANTITIES.items():
        name = next((name for name in quantity.names if name in by_name), None)
        if name is None:
            continue
        numbers = [sample.value for sample in _wholes(by_name[name])]
        values[key] = quantity.factor * sum(numbers) / (len(numbers) if quantity.is_mean else 1)
    if "pool_tokens" not in values:
        values |= _pool(by_name)
    if values.get("queried_tokens") and "hit_tokens" in values:
        values["hit_share"] = values["hit_tokens"] / values["queried_tokens"]
    return values


def _wholes(found: Sequence[Sample]) -> Sequence[Sample]:
    """The samples of a metric that count all priorities: those with an empty label `priority`, or without one. If there
    are none, all samples.
    """
    wholes = [sample for sample in found if not sample.labels.get("priority")]
    return wholes or found


def _pool(by_name: Mapping[str, list[Sample]]) -> dict[str, float]:
    """Size of the KV pool, from labels of vllm:cache_config_info: pool_tokens is the sum of tokens over all servers,
    page_tokens the number of tokens of a KV page. Empty: the metrics page has no such metric with both numbers.
    by_name: samples by metric.
    """
    total = size = 0.0
    for sample in by_name.get("vllm:cache_config_info", ()):
        try:
            size = finite(sample.labels.get("block_size"))
            total += size * finite(sample.labels.get("num_gpu_blocks"))
        except ValueError:
            continue
    return {"pool_tokens": total, "page_tokens": size} if total else {}


_OF_INFO = {
    "pool_tokens": ("max_total_num_tokens", "max_total_tokens", "token_capacity"),
    "page_tokens": ("page_size", "block_size"),
}
_OF_LOADS = {
    "running": ("num_running_reqs",),
    "waiting": ("num_waiting_reqs", "num_queue_reqs"),
    "cache_usage": ("token_usage",),
}
"""Names under which SGLang's server info reports the load of its ranks, by quantity of QUANTITIES. Values of several
ranks become their mean or their sum, as is_mean says.
"""
_TOLD = (
    "model_path", "model", "served_model_name", "version", "tp_size", "dp_size", "pp_size", "ep_size",
    "tensor_parallel_size", "max_running_requests", "chunked_prefill_size", "mem_fraction_static", "kv_cache_dtype",
    "disaggregation_mode",
)  # fmt: skip


def _of_info(path: Path, found: Any) -> Page:
    """Returns the Page of SGLang's answer to /server_info, or of similar JSON, in which states and configurations may
    be nested. Raises ConfigError if the JSON has no field that pdsim knows.
    """
    flat: dict[str, Any] = {}
    numbers: dict[str, list[float]] = {}
    for name, value in _leaves(found):
        flat.setdefault(name, value)
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            numbers.setdefault(name, []).append(value)
    page = Page(path)
    for key, names in (_OF_INFO | _OF_LOADS).items():
        each = next((numbers[name] for name in names if name in numbers), None)
        if each is not None and key in _OF_LOADS:
            page.values[key] = fmean(each) if QUANTITIES[key].is_mean else sum(each)
        elif each is not None:
            page.values[key] = each[0]
    if "running" not in page.values and "num_reqs" in numbers:  # of SGLang's /get_load, with those that wait
        page.values["running"] = sum(numbers["num_reqs"]) - page.values.get("waiting", 0.0)
    page.told = {name: flat[name] for name in _TOLD if flat.get(name) is not None}
    if not page.values and not page.told:
        raise ConfigError(f"{path} is no answer of a server's info: it has {', '.join(list(flat)[:12]) or 'no fields'}")
    return page


def _leaves(found: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(found, list):
        for one in found:
            yield from _leaves(one)
    elif isinstance(found, dict):
        yield from ((name, value) for name, value in found.items() if not isinstance(value, dict | list))
        for value in found.values():
            yield from _leaves(value)


def between(first: Page, last: Page, seconds: float | None) -> Page:
    """Returns the metrics page `last`, in which each counter that the page `first` has, too, is replaced by its
    increase since `first`. hit_share becomes the share during this time if the pages have its counters. seconds: time
    in s between the pages, from which rates are computed; None: not known, no rates. Raises ConfigError if a counter
    decreased, as with pages in the wrong order.
    """
    values = dict(last.values)
    for key in COUNTERS:
        if key in values and key in first.values:
            values[key] -= first.values[key]
            if values[key] < 0:
                raise ConfigError(f"{last.path}: {key} is less than in {first.path}: give the earlier page first")
    if values.get("queried_tokens") and "hit_tokens" in values:
        values["hit_share"] = values["hit_tokens"] / values["queried_tokens"]
    if seconds:
        for key, rate in RATES.items():
            if key in values:
                values[rate] = values[key] / seconds
    return Page(last.path, values, last.told)


RATES = {
    "requests": "request_throughput",
    "prompt_tokens": "input_throughput",
    "output_tokens": "output_throughput",
}
"""Counters of a metrics page whose rates per second a summary has. Values: the summary's fields with the rates."""
MEANS = ("ttft", "tpot", "itl", "e2e_latency")


def summary_of(page: Page) -> dict[str, float]:
    """The rates and mean times of a metrics page, as fields of a run's summary."""
    found = {rate: page.values[rate] for rate in RATES.values() if rate in page.values}
    for time in MEANS:
        if count := page.values.get(f"{time}_count"):
            found[f"mean_{time}_ms"] = page.values.get(f"{time}_sum", 0.0) / count
    return found
