"""Derives a profile for another GPU from a measured profile. Each coefficient scales with the resource that bounds it.

| coefficient | bound by |
|---|---|
| prefill, per token | compute, in matrix products |
| prefill, per pair and per continued pair, in graphs or not | compute, in attention |
| prefill, per context token, which is gathered; decode, per KV token | memory bandwidth, in attention |
| decode, base | memory bandwidth, for the time of reading the weights; launches, for the rest |
| decode, per request in a batch too large for memory to bind it | compute: prefill's time per token |
| other bases, per prompt, per request, least, host, rest, front end | launches and the host: not scaled |

CUDA graphs keep their sizes. The time of a graph's empty row stays the same share of the time in which a row reads its
KV. Transports are left out, because the links of the other machine have the values of the catalog, or are measured.

The ratio of an operator's times on two GPUs follows from their nominal rates, and from the share of them that kernels
reach. operators.csv has times of kernels by GPU, for the same shapes on all: matrix products (tokens x outputs x
inputs) of many tokens (matrix), and of few tokens, which wait for the weights (weights); attention in prefill
(attention) and in decode (kv), as batch x tokens, query heads/KV heads/head size. H20: bench_data of alibaba/InferSim;
other GPUs: the SGLang 0.5.14 tables of aiconfigurator 0.12.0; both Apache-2.0. experiments/scaled-h200 says more.
"""

import csv
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from pdsim.cost.settings import Affine, AffineTable, Roofline
from pdsim.dataclass import dataclass
from pdsim.inputs import shown
from pdsim.scenario.loading import load_cost
from pdsim.scenario.sections.component import component_name, describe_component
from pdsim.scenario.sections.cost import CostChoice, MeasuredSettings
from pdsim.scenario.sections.profile import origin, read_profile
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import GpuSpec
from pdsim.system.model import DTYPE_BYTES, Dtype, ModelSpec

Operator = Literal["matrix", "weights", "attention", "kv"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
_ATTENTION = {"attention", "kv"}
_COMPUTE = {"matrix", "attention"}
_FILE = Path(__file__).with_name("operators.csv")
ENDS = ("low", "best", "high")
_PREFILL: Mapping[str, Operator] = {
    "prefill_per_token_ns": "matrix",
    "prefill_per_pair_ns": "attention",
    "prefill_graph_per_pair_ns": "attention",
    "prefill_per_continued_pair_ns": "attention",
    "prefill_per_context_token_ns": "kv",
}
"""For each coefficient of an affine prefill: the operator by whose ratio it is multiplied. Other coefficients stay as
they are.
"""
_KEPT = (
    "host",
    "graph_sizes",
    "graph_empty_row_kv",
    "graph_empty_rows_free",
    "eager_layer",
    "encode_factor",
    "cold_start",
    "cold_kernels",
)
"""Fields of a profile's cost that are not scaled."""
_WAVES = ("attention_sm_bandwidth", "attention_merge")
"""Fields of a profile's cost on waves of attention. A derived profile has the same values if the number of SMs of its
GPU is known. Otherwise it leaves these fields out.
"""
_DIGITS = 4


@dataclass(frozen=True)
class Ratio:
    """The time of an operator on one GPU, divided by its time on another. best: median over the shapes that were timed
    on both GPUs. low, high: smallest and largest value among the ratios of these shapes and the ratio of the GPUs'
    nominal rates.
    """

    low: float
    best: float
    high: float
    num_shapes: int
    """Number of shapes for which both GPUs were timed. 0: the ratio is only that of the nominal rates."""

    def __str__(self) -> str:
        return f"{self.best:.3g}, {self.low:.3g} to {self.high:.3g}, {self.num_shapes} shapes"


def time_ratios(source: GpuSpec, target: GpuSpec, weights: tuple[Dtype, Dtype]) -> dict[Operator, Ratio]:
    """For each operator: its time on `target` divided by its time on `source`, with the range of this ratio (Ratio).
    weights: data types of the weights on source and on target.

    If a GPU was timed only with matrix products of another data type, the share of the nominal rate (FLOP/s, or memory
    bandwidth) that these reached is also assumed for the wanted type.
    """
    return {operator: _ratio(operator, source, target, weights) for operator in OPERATORS}


def _ratio(operator: Operator, source: GpuSpec, target: GpuSpec, weights: tuple[Dtype, Dtype]) -> Ratio:
    dtypes: tuple[Dtype, Dtype] = ("bf16", "bf16") if operator in _ATTENTION else weights
    nominal = _rate(operator, source, dtypes[0]) / _rate(operator, target, dtypes[1])
    before, after = _efforts(operator, source, dtypes[0]), _efforts(operator, target, dtypes[1])
    timed = [nominal * after[shape] / effort for shape, effort in before.items() if shape in after]
    if not timed:
        return Ratio(nominal, nominal, nominal, 0)
    return Ratio(min(*timed, nominal), median(timed), max(*timed, nominal), len(timed))


def _efforts(operator: Operator, gpu: GpuSpec, dtype: Dtype) -> Mapping[str, float]:
    """For each measured shape: the time of an operator on the GPU, multiplied by the GPU's nominal rate. Two GPUs that
    reach the same share of their nominal rates have equal values.
    """
    by_dtype = _times().get((gpu.name, operator), {})
    found: Dtype | None = dtype if dtype in by_dtype else next(iter(by_dtype), None)
    if found is None:
        return {}
    return {shape: time * _rate(operator, gpu, found) for shape, time in by_dtype[found].items()}


def _rate(operator: Operator, gpu: GpuSpec, dtype: Dtype) -> float:
    """Nominal rate of an operator on a GPU: operations per second, or elements read per second."""
    return gpu.flops_for(dtype) if operator in _COMPUTE else gpu.memory_bandwidth / DTYPE_BYTES[dtype]


@cache
def _times() -> dict[tuple[str, str], dict[Dtype, dict[str, float]]]:
    """Measured times of operators in us, by GPU and operator, then by data type, then by shape."""
    times: dict[tuple[str, str], dict[Dtype, dict[str, float]]] = {}
    with _FILE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            of_operator = times.setdefault((row["gpu"], row["operator"]), {})
            dtype: Any = row["dtype"]
            of_operator.setdefault(dtype, {})[row["shape"]] = float(row["time_us"])
    return times


@dataclass(frozen=True)
class GpuScaling:
    """Scales a profile from one GPU to another, for one model on a number of ranks."""

    source: GpuSpec
    """GPU on which the profile was measured."""
    target: GpuSpec
    """GPU of the derived profile."""
    model: ModelSpec
    tp: int
    """Number of ranks (tensor-parallel size) of each server, the same on both GPUs."""
    weight_dtypes: tuple[Dtype, Dtype]
    """Data types of the weights in the measured profile and in the derived one."""
    ratios: Mapping[Operator, Ratio]
    """For each operator: its time on the target divided by its time on the source."""

    @classmethod
    def between(
        cls, source: GpuSpec, target: GpuSpec, model: ModelSpec, *, tp: int = 1, weight_dtype: Dtype | None = None
    ) -> "GpuScaling":
        """The scaling from a source GPU to a target GPU. model: the model with the weights that were measured
        (measured_model). tp: number of ranks of each server. weight_dtype: data type of the weights in the derived
        profile; None: that of `model`. Raises ConfigError for a model with routed experts.
        """
        if model.experts is not None:
            raise ConfigError(
                f"{model.name} has routed experts: how many of them a step reads depends on its batch, "
                "which the coefficients of a profile do not separate from launches"
            )
        dtypes = (model.weight_dtype, weight_dtype or model.weight_dtype)
        return cls(source, target, model, tp, dtypes, time_ratios(source, target, dtypes))

    @property
    def notes(self) -> tuple[str, ...]:
        """A note that names the operators that were not measured on both GPUs at equal sizes. For these operators,
        ratios of times come from nominal rates, and low and high are equal. Empty: there are no such operators.
        """
        bare = [operator for operator, ratio in self.ratios.items() if not ratio.num_shapes]
        gpus = f"{self.source.name} and {self.target.name}"
        note = f"{', '.join(bare)}: no times on both {gpus}, so nominal rates are taken, without an interval"
        return (note,) if bare else ()

    @property
    def weights_ns(self) -> float:
        """Time in ns in which the source GPU reads the weights of one rank once."""
        rate = self.source.memory_bandwidth * Roofline().memory_efficiency
        return 1e9 * self.model.shared_bytes_read / self.tp / rate

    def cost(self, cost: CostChoice, end: str) -> dict[str, Any]:
        """The sections `prefill` and `decode` of the derived profile's cost, scaled to the target GPU. cost: that of
        the measured profile. end: which ratio of each operator to use: `low`, `best` or `high`. Raises ConfigError if
        decode is not affine, or prefill neither affine nor a table.
        """
        ratio = {operator: getattr(ratio, end) for operator, ratio in self.ratios.items()}
        prefill, token_ns = _prefill(cost.prefill, ratio)
        return {"prefill": _section(prefill), "decode": _section(self._decode(cost.decode, ratio, token_ns))}

    def measured(self, settings: MeasuredSettings) -> dict[str, Any]:
        """Returns the field `measured` for the cost of the derived profile: the setup for which the profile's times
        hold. settings: the same field of the measured profile. The result names the target GPU and the target's weight
        type; its field scaled_from names the source GPU and the source's weight type. If the measured profile does not
        name its model, its field is returned unchanged.
        """
        setup = settings.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        if settings.model is None:
            return setup
        target = {"device": self.target.name, "weight_dtype": self.weight_dtypes[1]}
        source = f"{self.source.name} with {self.weight_dtypes[0]} weights"
        return {**setup, **target, "scaled_from": source}

    def _decode(self, settings: Any, ratio: Mapping[Operator, float], token_ns: float) -> Affine:
        if isinstance(settings, AffineTable) or not isinstance(settings, Affine):
            raise ConfigError(
                f"decode of the profile is {component_name(settings)}: only that of affine profiles is scaled"
            )
        weights_ns = min(self.weights_ns, settings.decode_base_ns)
        return replace(
            settings,
            decode_base_ns=settings.decode_base_ns - weights_ns,
            decode_weights_ns=weights_ns * ratio["weights"],
            decode_matrices_per_request_ns=token_ns,
            decode_per_context_token_ns=settings.decode_per_context_token_ns * ratio["kv"],
            decode_per_distinct_token_ns=settings.decode_per_distinct_token_ns * ratio["kv"],
        )


def _prefill(settings: Any, ratio: Mapping[Operator, float]) -> tuple[Affine, float]:
    """The scaled cost of prefill, and the time in ns per token of its matrix products. settings: the measured cost.
    ratio: for each operator, the factor on its time. Raises ConfigError if this cost is neither affine nor a table.
    """
    if not isinstance(settings, Affine):
        raise ConfigError(
            f"prefill of the profile is {component_name(settings)}: only affine profiles and tables are scaled"
        )
    lines = {name: getattr(settings, name) * ratio[operator] for name, operator in _PREFILL.items()}
    if isinstance(settings, AffineTable) and settings.prefill_ns and len(settings.prefill_ns) > 1:
        sizes = sorted(settings.prefill_ns)
        least_ns = settings.prefill_ns[sizes[0]]  # launches: what is beyond them is compute
        entries = {size: least_ns + (settings.prefill_ns[size] - least_ns) * ratio["matrix"] for size in sizes}
        token_ns = (entries[sizes[-1]] - least_ns) / (sizes[-1] - sizes[0])
        return replace(settings, prefill_ns=entries, **lines), token_ns
    return replace(settings, **lines), lines["prefill_per_token_ns"]


def scale(path: Path, scaling: GpuScaling, name: str, command: str) -> dict[str, Any]:
    """The content of the derived profile: scaled coefficients, their intervals, and where they come from. path: file of
    the measured profile. name: name of the derived profile. command: the command that made the derived profile.
    Raises ConfigError if the profile is scaled already, or has a cost that cannot be scaled (GpuScaling.cost).
    """
    profile, cost = read_profile(path), load_cost(path)
    if cost.uncertain:
        raise ConfigError(f"profile {path} is scaled already: scale the measured one")
    low, best, high = (scaling.cost(cost, end) for end in ENDS)
    kept = (*_KEPT, *_WAVES) if scaling.target.num_sms else _KEPT
    network = {key: value for key, value in (profile.get("network") or {}).items() if key != "transports"}
    return {
        "name": name,
        "cost": {
            **best,
            **{key: profile["cost"][key] for key in kept if key in profile["cost"]},
            **({"measured": scaling.measured(cost.measured)} if cost.measured is not None else {}),
            **({f"{role}_interval": [low[role], high[role]] for role in best} if low != high else {}),
        },
        **({"network": network} if network else {}),
        **({"front_end": profile["front_end"]} if "front_end" in profile else {}),
        "provenance": {
            "scaled": {
                "profile": profile.get("name", path.stem),
                "from": scaling.source.name,
                "to": scaling.target.name,
                "model": scaling.model.name,
                "tp": scaling.tp,
                "weights": " to ".join(dict.fromkeys(scaling.weight_dtypes)),
                "time_ratios": {operator: str(ratio) for operator, ratio in scaling.ratios.items()},
            },
            **origin(command),
            "measured": profile["provenance"],
        },
    }


def model_of(profile: Mapping[str, Any]) -> str | None:
    """Name of the model with which a profile was measured. None: the profile does not name a model."""
    provenance = profile["provenance"]
    if not isinstance(provenance, dict):
        return None
    files = provenance.get("measured") or []
    named = [provenance.get("model"), *(file.get("model") for file in files if isinstance(file, dict))]
    return next((str(name) for name in named if name), None)


def measured_model(path: Path, model: ModelSpec) -> ModelSpec:
    """The model with the weights that were measured. path: file of the measured profile. If the profile does not name a
    data type of weights, the model is returned unchanged. Raises ConfigError if the profile names an unknown one.
    """
    measured = load_cost(path).measured
    dtype: Any = None if measured is None else measured.weight_dtype
    if dtype is None or dtype == model.weight_dtype:
        return model
    if dtype not in get_args(Dtype):
        raise ConfigError(
            f"{path}: cost.measured.weight_dtype: expected {', '.join(get_args(Dtype))}, found {shown(dtype)}"
        )
    return model.in_dtype(dtype)


def _section(settings: Affine) -> dict[str, Any]:
    """The profile's section for a fitted cost model: those settings that differ from their defaults, with floats
    rounded to four significant digits.
    """
    changed = {
        field.name: _rounded(getattr(settings, field.name))
        for field in fields(settings)
        if getattr(settings, field.name) != getattr(type(settings)(), field.name)
    }
    section: dict[str, Any] = describe_component(type(settings)(**changed))
    plain: dict[str, Any] = describe_component(type(settings)())
    return {key: value for key, value in section.items() if key == "use" or value != plain[key]}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {size: _rounded(amount) for size, amount in value.items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
