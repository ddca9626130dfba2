"""What of a run lies outside what its step times were measured on."""

from collections.abc import Iterable

from pdsim.metrics.records import StepRecord
from pdsim.scenario.component import component_name
from pdsim.scenario.measured import Setup
from pdsim.scenario.schema import Scenario, ServerSettings
from pdsim.system.catalog import load_model


def setup_of(scenario: Scenario) -> Setup:
    """The setup of a scenario's instances."""
    prefill, decode = _servers(scenario)
    return Setup(
        model=scenario.model,
        weight_dtype=scenario.weight_dtype or load_model(scenario.model).weight_dtype,
        kv_dtype=scenario.kv_dtype,
        device=_gpus(scenario),
        tp=(prefill.tp, decode.tp),
        dp=(prefill.dp, decode.dp),
    )


def device_of(scenario: Scenario) -> str:
    """The device whose step times a run has."""
    measured = scenario.cost.measured
    return (None if measured is None else measured.device) or _gpus(scenario)


def foreign_setup(scenario: Scenario) -> list[str]:
    """Parts of a scenario's setup that its profile was not measured on."""
    measured = scenario.cost.measured
    return [] if measured is None or measured.model is None else measured.differences(setup_of(scenario))


def cost_warnings(scenario: Scenario, steps: Iterable[StepRecord]) -> list[str]:
    """One line, or none where all of a run is within what was measured."""
    cost = scenario.cost
    if cost.measured is None:
        names = " and ".join(dict.fromkeys(map(component_name, (cost.prefill, cost.decode))))
        if names == "roofline":
            return ["cost: nothing here was measured: roofline, which compares configurations; fit a profile for more"]
        return [f"cost: {names}: the scenario does not say what it was measured on"]
    setup = foreign_setup(scenario)
    outside = ", ".join([*setup, *cost.measured.exceeded(steps)])
    if outside:
        interval = "; its interval is left out" if setup and cost.ends else ""
        return [f"cost: {cost.measured}; this run: {outside}: outside{interval}"]
    is_certain = cost.measured.model is not None and cost.measured.scaled_from is None
    return [] if is_certain else [f"cost: {cost.measured}"]


def _gpus(scenario: Scenario) -> str:
    return " and ".join(dict.fromkeys(servers.gpu for servers in _servers(scenario)))


def _servers(scenario: Scenario) -> tuple[ServerSettings, ServerSettings]:
    """Those who prefill, and those who decode."""
    return (scenario.aggregated, scenario.aggregated) if scenario.aggregated else scenario.pair
