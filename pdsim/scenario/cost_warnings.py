"""Warnings about runs whose steps no server was measured for."""

from collections.abc import Iterable, Mapping

from pdsim.cost.kernels import has_kernels
from pdsim.metrics.records import StepRecord
from pdsim.scenario.component import component_name
from pdsim.scenario.cost import CostChoice
from pdsim.scenario.schema import Scenario
from pdsim.scenario.servers import ServerSettings


def cost_warnings(scenario: Scenario, steps: Iterable[StepRecord]) -> list[str]:
    """A line for each cost that is not within what was measured."""
    cost, measured = scenario.cost, scenario.cost.measured
    servers = dict(zip(("prefill", "decode"), scenario.servers, strict=True))
    if measured is None:
        return [_unmeasured(cost, servers)]
    setup = scenario.foreign_setup
    outside = ", ".join([*setup, *measured.exceeded(steps)])
    found = []
    if outside:
        has_interval = any(measured.role in (None, role) for role in cost.uncertain)
        interval = "; its interval is left out" if setup and has_interval else ""
        found = [f"cost: {measured}; this run: {outside}: outside{interval}"]
    elif measured.model is None or measured.scaled_from is not None:
        found = [f"cost: {measured}"]
    others = {role: server for role, server in servers.items() if measured.role not in (None, role)}
    return [*found, *(_unmeasured(cost, {role: server}) for role, server in others.items())]


def _unmeasured(cost: CostChoice, servers: Mapping[str, ServerSettings]) -> str:
    """Says what the costs of roles are made of that no server was measured for."""
    costs = (cost.prefill if role == "prefill" else cost.decode for role in servers)
    names = " and ".join(dict.fromkeys(map(component_name, costs)))
    whose = "cost" if len(servers) > 1 else f"cost of {next(iter(servers))}"
    if names == "kernels":
        gpus = dict.fromkeys(server.gpu for server in servers.values())
        unknown = " and ".join(gpu for gpu in gpus if not has_kernels(gpu))
        kernels = f"kernels of {'other GPUs than ' if unknown else ''}{unknown or ' and '.join(gpus)}"
        return f"{whose}: only {kernels} were measured, no server: look at the range; a profile makes it narrow"
    if names == "roofline":
        return f"{whose}: nothing here was measured: roofline, which compares configurations; fit a profile for more"
    return f"{whose}: {names}: the scenario does not say what it was measured on"
