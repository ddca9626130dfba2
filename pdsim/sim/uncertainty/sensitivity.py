"""Simulates the same requests with 10 % more of one resource at a time.

A metric is limited by the resource whose increase improves the metric most, unless noise changes the metric as much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple, TypeVar

from pdsim.cost.copies import HostCopies
from pdsim.cost.swaps import SwapCosts
from pdsim.dataclass import dataclass
from pdsim.metrics.explanation.relief import reliefs
from pdsim.scenario.building.cluster import Cluster, build
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.network import StagingSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, Simulation
from pdsim.sim.uncertainty.noise import JITTERS, Band, bands, jittered

GAIN = 0.1
"""Share by which a resource of the cluster is increased, to measure how much the increase changes the metrics."""
MEASURES = {
    "request_throughput": "throughput",
    "mean_ttft_ms": "TTFT mean",
    "p99_ttft_ms": "TTFT p99",
    "mean_tpot_ms": "TPOT mean",
    "p99_tpot_ms": "TPOT p99",
}
"""Titles of summary fields. For throughput higher is better; for all other fields lower is better."""

CopiesT = TypeVar("CopiesT", HostCopies, SwapCosts)
Measure = Callable[[RunResult], Mapping[str, float]]
Numbers = Callable[[Cluster], Mapping[str, float]]


@dataclass(frozen=True)
class Sensitivity:
    """Relative changes of a run's metrics if the cluster has more of one resource. GAIN is the relative increase of the
    resource.
    """

    resource: str
    changes: Mapping[str, float]
    """For each metric: its relative change if the cluster has GAIN more of the resource. 0 if the metric is 0 without
    the increase.
    """
    relief: str
    """Fields of the scenario that increase the resource, as text. For a limiting resource of _TRIED: changes of the
    scenario that were simulated and help, with their gains. Empty: none of these changes helps.
    """
    noise: Mapping[str, Band] = field(default_factory=dict)
    """For each metric: its smallest and largest value over runs with the same resources and slightly different message
    times.
    """

    def by_chance(self, metric: str) -> bool:
        """True if noise alone changes the metric as much as the resource does."""
        return metric in self.noise and self.noise[metric].hides(self.changes[metric])

    @property
    def effect(self) -> float:
        """Largest relative change, in absolute value, of any metric if the resource grows."""
        return max(map(abs, self.changes.values()))


class Limit(NamedTuple):
    """The resource that limits one metric, or the finding that no resource does: then `resource` is empty, and `most`
    and `unstable` say what is known instead.
    """

    metric: str
    """Title of the metric in MEASURES, such as "TTFT p99". For other metrics: the name that `measure` gives."""
    resource: str
    """Name of the limiting resource. Empty: no resource limits the metric."""
    change: float
    """Relative change of the metric if the cluster has more of `resource`, or of `most` if no resource limits the
    metric. GAIN is the relative increase. 0: no resource improves the metric.
    """
    relief: str
    """What increases `resource`, as text (Sensitivity.relief). Empty: no change that was tried helps, or no resource
    limits the metric.
    """
    unstable: str = ""
    """Smallest and largest value of an unstable metric, as text. Empty: the metric is stable."""
    most: str = ""
    """If no resource limits the metric: the resource whose increase improves it most. Empty: no resource improves
    it."""
    noise: float = 0.0
    """Relative width of the metric's noise band."""

    def __str__(self) -> str:
        if not self.resource and self.unstable:
            return (
                f"what limits {self.metric}: not known. The metric is unstable: {self.unstable} as messages take up to "
                f"{JITTERS[-1]:.0%} more or less, and {GAIN:.0%} more of any resource changes it by no more than that"
            )
        if not self.resource:
            chance = f"; chance alone changes it by {self.noise:.1%}" if self.noise else ""
            if self.most:
                known = f"{GAIN:.0%} more {self.most} changes it by {self.change:+.1%}, others change it less"
            else:
                known = f"{GAIN:.0%} more of any resource does not improve it"
            return f"what limits {self.metric}: no single resource. {known}{chance}"
        change = f"{GAIN:.0%} more of it: {self.change:+.1%}"
        relief = f"relieved by {self.relief}" if self.relief else "and no tried field adds to it"
        return f"what limits {self.metric}: {self.resource} ({change}), {relief}"


def limits(found: Sequence[Sensitivity]) -> list[Limit]:
    """Returns the limiting resource of each metric."""
    return [_limit(found, metric) for metric in found[0].changes]


def _limit(found: Sequence[Sensitivity], metric: str) -> Limit:
    title = MEASURES.get(metric, metric)
    most = max(found, key=lambda one: _better(metric, one.changes[metric]))
    unstable = _unstable(found[0].noise.get(metric), metric)
    change, noise = most.changes[metric], most.noise[metric].width if metric in most.noise else 0.0
    if round(_better(metric, change), 3) <= 0:
        return Limit(title, "", 0.0, "", unstable, noise=noise)
    if most.by_chance(metric):
        return Limit(title, "", change, "", unstable, most.resource, noise)
    return Limit(title, most.resource, change, most.relief, unstable, noise=noise)


def _unstable(band: Band | None, metric: str) -> str:
    """Returns the band of an unstable metric as text. Empty: the metric is stable, or `band` is None (not known)."""
    if band is None or not band.is_unstable:
        return ""
    unit = "requests/s" if metric == "request_throughput" else "%" if "within " in metric else "ms"
    return f"{band} {unit}"


def _summary(result: RunResult) -> dict[str, float]:
    summary = result.summary()
    return {name: summary[name] or 0.0 for name in MEASURES}


def sensitivities(
    scenario: Scenario,
    *,
    measure: Measure = _summary,
    own_itl: bool = False,
    known: Sequence[Mapping[str, float]] = (),
    progress: Callable[[], None] = lambda: None,
) -> list[Sensitivity]:
    """Returns the sensitivities of a scenario, the largest effect first. Raises ConfigError if the scenario cannot be
    built. measure: function from a run's result to its metrics by name. progress: called `num_runs` times, after each
    run or known result; further runs of `_tried` do not count.

    own_itl: True: computes ITL percentiles of each single request. known: results of `measure` for the run itself and
    then for its repetitions (`jittered`), as far as these runs were made before.
    """

    def numbers(cluster: Cluster) -> Mapping[str, float]:
        return measure(Simulation(cluster, Observation(own_itl=own_itl)).run())

    has_decode_cache = scenario.decode is not None and scenario.decode.radix_cache
    relief = reliefs(aggregated=scenario.aggregated is not None, has_decode_cache=has_decode_cache)
    made = list(known)
    base = made.pop(0) if made else numbers(build(scenario))
    progress()
    repeated = []
    for cluster in jittered(lambda: build(scenario)):
        repeated.append(made.pop(0) if made else numbers(cluster))
        progress()
    noise = bands(base, repeated)
    found = []
    for resource, variant in _variants(scenario, 1 + GAIN).items():
        changed = numbers(variant())
        changes = {name: changed[name] / base[name] - 1 if base[name] else 0.0 for name in base}
        found.append(Sensitivity(resource, changes, relief[resource], noise))
        progress()
    limiting = {limit.resource for limit in limits(found)}
    found = [
        replace(one, relief=_tried(scenario, one, base, numbers)) if one.resource in limiting & _TRIED.keys() else one
        for one in found
    ]
    return sorted(found, key=lambda one: -one.effect)


def _fewer_descriptors(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Returns changes of the scenario that may reduce descriptors: larger pages and, if tensor-parallel sizes differ,
    equal sizes or staging. Keys: the change as text; values: new values by field of the scenario.
    """
    prefill, decode = scenario.pair
    size = max(_LARGE_PAGE, 2 * scenario.page_size)
    changes: dict[str, dict[str, Any]] = {f"page_size: {size}": {"page_size": size}}
    if prefill.tp != decode.tp:
        tp = max(prefill.tp, decode.tp)
        role, smaller = ("prefill", prefill) if prefill.tp < tp else ("decode", decode)
        changes[f"{role}.tp: {tp}"] = {role: smaller.model_copy(update={"tp": tp})}
        if scenario.network.staging is None and scenario.engine == "sglang":
            staged = scenario.network.model_copy(update={"staging": StagingSettings()})
            changes["network.staging: {}"] = {"network": staged}
    return changes


_LARGE_PAGE = 64
"""Smallest page size in tokens among the changes of page_size that are simulated (_fewer_descriptors)."""
_TRIED = {"descriptor cost": _fewer_descriptors}
"""By the name of a resource: a function that takes a scenario and returns changes to try. Whether these changes help
depends on the scenario.
"""


def _tried(scenario: Scenario, one: Sensitivity, base: Mapping[str, float], numbers: Numbers) -> str:
    """Simulates further changes for the resource of a sensitivity (_TRIED), and returns those that help, best first, as
    text with their gains. A change helps if it improves one metric by more than _USEFUL: the metric that the resource
    improves most.

    one: the sensitivity. base: metrics of the unchanged run. numbers: function that simulates a cluster and returns its
    metrics.
    """
    metric = max(one.changes, key=lambda name: _better(name, one.changes[name]))
    gains: dict[str, float] = {}
    for name, update in _TRIED[one.resource](scenario).items():
        try:
            cluster = build(scenario.model_copy(update=update))
        except ConfigError:  # no such cluster
            continue
        gains[name] = numbers(cluster)[metric] / base[metric] - 1
    useful = {name: gain for name, gain in gains.items() if _better(metric, gain) > _USEFUL}
    ranked = sorted(useful, key=lambda name: -_better(metric, useful[name]))
    title = MEASURES.get(metric, metric)
    return ", ".join(f"{name} ({title} {useful[name]:+.1%})" for name in ranked)


_USEFUL = 0.01
"""Minimum relative gain of a change that is proposed."""


def _better(metric: str, change: float) -> float:
    """Returns a relative change of a metric with the sign turned so that positive is better."""
    is_more_better = metric == "request_throughput" or "within " in metric  # a share of requests
    return change if is_more_better else -change


def num_runs(scenario: Scenario) -> int:
    return 1 + len(JITTERS) + len(_variants(scenario, 1 + GAIN))


def _variants(scenario: Scenario, factor: float) -> dict[str, Callable[[], Cluster]]:
    """Returns functions that build a cluster with more of one resource, by the resource's name. factor: the resource's
    new size relative to the present one.
    """
    scenario = resolve(scenario)

    def of_cluster(change: Callable[[Cluster], Cluster]) -> Callable[[], Cluster]:
        return lambda: change(build(scenario))

    def of_field(section: str, **fields: Any) -> Callable[[], Cluster]:
        settings = getattr(scenario, section).model_copy(update=fields)
        return lambda: build(scenario.model_copy(update={section: settings}))

    variants = {
        "prefill compute": of_cluster(lambda cluster: _computing(cluster, prefill=factor)),
        "decode steps": of_cluster(lambda cluster: _computing(cluster, decode=factor)),
        "messages": of_cluster(
            lambda cluster: replace(cluster, message_latency_ns=max(1, round(cluster.message_latency_ns / factor)))
        ),
    }
    roles = ("prefill", "decode") if scenario.aggregated is None else ("aggregated",)
    for role in roles:
        server = getattr(scenario, role)
        more_tokens = round(server.pool_tokens * factor / scenario.page_size) * scenario.page_size
        more_slots = round(server.max_running_requests * factor + 0.5)
        variants[f"{role} KV"] = of_field(role, pool_tokens=more_tokens)
        variants[f"{role} slots"] = of_field(role, max_running_requests=more_slots)
        if (host_bytes := server.host_cache_bytes) is not None:
            variants[f"{role} host memory"] = of_field(role, host_cache=round(host_bytes * factor))
            variants["host link"] = of_cluster(lambda cluster: _host_linked(cluster, factor))
    if scenario.decode is not None and scenario.decode.hisparse is not None:
        variants["host link"] = of_cluster(lambda cluster: _host_linked(cluster, factor))
    if scenario.storage is not None:
        variants["storage"] = of_cluster(lambda cluster: _stored(cluster, factor))
    if scenario.aggregated is None:
        variants["link"] = of_cluster(lambda cluster: _linked(cluster, factor))
        variants["descriptor cost"] = of_cluster(lambda cluster: _transport(cluster, descriptor=factor))
        variants["transfer set-up"] = of_cluster(lambda cluster: _transport(cluster, batch=factor))
        if (staging := scenario.network.staging) is not None:
            more = staging.model_copy(update={"ring": round(staging.ring * factor)})
            variants["staging ring"] = of_field("network", staging=more)
    return variants


def _computing(cluster: Cluster, *, prefill: float = 1.0, decode: float = 1.0) -> Cluster:
    costs = {name: replace(times, speedup=(prefill, decode)) for name, times in cluster.costs.items()}
    return replace(cluster, costs=costs)


def _linked(cluster: Cluster, factor: float) -> Cluster:
    assert cluster.interconnect is not None
    topology = cluster.interconnect.topology
    faster = replace(topology, capacity={link: rate * factor for link, rate in topology.capacity.items()})
    return replace(cluster, interconnect=replace(cluster.interconnect, topology=faster))


def _host_linked(cluster: Cluster, factor: float) -> Cluster:
    links = {name: _faster(link, factor) for name, link in cluster.host_links.items()}
    costs = {
        name: times if times.swaps is None else replace(times, swaps=_faster(times.swaps, factor))
        for name, times in cluster.costs.items()
    }
    return replace(cluster, host_links=links, costs=costs)


def _faster(copies: CopiesT, factor: float) -> CopiesT:
    rates = {name: factor * getattr(copies, name) for name in ("save_bandwidth", "load_bandwidth")}
    return replace(copies, **rates)


def _stored(cluster: Cluster, factor: float) -> Cluster:
    costs = cluster.storage
    assert costs is not None
    more = {
        name: factor * getattr(costs, name)
        for name in ("read_bandwidth", "write_bandwidth", "objects_per_s", "client_bandwidth")
    }
    return replace(cluster, storage=replace(costs, num_pages=round(factor * costs.num_pages), **more))


def _transport(cluster: Cluster, *, batch: float = 1.0, descriptor: float = 1.0) -> Cluster:
    assert cluster.interconnect is not None
    transport = cluster.interconnect.transport
    batch_ns, descriptor_ns = round(transport.batch_ns / batch), transport.descriptor_ns / descriptor
    quicker = replace(transport, batch_ns=batch_ns, descriptor_ns=descriptor_ns)
    return replace(cluster, interconnect=replace(cluster.interconnect, transport=quicker))
