"""The import law. `lint-imports` holds the rooms apart; this test needs no tool and names the line."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "pdsim"

BELOW = {
    "policy": set(),
    "system": {"ruamel"},
    "core": {"policy"},
    "cost": {"core", "policy", "system"},
    "workload": {"core", "policy", "system", "pyarrow", "pydantic_core"},
    "metrics": {"core", "policy", "numpy", "pandas", "pyarrow", "pydantic_core", "matplotlib"},
    "scenario": {"core", "policy", "system", "cost", "workload", "metrics", "pydantic", "pydantic_core", "ruamel"},
    "launch": {"scenario", "system", "policy", "workload"},
    "formats": {"launch", "scenario", "workload", "metrics", "system"},
    "calibration": {
        *("scenario", "cost", "core", "metrics", "workload", "system"),
        *("numpy", "scipy", "pyarrow", "matplotlib", "pydantic"),
    },
    "sim": {"system", "scenario", "workload", "metrics", "cost", "core", "policy", "simpy"},
    "study": {
        *("sim", "system", "scenario", "workload", "metrics", "cost"),
        *("numpy", "scipy", "matplotlib", "pydantic", "optuna", "ray"),
    },
    "web": {"study", "scenario", "metrics", "workload", "system", "aiohttp"},
    "show": {
        *(
            "",
            "study",
            "sim",
            "formats",
            "calibration",
            "scenario",
            "metrics",
            "workload",
            "cost",
            "core",
            "policy",
            "system",
        ),
        *("numpy", "matplotlib", "jinja2", "rich", "pydantic", "pydantic_core"),  # "": the version
    },
}
"""What each room may import besides itself, the standard library and TOOLS."""
TOOLS = {"dataclass", "files", "garbage", "signals", "inputs"}
"""Modules that stand beside the rooms, and know none."""

IMPURE = {"time", "datetime", "random", "secrets", "asyncio", "threading", "multiprocessing", "socket", "subprocess"}
IMPURE |= {"os", "pathlib", "io", "logging"}


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            parts = name.split(".")
            yield node.lineno, (parts[1] if len(parts) > 1 else "") if parts[0] == "pdsim" else parts[0]


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_rooms_below_it(room):
    tools = TOOLS if room not in {"policy", "core"} else {"dataclass"}
    standard = set(sys.stdlib_module_names) | tools
    assert (ROOT / room).is_dir()
    for path in sorted((ROOT / room).rglob("*.py")):
        for line, name in imports(path):
            allowed = name in BELOW[room] | {room} or name in standard
            assert allowed, f"{path}:{line} imports {name}"


@pytest.mark.parametrize("room", ["policy", "core"])
def test_what_decides_has_no_clock_no_randomness_and_no_io(room):
    for path in sorted((ROOT / room).rglob("*.py")):
        for line, name in imports(path):
            assert name not in IMPURE, f"{path}:{line} imports {name}"


TESTS = Path(__file__).parent
HEAVY = {"scipy", "pandas", "openai", "jupytext", "nbclient", "kubernetes_validate", "optuna", "duckdb", "transformers"}
OF_OPTIONAL_PACKAGES = {"unit/test_transformers_sizes.py": {"transformers"}}
"""Files of which every test needs a package that `make setup` does not install."""


def names_at(body):
    """What statements of a module's head import, also by `pytest.importorskip`."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(value := getattr(node, "value", None), ast.Call) and "importorskip" in ast.unparse(value.func):
            yield ast.literal_eval(value.args[0])


def test_no_test_module_imports_at_its_head_what_few_tests_need():
    """Each worker collects every test, and would import them before its first test."""
    found = {
        str(path.relative_to(TESTS)): HEAVY
        & {name.partition(".")[0] for name in names_at(ast.parse(path.read_text()).body)}
        for path in sorted(TESTS.rglob("*.py"))
    }
    assert {path: names for path, names in found.items() if names} == OF_OPTIONAL_PACKAGES
