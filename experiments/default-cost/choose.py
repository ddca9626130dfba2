"""Whether the default cost chooses the published configuration that serves an SLO at the least cost: python choose.py

Configurations are InferenceX rows of one GPU, weights and prompt length, with tensor parallelism or data-parallel
attention. The SLO is a mean TPOT, a tenth above that of each row in turn. Cost is GPU-seconds a request: GPUs times its
latency, over those in flight.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from judge import DEFAULT, HERE

from pdsim import simulate
from pdsim.calibration.validate.case import load_case

_ROOM = 1.1
NEAR = 0.1
_NUM_OUTPUTS = 922
"""Tokens of a mean answer: uniform from 819 to 1,024."""


class Row(NamedTuple):
    name: str
    tpot_ms: float
    gpu_s: float
    """For a request."""


def cost_of(metrics: Mapping[str, float], num_gpus: int, concurrency: int) -> float:
    latency_ms = metrics["mean_ttft_ms"] + (_NUM_OUTPUTS - 1) * metrics["mean_tpot_ms"]
    return num_gpus * latency_ms / 1e3 / concurrency


def groups() -> dict[str, list[tuple[Row, Row]]]:
    """Each row as published and as simulated."""
    cases = [load_case(HERE.parent / name) for name in ("inferencex-tp", "inferencex-dp")]
    found = defaultdict(list)
    for case, arm in [(one, arm) for one in cases for arm in one.arms]:
        scenario: Any = case.scenario(arm, 1, DEFAULT)
        result = simulate(scenario)
        sides = [
            Row(arm.name, metrics["mean_tpot_ms"], cost_of(metrics, scenario.num_gpus, scenario.client.concurrency))
            for metrics in (arm.measured, result.summary())
        ]
        found["-".join(arm.name.split("-")[:3])].append((sides[0], sides[1]))
    return found


def choices(rows: list[tuple[Row, Row]]) -> Iterator[tuple[float, Row, Row | None]]:
    """Limits, and the cheapest row within each: as published, and the one that the simulation chooses."""
    for limit_ms in sorted(_ROOM * row.tpot_ms for row, _ in rows):
        best = min((row for row, _ in rows if row.tpot_ms <= limit_ms), key=lambda row: row.gpu_s)
        meeting = [(simulated.gpu_s, row.name, row) for row, simulated in rows if simulated.tpot_ms <= limit_ms]
        yield limit_ms, best, min(meeting)[2] if meeting else None


def main() -> None:
    print("| configurations | TPOT limit, ms | cheapest published | chosen | its cost | its TPOT, ms | |")
    print("|---|---|---|---|---|---|---|")
    num_choices = num_near = 0
    for group, rows in groups().items():
        for limit_ms, best, chosen in choices(rows):
            num_choices += 1
            head = f"| {group}, {len(rows)} | {limit_ms:.1f} | {best.name.removeprefix(f'{group}-')}"
            if chosen is None:
                print(f"{head} | none | | | |")
                continue
            name, more = chosen.name.removeprefix(f"{group}-"), chosen.gpu_s / best.gpu_s - 1
            missed = chosen.tpot_ms / limit_ms - 1
            said = f"misses the limit by {missed:.0%}" if missed > 0 else ""
            num_near += missed <= 0 and more <= NEAR
            print(f"{head} | {name} | {more:+.0%} | {chosen.tpot_ms:.1f} | {said} |")
    print(f"\n{num_near} of {num_choices} choices keep the limit at no more than {NEAR:.0%} above the least cost")


if __name__ == "__main__":
    main()
