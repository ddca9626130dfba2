"""From cost settings to the cost models of instances."""

from pdsim.cost.aiconfigurator import UnavailableError
from pdsim.cost.graphs import GraphReplay, captured_batches
from pdsim.cost.model import CostModel, CostSettings
from pdsim.cost.pace import OnCores
from pdsim.cost.rest import Resting
from pdsim.cost.verification import Verification
from pdsim.cost.waking import Waking
from pdsim.scenario.schema import AggregatedSettings, DecodeSettings, Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.memory import Layout, memory_tier


def prefill_cost(scenario: Scenario, layout: Layout) -> CostModel:
    """Of an instance that does nothing else, and waits in between."""
    model, waking = forward_cost(scenario, layout), scenario.cost.waking
    return Waking(model, waking.most, waking.memory) if waking.most else model


def forward_cost(scenario: Scenario, layout: Layout) -> CostModel:
    """Of prefill, whatever the instance does besides."""
    model = _model(scenario, scenario.cost.prefill, layout)
    return _computed(scenario, model, scenario.cost.pace.prefill_slowdown)


def decode_cost(scenario: Scenario, settings: DecodeSettings | AggregatedSettings, layout: Layout) -> CostModel:
    """Of the decode steps of an instance, in a resolved scenario."""
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    model = _model(scenario, scenario.cost.decode, layout)
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
        launch_ns = graphs.eager_layer * layout.model.num_layers
        model = GraphReplay(model, sorted(graphs.sizes or default), launch_ns, graphs.empty_row_kv)
    model = _computed(scenario, model, scenario.cost.pace.decode_slowdown)
    rest = scenario.cost.rest
    return Resting(model, rest.step, rest.request) if rest.step or rest.request else model


def _computed(scenario: Scenario, model: CostModel, slowdown: float | None) -> CostModel:
    """Where steps are the work of cores that may be slow. slowdown: of such steps; None: as of the host's work."""
    pace = scenario.cost.pace
    if pace.is_none or pace.slows == "launches":
        return model
    return OnCores(model, 1 if slowdown is None else slowdown / pace.slowdown)


def _model(scenario: Scenario, settings: CostSettings, layout: Layout) -> CostModel:
    """Of steps as they were measured, before drafts and graphs change them."""
    try:
        model = settings.model(layout)
    except UnavailableError as wrong:
        raise ConfigError(f"cost: aiconfigurator: {wrong}") from None
    measured = scenario.cost.measured
    return model if measured is None else measured.bound(model)
