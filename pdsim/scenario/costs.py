"""From cost settings to the cost models of instances."""

from dataclasses import is_dataclass, replace

from pdsim.cost.aiconfigurator import UnavailableError
from pdsim.cost.graphs import GraphReplay, captured_batches
from pdsim.cost.model import CostModel, CostSettings
from pdsim.cost.rest import Resting
from pdsim.cost.verification import Verification
from pdsim.scenario.schema import AggregatedSettings, DecodeSettings, Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.memory import Layout, memory_tier


def prefill_cost(scenario: Scenario, layout: Layout) -> CostModel:
    """Prefill forwards of an instance."""
    return _model(scenario, scenario.cost.prefill, layout)


def decode_cost(scenario: Scenario, settings: DecodeSettings | AggregatedSettings, layout: Layout) -> CostModel:
    """Decode steps of an instance, in a resolved scenario."""
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    model = _model(scenario, scenario.cost.decode, layout)
    slowdown, rest = scenario.cost.host.slowdown, scenario.cost.rest
    speculative, graphs = settings.speculative, scenario.cost.graphs
    if speculative is not None:
        model = Verification(
            target=model,
            draft_tokens=speculative.draft_tokens,
            draft_ns=speculative.draft,
            draft_per_request_ns=speculative.draft_per_request,
        )
    if graphs is not None:
        largest = graphs.max_batch or memory_tier(layout.gpu, settings.tp).max_graph_batch
        default = captured_batches(largest, settings.max_running_requests, speculative=speculative is not None)
        launch_ns = slowdown * graphs.eager_layer * layout.model.num_layers
        model = GraphReplay(model, sorted(graphs.sizes or default), launch_ns, graphs.empty_row_kv)
    return Resting(model, slowdown * rest.step, slowdown * rest.request) if rest.step or rest.request else model


def _model(scenario: Scenario, settings: CostSettings, layout: Layout) -> CostModel:
    """Steps as they were measured, before drafts and graphs change them."""
    try:
        model = _slowed(settings, scenario.cost.host.slowdown).model(layout)
    except UnavailableError as wrong:
        raise ConfigError(f"cost: aiconfigurator: {wrong}") from None
    measured = scenario.cost.measured
    return model if measured is None else measured.bound(model)


def _slowed(settings: CostSettings, slowdown: float) -> CostSettings:
    """The settings with their host work slowed: a class names those fields in HOST_FIELDS."""
    host_fields = getattr(settings, "HOST_FIELDS", ())
    if slowdown == 1 or not host_fields or not is_dataclass(settings):
        return settings
    return replace(settings, **{name: slowdown * getattr(settings, name) for name in host_fields})
