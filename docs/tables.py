"""Fills the tables of errors in the documentation with what `pdsim validate CASE --json` prints: python docs/tables.py

A table stands between a marker and `<!-- end -->`:

<!-- table: CASE -->                                      every metric of every arm
<!-- table: CASE METRIC METRIC ... -->                    errors only, with a row for each arm
<!-- change: CASE METRIC,METRIC FROM:TO FROM:TO ... -->   changes from arm to arm, measured and simulated
<!-- matrix: MATRIX -->                                   errors of every metric over all variants
<!-- matrix: MATRIX METRIC METRIC ... -->                 errors with a row for each variant

With names of cases and matrices as arguments, only their tables change. Tests in tests/studies compare the tables with
the code.
"""

# ruff: noqa: INP001  a script

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.calibration.validate.case import load_case
from pdsim.calibration.validate.suite import is_suite
from pdsim.cli import main as pdsim

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "experiments").glob("*/README.md")))

Report = Mapping[str, Any]
"""The JSON that `pdsim validate` prints for one arm, with the errors that the case accepts; or for a whole matrix."""


class Table(NamedTuple):
    """A marked place in a page: the words of its marker, and the text between the markers."""

    kind: str
    case: str
    options: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return " ".join((self.kind, self.case, *self.options))


MARKED = re.compile(r"<!-- (table|change|matrix): (\S+)((?: \S+)*?) -->\n(.*?)<!-- end -->", re.DOTALL)


def tables(page: Path) -> Iterator[Table]:
    for kind, case, options, text in MARKED.findall(page.read_text(encoding="utf-8")):
        yield Table(kind, case, tuple(options.split()), text.strip())


def validate(case: str, *flags: str) -> dict[str, Report]:
    """The reports of a case, by arm; or of a matrix, by its name. flags: further flags of `pdsim validate`."""
    out = StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        pdsim(["validate", str(ROOT / "experiments" / case), "--json", *flags])
    if is_suite(case, ROOT / "experiments"):
        return {case: json.loads(out.getvalue())}
    within = {arm.name: arm.within for arm in load_case(ROOT / "experiments" / case).arms}
    return {arm["arm"]: {**arm, "within": within[arm["arm"]]} for arm in json.loads(out.getvalue())}


def render(table: Table, report: Mapping[str, Report]) -> str:
    makers: dict[str, Callable[[tuple[str, ...], Mapping[str, Report]], list[list[str]]]]
    makers = {
        "table": errors if table.options else metrics,
        "change": changes,
        "matrix": variants if table.options else spreads,
    }
    head, *rows = makers[table.kind](table.options, report)
    lines = ["|" + "|".join(f" {text} " if text else " " for text in row) + "|" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def metrics(_: tuple[str, ...], report: Mapping[str, Report]) -> list[list[str]]:
    rows = [["arm", "metric", "measured", "simulated", "error", "asked for", ""]]
    for arm in report.values():
        for name, found in arm["metrics"].items():
            asked = arm["within"].get(name)
            cells = [label(arm), f"`{name}`", number(found["measured"]), number(found["simulated"])]
            verdict = "" if asked is None else "met" if met(arm, name) else "**missed**"
            rows.append([*cells, percent(found["error"]), "" if asked is None else f"{100 * asked:.0f} %", verdict])
    return rows


def errors(names: tuple[str, ...], report: Mapping[str, Report]) -> list[list[str]]:
    """Rows of errors, one for each arm. Errors that are larger than accepted are bold. names: words of the marker."""
    rows = [["arm", *(f"`{name}`" for name in names)]]
    for arm in report.values():
        cells = [percent(arm["metrics"][name]["error"]) if name in arm["metrics"] else "" for name in names]
        marked = [cell if met(arm, name) else f"**{cell}**" for name, cell in zip(names, cells, strict=True)]
        rows.append([label(arm), *marked])
    return rows


def changes(options: tuple[str, ...], report: Mapping[str, Report]) -> list[list[str]]:
    names, *pairs = options
    rows = [["arms", "metric", "measured", "", "simulated", "", "apart"]]
    for pair, metric in product(pairs, names.split(",")):
        before, after = (report[name]["metrics"][metric] for name in pair.split(":"))
        cells, ratios = [pair.replace(":", " → "), f"`{metric}`"], []
        for side in ("measured", "simulated"):
            ratios.append(after[side] / before[side] - 1)
            cells += [f"{number(before[side])} → {number(after[side])}", percent(ratios[-1])]
        rows.append([*cells, f"{100 * (ratios[1] - ratios[0]):+.1f} points".replace("-", MINUS)])
    return rows


def spreads(_: tuple[str, ...], report: Mapping[str, Report]) -> list[list[str]]:
    """Rows of errors, one for each metric of a matrix, with the median of the absolute errors. An error that is larger
    than accepted is bold.
    """
    (matrix,) = report.values()
    rows = [["metric", "median error", "largest", "in variant", "variants beyond", "asked for"]]
    for name, spread in matrix["metrics"].items():
        beyond = str(spread["num_missed"] or "")
        cells = [f"{100 * spread['median']:.1f} %", percent(spread["worst"]), f"`{spread['where']}`", beyond]
        rows.append([f"`{name}`", *cells, "met" if spread["is_met"] else "**missed**"])
    return rows


def variants(names: tuple[str, ...], report: Mapping[str, Report]) -> list[list[str]]:
    (matrix,) = report.values()
    rows = [["variant", "requests", *(cell for name in names for cell in (f"`{name}`", "simulated", "error"))]]
    for variant in matrix["variants"]:
        found = [variant["metrics"].get(name) for name in names]
        cells = [
            (number(one["measured"]), number(one["simulated"]), percent(one["error"])) if one else ("", "", "")
            for one in found
        ]
        rows.append([f"`{variant['variant']}`", str(variant["num_requests"]), *(cell for row in cells for cell in row)])
    return rows


def met(arm: Report, metric: str) -> bool:
    asked = arm["within"].get(metric)
    return asked is None or abs(arm["metrics"][metric]["error"]) <= asked


def label(arm: Report) -> str:
    return f"{arm['arm']}, {'fitted' if arm['fitted'] else 'predicted'}"


MINUS = "\N{MINUS SIGN}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"  # noqa: PLR2004


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %".replace("-", MINUS)


def main(cases: list[str]) -> None:
    reports: dict[str, dict[str, Report]] = {}

    def filled(match: re.Match[str]) -> str:
        kind, case, options, text = match.groups()
        if cases and case not in cases:
            return match[0]
        if case not in reports:
            reports[case] = validate(case)
        table = render(Table(kind, case, tuple(options.split()), text), reports[case])
        return f"{match[0].partition('-->')[0]}-->\n{table}\n<!-- end -->"

    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = MARKED.sub(filled, before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
