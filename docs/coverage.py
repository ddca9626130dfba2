"""Judges the ranges, light loads and signs of accuracy.csv: python -m docs.accuracy --coverage"""

# ruff: noqa: INP001, T201  a script

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from docs.accuracy import BLIND, EXPERIMENTS, KNOWN, METRICS, Number
from docs.signs import VERDICTS, counted
from docs.widths import COLUMNS, widths
from pdsim.calibration.validate.case import find_cases
from pdsim.metrics.summary_rows import table_of_markdown

LIGHT = 8
"""A closed loop is a light load if it has at most this number of clients."""
ASKED_LIGHT = 0.25
"""Largest accepted median of TTFT's relative errors under light loads."""
LEAST_GROUP = 8
"""Smallest number of measured values by which a group of servers or loads is judged."""
ASKED_GROUP = 0.7
"""Share of a group's values that should be inside their ranges."""


def coverage_by(found: Sequence[Number], field: str) -> list[list[str]]:
    """Rows of a table, one for each metric and each value of `field`, such as gpu. Only numbers that were predicted
    without kernels of their GPU count. A row has the number of measured values, the share of them inside their ranges,
    and half the ranges' width.
    """
    rows = []
    kept = [one for one in found if one.known == KNOWN[-1] and not one.fitted]
    for value in sorted({getattr(one, field).partition(" ")[0] for one in kept}):
        for metric in METRICS:
            group = [one for one in kept if getattr(one, field).partition(" ")[0] == value and one.metric == metric]
            if group:
                rows.append([value, metric, *_inside(group)])
    return rows


def _inside(group: Sequence[Number]) -> list[str]:
    """Cells of a table: number of measured values, share of them inside their ranges, and half the ranges' width."""
    inside = sum(one.is_inside for one in group) / len(group)
    return [str(len(group)), f"{inside:.0%}", f"{median(one.half_width for one in group):.0%}"]


def on_gpus(found: Sequence[Number]) -> list[list[str]]:
    """Rows of a table, one for each metric: once for GPUs whose kernels were measured, and once for GPUs that count as
    unmeasured.
    """
    groups = [(known, metric) for known in BLIND for metric in METRICS]
    return [[*group, *_inside([one for one in found if (one.known, one.metric) == group])] for group in groups]


def missed_groups(found: Sequence[Number]) -> Iterator[list[str]]:
    """Rows of a table, one for each group with at least LEAST_GROUP values of a metric, of which fewer than ASKED_GROUP
    are inside their ranges: what the values have in common, known, metric, and cells as on_gpus has them, with the
    median error.
    """
    for known in BLIND:
        for metric in METRICS:
            kept = [one for one in found if (one.known, one.metric) == (known, metric)]
            for value in sorted({of(one) for of in GROUPS for one in kept}):
                group = [one for one in kept if value in {of(one) for of in GROUPS}]
                if len(group) >= LEAST_GROUP and sum(one.is_inside for one in group) < ASKED_GROUP * len(group):
                    yield [value, known, metric, *_inside(group), f"{median(one.error for one in group):+.0%}"]


def _layout(number: Number) -> str:
    if "DP" in number.layout:
        return "data-parallel attention"
    return "prefill and decode servers" if "P TP" in number.layout else "aggregated servers"


def _load(number: Number) -> str:
    clients = _num_clients(number)
    if clients < float("inf"):
        return f"at most {LIGHT} clients" if clients <= LIGHT else f"more than {LIGHT} clients"
    return "open loop"


GROUPS: Sequence[Callable[[Number], str]] = (
    lambda one: one.engine.partition(" ")[0],
    lambda one: one.gpu,
    lambda one: one.model,
    lambda one: one.study,
    _layout,
    _load,
)
"""Functions that return what a number has in common with others."""


def light_loads(found: Sequence[Number]) -> Iterator[list[str]]:
    """Rows of a table, one for each engine and front end: number of arms with light loads, and median of TTFT's
    absolute errors for each kind of row.
    """
    front_ends = {(case.name, arm.name): arm.front_end for case in find_cases((), EXPERIMENTS) for arm in case.arms}
    light = [one for one in found if one.metric == "TTFT" and _num_clients(one) <= LIGHT and not one.fitted]

    def place(number: Number) -> tuple[str, str]:
        return number.engine.partition(" ")[0], front_ends[number.study, number.arm]

    for engine, front_end in sorted({place(one) for one in light}):
        cells = []
        for known in KNOWN:
            errors = [abs(one.error) for one in light if (place(one), one.known) == ((engine, front_end), known)]
            missed = ", missed" if errors and median(errors) > ASKED_LIGHT else ""
            cells.append(f"{median(errors):.0%} of {len(errors)}{missed}" if errors else "")
        yield [engine, front_end, *cells]


def _num_clients(number: Number) -> float:
    """Number of clients of the arm's closed loop. Infinite for an open loop."""
    count, _, unit = number.load.partition(" ")
    return int(count) if unit == "clients" else float("inf")


def print_coverage(found: Sequence[Number]) -> None:
    columns = ["metric", "numbers", "inside the range", "half its width"]
    print(table_of_markdown(["known", *columns], on_gpus(found)))
    print("\nWidths by the rule, as shares of the present width:\n")
    print(table_of_markdown(COLUMNS, widths(found)))
    print(f"\nGroups of at least {LEAST_GROUP} numbers, of which less than {ASKED_GROUP:.0%} are inside:\n")
    print(table_of_markdown(["group", "known", *columns, "median error"], [*missed_groups(found)]))
    for field in ("study", "gpu", "engine"):
        print(f"\nWithout kernels of the GPU:\n\n{table_of_markdown([field, *columns], coverage_by(found, field))}")
    print(f"\nMedian error of TTFT with at most {LIGHT} clients:\n")
    print(table_of_markdown(["engine", "front end", *KNOWN], light_loads(found)))
    print(f"\nSigns of two layouts:\n\n{table_of_markdown(['a sign is said', *VERDICTS], counted(found))}")
