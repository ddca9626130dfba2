"""The commands of pdreal."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from pdreal.bootstrap import LaunchError
from pdreal.options import Device, Options, RealDtype
from pdsim import __version__
from pdsim.cli.command import Json, Out, Seed, Set, changes_of, fail_if_incomplete, print_json, run_app

app = App(
    name="pdreal",
    help="Run prefill/decode disaggregated LLM serving for real, with the scheduler that pdsim simulates.",
    version=__version__,
)

OnDevice = Annotated[Device, Parameter(help="Where models run.")]
Dtype = Annotated[RealDtype, Parameter(help="Of weights and KV.")]
Weights = Annotated[str, Parameter(help="seed:N for random ones, or the folder of a checkpoint.")]
CheckKv = Annotated[bool, Parameter(negative=(), help="Compare the KV of every request on both sides as it arrives.")]


@app.command
def run(
    scenario: Path,
    *,
    set_: Set = None,
    seed: Seed = None,
    out: Out = None,
    device: OnDevice = "cpu",
    dtype: Dtype = "float32",
    weights: Weights = "seed:0",
    check_kv: CheckKv = False,
    json_: Json = False,
) -> None:
    """Run a scenario and print its summary.

    Parameters
    ----------
    scenario: A scenario file (YAML).

    """
    from pdreal.run import run_scenario

    options = Options(device=device, dtype=dtype, weights=weights, check_kv=check_kv)
    finished, real = run_scenario(scenario, changes_of(set_, seed), options, out, quiet=json_)
    if json_:
        print_json(finished.summary)
    else:
        from pdsim.cli.tables import print_stages, print_summaries

        print_summaries({finished.name: finished.summary})
        print_stages({finished.name: finished.records})
        if out is not None:
            print(f"run folder: {out}")
    fail_if_incomplete(finished, "pdreal")
    problems = [*real.leaks, *([real.failure] if real.failure else [])]
    if problems:
        print(
            "\n  ".join([f"pdreal: {finished.name}: when all had ended, not all was well:", *problems]), file=sys.stderr
        )
        raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    run_app(app, arguments, (LaunchError,))
