"""pdsim sweep: many points of a scenario."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pdsim.cli.command import Engine, Jobs, Json, Set, print_json
from pdsim.study.sweep_file import NUM_RANGES


def sweep(
    sweep: Path,
    *,
    out: Annotated[
        Path | None, Parameter(name=("--out", "-o"), help="The folder of the sweep; else runs/NAME.")
    ] = None,
    jobs: Jobs = None,
    engine: Engine = "pool",
    ranges: Annotated[
        int, Parameter(help="So many points, the best first, are simulated at their fastest and slowest, too.")
    ] = NUM_RANGES,
    set_: Set = (),
    json_: Json = False,
) -> None:
    """Simulate many points of a scenario, and print the best. What the folder has is not computed again.

    Parameters
    ----------
    sweep
        A sweep file (YAML).

    """
    from pdsim.cli.finished import progress_over
    from pdsim.study.sweep import sweep as run_sweep

    try:
        with progress_over("sweeping", None, quiet=json_) as advance:
            result = run_sweep(sweep, out=out, changes=set_, jobs=jobs, engine=engine, ranges=ranges, progress=advance)
    except KeyboardInterrupt:
        print(f"pdsim: {sweep}: interrupted; the same command goes on with what is missing", file=sys.stderr)
        raise SystemExit(130) from None
    if json_:
        print_json(result.to_json())
    else:
        from pdsim.show.study_tables import print_sweep

        print_sweep(result)
    if all(point.error for point in result.points):
        raise SystemExit(1)
