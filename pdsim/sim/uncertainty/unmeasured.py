"""Describes which costs of a run were not measured on a server."""

from collections.abc import Iterable, Mapping
from statistics import fmean

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.kernels import has_kernels, medians_of
from pdsim.cost.model import FRACTION_BITS, Terms
from pdsim.cost.settings import Kernels
from pdsim.metrics.records import StepRecord
from pdsim.scenario.building.sizing import layout_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name
from pdsim.scenario.sections.servers import ServerSettings
from pdsim.system.catalog import load_model
from pdsim.system.memory import Layout

_TERMS = {
    "gemm": ("matrices", "matrix products"),
    "experts": ("experts", "experts"),
    "prefill_attention": ("attention", "attention"),
    "decode_attention": ("reading KV", "attention"),
    "all_reduce": ("all-reduce", "all-reduce"),
}
"""Two names for each operator: the name that a step's terms have for the operator's time, and the name that messages
have for the operator.
"""
_LEAST_SHARE = 0.05


def of_costs(scenario: Scenario, servers: Mapping[str, ServerSettings], steps: Iterable[StepRecord]) -> str:
    """Returns a warning about servers whose step times were not measured on a server. The warning names the source of
    the step times: measured kernels, a roofline, or a cost model of unknown origin. servers: settings by role. steps:
    all steps of the run.
    """
    costs = [scenario.cost.prefill if role == "prefill" else scenario.cost.decode for role in servers]
    names = " and ".join(dict.fromkeys(map(component_name, costs)))
    whose = "cost" if len(servers) > 1 else f"cost of {next(iter(servers))}"
    if names == "kernels":
        gpus = dict.fromkeys(server.gpu for server in servers.values())
        unknown = " and ".join(gpu for gpu in gpus if not has_kernels(gpu))
        kernels = f"kernels of {'other GPUs than ' if unknown else ''}{unknown or ' and '.join(gpus)}"
        deciding = "".join(f"; {found}" for role in servers if (found := _share_of_medians(scenario, role, steps)))
        return f"{whose}: only {kernels} were measured, no server{deciding}: see the range; a profile narrows it"
    if names == "roofline":
        return f"{whose}: roofline, without measurements: good to compare configurations; fit a profile for more"
    return f"{whose}: {names}: the scenario does not say what it was measured on"


def of_media(scenario: Scenario, modality: str) -> str:
    """Returns a warning about the time of encoding. The warning says that the model has no encoder, or that the
    encoder's times are not measured. modality: image or audio.
    """
    what = {"image": "images", "audio": "audio clips"}[modality]
    if modality not in load_model(scenario.model).encoders:
        return f"{what}: the catalog's entry of {scenario.model} has no {modality} encoder, so encoding takes no time"
    return (
        f"{what}: times of the encoder come from a roofline without measurements, and may be half or twice as long "
        f"(cost.encode_factor); loading and converting {what} is left out"
    )


def _share_of_medians(scenario: Scenario, role: str, steps: Iterable[StepRecord]) -> str:
    """Says which operators of a role were measured on other GPUs only, and their share of the role's mean step.
    Operators that take less than _LEAST_SHARE of the step are left out. Empty: no operator is left.
    """
    terms_ns = _mean_step(scenario, role, [step for step in steps if step.kind == role])
    total_ns = sum(terms_ns.values()) or 1
    shares = {}
    for operator in medians_of(_layout(scenario, role)):
        term, title = _TERMS.get(operator, ("", ""))
        if (share := terms_ns.get(term, 0) / total_ns) >= _LEAST_SHARE:
            shares[title] = share
    if not shares:
        return ""
    *first, last = sorted(shares, key=lambda title: -shares[title])
    what = f"{', '.join(first)} and {last}" if first else last
    step = "a forward" if role == "prefill" else "a decode step"
    are = "are medians" if first else "is the median"
    return f"{what}, {sum(shares.values()):.0%} of {step}, {are} of other GPUs"


def _mean_step(scenario: Scenario, role: str, steps: list[StepRecord]) -> Terms:
    if not steps:
        return {}
    settings = scenario.cost.prefill if role == "prefill" else scenario.cost.decode
    assert isinstance(settings, Kernels)
    model, context_tokens = (
        settings.model(_layout(scenario, role)),
        round(fmean(step.num_context_tokens for step in steps)),
    )
    if role == "prefill":
        chunk = PrefillChunk(0, context_tokens, round(fmean(step.num_tokens for step in steps)), is_last=True)
        return model.prefill_terms(PrefillStep(0, (chunk,)))
    batch = max(1, round(fmean(step.num_requests for step in steps)))
    line = model.decode_line(batch)
    kv_ns = (line.per_context_token + line.per_distinct_token) * context_tokens / (1 << FRACTION_BITS)
    return {**model.decode_terms(batch), "reading KV": kv_ns}


def _layout(scenario: Scenario, role: str) -> Layout:
    return layout_of(scenario, "aggregated" if scenario.aggregated else "prefill" if role == "prefill" else "decode")
