"""Runs variants of a matrix for real, one after another, by the command `pdreal`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdsim.calibration.validate.matrix import Matrix, Variant
from pdsim.metrics.run_folder import JOURNAL, SUMMARY
from pdsim.scenario.trust import imports_are_allowed
from pdsim.scenario.yaml_file import ConfigError

_CANNOT = 2
"""Exit code of pdreal for what this machine or the scenario lacks."""
_NOT_COMPARED = ("timeline.json.gz", "overview.png", JOURNAL)
"""What others make of a run folder: left out of kept ones, which may be many."""


def missing(matrix: Matrix) -> list[Variant]:
    return [variant for variant in matrix.variants if not (matrix.runs / variant.name / SUMMARY).is_file()]


def run_missing(matrix: Matrix) -> list[str]:
    """The variants that failed. What has finished is kept, also if this is interrupted.

    Raises ConfigError if this machine cannot run them.
    """
    variants = missing(matrix)
    if variants and find_spec("pdreal") is None:
        names = ", ".join(variant.name for variant in variants)
        raise ConfigError(f"{matrix.runs} lacks runs of {names}, and there is no pdreal: pip install 'pdsim[real]'")
    for variant in variants:  # before the first runs: mistakes, and modules that nobody trusts
        matrix.real_scenario(variant)
    matrix.runs.mkdir(parents=True, exist_ok=True)
    failed = []
    for i, variant in enumerate(variants):
        begin_s = time.monotonic()
        print(f"running {variant.name} for real ({i + 1} of {len(variants)})", end=" ", file=sys.stderr, flush=True)
        summary = _run(matrix, variant)
        if summary is None:
            failed.append(variant.name)
            continue
        rate, ttft_ms, tpot_ms = (summary[name] for name in ("request_throughput", "mean_ttft_ms", "mean_tpot_ms"))
        values = f"{rate:.3g} requests/s, TTFT {ttft_ms:.4g} ms, TPOT {tpot_ms:.4g} ms"
        print(f"{values}; {time.monotonic() - begin_s:.0f} s in all", file=sys.stderr)
    return failed


def _run(matrix: Matrix, variant: Variant) -> dict[str, Any] | None:
    """Its summary; None if it failed, which is said, and written down beside its folder."""
    part, log = matrix.runs / f"{variant.name}.part", matrix.runs / f"{variant.name}.log"
    shutil.rmtree(part, ignore_errors=True)
    changes = [word for change in variant.changes for word in ("--set", change)]
    command = [sys.executable, "-m", "pdreal", "run", str(matrix.scenario_path), *changes]
    command += ["--trust"] * imports_are_allowed() + [*matrix.real.flags, "--out", str(part), "--json"]
    with log.open("w", encoding="utf-8") as said:
        # a process group of its own: its ranks, which hold the devices, end with it
        process = subprocess.Popen(  # noqa: S603  ours
            command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=matrix.real.timeout_s)
        except subprocess.TimeoutExpired:
            print(f"not done after {matrix.real.timeout_s:.0f} s: see {log}", file=sys.stderr)
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode == _CANNOT:
        raise ConfigError(f"{variant.name}: {log.read_text(encoding='utf-8').strip()}")
    if process.returncode:
        print(f"failed with {process.returncode}: see {log}", file=sys.stderr)
        return None
    summary: dict[str, Any] = json.loads(output)
    _keep(part, matrix.runs / variant.name)
    log.unlink()
    return summary


def _keep(part: Path, folder: Path) -> None:
    for name in _NOT_COMPARED:
        (part / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
