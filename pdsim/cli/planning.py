"""pdsim plan: the cheapest cluster that meets an SLO."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pdsim.cli.command import Json, Set, print_json
from pdsim.study.planning.planning import MAX_GPUS
from pdsim.study.planning.slo import DEFAULT_SLO
from pdsim.study.questions.base import NUM_SEEDS


def plan(
    scenario: Annotated[Path | None, Parameter(help="A scenario file [a starter].")] = None,
    /,
    *,
    trace: Annotated[Path | None, Parameter(help="A trace that replaces the workload.")] = None,
    check: Annotated[Path | None, Parameter(help="Another trace, on which the plan is judged.")] = None,
    slo: Annotated[
        str, Parameter(help="Limits of ttft, tpot and e2e, for how many requests, and perhaps of which class.")
    ] = DEFAULT_SLO,
    gpu: Annotated[
        list[str] | None,
        Parameter(negative="", help="A GPU to choose from, perhaps with its price an hour: h100=2.5 [the scenario's]."),
    ] = None,
    max_gpus: Annotated[int, Parameter(help="The most GPUs of a cluster.")] = MAX_GPUS,
    try_: Annotated[
        list[str] | None,
        Parameter(name="--try", negative="", help="Values of a field to choose from, as page_size=[1, 64]."),
    ] = None,
    speedup: Annotated[
        str, Parameter(help="Times the load for which the cheapest cluster is found, too, as 0.5,2,4.")
    ] = "",
    set_: Set = None,
    seeds: Annotated[int, Parameter(help="Runs of each cluster, where arrivals are drawn.")] = NUM_SEEDS,
    jobs: Annotated[int | None, Parameter(help="Processes; else one for each CPU.")] = None,
    engine: Annotated[str, Parameter(help="pool, here, ray or ray:ADDRESS.")] = "pool",
    out: Annotated[
        Path | None,
        Parameter(
            name=("--out", "-o"), help="Write plan.json, plan.md, scenario.yaml and all runs here; runs are kept."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Find the cheapest cluster that meets an SLO: GPUs, roles, tensor parallelism, instances and router."""
    from pdsim.cli.finished import progress_over
    from pdsim.show.study_tables import print_plan
    from pdsim.study.planning.arguments import fields_of, prices_of
    from pdsim.study.planning.planning import plan as find

    def told(line: str) -> None:
        if not json_:
            print(line, file=sys.stderr)

    try:
        with progress_over("planning", None, quiet=json_) as advance:
            made = find(
                scenario,
                trace=trace,
                check=check,
                slo=slo,
                prices=prices_of(gpu or ()),
                max_gpus=max_gpus,
                tried=fields_of(try_ or ()),
                speedup=speedup,
                changes=set_ or (),
                seeds=seeds,
                jobs=jobs,
                engine=engine,
                out=out,
                progress=advance,
                told=told,
            )
    except KeyboardInterrupt:
        kept = "" if out is None else "; the same command goes on with what is missing"
        print(f"pdsim: interrupted{kept}", file=sys.stderr)
        raise SystemExit(130) from None
    if json_:
        print_json(made.to_json())
    else:
        print_plan(made)
    if made.chosen is None:
        raise SystemExit(1)
