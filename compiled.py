"""Compiles the core with mypyc: for a wheel as a hook of its build, or in place by `python compiled.py`.

The sources stay plain Python. Subclasses of SimPy's classes, exceptions and policies stay interpreted, so a user's
policy can subclass any of ours. Compiled code takes about half the CPU time (experiments/speed) and raises at run time
if a type is wrong, so golden scenarios and laws also run on the wheel.

What is compiled is a copy in which constructors of dataclasses are written out: mypyc leaves them to the interpreter,
where they take ten times as long. Lines keep their numbers.
"""

import ast
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from shutil import copytree, ignore_patterns, move
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
COMPILED = (
    "pdsim/core/**/*.py",
    "pdsim/cost/*.py",
    "pdsim/sim/**/*.py",
    "pdsim/policy/protocols.py",
    "pdsim/policy/views.py",
    "pdsim/metrics/distribution.py",
    "pdsim/metrics/journal_blocks.py",
    "pdsim/metrics/recorder.py",
    "pdsim/metrics/records.py",
    "pdsim/metrics/summary.py",
    "pdsim/workload/hash_ids.py",
)
INTERPRETED = {
    "pdsim/core/invariants.py",
    "pdsim/core/journal/replay.py",
    "pdsim/cost/aiconfigurator.py",
    "pdsim/cost/kernels.py",
    "pdsim/cost/settings.py",
    "pdsim/sim/uncertainty/ends.py",
    "pdsim/sim/uncertainty/part.py",
    "pdsim/sim/result.py",
    "pdsim/sim/uncertainty/sensitivity.py",
}

MYPY = """
[mypy]
ignore_missing_imports = True
[mypy-matplotlib.*,numpy.*,pandas.*,pyarrow.*,pydantic.*,pydantic_core.*,rich.*,ruamel.*,pdsim.calibration.*,pdsim.cli.*,pdsim.metrics.columns,pdsim.metrics.explanation.explain,pdsim.metrics.explanation.tail,pdsim.show.*,pdsim.study.*]
follow_imports = skip
"""
"""What the compiled modules do not use need not be read."""


def modules() -> list[str]:
    found = sorted(path.relative_to(ROOT).as_posix() for pattern in COMPILED for path in ROOT.glob(pattern))
    return [name for name in found if name not in INTERPRETED and not name.endswith("__init__.py")]


@dataclass(frozen=True)
class Field:
    """A field of a dataclass as its constructor takes it, in the words of the source."""

    name: str
    kind: str
    default: str | None = None
    factory: str | None = None
    by_keyword: bool = False
    is_inherited: bool = False

    @property
    def parameter(self) -> str:
        if self.factory is not None:
            return f"{self.name}: {self.kind} | None = None"
        return f"{self.name}: {self.kind}" + ("" if self.default is None else f" = {self.default}")

    @property
    def assignment(self) -> str:
        made = self.name if self.factory is None else f"({self.factory})() if {self.name} is None else {self.name}"
        return f"self.{self.name} = {made}"


def fields_of_classes(sources: list[str]) -> dict[str, list[Field]]:
    """Fields of the dataclasses whose constructors do no more than to assign them, by class."""
    classes = [one for source in sources for one in ast.parse(source).body if isinstance(one, ast.ClassDef)]
    found: dict[str, list[Field]] = {}
    while new := {one.name: fields for one in classes if one.name not in found and (fields := _fields(one, found))}:
        found |= new
    return found


def _fields(one: ast.ClassDef, known: Mapping[str, list[Field]]) -> list[Field]:
    """Bases are behind what is known. The types of their fields may not be imported here."""
    decorators = [text for text in map(ast.unparse, one.decorator_list) if text.startswith("dataclass")]
    bases = [text for text in map(ast.unparse, one.bases) if not text.startswith("Generic[")]
    methods = {member.name for member in one.body if isinstance(member, ast.FunctionDef)}
    if not decorators or methods & {"__init__", "__post_init__"} or not known.keys() >= set(bases):
        return []
    fields = [field for base in bases for field in _inherited(known[base])]
    by_keyword = "kw_only=True" in decorators[0] or any(field.by_keyword for field in fields)
    for member in one.body:
        if isinstance(member, ast.AnnAssign):
            kind, value = ast.unparse(member.annotation), member.value
            if kind.startswith("ClassVar"):
                continue
            field = Field(ast.unparse(member.target), kind, by_keyword=by_keyword)
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
                told = {word.arg: ast.unparse(word.value) for word in value.keywords if word.arg != "metadata"}
                if len(told) != 1 or "None" in kind:
                    return []
                field = replace(field, default=told.get("default"), factory=told.get("default_factory"))
            elif value is not None:
                field = replace(field, default=ast.unparse(value))
            fields.append(field)
    return fields


def _inherited(fields: list[Field]) -> list[Field]:
    """Fields that a derived class's constructor passes on to the base's constructor. A default that names something of
    the base's module cannot be written elsewhere, so the base sets that field, and later fields are passed by keyword.
    """
    found: list[Field] = []
    by_keyword = False
    for field in fields:
        nodes = ast.walk(ast.parse(field.default or "None"))
        if field.factory is None and not any(isinstance(node, ast.Name) for node in nodes):
            by_keyword |= field.by_keyword
            found.append(replace(field, kind="object", by_keyword=by_keyword, is_inherited=True))
        else:
            by_keyword = True
    return found


def with_constructors(source: str, known: Mapping[str, list[Field]]) -> str:
    """Constructors, and how to pickle what they made, go into the two blank lines behind a class."""
    lines = [*source.splitlines(), "", ""]
    for one in ast.parse(source).body:
        if isinstance(one, ast.ClassDef) and (fields := known.get(one.name)) and one.end_lineno is not None:
            first = [field.parameter for field in fields if not field.by_keyword]
            then = [field.parameter for field in fields if field.by_keyword]
            declared = ", ".join(["self", *first, *["*"][: len(then)], *then])
            passed = [f"{field.name}={field.name}" for field in fields if field.is_inherited]
            own = [field.assignment for field in fields if not field.is_inherited]
            assigned = "; ".join([f"super().__init__({', '.join(passed)})", *own] if passed else own)
            for decorator in one.decorator_list:  # a native class has slots, and needs no second class that has
                lines[decorator.lineno - 1] = lines[decorator.lineno - 1].replace("slots=True", "init=False")
            assert lines[one.end_lineno : one.end_lineno + 2] == ["", ""], f"{one.name}: no two blank lines behind it"
            lines[one.end_lineno] = f"    def __init__({declared}) -> None: {assigned}  # type: ignore"
            if not then and not passed:
                made = "".join(f"self.{field.name}, " for field in fields)
                lines[one.end_lineno + 1] = (
                    f"    def __reduce__(self) -> object: return {one.name}, ({made})  # type: ignore"
                )
    return "\n".join(lines) + "\n"


def with_guards(source: str) -> str:
    """Class patterns of `match message` become guards: mypyc compiles isinstance to a comparison of types, but looks up
    the class of a pattern by its name, and calls isinstance.
    """
    return re.sub(r"case (m\.\w+)\(\):", r"case _ if isinstance(message, \1):", source)


def libraries(root: Path = ROOT) -> list[Path]:
    """Compiled modules that lie in this tree."""
    return sorted(
        [*root.glob("pdsim_compiled__mypyc.*"), *(root / "pdsim").rglob("*.so"), *(root / "pdsim").rglob("*.pyd")]
    )


def compile_in_place() -> None:
    """A file of C for each module, so that a compiler needs 250 MiB; as many at a time as there are cores."""
    from mypyc.build import mypycify  # noqa: PLC0415  a build's
    from setuptools import Extension, setup  # noqa: PLC0415
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415

    class BuildAtOnce(build_ext):
        def build_extension(self, ext: Extension) -> None:
            hidden = ["-fvisibility=hidden"] if self.compiler.compiler_type == "unix" else []  # direct calls are faster

            def compile_one(source: str) -> list[str]:
                return self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    include_dirs=ext.include_dirs,
                    extra_postargs=[*ext.extra_compile_args, *hidden],
                )

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                ext.extra_objects += chain.from_iterable(pool.map(compile_one, ext.sources))
            ext.sources = []
            super().build_extension(ext)

    with TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        copytree(ROOT / "pdsim", folder / "pdsim", ignore=ignore_patterns("__pycache__", "*.so"))
        sources = {module: (ROOT / module).read_text(encoding="utf-8") for module in modules()}
        known = fields_of_classes(list(sources.values()))
        for module, source in sources.items():
            (folder / module).write_text(with_guards(with_constructors(source, known)), encoding="utf-8")
        (folder / "mypy.ini").write_text(MYPY)
        options = ["--config-file=mypy.ini", *sources]
        extensions = mypycify(
            options,
            group_name="pdsim_compiled",
            target_dir="made",
            opt_level=os.environ.get("PDSIM_OPT_LEVEL", "2"),
            debug_level="0",
            multi_file=True,
        )
        setup(
            name="pdsim_compiled",
            packages=[],
            ext_modules=extensions,
            cmdclass={"build_ext": BuildAtOnce},
            script_args=["--quiet", "build_ext", "--inplace", "--build-temp", "made", "--build-lib", "made"],
        )
        for path in libraries(folder):
            move(path, ROOT / path.relative_to(folder))


class CompileHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        compile_in_place()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in libraries():
            build_data["force_include"][str(path)] = path.relative_to(ROOT).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            for path in libraries():
                path.unlink()


if __name__ == "__main__":
    compile_in_place()
    sys.stdout.write(f"compiled {len(modules())} modules\n")
