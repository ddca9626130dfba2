"""What the commands of every program have in common: options, JSON, and how they fail."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from pdsim.cli.finished import FinishedRun
from pdsim.core.instance import PolicyError
from pdsim.metrics.run_folder import RunFolderError
from pdsim.scenario.yaml_file import ConfigError

Set = Annotated[
    list[str] | None, Parameter(name="--set", negative=(), help="Change a field: path=value. May be given again.")
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON instead of tables.")]
Seed = Annotated[int | None, Parameter(help="Instead of the scenario's seed.")]
Tornado = Annotated[
    bool, Parameter(negative=(), help="Simulate again with 10 % more of each resource, and say what that changes.")
]
Out = Annotated[Path | None, Parameter(name=("--out", "-o"), help="Write the run folder here.")]


def run_app(app: App, arguments: Sequence[str] | None, mistakes: tuple[type[Exception], ...] = ()) -> None:
    """Mistakes are told in one message, with exit code 2."""
    known: tuple[type[Exception], ...] = (CycloptsError, ConfigError, RunFolderError, PolicyError, *mistakes)
    sys.path.insert(0, "")  # policies may lie in the folder that one works in
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except known as wrong:
        print(f"{app.name[0]}: {wrong}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None


def changes_of(changes: list[str] | None, seed: int | None) -> tuple[str, ...]:
    return (*(changes or ()), *(() if seed is None else (f"seed={seed}",)))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def warn_outside_measured(finished: FinishedRun) -> None:
    """Of steps beyond the rows that the profile was fitted to: once for each field."""
    for message in finished.summary.get("pdsim", {}).get("outside_measured", ()):
        print(f"pdsim: {finished.name}: warning: {message}", file=sys.stderr)


def fail_if_incomplete(finished: FinishedRun, program: str = "pdsim") -> None:
    if finished.interrupted:
        print(f"{program}: {finished.name}: interrupted; what had finished is kept", file=sys.stderr)
        raise SystemExit(130)
    if finished.stall:
        lines = [
            f"{program}: {finished.name}: stalled: nothing can happen any more, and these wait:",
            *finished.stall[:20],
        ]
        if len(finished.stall) > 20:  # noqa: PLR2004
            lines.append(f"... and {len(finished.stall) - 20} more")
        print("\n  ".join(lines), file=sys.stderr)
        raise SystemExit(1)
