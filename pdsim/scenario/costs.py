"""From cost settings to the step times of instances."""

from dataclasses import is_dataclass, replace

from pdsim.cost.aiconfigurator import NoOperatorTablesError
from pdsim.cost.model import CostModel, CostSettings
from pdsim.cost.step_times import NO_DRAFTING, DecodeHostOverhead, Drafting, Graphs, StepTimes, captured_batches
from pdsim.scenario.schema import AggregatedSettings, DecodeSettings, Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.memory import Layout, memory_tier


def prefill_times(scenario: Scenario, layout: Layout) -> StepTimes:
    """An instance that computes prompts alone."""
    model, measured = _model(scenario, scenario.cost.prefill, layout), scenario.cost.measured
    return StepTimes(prefill=model, decode=model, measured=None if measured is None else measured.bounds())


def decode_times(scenario: Scenario, settings: DecodeSettings | AggregatedSettings, layout: Layout) -> StepTimes:
    """An instance that decodes, in a resolved scenario; an aggregated one computes prompts as well."""
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    cost, host, draft_tokens = scenario.cost, scenario.cost.host, settings.speculative_draft_tokens
    drafting, graphs = NO_DRAFTING, None
    if draft_tokens is not None:
        drafting = Drafting(draft_tokens, settings.speculative_drafting)
    if cost.graph_sizes is not None:
        largest = memory_tier(layout.gpu, settings.tp).max_graph_batch
        default = captured_batches(largest, settings.max_running_requests, speculative=draft_tokens is not None)
        launch_ns = host.slowdown * cost.eager_layer * layout.model.num_layers
        sizes = default if cost.graph_sizes == "sglang" else cost.graph_sizes
        graphs = Graphs(sorted(sizes), launch_ns, cost.graph_empty_row_kv)
    return StepTimes(
        prefill=_model(scenario, cost.prefill, layout),
        decode=_model(scenario, cost.decode, layout),
        measured=None if cost.measured is None else cost.measured.bounds(),
        drafting=drafting,
        graphs=graphs,
        host_overhead=DecodeHostOverhead(host.slowdown * host.decode_step, host.slowdown * host.decode_request),
    )


def _model(scenario: Scenario, settings: CostSettings, layout: Layout) -> CostModel:
    try:
        return _slowed(settings, scenario.cost.host.slowdown).model(layout)
    except NoOperatorTablesError as wrong:
        raise ConfigError(f"cost: aiconfigurator: {wrong}") from None


def _slowed(settings: CostSettings, slowdown: float) -> CostSettings:
    """The settings with their host work slowed: a class names those fields in HOST_FIELDS."""
    host_fields = getattr(settings, "HOST_FIELDS", ())
    if slowdown == 1 or not host_fields or not is_dataclass(settings):
        return settings
    return replace(settings, **{name: slowdown * getattr(settings, name) for name in host_fields})
