"""Numbers of the documentation: tables of errors are what `pdsim validate` prints."""

import json
import re

import pytest

from docs.tables import PAGES, Table, render, tables, validate
from pdsim.scenario.yaml_file import read_yaml
from tests.markdown import ROOT, numbers, sections, table, without_numbers
from tests.studies.reports import report

MARKED = [(page, marked) for page in PAGES for marked in tables(page)]
CASES = [(page, marked) for page, marked in MARKED if marked.kind != "matrix"]
MATRICES = [(page, marked) for page, marked in MARKED if marked.kind == "matrix"]


def test_every_marked_table_is_found():
    for page in PAGES:
        text = page.read_text()
        assert (
            len(re.findall(r"<!-- (?:table|change|matrix): ", text))
            == text.count("<!-- end -->")
            == len(list(tables(page)))
        )


def require_current(stands: list[list[str]], made: list[list[str]]) -> None:
    """Last digits may differ, as means do between versions of Python."""
    assert [[without_numbers(cell) for cell in row] for row in stands] == [
        [without_numbers(cell) for cell in row] for row in made
    ]
    for row, new in zip(stands, made, strict=True):
        for cell, current in zip(row, new, strict=True):
            near = {"abs": 0.11} if "%" in cell or "points" in cell else {"rel": 2e-3}
            assert numbers(cell) == pytest.approx(numbers(current), **near), row


def require_all_current(marked: Table) -> None:
    """Else: python docs/tables.py."""
    made = render(marked, report(marked.case))
    assert marked.text.splitlines()[:2] == made.splitlines()[:2]
    require_current(table(marked.text), table(made))


@pytest.mark.parametrize("case", ["aiconfigurator-points", "inferencex-tp"])
def test_the_readme_begins_with_the_worst_errors(case):
    first = " ".join(sections(ROOT / "README.md")["How accurate"].partition("|")[0].split())
    marked = next(m for _, m in CASES if m.case == case and m.options == ("mean_ttft_ms", "mean_tpot_ms"))
    rows = [row for row in table(marked.text) if row[0].endswith("predicted")]
    for errors in ([row[column].strip("*") for row in rows if row[column]] for column in (1, 2)):
        errors.sort(key=lambda error: numbers(error)[0])
        assert f"{errors[0].removesuffix(' %')} to {errors[-1]}" in first


def ids(marked_tables):
    return [f"{page.relative_to(ROOT)}: {marked.name}" for page, marked in marked_tables]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "marked"), CASES, ids=ids(CASES))
def test_a_marked_table_is_current(page, marked: Table):
    require_all_current(marked)


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "marked"), MATRICES, ids=ids(MATRICES))
def test_a_marked_table_of_a_matrix_is_current(page, marked: Table):
    require_all_current(marked)


@pytest.mark.parametrize(("name", "variant"), [("validation-h200", "in16k_c4"), ("validation-h200-aggregated", "c8")])
def test_a_row_of_a_matrix_is_current(name, variant, tmp_path):
    """One of each, where the other test takes half a minute for all."""
    folder = ROOT / "experiments" / name
    matrix = read_yaml(folder / "matrix.yaml")
    matrix |= {kind: str(folder / matrix[kind]) for kind in ("scenario", "profile")}
    (tmp_path / "matrix.yaml").write_text(json.dumps(matrix | {"variants": {variant: matrix["variants"][variant]}}))
    marked = next(marked for _, marked in MATRICES if marked.case == name and marked.options)
    stands = [row for row in table(marked.text) if row[0] == f"`{variant}`"]
    require_current(stands, table(render(marked, validate(str(tmp_path), "--runs", str(folder / matrix["runs"])))))
