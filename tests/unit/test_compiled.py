"""Which of the two runs: the files as they are, or compiled."""

import ast
import os

import pytest

import pdsim
from compiled import INTERPRETED, ROOT, fields_of_classes, modules, with_constructors, with_guards
from pdsim.cli import main
from pdsim.core import messages
from pdsim.metrics.columns import NEVER, StoredRecords
from pdsim.metrics.tables import TABLES, checked_table, write_tables
from tests.support import run, small


def test_what_runs_is_what_was_asked_for():
    """make test-compiled sets PDSIM_COMPILED."""
    if wanted := os.environ.get("PDSIM_COMPILED"):
        assert pdsim.is_compiled() == bool(int(wanted))


def test_the_version_says_which_runs(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.split() == [
        pdsim.__version__,
        "(compiled)" if pdsim.is_compiled() else "(interpreted)",
    ]


def test_times_that_an_earlier_release_did_not_record_never_happened(tmp_path):
    """A compiled record says less about its fields' types than its source does."""
    records = run(small(workload={"use": "random_lengths", "num_requests": 3, "input_tokens": 9, "output_tokens": 2}))
    write_tables(tmp_path, records.records)
    tables = {name: checked_table(tmp_path, name) for name in TABLES}
    tables["requests"] = tables["requests"].drop_columns(["streamed_ns", "num_retries"])
    requests = StoredRecords(tmp_path, tables).columns("requests")
    assert requests["streamed_ns"].tolist() == [NEVER] * 3
    assert requests["num_retries"].tolist() == [0] * 3


def test_the_core_is_compiled_and_policies_are_not():
    names = modules()
    core = {
        "pdsim/core/routing/router.py",
        "pdsim/core/prefill/prefill_instance.py",
        "pdsim/core/decode/decode_instance.py",
    }
    assert core | {"pdsim/sim/simulation.py"} <= set(names)
    assert all((ROOT / name).is_file() for name in INTERPRETED)
    assert [name for name in names if name.startswith("pdsim/policy/")] == [
        "pdsim/policy/protocols.py",
        "pdsim/policy/views.py",
    ]


CLASSES = '''
from dataclasses import dataclass, field


ORIGIN = (0, 0)


@dataclass(slots=True)
class Base:
    """A class with every kind of default."""

    number: int
    name: str = "x"
    rows: list[int] = field(default_factory=list)
    place: tuple[int, int] = ORIGIN
    last: int = 7


@dataclass(slots=True, kw_only=True)
class Derived(Base):
    more: int
    is_done: bool = False


@dataclass(slots=True)
class Checked:
    number: int

    def __post_init__(self) -> None:
        assert self.number > 0
'''


def classes(source):
    made = {}
    exec(source, made)
    return made


def test_constructors_are_written_out_as_dataclasses_make_them():
    known = fields_of_classes([CLASSES])
    written = with_constructors(CLASSES, known)
    assert known.keys() == {"Base", "Derived"}, "a class that checks its fields keeps its own"
    assert [written.splitlines().index(f"class {name}:") for name in ("Base", "Checked")] == [
        CLASSES.splitlines().index(f"class {name}:") for name in ("Base", "Checked")
    ]
    plain, compiled = classes(CLASSES), classes(written)
    for name, args, kwargs in (
        ("Base", (1,), {}),
        ("Base", (1, "y", [2], (3, 4), 5), {}),
        ("Derived", (1, "y"), {"more": 2}),
        ("Derived", (1,), {"more": 2, "is_done": True, "last": 9}),
    ):
        assert repr(compiled[name](*args, **kwargs)) == repr(plain[name](*args, **kwargs))
    assert compiled["Base"](1).rows is not compiled["Base"](1).rows


MATCH = """
def kind_of(message):
    match message:
        case m.Cancel():
            return "cancel"
        case m.Failed() | m.Abort():
            return "other"
        case _:
            return ""
"""


def test_class_patterns_are_written_out_as_guards():
    written = with_guards(MATCH)
    assert written.count("isinstance") == 1
    for source in (MATCH, written):
        made = {"m": messages}
        exec(source, made)
        given = messages.Cancel(1, ""), messages.Abort(1, ""), messages.Finished(1)
        assert [made["kind_of"](one) for one in given] == ["cancel", "other", ""]


def test_class_patterns_of_compiled_modules_match_what_their_guards_compare():
    for name in modules():
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Match) and any(isinstance(one.pattern, ast.MatchClass) for one in node.cases):
                assert ast.unparse(node.subject) == "message", f"{name}, line {node.lineno}"


def test_every_compiled_module_can_be_written_out():
    sources = [(ROOT / name).read_text(encoding="utf-8") for name in modules()]
    known = fields_of_classes(sources)
    assert {"Send", "DecodeStep", "StepRecord", "DecodeRequest"} <= known.keys()
    for source in sources:
        ast.parse(with_guards(with_constructors(source, known)))
