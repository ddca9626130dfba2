"""pdsim plan: the cheapest cluster that meets an SLO."""

import sys
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from pdsim.cli.command import Engine, Jobs, Json, Limits, Set, Trace, print_json
from pdsim.scenario.yaml_file import ConfigError, parse_yaml
from pdsim.study.planning.planning import MAX_GPUS
from pdsim.study.planning.slo import DEFAULT_SLO
from pdsim.study.questions.base import NUM_SEEDS
from pdsim.system.catalog import CatalogError, load_gpu


def plan(
    scenario: Annotated[Path | None, Parameter(help="A scenario file [a starter].")] = None,
    /,
    *,
    trace: Trace = None,
    check: Annotated[Path | None, Parameter(help="Another trace, on which the plan is judged.")] = None,
    slo: Limits = DEFAULT_SLO,
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
    set_: Set = (),
    seeds: Annotated[int, Parameter(help="Runs of each cluster, where arrivals are drawn.")] = NUM_SEEDS,
    jobs: Jobs = None,
    engine: Engine = "pool",
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
    from pdsim.study.planning.planning import plan as find

    def report(line: str) -> None:
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
                changes=set_,
                seeds=seeds,
                jobs=jobs,
                engine=engine,
                out=out,
                progress=advance,
                report=report,
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


def prices_of(gpus: Iterable[str]) -> dict[str, float]:
    """Prices of "h100=2.5" or "h100", whose price is 1 unless others have theirs. Raises ConfigError."""
    found: dict[str, float] = {}
    unpriced = []
    for gpu in gpus:
        name, equals, price = gpu.partition("=")
        try:
            load_gpu(name)
            found[name] = float(price) if equals else 1.0
        except CatalogError as wrong:
            raise ConfigError(f"--gpu {gpu}: {wrong}") from None
        except ValueError:
            raise ConfigError(f"--gpu {gpu}: expected NAME=PRICE, such as h100=2.5") from None
        if not 0 < found[name] < inf:
            raise ConfigError(f"--gpu {gpu}: a price is above 0")
        if not equals:
            unpriced.append(name)
    if unpriced and len(found) > 1:
        raise ConfigError(f"--gpu {unpriced[0]}: several GPUs need a price each, such as {unpriced[0]}=2.5")
    return found


def fields_of(tried: Iterable[str]) -> dict[str, list[Any]]:
    """Fields and values of "page_size=[1, 64]". Raises ConfigError."""
    found: dict[str, list[Any]] = {}
    for one in tried:
        path, equals, text = one.partition("=")
        values = parse_yaml(text, f"--try {one}") if equals else None
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--try {one}: expected FIELD=[VALUE, ...], such as decode.radix_cache=[true, false]")
        found[path.strip()] = values
        if path.strip().endswith((".tp", ".pp", ".cp", ".instances")) and not all(
            type(value) is int and value > 0 for value in values
        ):
            raise ConfigError(f"--try {one}: whole numbers above 0")
        if path.strip().endswith(".gpu"):
            raise ConfigError(f"--try {one}: GPUs have prices, and each role tries all of them: --gpu h100=2.5")
    return found
