"""Simulates every measured number of the studies and writes accuracy.csv: make accuracy

A row is one metric of one arm, predicted with one of four kinds of knowledge of the server:

own rows      The study's own profile, fitted to measured steps. The column `fitted` says whether to those of this arm.
own means     The study's own profile, fitted to published means of an arm.
its kernels   The default cost, if its tables have kernels of the GPU.
neither       The default cost without kernels of the GPU, and without those of GPUs that are built alike.

With names of studies as arguments, only the rows of these studies change.
With --coverage nothing is simulated: docs/coverage.py judges the rows of the table.
"""

# ruff: noqa: INP001, T201  a script

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from pdsim import Scenario, simulate
from pdsim.calibration.validate.case import MeasuredArm, MeasuredCase, find_cases
from pdsim.cost.kernels import has_kernels, leaving_out
from pdsim.files import write_whole
from pdsim.metrics.summary import by_client
from pdsim.workload.client import ClosedLoop

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
TABLE = Path(__file__).with_name("accuracy.csv")
KNOWN = ("own rows", "own means", "its kernels", "neither")
BLIND = KNOWN[2:]
"""Kinds of knowledge without a profile of the server. Only their predictions have ranges."""
OF_MEANS = ("decode-radix-b200", "incremental-h20", "inferencex-tp", "layerwise-tcp", "vllm-rtx")
"""Studies whose profiles were fitted to two to five published means."""
UNKNOWN_GPUS = ("layerwise-tcp", "staging-ring-gb200")
"""Studies that do not say which GPU was measured, or that measured transfers only. They are simulated with their own
profile only.
"""
TITLES = ("your own steps: a profile", "means of one of your runs", "kernels of your GPU", "neither")
README = EXPERIMENTS.parent / "README.md"
MARKED = re.compile(r"(<!-- accuracy -->\n).*?(\n<!-- accuracy end -->)", re.DOTALL)
METRICS = {
    "TTFT": ("mean_ttft_ms", "median_ttft_ms"),
    "TPOT": ("mean_tpot_ms", "median_tpot_ms", "mean_itl_ms"),
    "throughput": ("request_throughput", "output_throughput", "input_throughput"),
}
"""For each metric: fields of a summary that may have it. The first field that the study measured counts."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A measured number, and a simulation's prediction with its range."""

    study: str
    arm: str
    known: str
    fitted: bool
    engine: str
    model: str
    gpu: str
    layout: str
    load: str
    field: str
    metric: str
    measured: float
    predicted: float
    low: float
    high: float
    """Largest value of the prediction's range. If the step times have no range: the prediction."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / (self.high + self.low)


def numbers(case: MeasuredCase, arm: MeasuredArm) -> Iterator[Number]:
    if arm.name.endswith("-roofline"):  # the arm before it by a cost of its own
        return
    own, default = case.scenario(arm, case.seeds[0]), ("cost=kernels", f"front_end={arm.front_end}")
    if not own.cost.is_of_kernels:
        yield from _simulated(case, arm, own, KNOWN[case.name in OF_MEANS])
    if case.name in UNKNOWN_GPUS:
        return
    scenario = case.scenario(arm, case.seeds[0], default)
    gpus = {servers.gpu for servers in scenario.servers}
    if all(map(has_kernels, gpus)):
        yield from _simulated(case, arm, scenario, "its kernels")
    with leaving_out(gpus):
        yield from _simulated(case, arm, scenario, "neither")


def _simulated(case: MeasuredCase, arm: MeasuredArm, scenario: Scenario, known: str) -> Iterator[Number]:
    skip = (arm.skip,) if arm.skip else ()
    best, *ends = (by_client(simulate(one).summary(*skip), case.client) for one in (scenario, *scenario.ends))
    for metric, names in METRICS.items():
        if name := next((name for name in names if name in arm.measured), None):
            values = [float(summary[name]) for summary in (best, *ends)]
            yield Number(
                study=case.name,
                arm=arm.name,
                known=known,
                fitted=arm.fitted and known not in BLIND,
                engine=arm.engine,
                model=scenario.model,
                gpu=scenario.device,
                layout=_layout(scenario),
                load=_load(scenario),
                field=name,
                metric=metric,
                measured=arm.measured[name],
                predicted=values[0],
                low=min(values),
                high=max(values),
            )


def _layout(scenario: Scenario) -> str:
    """Text of a cluster's servers, such as '2P TP4, 1D TP8 DP8'."""
    parts = []
    for role, servers in scenario.roles.items():
        sizes = [f"TP{servers.tp}", *([f"DP{servers.dp}"] if servers.dp > 1 else [])]
        parts.append(f"{servers.instances}{'' if role == 'aggregated' else role[0].upper()} {' '.join(sizes)}")
    return ", ".join(parts)


def _load(scenario: Scenario) -> str:
    if isinstance(scenario.client, ClosedLoop):
        return f"{scenario.client.concurrency} clients"
    return "open loop"


def read() -> list[Number]:
    with TABLE.open(newline="") as file:
        kinds = {field.name: field.type for field in fields(Number)}
        return [
            Number(**{name: _parsed(kinds[name], text) for name, text in row.items()}) for row in csv.DictReader(file)
        ]


def _parsed(kind: Any, text: str) -> Any:
    return {float: float, bool: "yes".__eq__}.get(kind, str)(text)


def write(found: Sequence[Number]) -> None:
    out = StringIO()
    rows = csv.DictWriter(out, [field.name for field in fields(Number)], lineterminator="\n")
    rows.writeheader()
    for number in sorted(found, key=lambda one: (one.study, one.arm, KNOWN.index(one.known), one.metric)):
        rows.writerow({name: _written(value) for name, value in asdict(number).items()})
    write_whole(TABLE, out.getvalue())


def _written(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else {True: "yes", False: ""}.get(value, value)


def coverage(found: Sequence[Number]) -> list[list[str]]:
    """Rows of a table, one for each metric and each kind of row: number of measured values,
    share of them inside the predicted range, half the range's width, and error.
    """
    rows = []
    for known in KNOWN:
        for metric in METRICS:
            kept = [one for one in found if (one.known, one.metric, one.fitted) == (known, metric, False)]
            if not kept:
                continue
            inside = sum(one.is_inside for one in kept) / len(kept)
            width, error = (
                median(values) for values in zip(*((n.half_width, abs(n.error)) for n in kept), strict=True)
            )
            ranged = [f"{inside:.0%}", f"{width:.0%}"] if known in BLIND else ["", ""]
            rows.append([known, metric, str(len(kept)), f"{error:.1%}", *ranged])
    return rows


def in_few_rows(found: Sequence[Number]) -> str:
    """The README's table in Markdown, with a row for each kind of row."""
    lines = ["| known of the server | TTFT | TPOT | throughput | inside the range |", "|---|---|---|---|---|"]
    for known, title in zip(KNOWN, TITLES, strict=True):
        kept = [one for one in found if one.known == known and not one.fitted]
        errors = [median(abs(one.error) for one in kept if one.metric == metric) for metric in METRICS]
        cells = [f"{error:.0%}".replace("%", " %") for error in errors]
        inside = f"{sum(one.is_inside for one in kept) / len(kept):.0%}".replace("%", f" % of {len(kept)}")
        lines.append(f"| {title} | {' | '.join(cells)} | {inside if known in BLIND else ''} |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> None:
    if list(names) == ["--coverage"]:
        import_module("docs.coverage").print_coverage(read())  # which imports this module
        return
    before = read() if TABLE.exists() else []
    cases = find_cases(tuple(names), EXPERIMENTS)
    done = {case.name for case in cases}
    found = [one for one in before if one.study not in done]
    for case in cases:
        for arm in case.arms:
            print(f"{case.name}: {arm.name}", file=sys.stderr, flush=True)
            found += numbers(case, arm)
    write(found)
    made = MARKED.sub(rf"\1{in_few_rows(found)}\2", README.read_text(encoding="utf-8"))
    write_whole(README, made)
    print("| known | metric | numbers | median error | inside the range | half its width |\n|---|---|---|---|---|---|")
    for row in coverage(found):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
