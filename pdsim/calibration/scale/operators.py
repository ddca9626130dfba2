"""Ratios of operators' times on two GPUs: nominal rates, and what kernels reach of them.

operators.csv has the times of kernels by GPU, all for the same shapes: matrix products (tokens x outputs x inputs), of
many tokens (matrix) and of few, which wait for the weights (weights); attention in prefill (attention) and in decode
(kv), as batch x tokens, query heads/KV heads/head size. H20: bench_data of alibaba/InferSim; the other GPUs: the SGLang
0.5.14 tables of aiconfigurator 0.12.0; both Apache-2.0. experiments/scaled-h200 says more.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from pdsim.system.catalog import GpuSpec
from pdsim.system.model import DTYPE_BYTES, Dtype

Operator = Literal["matrix", "weights", "attention", "kv"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
_ATTENTION = {"attention", "kv"}
_COMPUTE = {"matrix", "attention"}
_FILE = Path(__file__).with_suffix(".csv")


@dataclass(frozen=True)
class Ratio:
    """The ratio of an operator's time on one GPU to its time on another."""

    low: float
    best: float
    high: float
    num_shapes: int
    """Shapes that were timed on both; 0: the nominal rates are all that is known."""

    def __str__(self) -> str:
        return f"{self.best:.3g}, {self.low:.3g} to {self.high:.3g}, {self.num_shapes} shapes"


def time_ratios(source: GpuSpec, target: GpuSpec, weights: tuple[Dtype, Dtype]) -> dict[Operator, Ratio]:
    """Ratios of target to source, and of weights in one type to another.

    Best: the median over shapes; low and high: the range of all shapes and the nominal rates.

    A matrix product that was timed in another type than asked for counts by the share of the nominal rate it reaches.
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
    """Time x nominal rate by shape: what is left of a time when the nominal rate is taken out of it."""
    by_dtype = _times().get((gpu.name, operator), {})
    found: Dtype | None = dtype if dtype in by_dtype else next(iter(by_dtype), None)
    if found is None:
        return {}
    return {shape: time * _rate(operator, gpu, found) for shape, time in by_dtype[found].items()}


def _rate(operator: Operator, gpu: GpuSpec, dtype: Dtype) -> float:
    """Operations, or elements read, per second."""
    return gpu.flops_for(dtype) if operator in _COMPUTE else gpu.memory_bandwidth / DTYPE_BYTES[dtype]


@cache
def _times() -> dict[tuple[str, str], dict[Dtype, dict[str, float]]]:
    """Times in us, by GPU and operator, then by type, then by shape."""
    times: dict[tuple[str, str], dict[Dtype, dict[str, float]]] = {}
    with _FILE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            of_operator = times.setdefault((row["gpu"], row["operator"]), {})
            dtype: Any = row["dtype"]
            of_operator.setdefault(dtype, {})[row["shape"]] = float(row["time_us"])
    return times
