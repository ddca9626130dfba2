"""What a run would be if one resource were a little faster or larger: simulated again for each, same requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdsim.scenario.build import Cluster, build, resolve
from pdsim.scenario.schema import Scenario
from pdsim.sim.simulation import Simulation

GAIN = 0.1
MEASURES = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms")


@dataclass(frozen=True)
class Sensitivity:
    """Relative changes of a run's summary when there is GAIN more of one resource."""

    resource: str
    changes: Mapping[str, float]
    """By the names of MEASURES."""

    @property
    def effect(self) -> float:
        """The largest of them, whatever its sign."""
        return max(map(abs, self.changes.values()))


def sensitivities(
    scenario: Scenario, *, gain: float = GAIN, progress: Callable[[], None] = lambda: None
) -> list[Sensitivity]:
    """What moves the run most comes first. Raises ConfigError as build does. Calls progress after each run."""
    variants = _variants(scenario, 1 + gain)
    base = _measured(build(scenario))
    progress()
    found = []
    for resource, cluster in variants.items():
        changed = _measured(cluster())
        changes = {name: changed[name] / base[name] - 1 if base[name] else 0.0 for name in MEASURES}
        found.append(Sensitivity(resource, changes))
        progress()
    return sorted(found, key=lambda one: -one.effect)


def num_runs(scenario: Scenario) -> int:
    return 1 + len(_variants(scenario, 1 + GAIN))


def _measured(cluster: Cluster) -> dict[str, float]:
    summary = Simulation(cluster).run().summary()
    return {name: summary[name] for name in MEASURES}


def _variants(scenario: Scenario, factor: float) -> dict[str, Callable[[], Cluster]]:
    """By resource, clusters that have more of it."""
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


def _transport(cluster: Cluster, *, batch: float = 1.0, descriptor: float = 1.0) -> Cluster:
    assert cluster.interconnect is not None
    transport = cluster.interconnect.transport
    batch_ns, descriptor_ns = round(transport.batch_ns / batch), transport.descriptor_ns / descriptor
    quicker = replace(transport, batch_ns=batch_ns, descriptor_ns=descriptor_ns)
    return replace(cluster, interconnect=replace(cluster.interconnect, transport=quicker))
