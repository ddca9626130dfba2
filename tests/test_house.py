"""Circles of imports, imports against the layers, and sizes of folders, files and functions."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def house():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import house  # noqa: PLC0415
    finally:
        sys.path.pop(0)
    return house


def over(sizes, limit):
    return {name for name, size in sizes.items() if size > limit}


def test_modules_load_without_circles(house):
    assert house.circles(house.imports(ROOT)) == []


def test_no_circle_of_types_is_new(house):
    circles = house.circles(house.all_imports(ROOT))
    assert {".".join(name.split(".")[:2]) for circle in circles for name in circle} <= {
        "pdsim.cost",
        "pdsim.scenario",
    }
    assert sum(map(len, circles)) <= 7


def test_no_import_goes_up(house):
    assert house.arrows_up(ROOT) == []


def test_a_circle_is_found(house):
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert house.circles(graph) == [{"b", "c"}]


def test_no_folder_has_more_than_15_files(house):
    assert over(house.folder_sizes(ROOT), 15) == set()


def test_no_file_has_more_than_450_lines(house):
    assert over(house.file_lengths(ROOT), 450) == {"pdsim/core/messages.py"}  # a table of messages


def test_a_plain_request_visits_few_files(house):
    assert house.output(house.REQUEST, ROOT)["files"] <= 22  # architecture.md, "One request"


def test_docs_have_fewer_than_20_000_words(house):
    tracked = ["README.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    assert house.num_words(ROOT, tracked) < 20_000


def test_no_function_has_more_than_70_lines(house):
    assert over(house.function_lengths(ROOT), 70) == set()
