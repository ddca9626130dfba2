"""A campaign: rows of a machine, a profile of them, and a matrix run for real and simulated, for a pull request.

Each step is a command that anybody can call; one whose result is there is left out, so that a campaign goes on where it
was interrupted.
"""

import csv
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdsim import __version__
from pdsim.calibration.suite import SUITE_FILE, ValidationSuite, Variant, load_suite
from pdsim.scenario.loading import apply_change
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError, read_yaml, write_yaml

_DATA = "data"
_ERRORS = "errors.txt"
_OF_ROWS = ("device", "model", "dtype", "driver", "torch_version", "versions", "python", "date")
_NOT_COPIED = {".md", ".py"}
Ranks = tuple[int, int]
"""Tensor-parallel sizes of a prefill and a decode instance."""


@dataclass(frozen=True)
class Step:
    command: tuple[str, ...]
    makes: str
    """A file of the folder."""


def prepare(matrix: str, out: Path, changes: Sequence[str], hosts: Path | None) -> ValidationSuite:
    """Copies a matrix with its scenario and their inputs into the folder. Raises ConfigError."""
    suite = load_suite(matrix, Path("experiments"))
    source = suite.scenario_path.parent
    scenario, copied = read_yaml(suite.scenario_path), read_yaml(source / SUITE_FILE)
    for change in changes:
        apply_change(scenario, change)
    out.mkdir(parents=True, exist_ok=True)
    if out.resolve() == source.resolve():
        raise ConfigError(f"--out: {out} is the matrix itself; expected another folder")
    profiles = {suite.profile, *(variant.profile for variant in suite.variants)}
    for path in source.iterdir():
        is_input = path.suffix not in _NOT_COPIED and path.name not in {SUITE_FILE, suite.scenario_path.name}
        if path.is_file() and is_input and path not in profiles:
            shutil.copy(path, out)
    if hosts is not None:
        shutil.copy(hosts, out / "hosts.yaml")
        copied.setdefault("real", {})["hosts"] = "hosts.yaml"
    scenario["name"] = out.resolve().name
    write_yaml(scenario, out / "scenario.yaml")
    ranks = {variant.name: _ranks(suite.real_scenario(variant)) for variant in suite.variants}
    first = ranks[suite.variants[0].name]
    variants = {variant.name: _variant(variant, ranks[variant.name], first) for variant in suite.variants}
    copied |= {"scenario": "scenario.yaml", "profile": _profile_name(first, first), "runs": _DATA, "variants": variants}
    write_yaml(copied, out / SUITE_FILE)
    return load_suite(str(out), Path())


def _variant(variant: Variant, ranks: Ranks, first: Ranks) -> Any:
    changes = list(variant.changes)
    return changes if ranks == first else {"changes": changes, "profile": _profile_name(ranks, first)}


def _profile_name(ranks: Ranks, first: Ranks) -> str:
    return "profile.yaml" if ranks == first else f"profile-tp{ranks[0]}to{ranks[1]}.yaml"


def _ranks(scenario: Scenario) -> Ranks:
    if scenario.aggregated is not None:
        return scenario.aggregated.tp, scenario.aggregated.tp
    return scenario.pair.prefill.tp, scenario.pair.decode.tp


def steps(suite: ValidationSuite, *, rounds: int, num_gpus: int) -> Iterator[Step]:
    """num_gpus: of this host, 0 on a CPU."""
    scenario = suite.real_scenario(suite.variants[0])
    by_ranks = {_ranks(suite.real_scenario(variant)): variant for variant in suite.variants}
    rows = []
    for tp in sorted({tp for ranks in by_ranks for tp in ranks} | {1}):
        rows.append(f"{_DATA}/rows.csv" if tp == 1 else f"{_DATA}/rows-tp{tp}.csv")
        yield Step(tuple(_measure(suite, scenario, tp, rows[-1], rounds, num_gpus)), rows[-1])
    server = scenario.aggregated or scenario.pair.decode
    for (prefill_tp, decode_tp), variant in by_ranks.items():
        profile = (variant.profile or suite.profile or Path("profile.yaml")).name
        of_ranks = ["--prefill-tp", prefill_tp, "--decode-tp", decode_tp] if (prefill_tp, decode_tp) != (1, 1) else []
        command = ["pdsim", "calibrate", *rows, "--out", profile, "--gpu", server.gpu, *of_ranks]
        yield Step(tuple(map(str, command)), profile)
    yield Step(("pdsim", "validate", SUITE_FILE), _ERRORS)


def _measure(
    suite: ValidationSuite, scenario: Scenario, tp: int, out: str, rounds: int, num_gpus: int
) -> Iterator[str]:
    yield from ("pdreal", "measure", "--model", scenario.model, "--page-size", str(scenario.page_size), "--out", out)
    yield from ("--device", suite.real.device, "--dtype", suite.real.dtype)
    if suite.real.threads is not None:
        yield from ("--threads", str(suite.real.threads))
    if tp > 1:
        has_room = suite.real.device == "cpu" or num_gpus >= 2 * tp
        yield from ("--tp", str(tp), "--only", "prefill,decode,host" if has_room else "prefill,decode")
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
) -> Path:
    """Returns the archive. Raises ConfigError, also if a step fails."""
    suite = prepare(matrix, out, changes, hosts)
    (out / _DATA).mkdir(exist_ok=True)
    commands = []
    for step in steps(suite, rounds=rounds, num_gpus=num_gpus):
        commands.append(shlex.join(step.command))
        if (out / step.makes).is_file():
            tell(f"has {step.makes}")
            continue
        tell(commands[-1])
        _run(step, out)
    write_yaml(_provenance(out, commands), out / "provenance.yaml")
    (out / "README.md").write_text(_readme(out, commands), encoding="utf-8")
    archive = out.with_name(f"{out.resolve().name}.tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(out, out.resolve().name)
    return archive


def _run(step: Step, out: Path) -> None:
    """Run a step; its output is kept where that is the result."""
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
        (out / step.makes).write_text(done.stdout, encoding="utf-8")
    elif done.returncode:
        (out / step.makes).unlink(missing_ok=True)
        raise ConfigError(f"{shlex.join(step.command)}: exit code {done.returncode}")


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
