"""Say which rules of an engine a release has moved: python release.py [--loads N] [--json] [WHEEL ...]

WHEEL is a wheel of SGLang or vLLM, or what pip calls a requirement (sglang==0.5.23). Without any, the newest of both on
the index are taken. Three things are held against what pdsim was written for: what the scheduler decides in kept random
loads, the lines that refusals cite, and flags with their defaults. The exit code is 1 if a rule moved.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kept_loads import DRIVES, LoadOutcome, first_loads
from released_wheel import Wheel, fetch

TESTS = Path(__file__).parents[2] / "tests" / "launch"
sys.path.insert(0, str(TESTS.parents[1]))

from pdsim.scenario.yaml_file import read_yaml  # noqa: E402
from tests.launch import engine_parsers  # noqa: E402

ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
SERVERS = {"sglang": "python -m sglang.launch_server", "vllm": "vllm serve"}
LONGEST_DIFFERENCE = 300
"""In characters."""


@dataclass(frozen=True)
class Report:
    engine: str
    release: str
    written_for: str
    """The release that the rules were written for."""
    loads: list[LoadOutcome]
    refusals: list[str]
    """Sentences on rules that are gone."""
    flags: list[str]
    """Sentences on flags that a launch or an import relies on."""
    notes: list[str]
    """Sentences on what changed and moves no rule."""

    @property
    def other_loads(self) -> list[LoadOutcome]:
        """Loads that are not scheduled as by the release that the rules were written for."""
        return [outcome for outcome in self.loads if not outcome.is_known]

    @property
    def num_moved(self) -> int:
        return len(self.other_loads) + len(self.refusals) + len(self.flags)


def refusal_moves(package: Path, rules: list[dict[str, str]]) -> tuple[list[str], list[str]]:
    """Sentences on rules that are gone, and on rules that stand on other lines of their files."""
    gone, elsewhere = [], []
    for rule in rules:
        path, _, line = rule["at"].rpartition(":")
        file = package / path
        if not file.is_file():
            gone.append(f"“{rule['rule']}”: the file {path} is gone.")
            continue
        found = [i for i, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if rule["finds"] in text]
        if not found:
            gone.append(f"“{rule['rule']}”: {path} no longer has `{rule['finds']}`.")
        elif int(line) not in found:
            elsewhere.append(f"“{rule['rule']}” stands on line {found[0]} of {path}, no longer on {line}.")
    return gone, elsewhere


def flag_moves(kept: dict[str, str], found: dict[str, str]) -> tuple[list[str], list[str]]:
    """Sentences on flags that are gone or take less than before, and on flags that take more."""
    moved, more = [], []
    for name, before in kept.items():
        if name not in found:
            moved.append(f"{name} is gone.")
            continue
        (nargs, choices), (nargs_now, choices_now) = _apart(before), _apart(found[name])
        if nargs != nargs_now:
            moved.append(f"{name} took {nargs} values, and takes {nargs_now}.")
        if choices_now and choices - choices_now:
            moved.append(f"{name} no longer takes {', '.join(sorted(choices - choices_now))}.")
        if choices and choices_now - choices:
            more.append(f"{name} takes {', '.join(sorted(choices_now - choices))}, too.")
    return moved, more


def _apart(said: str) -> tuple[str, set[str]]:
    """Number of values, and choices, of a line of engine_flags.txt."""
    nargs, _, choices = said.partition(" ")
    return nargs, {*choices.split("|")} - {""}


def default_moves(kept: dict[str, str], found: dict[str, str]) -> list[str]:
    return [
        f"The default of {name} was {before}, and is {found[name]}."
        for name, before in kept.items()
        if found.get(name, before) != before
    ]


def kept_lines(file: str, program: str) -> tuple[str, dict[str, str]]:
    """The release of a program in such a file, and what the file says of each flag."""
    head, _, rest = (TESTS / file).read_text(encoding="utf-8").partition(f"# {program}: ")[2].partition("\n")
    return head.rpartition(" ")[2], _by_flag(rest.partition("# ")[0])


def _by_flag(lines: str) -> dict[str, str]:
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines.splitlines() if line.startswith("--")}


def parser_moves(wheel: Wheel) -> tuple[list[str], list[str]]:
    """Sentences on flags and defaults that moved, and on choices that are new."""
    program = SERVERS[wheel.engine]
    os.environ["PYTHONPATH"] = str(wheel.install_parsing())
    try:
        flags = _by_flag(engine_parsers.in_own_process(wheel.folder, program))
        defaults = _by_flag(engine_parsers.in_own_process(wheel.folder, program, "--defaults"))
    except RuntimeError as error:
        return [f"The parser cannot be read: {str(error).strip().splitlines()[-1]}."], []
    moved, more = flag_moves(kept_lines("engine_flags.txt", program)[1], flags)
    return moved + default_moves(kept_lines("engine_defaults.txt", program)[1], defaults), more


def examine(wheel: Wheel, num_each: int) -> Report:
    """Hold one wheel against the rules."""
    rules = [rule for rule in read_yaml(TESTS / "engine_rules.yaml") if rule["engine"] == wheel.engine]
    refusals, elsewhere = refusal_moves(wheel.path, rules)
    flags, more = parser_moves(wheel)
    written_for, _ = kept_lines("engine_flags.txt", SERVERS[wheel.engine])
    loads = drive(wheel, num_each)
    return Report(wheel.engine, wheel.release, written_for, loads, refusals, flags, elsewhere + more)


def drive(wheel: Wheel, num_each: int) -> list[LoadOutcome]:
    """Outcomes of the kept loads, in a process of their own. What engines print goes to a file beside the wheel."""
    logs = wheel.folder / "logs"
    logs.mkdir()
    site, loads = wheel.install_site(), first_loads(wheel.engine, num_each)
    spawned, said = multiprocessing.get_context("spawn"), str(wheel.folder / "said.txt")
    with ProcessPoolExecutor(1, mp_context=spawned, initializer=_write_to, initargs=(said,)) as process:
        return process.submit(DRIVES[wheel.engine], site, wheel.release, logs, loads).result()


def _write_to(file: str) -> None:
    opened = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(opened, 1)
    os.dup2(opened, 2)


def show(report: Report) -> None:
    others = report.other_loads
    num_decisions = sum(outcome.num_compared for outcome in report.loads if outcome.is_known)
    print(f"{ENGINES[report.engine]} {report.release}. The rules were written for {report.written_for}.")
    print(f"{len(report.loads) - len(others)} of {len(report.loads)} loads are scheduled as before:", end=" ")
    print(f"{num_decisions:,} decisions.")
    differences = [
        f"{outcome.load}: {outcome.difference[:LONGEST_DIFFERENCE] or 'it agrees now'}" for outcome in others
    ]
    parts = {
        "loads are scheduled in another way": differences,
        "refusals are gone": report.refusals,
        "flags or defaults moved": report.flags,
        "other changes move no rule": report.notes,
    }
    for what, sentences in parts.items():
        print(f"{len(sentences)} {what}{':' if sentences else '.'}")
        for sentence in sentences:
            print(f"  {sentence}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="*", metavar="WHEEL", default=[*ENGINES])
    parser.add_argument("--loads", type=int, default=8, help="kept loads of each kind")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    reports = []
    for wanted in given.wheels:
        with tempfile.TemporaryDirectory() as folder:
            reports.append(examine(fetch(wanted, Path(folder)), given.loads))
        if not given.json:
            show(reports[-1])
    if given.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
    sys.exit(any(report.num_moved for report in reports))


if __name__ == "__main__":
    main()
