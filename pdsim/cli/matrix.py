"""Validates a matrix, a scenario with several settings (variants): makes missing runs in real mode, simulates all
variants, and compares real and simulated runs. A campaign keeps the validation in one folder, together with all
measurements that the simulation needs.

Each step of a campaign is a command of its own. Steps whose result exists are skipped, so a repeated command continues
an interrupted campaign.
"""

import csv
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from pdsim import __version__
from pdsim.calibration.fit.rows import ONE_RANK, Ranks, flags_of
from pdsim.calibration.validate.comparison import Comparison, Side, Validation, compare_sides
from pdsim.calibration.validate.suite import SUITE_FILE, ValidationSuite, Variant, load_suite
from pdsim.cli.command import print_json
from pdsim.cli.finished import fail_for_requests, progress_over
from pdsim.files import remove_own, replace_folder, require_empty_or_own, require_own, write_whole
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.run_folder import (
    JOURNAL,
    OVERVIEW,
    RUN_FILES,
    SAID,
    SCENARIO,
    SUMMARY,
    TIMELINE,
    read_records,
    read_summary,
)
from pdsim.scenario.loading import apply_change, load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import imports_are_allowed
from pdsim.scenario.yaml_file import ConfigError, read_yaml, write_yaml

_CANNOT = 2
"""Exit code of pdreal if this machine or the scenario lacks something that a real run needs."""
_PART_FILES = (*RUN_FILES, SAID)
_NOT_COMPARED = (TIMELINE, OVERVIEW, JOURNAL)
"""Files of a run folder that no comparison reads. They are removed from the folders of real runs, to save space."""


def validate_suite(
    name: str,
    experiments: Path,
    *,
    profile: Path | None,
    runs: Path | None,
    real_only: bool,
    quiet: bool,
) -> None:
    """Makes the missing real runs of a matrix, simulates its variants, and prints the errors of the simulations. name:
    the matrix's folder or file, or its name in `experiments`. profile: profile of all variants, instead of the
    matrix's; None: the matrix's. runs: folder of the real runs; None: the matrix's. real_only: True: only makes missing
    real runs. quiet: True: prints JSON, and no progress of the simulations.

    Exits with 1 if a real run failed, if a simulated request failed although the scenario asks for no failures, or if a
    request sent other bytes with the same cached prefix, or finished in only one of the two runs. Exits with 130 if the
    user interrupts the real runs.
    """
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
        print(f"pdsim: {suite.name}: no real run of {', '.join(failed)}", file=sys.stderr)
    if not real_only:
        validation = _compare(suite, quiet=quiet)
        if quiet:
            print_json(validation.to_json())
        else:
            from pdsim.show.terminal.measurements import print_validation

            print_validation(validation)
        if validation.unequal:
            what = "requests sent other bytes than in the simulation, or finished in only one of the two runs"
            print(f"pdsim: {suite.name}: {', '.join(validation.unequal)}: {what}", file=sys.stderr)
            raise SystemExit(1)
        fail_for_requests({f"{one.name}, simulated": one.failures for one in validation.comparisons})
    if failed:
        raise SystemExit(1)


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
    """Makes the missing runs in real mode. Returns the names of the variants that failed.

    An interruption keeps runs that have ended. Raises ConfigError if this machine cannot make the runs.
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
        shown = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms")
        rate, ttft_ms, tpot_ms = (summary[name] or 0.0 for name in shown)
        values = f"{rate:.3g} requests/s, TTFT {ttft_ms:.4g} ms, TPOT {tpot_ms:.4g} ms"
        print(f"{values}; {time.monotonic() - begin_s:.0f} s in all", file=sys.stderr)
    return failed


def _run(suite: ValidationSuite, variant: Variant) -> dict[str, Any] | None:
    """Runs a variant in real mode, and returns the run's summary. None: the run failed or took longer than the timeout;
    this and the path of pdreal's log are printed. Raises ConfigError if this machine or the scenario lacks something
    that the run needs.
    """
    folder, part = suite.runs / variant.name, suite.runs / f".{variant.name}.part"
    for own in (folder, part):
        require_own(own, _PART_FILES)
    remove_own(part, _PART_FILES)
    part.mkdir()
    log = part / SAID
    changes = [word for change in variant.changes for word in ("--set", change)]
    command = [sys.executable, "-m", "pdreal", "run", str(suite.scenario_path), *changes]
    command += ["--trust"] * imports_are_allowed() + [*suite.real.flags, "--out", str(part), "--json"]
    with log.open("x", encoding="utf-8") as said:
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
    for name in (*_NOT_COMPARED, SAID):
        (part / name).unlink(missing_ok=True)
    replace_folder(part, folder, RUN_FILES)
    return summary


_DATA = "data"
_ERRORS = "errors.txt"
_OF_ROWS = ("device", "model", "dtype", "driver", "torch_version", "versions", "python", "date")
_NOT_COPIED = {".md", ".py"}
PairRanks = tuple[Ranks, Ranks]
"""Ranks of a prefill instance, and of a decode instance."""


@dataclass(frozen=True)
class Step:
    command: tuple[str, ...]
    """The command of the step: the program (pdsim or pdreal) and its arguments."""
    makes: str
    """File that the step writes: its path in the campaign's folder."""


def prepare(matrix: str, out: Path, changes: Sequence[str], hosts: Path | None) -> ValidationSuite:
    """Copies a matrix into `out`, the folder of a campaign, and returns the copied matrix. Files beside the matrix and
    beside its scenario are copied, too, except profiles, .md and .py files. The copy names profiles and real runs that
    the campaign will make.

    changes: changes of the scenario, in the notation of --set. hosts: file of hosts; None: the matrix's. Raises
    ConfigError if the matrix is wrong, or if `out` is its folder or that of its scenario. Raises InputError as
    _require_campaign does.
    """
    suite = load_suite(matrix, Path("experiments"))
    sources = list(dict.fromkeys(path.parent.resolve() for path in (suite.scenario_path, suite.path)))
    scenario, copied = read_yaml(suite.scenario_path), read_yaml(suite.path)
    for change in changes:
        apply_change(scenario, change)
    if out.resolve() in sources:
        raise ConfigError(f"--out: {out} is the matrix itself; expected another folder")
    _require_campaign(out)
    changed = {one.name: replace(one, changes=(*changes, *one.changes)) for one in suite.variants}
    ranks = {name: _ranks(suite.real_scenario(variant)) for name, variant in changed.items()}
    first = ranks[suite.variants[0].name]
    (out / _DATA).mkdir(parents=True, exist_ok=True)
    made = {_ERRORS, *(_profile_name(one, first) for one in ranks.values())}
    for source in sources:
        _copy_inputs(suite, source, out, made)
    if hosts is not None:
        shutil.copy(hosts, out / "hosts.yaml")
        copied.setdefault("real", {})["hosts"] = "hosts.yaml"
    scenario["name"] = out.resolve().name
    write_yaml(scenario, out / "scenario.yaml")
    variants = {variant.name: _variant(variant, ranks[variant.name], first) for variant in suite.variants}
    copied |= {"scenario": "scenario.yaml", "profile": _profile_name(first, first), "runs": _DATA, "variants": variants}
    write_yaml(copied, out / SUITE_FILE)
    return load_suite(str(out), Path())


def _copy_inputs(suite: ValidationSuite, source: Path, out: Path, made: Collection[str]) -> None:
    """Copies the input files of a matrix from the folder `source` into the campaign's folder. made: names of files that
    steps of the campaign make; a copy of such a file would stand for the campaign's own result.
    """
    profiles = [suite.profile, *(variant.profile for variant in suite.variants)]
    others = {path.resolve() for path in (suite.path, suite.scenario_path, *profiles) if path is not None}
    for path in source.iterdir():
        is_input = path.suffix not in _NOT_COPIED and path.name not in {SUITE_FILE, *made}
        if path.is_file() and is_input and path.resolve() not in others:
            shutil.copy(path, out)


def _require_campaign(out: Path) -> None:
    """Raises InputError if a campaign in the folder `out` would overwrite files that are not its own. The folder must
    be new, empty or the folder of a campaign. For a new campaign, there must be no archive (.tar.gz) with the folder's
    name beside the folder.
    """
    is_begun = (out / SUITE_FILE).is_file() and (out / _DATA).is_dir()
    require_empty_or_own(out, f"campaign ({SUITE_FILE} and {_DATA})", is_own=is_begun)
    if not is_begun and (archive := _archive_of(out)).exists():
        raise ConfigError(f"--out {out}: {archive} exists already, and would be overwritten; name another folder")


def _archive_of(out: Path) -> Path:
    return out.with_name(f"{out.resolve().name}.tar.gz")


def _variant(variant: Variant, ranks: PairRanks, first: PairRanks) -> Any:
    changes = list(variant.changes)
    return changes if ranks == first else {"changes": changes, "profile": _profile_name(ranks, first)}


def _profile_name(ranks: PairRanks, first: PairRanks) -> str:
    return "profile.yaml" if ranks == first else f"profile-tp{'to'.join(map(_size, ranks))}.yaml"


def _size(ranks: Ranks) -> str:
    """The ranks as part of a file name: "2", or with expert parallelism "2ep2". The name of an all-to-all backend
    follows, if there is one.
    """
    size = str(ranks.tp) if ranks.ep == 1 else f"{ranks.tp}ep{ranks.ep}"
    return size if ranks.a2a == ONE_RANK.a2a else size + ranks.a2a


def _ranks(scenario: Scenario) -> PairRanks:
    prefill, decode = (Ranks(one.tp, one.resolved_ep, scenario.a2a_backend(one)) for one in scenario.servers)
    return prefill, decode


def steps(suite: ValidationSuite, *, rounds: int, num_gpus: int) -> Iterator[Step]:
    """Yields the steps of a campaign in order: measuring for each rank layout, fitting a profile for each pair of
    layouts, and `pdsim validate`, which makes the real runs and compares simulations with them. rounds: how many times
    each measurement is made. num_gpus: number of GPUs of this host; 0: a CPU alone.
    """
    scenario = suite.real_scenario(suite.variants[0])
    by_ranks = {_ranks(suite.real_scenario(variant)): variant for variant in suite.variants}
    rows = []
    for size in sorted({size for ranks in by_ranks for size in ranks} | {ONE_RANK}):
        rows.append(f"{_DATA}/rows.csv" if size.tp == 1 else f"{_DATA}/rows-tp{_size(size)}.csv")
        yield Step(tuple(_measure(suite, scenario, size, rows[-1], rounds, num_gpus)), rows[-1])
    for pair, variant in by_ranks.items():
        profile = (variant.profile or suite.profile or Path("profile.yaml")).name
        command = ["pdsim", "calibrate", *rows, "--out", profile, "--gpu", scenario.servers[1].gpu, *flags_of(pair)]
        yield Step(tuple(command), profile)
    yield Step(("pdsim", "validate", SUITE_FILE), _ERRORS)


def _measure(
    suite: ValidationSuite, scenario: Scenario, ranks: Ranks, out: str, rounds: int, num_gpus: int
) -> Iterator[str]:
    yield from ("pdreal", "measure", "--model", scenario.model, "--page-size", str(scenario.page_size), "--out", out)
    yield from ("--device", suite.real.device, "--dtype", suite.real.dtype)
    if suite.real.threads is not None:
        yield from ("--threads", str(suite.real.threads))
    if ranks.tp > 1:
        has_room = suite.real.device == "cpu" or num_gpus >= 2 * ranks.tp
        yield from ("--tp", str(ranks.tp), "--only", "prefill,decode,host" if has_room else "prefill,decode")
    if ranks.ep > 1:
        yield from ("--ep", str(ranks.ep))
    if ranks.a2a != ONE_RANK.a2a:
        yield from ("--moe-a2a-backend", ranks.a2a)
    if suite.real.hosts is not None:
        yield from ("--hosts", suite.real.hosts.name)
    if rounds > 1:
        yield from ("--rounds", str(rounds))


def carry_out(
    matrix: str,
    out: Path,
    changes: Sequence[str],
    hosts: Path | None,
    *,
    rounds: int,
    num_gpus: int,
    tell: Callable[[str], None],
) -> tuple[Path, int]:
    """Does all steps of a campaign (see the module), but skips measurements and fits whose result exists. Returns the
    path of an archive of the campaign's folder, and the exit code of `pdsim validate`. matrix: name or
    folder of the matrix. out: folder of the campaign. changes: of the scenario, in the notation of --set. hosts: file
    of hosts; None: the matrix's. rounds: how many times each measurement is made. num_gpus: number of GPUs of this
    host; 0: a CPU alone. tell: called with a line for each step.

    Raises ConfigError as `prepare` and `_run_step` do, and InputError if `out` has files that are not of a campaign.
    """
    suite = prepare(matrix, out, changes, hosts)
    commands, exit_code = [], 0
    for step in steps(suite, rounds=rounds, num_gpus=num_gpus):
        commands.append(shlex.join(step.command))
        if step.makes != _ERRORS and (out / step.makes).is_file():
            tell(f"has {step.makes}")
            continue
        tell(commands[-1])
        exit_code = _run_step(step, out)
    write_yaml(_provenance(out, commands), out / "provenance.yaml")
    write_whole(out / "README.md", _readme(out, commands))
    archive = _archive_of(out)
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        file.add(out, out.resolve().name)
    write_whole(archive, packed.getvalue())
    return archive, exit_code


def _run_step(step: Step, out: Path) -> int:
    """Runs the command of a step in the folder `out`, in which the command writes the step's file, and returns the exit
    code of the command. The command `pdsim validate` writes no file; if the command prints text, this text is saved
    instead, and a failure of the command raises no error. Otherwise removes the step's file and raises ConfigError if
    the command fails. An interruption removes the file, too.
    """
    program, *arguments = step.command
    is_printed = step.makes == _ERRORS
    try:
        done = subprocess.run(  # noqa: S603  ours
            [sys.executable, "-m", program, *arguments],
            cwd=out,
            stdout=subprocess.PIPE if is_printed else None,
            env=os.environ | {"COLUMNS": "160"},
            text=True,
            check=False,
        )
    except BaseException:
        (out / step.makes).unlink(missing_ok=True)
        raise
    if is_printed and done.stdout:  # also of some runs, where others failed
        sys.stdout.write(done.stdout)
        write_whole(out / step.makes, done.stdout)
    elif done.returncode:
        (out / step.makes).unlink(missing_ok=True)
        raise ConfigError(f"{shlex.join(step.command)}: exit code {done.returncode}")
    return done.returncode


def _provenance(out: Path, commands: Sequence[str]) -> dict[str, Any]:
    with (out / _DATA / "rows.csv").open(encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    machine = {name: row[name] for name in _OF_ROWS if row[name]}
    return {"pdsim": __version__, **machine, "system": platform.platform(), "commands": list(commands)}


def _readme(out: Path, commands: Sequence[str]) -> str:
    errors = (out / _ERRORS).read_text(encoding="utf-8").strip("\n")
    name = out.resolve().name
    return f"""# {name}

What these rows were measured on: [`provenance.yaml`](provenance.yaml). Nothing is fitted on a run.

```sh
{chr(10).join(commands)}
```

```
{errors}
```
"""
