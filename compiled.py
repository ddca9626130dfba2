"""Compiles the core with mypyc: for a wheel as a hook of its build, or in place by `python compiled.py`.

The sources stay plain Python. What SimPy's classes underlie, what raises exceptions of its own, and every policy stays
interpreted, so a user's policy subclasses what it likes.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
COMPILED = (
    "pdsim/core/*.py",
    "pdsim/cost/*.py",
    "pdsim/sim/*.py",
    "pdsim/policy/protocols.py",
    "pdsim/policy/views.py",
    "pdsim/metrics/distribution.py",
    "pdsim/metrics/recorder.py",
    "pdsim/metrics/summary.py",
    "pdsim/workload/hash_blocks.py",
)
INTERPRETED = {
    "pdsim/core/invariants.py",
    "pdsim/core/journal.py",
    "pdsim/cost/aiconfigurator.py",
    "pdsim/cost/expert_loads.py",
    "pdsim/cost/kernels.py",
    "pdsim/cost/settings.py",
    "pdsim/sim/result.py",
    "pdsim/sim/sensitivity.py",
}

MYPY = """
[mypy]
ignore_missing_imports = True
[mypy-matplotlib.*,numpy.*,pandas.*,pyarrow.*,pydantic.*,pydantic_core.*,rich.*,ruamel.*,pdsim.calibration.*,pdsim.cli.*,pdsim.show.*,pdsim.study.*]
follow_imports = skip
"""
"""What the compiled modules do not use need not be read."""


def modules() -> list[str]:
    found = sorted(path.relative_to(ROOT).as_posix() for pattern in COMPILED for path in ROOT.glob(pattern))
    return [name for name in found if name not in INTERPRETED and not name.endswith("__init__.py")]


def libraries() -> list[Path]:
    """Compiled modules that lie in this tree."""
    return sorted(
        [*ROOT.glob("pdsim_compiled__mypyc.*"), *(ROOT / "pdsim").rglob("*.so"), *(ROOT / "pdsim").rglob("*.pyd")]
    )


def compile_in_place() -> None:
    from mypyc.build import mypycify  # noqa: PLC0415  a build's
    from setuptools import setup  # noqa: PLC0415

    with TemporaryDirectory() as folder:
        settings = Path(folder) / "mypy.ini"
        settings.write_text(MYPY)
        options = [f"--config-file={settings}", *modules()]
        extensions = mypycify(options, group_name="pdsim_compiled", target_dir=folder, opt_level="2", debug_level="0")
        setup(
            name="pdsim_compiled",
            packages=[],
            ext_modules=extensions,
            script_args=["--quiet", "build_ext", "--inplace", "--build-temp", folder, "--build-lib", folder],
        )


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
