"""Commands on studies: ask, plan, sweep, serve."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from pdsim.cli.command import (
    NO_LOAD,
    Engine,
    Jobs,
    Json,
    Limits,
    Load,
    Port,
    ProfileFiles,
    Set,
    Trace,
    out_at,
    print_json,
    profile_changes,
)
from pdsim.files import temporary_folder
from pdsim.scenario.load_options import require_load
from pdsim.scenario.yaml_file import ConfigError, parse_yaml
from pdsim.study.base import MAX_GPUS, NUM_SEEDS, AskOptions, base_of
from pdsim.study.sweeping.sweep_file import NUM_RANGES
from pdsim.study.verdict.slo import DEFAULT_SLO, Slo
from pdsim.system.catalog import CatalogError, load_gpu


def ask(
    name: Annotated[
        str | None, Parameter(help="Name of the question. Without a name, print the list of questions.")
    ] = None,
    scenario: Annotated[
        Path | None, Parameter(help="Scenario file (YAML) [a built-in scenario with four H200].")
    ] = None,
    /,
    *,
    options: Annotated[AskOptions, Parameter(name="*", help="Load and SLO.")] = AskOptions(),  # noqa: B008  it is frozen
    load: Load = NO_LOAD,
    set_: Set = (),
    profile: ProfileFiles = (),
    seeds: Annotated[int, Parameter(help="Number of seeds: each candidate runs once per seed.")] = NUM_SEEDS,
    jobs: Jobs = None,
    out: Annotated[Path | None, out_at("Folder for answer.md, answer.json, answer.png and all runs.")] = None,
    details: Annotated[bool, Parameter(help="Print all notes on the answer, too.")] = False,
    json_: Json = False,
) -> None:
    """Answer a question about a scenario: a recommendation, its numbers, and the resource that limits it."""
    set_ = (*profile_changes(profile), *set_)
    from pdsim.show.terminal.studies import print_answer, print_questions
    from pdsim.study.questions.study import QUESTIONS, question

    if name is None:
        asks = {name: question(name).asks for name in QUESTIONS}
        (print_json if json_ else print_questions)(asks)
        return
    from pdsim.cli.finished import progress_over
    from pdsim.study.questions.answering import ask as answer

    has_load = scenario is not None or options.trace is not None
    changes = (*load.changes(has_own_load=has_load), *set_)
    given = {"changes": changes, "seeds": seeds, "jobs": jobs, "out": out, **asdict(options)}
    with _interruptible(name, is_kept=out is not None), progress_over(name, None, quiet=json_) as advance:
        made = answer(name, scenario, **given, progress=advance)
    if json_:
        print_json(made.to_json())
        return
    print_answer(made, details=details)
    if out is not None:
        print(f"answer.md, answer.json and answer.png: {out}")


@contextmanager
def _interruptible(what: str, *, is_kept: bool) -> Iterator[None]:
    """Context in which Ctrl-C, SIGTERM or SIGHUP ends the command with one line and exit code 130. what: name of the
    question, plan or sweep in this line. is_kept: True: the line says that the command can resume.
    """
    try:
        yield
    except KeyboardInterrupt:
        goes_on = "; the same command goes on with what is missing" if is_kept else ""
        print(f"pdsim: {what}: interrupted{goes_on}", file=sys.stderr)
        raise SystemExit(130) from None


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a plan: GPUs and settings of the clusters from which it chooses, currency, and further loads."""

    gpu: Annotated[
        list[str] | None,
        Parameter(
            help="GPU to choose from, perhaps with its price per hour: h100=2.5. Repeat for more [the scenario's]."
        ),
    ] = None
    currency: Annotated[str, Parameter(help="Currency of prices: a symbol, or a code such as EUR.")] = "$"
    max_gpus: Annotated[
        int, Parameter(validator=Number(gte=1, lte=1024), help="Maximum number of GPUs of a cluster.")
    ] = MAX_GPUS
    try_: Annotated[
        list[str] | None,
        Parameter(name="--try", help="Values of a field to search, such as page_size=[1,64]. Repeat for more fields."),
    ] = None
    speedup: Annotated[
        str, Parameter(help="Also find the cheapest cluster for these multiples of the load, such as 0.5,2,4.")
    ] = ""


def plan(
    scenario: Annotated[Path | None, Parameter(help="Scenario file (YAML) [a built-in scenario].")] = None,
    /,
    *,
    load: Load = NO_LOAD,
    trace: Trace = None,
    check: Annotated[Path | None, Parameter(help="Second trace, to judge the plan with.")] = None,
    slo: Limits = DEFAULT_SLO,
    clusters: Annotated[ClusterOptions, Parameter(name="*")] = ClusterOptions(),
    set_: Set = (),
    profile: ProfileFiles = (),
    seeds: Annotated[
        int, Parameter(help="Number of seeds: each cluster runs once per seed, if arrivals are drawn.")
    ] = NUM_SEEDS,
    jobs: Jobs = None,
    engine: Engine = "pool",
    out: Annotated[
        Path | None,
        out_at("Folder for plan.json, plan.md, scenario.yaml and all runs. A later command reuses the runs."),
    ] = None,
    details: Annotated[
        bool, Parameter(help="Also print why each cluster misses the SLO, and the numbers at both ends of the range.")
    ] = False,
    json_: Json = False,
) -> None:
    """Find the cheapest cluster that meets an SLO: GPU, roles, tensor parallelism, number of servers, router."""
    set_ = (*profile_changes(profile), *set_)
    from pdsim.cli.finished import progress_over
    from pdsim.show.terminal.plan import print_plan
    from pdsim.study.planning.planning import plan as find
    from pdsim.study.planning.screen import Screen

    has_load = scenario is not None or trace is not None
    if not has_load:
        require_load(load, set_)

    def report(line: str) -> None:
        if not json_:
            print(line, file=sys.stderr)

    with _interruptible("plan", is_kept=out is not None), progress_over("runs", None, quiet=json_) as advance:
        made = find(
            scenario,
            trace=trace,
            check=check,
            slo=slo,
            prices=prices_of(clusters.gpu or ()),
            currency=clusters.currency,
            max_gpus=clusters.max_gpus,
            tried=fields_of(clusters.try_ or ()),
            speedup=clusters.speedup,
            changes=(*load.changes(has_own_load=has_load), *set_),
            seeds=seeds,
            jobs=jobs,
            engine=engine,
            out=out,
            progress=lambda done, _of_this_round: advance(done),
            report=report,
        )
    if json_:
        print_json(Screen(made).to_json())
    else:
        print_plan(made, details=details, out=out)
    if made.chosen is None:
        raise SystemExit(1)


def prices_of(gpus: Iterable[str]) -> dict[str, float]:
    """Prices per hour by GPU, read from texts such as "h100=2.5". A text without a price, such as "h100", is allowed if
    it is the only one; the price is then 1. Raises ConfigError if a GPU is unknown, or a price is wrong or missing.
    """
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
        if not 0 < found[name] <= _MAX_PRICE:
            raise ConfigError(f"--gpu {gpu}: a price is above 0 and at most {_MAX_PRICE:g}")
        if not equals:
            unpriced.append(name)
    if unpriced and len(found) > 1:
        raise ConfigError(f"--gpu {unpriced[0]}: several GPUs need a price each, such as {unpriced[0]}=2.5")
    return found


_MAX_PRICE = 1e9
"""Largest price of a GPU-hour. Prices of clusters must stay finite."""
_LOAD = ("workload", "client", "seed")
"""Fields that a plan must not vary, because they change the load. A plan compares clusters under one load."""
_ROLES = ("prefill", "decode", "aggregated", "encode")
"""Sections of a scenario that `pdsim plan` writes for each candidate cluster. --try takes their fields, but no whole
section.
"""


def fields_of(tried: Iterable[str]) -> dict[str, list[Any]]:
    """Values to try by field, read from texts such as "page_size=[1, 64]". Raises ConfigError if a text has no list of
    values or an empty one, names a field that a plan cannot try, or sets a size such as tp or instances to a value
    other than a whole number above 0.
    """
    found: dict[str, list[Any]] = {}
    for one in tried:
        path, equals, text = one.partition("=")
        values = parse_yaml(text, f"--try {one}") if equals else None
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--try {one}: expected FIELD=[VALUE, ...], such as decode.radix_cache=[true, false]")
        path = path.strip()
        is_size = path.endswith((".tp", ".pp", ".cp", ".dcp", ".instances"))
        if is_size and not all(type(value) is int and value > 0 for value in values):
            raise ConfigError(f"--try {one}: expected whole numbers above 0")
        if path.partition(".")[0] in _LOAD:
            raise ConfigError(f"--try {one}: this field changes the load, and all clusters have one load: use --set")
        if path.endswith(".gpu"):
            raise ConfigError(f"--try {one}: GPUs have prices, and each role tries all of them: --gpu h100=2.5")
        if path in _ROLES:
            raise ConfigError(f"--try {one}: name a field of {path}, such as {path}.instances=[1, 2]")
        found[path] = values
    return found


def sweep(
    sweep: Annotated[Path, Parameter(help="Sweep file (YAML).")],
    *,
    out: Annotated[Path | None, out_at("Folder of the sweep [runs/NAME].")] = None,
    jobs: Jobs = None,
    engine: Engine = "pool",
    ranges: Annotated[
        int,
        Parameter(
            validator=Number(gte=0),
            help="Number of best points to simulate at both ends of their ranges.",
        ),
    ] = NUM_RANGES,
    load: Load = NO_LOAD,
    set_: Set = (),
    profile: ProfileFiles = (),
    json_: Json = False,
) -> None:
    """Simulate many variants of a scenario, and print the best. Variants that the folder has are kept."""
    set_ = (*profile_changes(profile), *set_)
    from pdsim.cli.finished import progress_over
    from pdsim.study.sweeping.sweep import sweep as run_sweep

    with _interruptible(str(sweep), is_kept=True), progress_over("sweeping", None, quiet=json_) as advance:
        changes = (*load.changes(has_own_load=True), *set_)
        result = run_sweep(sweep, out=out, changes=changes, jobs=jobs, engine=engine, ranges=ranges, progress=advance)
    if json_:
        print_json(result.to_json())
    else:
        from pdsim.show.terminal.studies import print_sweep

        print_sweep(result)
    if all(point.error for point in result.points):
        raise SystemExit(1)


_PORT = 8321
_NUM_REQUESTS = 500
_STARTER = {"client": {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "10 /s"}}}


def serve(
    scenario: Annotated[Path | None, Parameter(help="Scenario file (YAML) [a built-in scenario].")] = None,
    /,
    *,
    trace: Trace = None,
    slo: Limits = DEFAULT_SLO,
    gpu: Annotated[list[str] | None, Parameter(help="Price of a GPU per hour: h100=2.5. Repeat for more GPUs.")] = None,
    set_: Set = (),
    profile: ProfileFiles = (),
    num_requests: Annotated[
        int, Parameter(help="Maximum number of requests to simulate; 500 are answered within a second.")
    ] = _NUM_REQUESTS,
    port: Annotated[Port, Parameter(help="Port on 127.0.0.1; 0 takes a free one.")] = _PORT,
    jobs: Annotated[int | None, Parameter(help="Number of processes [one per CPU, at most three].")] = None,
) -> None:
    """Serve a local page to choose model, load, SLO, GPUs and servers, and see latency and price."""
    set_ = (*profile_changes(profile), *set_)
    from pdsim.study.points.engine import Work, open_engine
    from pdsim.study.points.store import Store
    from pdsim.web.board import Board

    try:
        from pdsim.web.server import serve as run_server
    except ImportError:
        raise ConfigError("serve needs aiohttp, which is not installed: pip install 'pdsim[web]'") from None
    wanted, prices = Slo.parse(slo), prices_of(gpu or ())
    with temporary_folder("pdsim-serve-") as folder:
        base = base_of(scenario, AskOptions(trace=trace), set_, folder=folder, starter=_STARTER)
        with closing(open_engine("pool", min(3, os.cpu_count() or 1) if jobs is None else jobs)) as engine:
            board = Board(base, Work(Store(folder), engine), wanted, prices, num_requests)
            try:
                run_server(board, port, lambda address: print(f"{address}  (Ctrl-C ends it)", flush=True))
            except OSError as taken:
                raise ConfigError(f"--port {port}: {taken.strerror}; --port 0 takes a free one") from None
            except KeyboardInterrupt:
                print()
