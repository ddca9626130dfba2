"""Validates a matrix: runs for real what was not run yet, simulates all of it, and puts the two side by side."""

import sys
from dataclasses import replace
from pathlib import Path

from pdsim.calibration.validate.matrix import Matrix, Variant, load_matrix
from pdsim.calibration.validate.validation import Comparison, Side, Validation, compare_sides
from pdsim.cli.command import print_json
from pdsim.cli.finished import progress_over
from pdsim.cli.real_runs import missing, run_missing
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.run_folder import SCENARIO, read_records, read_summary
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.yaml_file import ConfigError


def validate_matrix(
    name: str,
    experiments: Path,
    *,
    profile: Path | None,
    runs: Path | None,
    real_only: bool,
    quiet: bool,
) -> None:
    """Exits with 1 if a real run failed, or if the two sides differ in what does not depend on time."""
    matrix = load_matrix(name, experiments)
    matrix = replace(matrix if profile is None else matrix.with_profile(profile), runs=runs or matrix.runs)
    if not real_only:
        for variant in matrix.variants:  # before hours are spent on real runs
            matrix.scenario(variant)
    try:
        failed = run_missing(matrix)
    except KeyboardInterrupt:
        print(f"\npdsim: {matrix.name}: interrupted; the same command goes on with what is missing", file=sys.stderr)
        raise SystemExit(130) from None
    if failed:
        print(f"pdsim: {matrix.name}: no run of {', '.join(failed)}", file=sys.stderr)
    if not real_only:
        validation = _compare(matrix, quiet=quiet)
        if quiet:
            print_json(validation.to_json())
        else:
            from pdsim.show.matrix_tables import print_validation

            print_validation(validation)
        if validation.unequal:
            what = "bytes or descriptors are not equal, of requests that were cached and sent alike"
            print(f"pdsim: {matrix.name}: {', '.join(validation.unequal)}: {what}", file=sys.stderr)
            raise SystemExit(1)
    if failed:
        raise SystemExit(1)


def _compare(matrix: Matrix, *, quiet: bool) -> Validation:
    absent = missing(matrix)
    there = [variant for variant in matrix.variants if variant not in absent]
    if not there:
        raise ConfigError(f"{matrix.name}: {matrix.runs} has no finished run")
    with progress_over("simulating", len(there), quiet=quiet) as advance:
        comparisons = []
        for variant in there:
            comparisons.append(_compare_variant(matrix, variant))
            advance()
    return Validation(matrix.name, matrix.asked, tuple(comparisons))


@garbage_collection_paused()
def _compare_variant(matrix: Matrix, variant: Variant) -> Comparison:
    from pdsim.sim.simulation import simulate

    folder = matrix.runs / variant.name
    matrix.require_same(variant, load_scenario(folder / SCENARIO), folder)
    result = simulate(matrix.scenario(variant))
    measured = Side(read_summary(folder), read_records(folder))
    return compare_sides(variant.name, matrix.asked, measured, Side(result.summary(), result.records))
