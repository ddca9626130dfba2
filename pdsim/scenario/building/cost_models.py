"""Makes the cost models of prefill forwards and decode steps from a scenario's settings. From cost models also makes
the times of draft models, and the chunk sizes of dynamic chunking.
"""

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from operator import mul
from statistics import fmean
from typing import Literal

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.core.prefill.chunk_sizer import ChunkSizer
from pdsim.cost.aiconfigurator import NoOperatorTablesError
from pdsim.cost.drafts import DraftTimes
from pdsim.cost.model import CostModel, CostSettings
from pdsim.cost.settings import Affine, Kernels, Roofline
from pdsim.scenario.building.sizing import layout_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_model
from pdsim.system.memory import Layout, Role
from pdsim.system.model import ModelSpec

_PROFILED_LENGTHS, _PROFILED_SHARE = 128, 1.25
"""For dynamic chunking, SGLang times forwards of _PROFILED_LENGTHS prompt lengths, of which the longest is
_PROFILED_SHARE times the chunk size. The parabola of times over lengths is fitted without the longest.
"""


def prefill_model(scenario: Scenario, role: Role) -> CostModel:
    """Returns the cost model of the prefill forwards of one instance. With pipeline stages: of the stage with the most
    layers. Raises ConfigError if the scenario's cost model has no times of stages.
    """
    layout = layout_of(scenario, role)
    return timed(_of_stage(scenario, "prefill", layout), scenario.cost.host.slowdown, layout)


def decode_model(scenario: Scenario, role: Role) -> CostModel:
    """Returns the cost model of the decode steps of one instance. With pipeline stages: of the stage with the most
    layers. Raises ConfigError if the scenario's cost model has no times of stages.
    """
    layout = layout_of(scenario, role)
    return timed(_of_stage(scenario, "decode", layout), scenario.cost.host.slowdown, layout)


def draft_times(scenario: Scenario, role: Role) -> DraftTimes | None:
    """Times of the draft model on an instance of this role. None: there is no draft model, or the scenario has measured
    times of drafting: in speculative_drafting, or included in the step times.

    The times come from the scenario's cost model; if that model has no times of single layers, from the model
    `kernels`. Draft forwards belong to the decode step, so the host time between steps counts once per step.
    """
    layout, decoding, measured = layout_of(scenario, role), scenario.servers[1], scenario.cost.measured
    if layout.draft is None or decoding.speculative_drafting is not None:
        return None
    if measured is not None and measured.draft_tokens is not None and measured.role in (None, role):
        return None
    costs = scenario.cost.prefill if role == "prefill" else scenario.cost.decode
    settings = costs if isinstance(costs, Kernels | Roofline) else Kernels()
    settings = replace(settings, step_overhead_ns=0, prompt_overhead_ns=0)
    alone = replace(layout, draft=None, num_draft_layers=0, num_verified_tokens=1, dcp=1)

    def model(spec: ModelSpec) -> CostModel:
        sending = alone.moe_a2a_backend if spec.experts else None
        return timed(settings, scenario.cost.host.slowdown, replace(alone, model=spec, moe_a2a_backend=sending))

    is_block = decoding.speculative_algorithm == "DSPARK"
    num_tokens = decoding.num_verified_tokens
    return DraftTimes(
        layers=model(layout.draft.layers),
        proposing=model(layout.draft.proposing),
        num_steps=decoding.num_draft_steps,
        num_rows=num_tokens - 1 if is_block else decoding.speculative_eagle_topk or 1,
        num_verified=num_tokens,
        computes_prompts=not is_block,
    )


def chunk_sizer(scenario: Scenario) -> ChunkSizer | None:
    """Computes the chunk sizes of dynamic chunking, from the modelled times of forwards with one prompt each. None: all
    chunks have the same size. The scenario must be resolved.
    """
    prefill = scenario.pair.prefill
    if not prefill.dynamic_chunks:
        return None
    model, first = prefill_model(scenario, "prefill"), prefill.rank_chunk_tokens
    longest = int(_PROFILED_SHARE * first)
    lengths = range(longest, 0, -max(1, longest // _PROFILED_LENGTHS))[1:_PROFILED_LENGTHS]
    alone = [PrefillStep(0, (PrefillChunk(0, 0, n, is_last=True),)) for n in lengths]
    quadratic, linear = fitted_parabola(lengths, [sum(model.prefill_terms(step).values()) for step in alone])
    return ChunkSizer(
        quadratic=quadratic,
        linear=max(0.0, linear),
        first_tokens=first,
        max_tokens=prefill.max_prefill_tokens,
        context_tokens=layout_of(scenario, "prefill").model.max_context_tokens,
        page_size=scenario.page_size,
    )


def fitted_parabola(lengths: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Fits a parabola to times by least squares, as a function of lengths. Returns the coefficient of the squared
    length and that of the length; the constant is dropped. lengths: must be equally spaced. times: one per length.
    """
    mean = fmean(lengths)
    offsets = [length - mean for length in lengths]
    mean_square = fmean([offset * offset for offset in offsets])
    bends = [offset * offset - mean_square for offset in offsets]  # orthogonal to the offsets, as these are to 1
    quadratic, slope = (_coefficient(basis, times) for basis in (bends, offsets))
    return quadratic, slope - 2 * quadratic * mean


def _coefficient(basis: Sequence[float], times: Sequence[float]) -> float:
    """Coefficient of one basis function in a least-squares fit of `times` by a sum of orthogonal basis functions.
    basis: values of the basis function, one per time.
    """
    found: float = sum(map(mul, basis, times)) / sum(map(mul, basis, basis))
    return found


def _of_stage(scenario: Scenario, kind: Literal["prefill", "decode"], layout: Layout) -> CostSettings:
    """Cost settings of the largest pipeline stage. Roofline and kernels take the stage's layers; affine costs are
    multiplied by the stage's share of the layers. With pp above 1, raises ConfigError for cost models of other kinds.
    """
    settings: CostSettings = getattr(scenario.cost, kind)
    if layout.pp == 1 or isinstance(settings, Kernels | Roofline):
        return settings
    if isinstance(settings, Affine):
        return settings.of_stage(layout.model.num_layers / load_model(scenario.model).num_layers)
    raise ConfigError(
        f"cost.{kind}: {component_name(settings)} has times of whole models only, and pp {layout.pp} needs times of "
        "pipeline stages: use kernels, roofline, affine or table"
    )


def timed(settings: CostSettings, slowdown: float, layout: Layout) -> CostModel:
    """Returns the cost model of an instance with this layout, in which all host work takes `slowdown` times as long.
    The settings class lists its fields of host work in HOST_FIELDS. Raises ConfigError if aiconfigurator lacks the
    tables.
    """
    host_fields = getattr(settings, "HOST_FIELDS", ())
    if slowdown != 1 and is_dataclass(settings):
        settings = replace(settings, **{name: slowdown * getattr(settings, name) for name in host_fields})
    try:
        return settings.model(layout)
    except NoOperatorTablesError as wrong:
        raise ConfigError(f"cost: aiconfigurator: {wrong}") from None
