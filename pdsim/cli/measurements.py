"""Commands on measurements: observe a server, fit a profile, derive a profile for another GPU, print errors of
simulations.
"""

import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from pdsim.cli.command import Json, Set, out_at, print_json
from pdsim.metrics.run_folder import require_out, require_out_file
from pdsim.scenario.yaml_file import ConfigError

_EXPERIMENTS = Path("experiments")
"""Folder, in the working folder, in which `pdsim validate` looks up cases and matrices by name."""
_PROFILE = "name:"
"""Text with which each new profile begins. A file that begins with other text is not overwritten, unless the file is
empty.
"""


@dataclass(frozen=True)
class ObservationLimits:
    """Limits of time, requests and concurrency within which a server is measured."""

    minutes: Annotated[
        float, Parameter(validator=Number(gt=0), help="Maximum duration of all measurements, in minutes.")
    ] = 10.0
    requests: Annotated[int, Parameter(validator=Number(gte=20), help="Maximum number of requests in total.")] = 600
    concurrency: Annotated[int, Parameter(validator=Number(gte=1), help="Maximum number of requests in flight.")] = 16
    longest_prompt: Annotated[
        int, Parameter(validator=Number(gte=64), help="Maximum length of a prompt, in tokens.")
    ] = 4096


@dataclass(frozen=True)
class ServerOptions:
    """Facts about a server that a client needs and that the server does not always report."""

    model: Annotated[str | None, Parameter(help="Model, by the server's name for it [the server's first].")] = None
    gpu: Annotated[
        str | None, Parameter(help="GPU of the server, by its name in pdsim catalog. Servers do not report it.")
    ] = None
    tp: Annotated[
        int | None,
        Parameter(validator=Number(gte=1), help="Number of GPUs of the server, if the server does not report it."),
    ] = None
    api_key: Annotated[
        str | None, Parameter(env_var="OPENAI_API_KEY", help="Key to send as bearer token. It is written nowhere.")
    ] = None


def observe(
    url: Annotated[
        str,
        Parameter(
            help="Address of the server, such as http://127.0.0.1:30000; or a file: a saved page of /metrics or "
            "/server_info."
        ),
    ],
    later: Annotated[
        Path | None, Parameter(help="A page that was saved later, to print rates between the two.")
    ] = None,
    /,
    *,
    scenario: Annotated[
        Path | None, Parameter(help="For saved pages: scenario of the server, to simulate and compare.")
    ] = None,
    seconds: Annotated[
        float | None, Parameter(validator=Number(gt=0), help="Seconds between two saved pages [from the files' times].")
    ] = None,
    set_: Set = (),
    out: Annotated[Path, out_at("Folder for rows, description of the server, and load.")] = Path("observed"),
    limits: Annotated[ObservationLimits, Parameter(name="*")] = ObservationLimits(),
    about: Annotated[ServerOptions, Parameter(name="*")] = ServerOptions(),
    dry_run: Annotated[bool, Parameter(help="Print what would be sent, and send nothing.")] = False,
    json_: Json = False,
) -> None:
    """Measure a running OpenAI-compatible server as a client: rows for calibrate, a load for validate --observed.

    Prompts are random text, each sent once. An interrupted command keeps its rows. With a saved page, nothing is sent.
    """
    if Path(url).is_file():
        from pdsim.cli.pages import show_pages

        show_pages(Path(url), later, scenario, set_, seconds, json_=json_)
        return
    if later is not None or scenario is not None or seconds is not None:
        raise ConfigError(f"{url} is no file: a second page, --scenario and --seconds need saved pages")
    from pdsim.calibration.observe.observation import Session, require_observation
    from pdsim.calibration.observe.probes import ObservationBudget, loads, planned
    from pdsim.calibration.observe.server_client import ServerClient
    from pdsim.cli.finished import progress_over
    from pdsim.show.terminal.measurements import print_observation, print_plan

    server = ServerClient(url, model=about.model, api_key=about.api_key)
    budget = ObservationBudget(*astuple(limits))
    probes = list(planned(budget))
    if dry_run:
        if json_:
            print_json({"url": server.url, "budget": asdict(budget), "probes": [one._asdict() for one in probes]})
        else:
            print_plan(server.url, budget, probes, loads(budget))
        return
    require_out(out)
    require_observation(out)
    flags = ("--minutes", "--requests", "--concurrency", "--longest-prompt")
    words = zip(flags, astuple(budget), strict=True)
    command = " ".join(["pdsim observe", server.url, *(f"{flag} {value:g}" for flag, value in words)])
    session = Session(server, budget, out, command=command, gpu=about.gpu, tp=about.tp)
    with progress_over("observing", sum(one.num_requests for one in probes), quiet=json_) as advance:
        session.run(probes, advance)
    for note in session.notes:
        print(f"pdsim: {note}", file=sys.stderr)
    if json_:
        print_json(session.to_json())
    else:
        print_observation(session)
    if session.interrupted:
        raise SystemExit(130)


def calibrate(
    *rows: Annotated[
        Path,
        Parameter(help="Files of rows (CSV or Parquet) from `pdreal measure`, `pdkernels.bench` or `pdsim observe`."),
    ],
    out: Annotated[Path, out_at("Profile to write (YAML).")],
    gpu: Annotated[str | None, Parameter(help="GPU, by its name in pdsim catalog, if the rows do not name it.")] = None,
    prefill_tp: Annotated[int, Parameter(help="Tensor-parallel size of the prefill rows to fit.")] = 1,
    decode_tp: Annotated[int, Parameter(help="Tensor-parallel size of the decode rows to fit.")] = 1,
    prefill_ep: Annotated[int, Parameter(help="Expert-parallel size of the prefill rows to fit.")] = 1,
    decode_ep: Annotated[int, Parameter(help="Expert-parallel size of the decode rows to fit.")] = 1,
    prefill_a2a: Annotated[str, Parameter(help="All-to-all backend of the prefill rows to fit.")] = "none",
    decode_a2a: Annotated[str, Parameter(help="All-to-all backend of the decode rows to fit.")] = "none",
    host_slowdown: Annotated[
        float,
        Parameter(
            validator=Number(gt=0, lte=1000),
            help="Factor by which this host's work takes longer in a run than in the rows.",
        ),
    ] = 1,
    json_: Json = False,
) -> None:
    """Fit a profile to measured rows, and print its errors for shapes that were held out of the fit."""
    from pdsim.calibration.fit.profile import calibrate as fit_rows
    from pdsim.calibration.fit.profile import profile_of
    from pdsim.calibration.fit.rows import Ranks, flags_of, read_rows
    from pdsim.cli.finished import saying
    from pdsim.show.terminal.measurements import print_calibration

    if not rows:
        raise ConfigError("calibrate needs files of rows")
    require_out_file(out, rows, _PROFILE)
    pair = Ranks(prefill_tp, prefill_ep, prefill_a2a), Ranks(decode_tp, decode_ep, decode_a2a)
    measurements = read_rows(rows).of_ranks(*pair)
    with saying("fitting ...", quiet=json_):
        made = fit_rows(measurements, gpu=gpu)
    given = [*flags_of(pair), *(("--host-slowdown", str(host_slowdown)) if host_slowdown != 1 else ())]
    command = shlex.join(["pdsim", "calibrate", *(path.name for path in rows), *given])
    profile = profile_of(made, out.stem, command, host_slowdown=host_slowdown)
    _write_profile(profile, out, made.notes, None if json_ else lambda: print_calibration(made, profile))


def _write_profile(profile: Any, out: Path, notes: Iterable[str], show: Callable[[], None] | None) -> None:
    """Writes a profile to the file `out`, prints each of `notes` to stderr, and calls `show`, which prints the profile.
    show: None: the profile is printed as JSON.
    """
    from pdsim.scenario.yaml_file import write_yaml

    out.parent.mkdir(parents=True, exist_ok=True)
    write_yaml(profile, out)
    for note in notes:
        print(f"pdsim: {note}", file=sys.stderr)
    if show is None:
        print_json(profile)
    else:
        show()
        print(f"profile: {out}")


def scale(
    profile: Annotated[Path, Parameter(help="Measured profile (YAML).")],
    *,
    source: Annotated[str, Parameter(name="--from", help="GPU of the measured profile.")],
    target: Annotated[str, Parameter(name="--to", help="GPU of the derived profile.")],
    out: Annotated[Path, out_at("Derived profile to write (YAML).")],
    model: Annotated[
        str | None, Parameter(help="Model, by its name in pdsim catalog, if the profile does not name it.")
    ] = None,
    tp: Annotated[int, Parameter(validator=Number(gte=1), help="Tensor-parallel size of the measured profile.")] = 1,
    weight_dtype: Annotated[
        Literal["bf16", "fp8", "fp4"] | None,
        Parameter(help="Weight type of the derived profile [the measured profile's]."),
    ] = None,
    json_: Json = False,
) -> None:
    """Derive a profile for another GPU. Coefficients that a resource of the GPU limits are scaled by this resource, and
    get an interval of possible values if both GPUs were timed.
    """
    from pdsim.calibration.fit.scaling import GpuScaling, measured_model, model_of
    from pdsim.calibration.fit.scaling import scale as scaled
    from pdsim.scenario.sections.profile import read_profile
    from pdsim.show.terminal.measurements import print_scaling
    from pdsim.system.catalog import load_gpu, load_model

    require_out_file(out, [profile], _PROFILE)
    model = model or model_of(read_profile(profile))
    if model is None:
        raise ConfigError(f"profile {profile} does not say its model: name it with --model")
    gpus = load_gpu(source), load_gpu(target)
    spec = measured_model(profile, load_model(model))
    scaling = GpuScaling.between(*gpus, spec, tp=tp, weight_dtype=weight_dtype)
    command = f"pdsim scale {profile.name} --from {source} --to {target} --model {model} --tp {tp}"
    if weight_dtype is not None:
        command += f" --weight-dtype {weight_dtype}"
    derived = scaled(profile, scaling, out.stem, command)
    _write_profile(derived, out, scaling.notes, None if json_ else lambda: print_scaling(scaling, derived["cost"]))


def validate(
    *cases: Annotated[
        str,
        Parameter(
            help="Names of cases in the experiments folder, or their folders; all if none is given. Or one matrix: a "
            "folder with a matrix.yaml, or such a file. With --observed, the scenario of the server."
        ),
    ],
    profile: Annotated[Path | None, Parameter(help="For a matrix: profile to simulate with.")] = None,
    runs: Annotated[Path | None, Parameter(help="For a matrix: folder of the real runs.")] = None,
    real_only: Annotated[bool, Parameter(help="For a matrix: make the real runs only.")] = False,
    observed: Annotated[
        Path | None, Parameter(help="Folder that pdsim observe wrote, whose load is simulated with one scenario.")
    ] = None,
    json_: Json = False,
) -> None:
    """Simulate measured loads and print the errors: published numbers, real runs, or the load of a server.

    Variants of a matrix without a real run are first run with pdreal.
    """
    if observed is not None:
        if len(cases) != 1 or runs or real_only:
            raise ConfigError("--observed needs the scenario of the server, alone or with --profile")
        _validate_load(Path(cases[0]), observed, profile, quiet=json_)
        return
    from pdsim.calibration.validate.suite import is_suite

    suites = [name for name in cases if is_suite(name, _EXPERIMENTS)]
    if suites:
        from pdsim.cli.matrix import validate_suite

        if len(cases) > 1:
            raise ConfigError(f"{suites[0]} is a matrix: validate one matrix at a time; found {', '.join(cases)}")
        validate_suite(suites[0], _EXPERIMENTS, profile=profile, runs=runs, real_only=real_only, quiet=json_)
        return
    if profile or runs or real_only:
        raise ConfigError("--profile, --runs and --real-only need a matrix or --observed")
    from pdsim.calibration.validate.case import compare_case, find_cases
    from pdsim.cli.finished import fail_for_requests, progress_over
    from pdsim.metrics.explanation.failures import failure_text
    from pdsim.show.terminal.measurements import print_errors
    from pdsim.sim.simulation import simulate

    found, failures = find_cases(cases, _EXPERIMENTS), dict[str, str]()
    total = sum(len(case.arms) * len(case.seeds) for case in found)
    with progress_over("validating", total, quiet=json_) as advance:

        def summary(scenario: Any, skip: int = 0) -> dict[str, Any]:
            result = simulate(scenario).summary(skip)
            failures[scenario.name] = failures.get(scenario.name) or failure_text(result)
            advance()
            return result

        errors = [arm for case in found for arm in compare_case(case, summary)]
    if json_:
        print_json([arm.to_json() for arm in errors])
    else:
        print_errors(errors)
    fail_for_requests(failures)


def _validate_load(scenario: Path, observed: Path, profile: Path | None, *, quiet: bool) -> None:
    """Simulates the loads that `pdsim observe` sent to a server. Prints the errors of simulated throughput and times
    against those that `pdsim observe` measured, and the mean simulated time of each stage. Exits with 1 if simulated
    requests failed although the scenario asks for no failures.

    observed: folder of the observation, or its load file. profile: its cost, network and front_end replace those of the
    scenario; None: none are replaced. quiet: True: prints the errors alone, as JSON.
    """
    from pdsim.calibration.validate.observed import compare_load
    from pdsim.cli.finished import fail_for_requests
    from pdsim.metrics.explanation.explain import mean_stage_ms
    from pdsim.metrics.explanation.failures import failure_text
    from pdsim.sim.simulation import simulate

    records, failures = {}, {}

    def summary(scenario: Any) -> dict[str, Any]:
        result = simulate(scenario)
        name = f"simulated at concurrency {scenario.client.concurrency}"
        records[name], summary = result.records, result.summary()
        failures[name] = failure_text(summary)
        seen = {f"mean_server_{time}_ms": summary[f"mean_{time}_ms"] for time in ("ttft", "e2e_latency")}
        return {
            **summary,
            **seen,
            **{f"mean_{stage}_ms": ms for stage, ms in mean_stage_ms(result.records).items()},
        }

    errors = compare_load(scenario, observed, profile, summary)
    if quiet:
        print_json([arm.to_json() for arm in errors])
    else:
        from pdsim.show.terminal.measurements import print_errors
        from pdsim.show.terminal.tables import print_stages

        print_errors(errors)
        print_stages(records)
    fail_for_requests(failures)
