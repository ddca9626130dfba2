"""Clusters without disaggregation: each instance computes prompts and decodes them."""

from collections.abc import Sequence
from copy import deepcopy

from pdsim.core.aggregated_instance import AggregatedInstance, AggregatedLimits
from pdsim.cost.step_times import StepTimes
from pdsim.scenario.costs import decode_times
from pdsim.scenario.decoding import num_ahead_tokens, speculation
from pdsim.scenario.faults import HealthSettings
from pdsim.scenario.schema import AggregatedSettings, Scenario
from pdsim.scenario.sizing import instance_ids, kv_cache, layout_of
from pdsim.scenario.yaml_file import ConfigError
from pdsim.workload.request_spec import RequestSpec

DP_CONSERVATIVENESS = 0.3
"""SGLang's factor on schedule_conservativeness with data-parallel attention."""


def check_aggregated_requests(
    scenario: Scenario, settings: AggregatedSettings, requests: Sequence[RequestSpec]
) -> None:
    """Each request alone must fit as SGLang counts: whole pages of its prompt, its output, a page, a step's tokens."""
    page = scenario.page_size
    tokens = {spec.request_id: -(-len(spec.prompt) // page) * page + len(spec.output) for spec in requests}
    largest = max(tokens, key=lambda request_id: tokens[request_id])
    room = (settings.pool_tokens or 0) - page - num_ahead_tokens(settings.speculative)
    if tokens[largest] > room:
        raise ConfigError(
            f"request {largest} grows to {tokens[largest]} tokens; an aggregated instance has room for {room}: "
            f"give it a larger GPU, tp or mem_fraction, or leave the request out"
        )


def build_aggregated_instances(scenario: Scenario, settings: AggregatedSettings) -> list[AggregatedInstance]:
    """Fresh instances of a resolved scenario. Each has its own copy of its policies: they may keep state."""
    return [
        AggregatedInstance(
            instance_id,
            cache=kv_cache(scenario, settings),
            limits=_limits(settings, scenario.health),
            policy=deepcopy(settings.policy),
            preemption_policy=deepcopy(settings.preemption),
        )
        for instance_id in instance_ids(settings, "aggregated")
    ]


def aggregated_costs(scenario: Scenario, settings: AggregatedSettings) -> dict[str, StepTimes]:
    layout = layout_of(scenario, "aggregated")
    return {i: decode_times(scenario, settings, layout) for i in instance_ids(settings, "aggregated")}


def _limits(settings: AggregatedSettings, health: HealthSettings | None) -> AggregatedLimits:
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    return AggregatedLimits(
        max_running_requests=settings.max_running_requests,
        chunked_prefill_tokens=settings.rank_chunk_tokens or None,
        max_prefill_tokens=settings.max_prefill_tokens,
        schedule_conservativeness=settings.schedule_conservativeness * (1 if settings.dp == 1 else DP_CONSERVATIVENESS),
        overlap=settings.overlap,
        speculation=speculation(settings.speculative),
        waiting_timeout_ns=None if health is None else health.waiting_timeout,
    )
