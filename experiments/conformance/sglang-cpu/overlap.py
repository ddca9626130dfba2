"""What SGLang's overlap schedule changes: python overlap.py LOAD ... compares drawn-overlap-N with drawn-N.

With overlap, the results of a step are processed when the next step has been chosen. A request whose longest output is
reached is left out of that step, and one that stops earlier is computed once more in vain.
"""

import gzip
import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from random_loads import drawn_load

LOGS = Path(__file__).parent / "logs"
Row = list[Any]


@dataclass
class Counts:
    """Of one load, or of all."""

    steps: int = 0
    steps_without_overlap: int = 0
    longest: int = 0
    """Requests that reached their longest output."""
    longest_in_vain: int = 0
    """Of those, how many were computed once more."""
    stopped: int = 0
    """Requests that stopped earlier, or were aborted while they ran."""
    stopped_in_vain: int = 0
    ended_later: int = 0
    """Steps that requests ended later than without overlap, all together."""

    def add(self, other: "Counts") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def rows_of(name: str) -> list[Row]:
    text = gzip.decompress((LOGS / f"{name}.jsonl.gz").read_bytes()).decode()
    return [json.loads(line)[1:] for line in text.splitlines()]


def members(row: Row) -> list[str]:
    return [member if isinstance(member, str) else member[0] for member in row[3]]


def steps_of(rows: list[Row]) -> dict[int, Row]:
    return {row[0]: row for row in rows if row[2] in {"prefill", "decode"}}


def ends_of(rows: list[Row], *, late: int) -> dict[str, int]:
    """Iteration of the step that gave each request its last token."""
    return {rid: row[0] - late for row in rows if row[2] == "ended" for rid, _ in row[3]}


def counts(seed: int) -> Counts:
    with_overlap, without = rows_of(f"drawn-overlap-{seed}"), rows_of(f"drawn-{seed}")
    steps, ends = steps_of(with_overlap), ends_of(with_overlap, late=1)
    outputs = {rid: output for row in with_overlap if row[2] == "ended" for rid, output in row[3]}
    requests = drawn_load(f"drawn-overlap-{seed}").requests(None)  # type: ignore[arg-type]
    found = Counts(len(steps), len(steps_of(without)))
    for rid, end in ends.items():
        in_vain = end + 1 in steps and rid in members(steps[end + 1])
        if len(outputs[rid]) == requests[int(rid[1:])].max_new_tokens:
            found.longest += 1
            found.longest_in_vain += in_vain
        else:
            found.stopped += 1
            found.stopped_in_vain += in_vain
    earlier = ends_of(without, late=0)
    found.ended_later = sum(end - earlier[rid] for rid, end in ends.items() if rid in earlier)
    return found


def main() -> None:
    names = [each.name for each in fields(Counts)]
    print("| load |", " | ".join(names), "|")
    print("|---" * (len(names) + 1) + "|")
    total = Counts()
    for seed in map(int, sys.argv[1:]):
        found = counts(seed)
        total.add(found)
        print(f"| {seed} |", " | ".join(str(getattr(found, name)) for name in names), "|")
    print("| all |", " | ".join(str(getattr(total, name)) for name in names), "|")


if __name__ == "__main__":
    main()
