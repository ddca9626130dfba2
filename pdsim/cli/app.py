"""The commands. A wrong file or flag is one message and exit code 2; a run that stalls exits with 1."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from pdsim import __version__
from pdsim.cli.asking import ask
from pdsim.cli.command import (
    Json,
    Out,
    Seed,
    Set,
    Tornado,
    changes_of,
    fail_if_incomplete,
    print_json,
    run_app,
    warn_outside_measured,
)
from pdsim.scenario.yaml_file import ConfigError

app = App(
    name="pdsim",
    help="Simulate prefill/decode disaggregated LLM serving with the scheduler that real hardware runs.",
    version=__version__,
)
app.command(ask)


@app.command
def run(scenario: Path, *, set_: Set = None, seed: Seed = None, out: Out = None, json_: Json = False) -> None:
    """Simulate a scenario and print its summary.

    Parameters
    ----------
    scenario
        A scenario file (YAML).

    """
    from pdsim.cli.runner import run_scenario

    finished = run_scenario(scenario, changes_of(set_, seed), out, quiet=json_)
    if json_:
        print_json(finished.summary)
    else:
        from pdsim.cli.tables import print_intervals, print_stages, print_summaries

        print_summaries({finished.name: finished.summary})
        print_intervals({finished.name: finished.summary})
        print_stages({finished.name: finished.records})
        if out is not None:
            print(f"run folder: {out}")
    warn_outside_measured(finished)
    fail_if_incomplete(finished)


@app.command
def compare(*runs: Path, set_: Set = None, seed: Seed = None, out: Out = None, json_: Json = False) -> None:
    """Show runs side by side, each with its difference from the first.

    Parameters
    ----------
    runs
        Scenario files, which are simulated, folders of earlier runs, or results of SGLang's bench_serving,
        vLLM's bench serve, AIPerf or InferenceX (.json, .jsonl).
    out
        Write a folder for each simulated run, and compare.png, here.

    """
    from pdsim.cli.runner import obtain_runs, write_comparison

    if len(runs) < 2:  # noqa: PLR2004
        raise ConfigError(f"compare needs two or more scenarios, run folders or results, found {len(runs)}")
    finished = obtain_runs(runs, changes_of(set_, seed), out, quiet=json_)
    if json_:
        print_json([{"run": run.name, "limit": run.limit_json(), **run.summary} for run in finished])
    else:
        from pdsim.cli.tables import print_intervals, print_limits, print_stages, print_summaries, print_usage

        observed = [run for run in finished if run.is_observed]
        records = {run.name: run.records for run in observed}
        print_summaries({run.name: run.summary for run in finished})
        print_intervals({run.name: run.summary for run in finished})
        if observed:
            print_stages(records)
            print_usage(records)
            print_limits({run.name: run.limit() for run in observed})
    if out is not None:
        write_comparison(out / "compare.png", finished, quiet=json_)
        if not json_:
            print(f"run folders and compare.png: {out}")
    for one in finished:
        warn_outside_measured(one)
        fail_if_incomplete(one)


@app.command
def validate(
    *cases: str,
    experiments: Annotated[Path, Parameter(help="Where cases are looked for.")] = Path("experiments"),
    profile: Annotated[Path | None, Parameter(help="Of a matrix: whose costs are simulated.")] = None,
    runs: Annotated[Path | None, Parameter(help="Of a matrix: where the folders of real runs are, or go.")] = None,
    real_only: Annotated[bool, Parameter(negative=(), help="Of a matrix: run it for real, and stop there.")] = False,
    plots: Annotated[Path | None, Parameter(help="Of a matrix: write a figure, simulated against measured.")] = None,
    json_: Json = False,
) -> None:
    """Simulate what was measured and print the errors: published numbers, or a matrix of scenarios run for real.

    Of a matrix, variants that were not run yet are run first, by pdreal.

    Parameters
    ----------
    cases
        Names of cases in the experiments folder, or their folders; all if none is given. Or one matrix: a folder with
        a matrix.yaml, or such a file.

    """
    from pdsim.calibration.matrix import is_matrix

    matrices = [name for name in cases if is_matrix(name, experiments)]
    if matrices:
        from pdsim.cli.matrix import validate_matrix

        if len(cases) > 1:
            raise ConfigError(f"{matrices[0]} is a matrix, which is validated alone; found {', '.join(cases)}")
        where: dict[str, Any] = {"profile": profile, "runs": runs, "plots": plots}
        validate_matrix(matrices[0], experiments, **where, real_only=real_only, quiet=json_)
        return
    if profile or runs or real_only or plots:
        raise ConfigError("--profile, --runs, --real-only and --plots are of a matrix, and none is named")
    from pdsim.calibration.case import find_cases
    from pdsim.calibration.compare import compare_case
    from pdsim.cli.progress import progress_over
    from pdsim.cli.tables import print_errors
    from pdsim.sim.simulation import simulate

    found = find_cases(cases, experiments)
    total = sum(len(case.arms) * len(case.seeds) for case in found)
    with progress_over("validating", total, quiet=json_) as advance:

        def summary(scenario: Any) -> dict[str, Any]:
            result = simulate(scenario).summary()
            advance()
            return result

        errors = [arm for case in found for arm in compare_case(case, summary)]
    if json_:
        print_json([arm.to_json() for arm in errors])
    else:
        print_errors(errors)


@app.command
def calibrate(
    *rows: Path,
    out: Annotated[Path, Parameter(name=("--out", "-o"), help="Write the profile here.")],
    name: Annotated[str | None, Parameter(help="Of the profile, instead of its file's.")] = None,
    gpu: Annotated[str | None, Parameter(help="In the catalog, where the rows do not name it.")] = None,
    plots: Annotated[Path | None, Parameter(help="Write a figure of held-out errors for each part here.")] = None,
    table_above: Annotated[str, Parameter(help="Held-out error from which a table is tried instead of lines.")] = "5%",
    json_: Json = False,
) -> None:
    """Fit a profile to measured rows, and say how well it predicts shapes it was not fitted to.

    Parameters
    ----------
    rows
        Files of rows, CSV or Parquet: what `pdreal measure` and `pdkernels.bench` write.

    """
    import shlex

    from pdsim.calibration.case import percent
    from pdsim.calibration.profile import calibrate as fit_rows
    from pdsim.calibration.profile import profile_of
    from pdsim.calibration.rows import read_rows
    from pdsim.cli.progress import saying
    from pdsim.cli.tables import print_calibration
    from pdsim.scenario.yaml_file import write_yaml

    if not rows:
        raise ConfigError("calibrate needs files of rows")
    measurements, bound = read_rows(rows), percent(table_above, "--table-above")
    with saying("fitting ...", quiet=json_):
        made = fit_rows(measurements, gpu=gpu, table_above=bound)
    command = shlex.join(["pdsim", "calibrate", *(path.name for path in rows)])
    profile = profile_of(made, name or out.stem, command)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_yaml(profile, out)
    if plots is not None:
        from pdsim.calibration.plots import write_residuals

        write_residuals(made, plots)
    for note in made.notes:
        print(f"pdsim: {note}", file=sys.stderr)
    if json_:
        print_json(profile)
    else:
        print_calibration(made)
        print(f"profile: {out}")


@app.command
def scale(
    profile: Path,
    *,
    source: Annotated[str, Parameter(name="--from", help="The GPU that was measured.")],
    target: Annotated[str, Parameter(name="--to", help="The GPU to derive a profile of.")],
    out: Annotated[Path, Parameter(name=("--out", "-o"), help="Write the derived profile here.")],
    model: Annotated[str | None, Parameter(help="In the catalog, where the profile does not say it.")] = None,
    tp: Annotated[int, Parameter(help="Tensor-parallel size of what was measured.")] = 1,
    weight_dtype: Annotated[
        Literal["bf16", "fp8", "fp4"] | None, Parameter(help="Of the derived profile, if not as measured.")
    ] = None,
    json_: Json = False,
) -> None:
    """Derive a profile of another GPU: each coefficient by what it is bound by, with an interval.

    Parameters
    ----------
    profile
        A measured profile (YAML).

    """
    from pdsim.calibration.scaling import Scaling, model_of
    from pdsim.calibration.scaling import scale as scaled
    from pdsim.cli.tables import print_scaling
    from pdsim.scenario.profile import read_profile
    from pdsim.scenario.yaml_file import write_yaml
    from pdsim.system.catalog import UnknownNameError, load_gpu, load_model

    model = model or model_of(read_profile(profile))
    if model is None:
        raise ConfigError(f"profile {profile} does not say its model: name it with --model")
    if tp < 1:
        raise ConfigError(f"--tp: expected at least 1, found {tp}")
    try:
        gpus = load_gpu(source), load_gpu(target)
        scaling = Scaling.between(*gpus, load_model(model), tp=tp, weight_dtype=weight_dtype)
    except UnknownNameError as wrong:
        raise ConfigError(str(wrong)) from None
    command = f"pdsim scale {profile.name} --from {source} --to {target} --model {model} --tp {tp}"
    if weight_dtype is not None:
        command += f" --weight-dtype {weight_dtype}"
    derived = scaled(profile, scaling, out.stem, command)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_yaml(derived, out)
    for note in scaling.notes:
        print(f"pdsim: {note}", file=sys.stderr)
    if json_:
        print_json(derived)
    else:
        print_scaling(scaling, derived["cost"])
        print(f"profile: {out}")


@app.command
def explain(
    run: Path,
    *,
    request: Annotated[int | None, Parameter(help="Follow one request.")] = None,
    tornado: Tornado = False,
    set_: Set = None,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Say where the time of a run went, and what limits it.

    Parameters
    ----------
    run
        A run folder, or a scenario file, which is simulated first.

    """
    from dataclasses import asdict

    from pdsim.cli.runner import obtain_runs, obtain_sensitivities
    from pdsim.cli.tables import print_limits, print_path, print_request, print_sensitivities, print_stages, print_usage
    from pdsim.metrics.critical_path import CriticalPaths, mean_parts_ms
    from pdsim.metrics.explain import stage_ms, stage_times
    from pdsim.metrics.usage import instance_usage

    (finished,) = obtain_runs((run,), changes_of(set_, seed), None, quiet=json_)
    if request is not None:
        record = next((r for r in finished.records.requests if r.request_id == request), None)
        if record is None:
            last = max((r.request_id for r in finished.records.requests), default=-1)
            raise ConfigError(f"--request {request}: the run has requests 0 to {last}")
        is_done = record.outcome == "finished"
        path_ns = CriticalPaths(finished.records).of(record) if is_done else {}
        parts_ms = {part: duration_ns / 1e6 for part, duration_ns in path_ns.items()}
        if json_:
            print_json({**asdict(record), "stages_ms": stage_ms(record), "path_ms": parts_ms})
        else:
            print_request(record)
            print_path("its critical path", parts_ms)
        return
    found = obtain_sensitivities(run, changes_of(set_, seed), quiet=json_) if tornado else []
    path_ms = mean_parts_ms(finished.records)
    if json_:
        stages = [asdict(stage) for stage in stage_times(finished.records.requests)]
        instances = [asdict(use) for use in instance_usage(finished.records)]
        made = {"limit": finished.limit_json(), "stages": stages, "path_ms": path_ms, "instances": instances}
        print_json(made | ({"sensitivities": [asdict(one) for one in found]} if tornado else {}))
    else:
        print_stages({finished.name: finished.records})
        print_path("what requests wait for, in the mean", path_ms)
        print_usage({finished.name: finished.records})
        if tornado:
            print_sensitivities(found)
        print_limits({finished.name: finished.limit()})


@app.command
def report(
    *paths: Path,
    out: Annotated[Path, Parameter(name=("--out", "-o"), help="Write the page here.")] = Path("report.html"),
    measured: Annotated[
        list[Path] | None,
        Parameter(
            negative=(), help="What a load generator measured of a run, in the order of the runs. Again for each."
        ),
    ] = None,
    tornado: Tornado = False,
    set_: Set = None,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Write a page with figures and tables of a run, of several, or of a sweep: one HTML file that needs no other.

    Parameters
    ----------
    paths
        The folder of a sweep; or run folders, scenario files, which are simulated, and results that compare takes.

    """
    from pdsim.cli.reporting import make_page
    from pdsim.report.page import render

    if not paths:
        raise ConfigError("report needs a run folder, a scenario file, or the folder of a sweep")
    page = make_page(paths, measured or (), changes_of(set_, seed), with_tornado=tornado, quiet=json_)
    html = render(page)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, encoding="utf-8")
    if json_:
        print_json({"report": str(out), "bytes": len(html.encode()), "answer": page.answer})
    else:
        print(f"{page.answer}\nreport: {out}")


@app.command
def replay(run: Path, *, json_: Json = False) -> None:
    """Make the recorded calls of a run on fresh instances, and require the same decisions.

    Parameters
    ----------
    run
        A run folder with a journal, simulated or real.

    """
    from pdsim.core.journal import ReplayError
    from pdsim.core.journal import replay as replay_journal
    from pdsim.metrics.run_folder import SCENARIO, read_journal, read_summary
    from pdsim.scenario.build import resolve, restarted, state_machines
    from pdsim.scenario.loading import load_scenario

    read_summary(run)
    scenario = resolve(load_scenario(run / SCENARIO))
    try:
        count = replay_journal(read_journal(run), state_machines(scenario), partial(restarted, scenario))
    except ReplayError as difference:
        if json_:
            print_json({"run": str(run), "identical": False, "difference": str(difference)})
        else:
            print(f"{run}: {difference}", file=sys.stderr)
        raise SystemExit(1) from None
    if json_:
        print_json({"run": str(run), "identical": True, "calls": count})
    else:
        print(f"{run}: {count} calls replayed, all decisions identical")


@app.command
def sweep(
    sweep: Path,
    *,
    out: Annotated[Path | None, Parameter(help="The folder of the sweep; else runs/NAME.")] = None,
    jobs: Annotated[int | None, Parameter(help="Processes; else one for each CPU.")] = None,
    engine: Annotated[str, Parameter(help="pool, here, ray or ray:ADDRESS.")] = "pool",
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Simulate many points of a scenario, and print the best. What the folder has is not computed again.

    Parameters
    ----------
    sweep
        A sweep file (YAML).

    """
    from pdsim.cli.progress import progress_over
    from pdsim.sweeps.running import sweep as run_sweep

    try:
        with progress_over("sweeping", None, quiet=json_) as advance:
            result = run_sweep(sweep, out=out, changes=set_ or (), jobs=jobs, engine=engine, progress=advance)
    except KeyboardInterrupt:
        print(f"pdsim: {sweep}: interrupted; the same command goes on with what is missing", file=sys.stderr)
        raise SystemExit(130) from None
    if json_:
        print_json(result.to_json())
    else:
        from pdsim.cli.sweep_table import print_sweep

        print_sweep(result)
    if all(point.error for point in result.points):
        raise SystemExit(1)


@app.command
def export(
    run: Path,
    *,
    to: Annotated[Literal["sglang", "vllm", "aiperf", "inferencex", "mooncake"], Parameter(help="Whose format.")],
    out: Annotated[Path, Parameter(name=("--out", "-o"), help="The file.")],
    block_tokens: Annotated[int, Parameter(help="mooncake: prompt tokens of one hash id.")] = 512,
    set_: Set = None,
    seed: Seed = None,
) -> None:
    """Write a run as another tool's result file, by its definitions; or what was sent, and when, as a Mooncake trace.

    Parameters
    ----------
    run
        A run folder, or a scenario file, which is simulated first.

    """
    from pdsim.calibration.exported import Run, write_result
    from pdsim.cli.runner import obtain_runs, scenario_of
    from pdsim.scenario.build import requests_of
    from pdsim.workload.mooncake_file import write_mooncake

    if block_tokens < 1:
        raise ConfigError(f"--block-tokens {block_tokens}: at least 1")
    changes = changes_of(set_, seed)
    scenario = scenario_of(run, changes)
    (finished,) = obtain_runs((run,), changes, None, quiet=False)
    if to == "mooncake":
        sent_ns = {request.request_id: request.arrival_ns for request in finished.records.requests}
        write_mooncake(out, requests_of(scenario), sent_ns, block_tokens=block_tokens)
    else:
        write_result(out, to, Run(finished.summary, finished.records.requests, scenario))
    print(f"{to}: {out}")
    fail_if_incomplete(finished)


@app.command
def sglang(
    scenario: Path,
    *,
    model: Annotated[str, Parameter(help="Path or name of the model, for SGLang.")] = "$MODEL",
    set_: Set = None,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Print the commands that put a scenario on real GPUs with SGLang: servers, gateway, load.

    Parameters
    ----------
    scenario
        A scenario file (YAML).

    """
    from pdsim.scenario.loading import load_scenario
    from pdsim.scenario.sglang import launch

    loaded = load_scenario(scenario, changes_of(set_, seed))
    made = launch(loaded, model)
    if json_:
        print_json({"commands": made.commands, "notes": made.notes})
        return
    for what, command in made.commands.items():
        print(f"# {what}\n{command}\n")
    for note in made.notes:
        print(f"# not carried over: {note}")
    if "load" in made.commands:
        print(f"# beside the simulation\npdsim compare {scenario} {loaded.name}.jsonl")


@app.command
def catalog(*, json_: Json = False) -> None:
    """List the models and GPUs that scenarios can name."""
    from pdsim.cli.tables import print_catalog
    from pdsim.system.catalog import names

    if json_:
        print_json({"models": names("models"), "gpus": names("gpus")})
    else:
        print_catalog()


@app.command
def schema(of: Literal["scenario", "sweep"] = "scenario", /) -> None:
    """Print the JSON schema of scenario files, or of sweep files.

    Parameters
    ----------
    of
        Which of the two.

    """
    from pdsim.scenario.json_schema import scenario_schema
    from pdsim.sweeps.sweep_file import sweep_schema

    print_json(sweep_schema() if of == "sweep" else scenario_schema())


def main(arguments: Sequence[str] | None = None) -> None:
    run_app(app, arguments)
