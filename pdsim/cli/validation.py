"""Validates a suite: runs for real what was not run yet, simulates all of it, and compares the two."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdsim.calibration.comparison import Comparison, Side, Validation, compare_sides
from pdsim.calibration.suite import ValidationSuite, Variant, load_suite
from pdsim.cli.command import print_json
from pdsim.cli.finished import progress_over
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.run_folder import JOURNAL, SCENARIO, SUMMARY, read_records, read_summary
from pdsim.scenario.component import imports_are_allowed
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.yaml_file import ConfigError

_CANNOT = 2
"""Exit code of pdreal for what this machine or the scenario lacks."""
_NOT_COMPARED = ("timeline.json.gz", "overview.png", JOURNAL)
"""Files of a run folder that the comparison does not read: left out of kept folders, which may be many."""


def validate_suite(
    name: str,
    experiments: Path,
    *,
    profile: Path | None,
    runs: Path | None,
    real_only: bool,
    quiet: bool,
) -> None:
    """Exits with 1 if a real run failed, or if the two sides differ in what does not depend on time."""
    suite = load_suite(name, experiments)
    suite = replace(suite if profile is None else suite.with_profile(profile), runs=runs or suite.runs)
    if not real_only:
        for variant in suite.variants:  # before hours are spent on real runs
            suite.scenario(variant)
    try:
        failed = run_missing(suite)
    except KeyboardInterrupt:
        print(f"\npdsim: {suite.name}: interrupted; the same command goes on with what is missing", file=sys.stderr)
        raise SystemExit(130) from None
    if failed:
        print(f"pdsim: {suite.name}: no run of {', '.join(failed)}", file=sys.stderr)
    if not real_only:
        validation = _compare(suite, quiet=quiet)
        if quiet:
            print_json(validation.to_json())
        else:
            from pdsim.show.measurement_tables import print_validation

            print_validation(validation)
        if validation.unequal:
            what = "bytes or descriptors are not equal, of requests that were cached and sent alike"
            print(f"pdsim: {suite.name}: {', '.join(validation.unequal)}: {what}", file=sys.stderr)
            raise SystemExit(1)
    if failed:
        raise SystemExit(1)


def validate_load(scenario: Path, observed: Path, profile: Path | None, *, quiet: bool) -> None:
    """Prints what a server's clients saw beside the simulation, and where the simulation's time went."""
    from pdsim.calibration.observed_load import compare_load
    from pdsim.metrics.explain import mean_stage_ms
    from pdsim.sim.simulation import simulate

    records = {}

    def summary(scenario: Any) -> dict[str, Any]:
        result = simulate(scenario)
        records[f"simulated at concurrency {scenario.client.concurrency}"] = result.records
        summary = result.summary()
        seen = {f"mean_server_{time}_ms": summary[f"mean_{time}_ms"] for time in ("ttft", "e2e_latency")}
        return {
            **summary,
            **seen,
            **{f"mean_{stage}_ms": ms for stage, ms in mean_stage_ms(result.records.requests).items()},
        }

    errors = compare_load(scenario, observed, profile, summary)
    if quiet:
        print_json([arm.to_json() for arm in errors])
        return
    from pdsim.show.measurement_tables import print_errors
    from pdsim.show.tables import print_stages

    print_errors(errors)
    print_stages(records)


def _compare(suite: ValidationSuite, *, quiet: bool) -> Validation:
    absent = missing(suite)
    there = [variant for variant in suite.variants if variant not in absent]
    if not there:
        raise ConfigError(f"{suite.name}: {suite.runs} has no finished run")
    with progress_over("simulating", len(there), quiet=quiet) as advance:
        comparisons = []
        for variant in there:
            comparisons.append(_compare_variant(suite, variant))
            advance()
    return Validation(suite.name, suite.tolerances, tuple(comparisons))


@garbage_collection_paused()
def _compare_variant(suite: ValidationSuite, variant: Variant) -> Comparison:
    from pdsim.sim.simulation import simulate

    folder = suite.runs / variant.name
    suite.require_same(variant, load_scenario(folder / SCENARIO), folder)
    result = simulate(suite.scenario(variant))
    measured = Side(read_summary(folder), read_records(folder))
    return compare_sides(variant.name, suite.tolerances, measured, Side(result.summary(), result.records))


def missing(suite: ValidationSuite) -> list[Variant]:
    return [variant for variant in suite.variants if not (suite.runs / variant.name / SUMMARY).is_file()]


def run_missing(suite: ValidationSuite) -> list[str]:
    """The variants that failed. What has finished is kept, also if this is interrupted.

    Raises ConfigError if this machine cannot run them.
    """
    variants = missing(suite)
    if variants and find_spec("pdreal") is None:
        names = ", ".join(variant.name for variant in variants)
        raise ConfigError(f"{suite.runs} lacks runs of {names}, and there is no pdreal: pip install 'pdsim[real]'")
    for variant in variants:  # before the first runs: mistakes, and modules that nobody trusts
        suite.real_scenario(variant)
    suite.runs.mkdir(parents=True, exist_ok=True)
    failed = []
    for i, variant in enumerate(variants):
        begin_s = time.monotonic()
        print(f"running {variant.name} for real ({i + 1} of {len(variants)})", end=" ", file=sys.stderr, flush=True)
        summary = _run(suite, variant)
        if summary is None:
            failed.append(variant.name)
            continue
        rate, ttft_ms, tpot_ms = (summary[name] for name in ("request_throughput", "mean_ttft_ms", "mean_tpot_ms"))
        values = f"{rate:.3g} requests/s, TTFT {ttft_ms:.4g} ms, TPOT {tpot_ms:.4g} ms"
        print(f"{values}; {time.monotonic() - begin_s:.0f} s in all", file=sys.stderr)
    return failed


def _run(suite: ValidationSuite, variant: Variant) -> dict[str, Any] | None:
    """Its summary; None if it failed, which is said, and written down beside its folder."""
    part, log = suite.runs / f"{variant.name}.part", suite.runs / f"{variant.name}.log"
    shutil.rmtree(part, ignore_errors=True)
    changes = [word for change in variant.changes for word in ("--set", change)]
    command = [sys.executable, "-m", "pdreal", "run", str(suite.scenario_path), *changes]
    command += ["--trust"] * imports_are_allowed() + [*suite.real.flags, "--out", str(part), "--json"]
    with log.open("w", encoding="utf-8") as said:
        # a process group of its own: its ranks, which hold the devices, end with it
        process = subprocess.Popen(  # noqa: S603  ours
            command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=suite.real.timeout / 1e9)
        except subprocess.TimeoutExpired:
            print(f"not done after {suite.real.timeout / 1e9:.0f} s: see {log}", file=sys.stderr)
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
    _keep(part, suite.runs / variant.name)
    log.unlink()
    return summary


def _keep(part: Path, folder: Path) -> None:
    for name in _NOT_COMPARED:
        (part / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
