"""Whether the default cost chooses the published configuration that serves an SLO at the least cost: python choose.py

Configurations are InferenceX rows of one GPU, weights and prompt length, with tensor parallelism or data-parallel
attention. The SLO is a mean TPOT, a tenth above that of each row in turn. Cost is GPU-seconds a request: GPUs times its
latency, over those in flight. A choice is safe if it keeps the limit on the slowest server that it may be, too. A plan
says that the choice is not known where the fastest or the slowest servers would have another.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdsim import simulate
from pdsim.calibration.validate.case import load_case

EXPERIMENTS = Path(__file__).parents[1]
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


class Arm(NamedTuple):
    """A row as published, as simulated, and as simulated on the fastest and on the slowest server that it may be."""

    published: Row
    simulated: Row
    fastest: Row
    slowest: Row


class Choice(NamedTuple):
    limit_ms: float
    best: Row
    middle: Row | None
    safe: Row | None
    """Published numbers of what is chosen; None: nothing keeps the limit."""
    is_known: bool
    """True: the fastest and the slowest servers have the same choice."""

    @property
    def verdict(self) -> str:
        return "right" if self.middle == self.best else "wrong"


def groups() -> dict[str, list[Arm]]:
    cases = [load_case(EXPERIMENTS / name) for name in ("inferencex-tp", "inferencex-dp")]
    found = defaultdict(list)
    for case, arm in [(one, arm) for one in cases for arm in one.arms]:
        scenario: Any = case.scenario(arm, 1, ("cost=kernels", f"front_end={arm.front_end}"))
        metrics = (arm.measured, *(simulate(run).summary() for run in (scenario, *scenario.ends)))
        size = scenario.num_gpus, scenario.client.concurrency
        sides = (Row(arm.name, one["mean_tpot_ms"], cost_of(one, *size)) for one in metrics)
        found["-".join(arm.name.split("-")[:3])].append(Arm(*sides))
    return found


def choices(arms: list[Arm]) -> Iterator[Choice]:
    """The cheapest row within each limit: as published, and the ones that the simulation chooses."""
    for limit_ms in sorted(_ROOM * arm.published.tpot_ms for arm in arms):
        best = min((arm.published for arm in arms if arm.published.tpot_ms <= limit_ms), key=lambda row: row.gpu_s)
        safe = [arm for arm in arms if arm.slowest.tpot_ms <= limit_ms]
        at_ends = {_cheapest(arms, limit_ms, end) for end in ("fastest", "slowest")}
        middle = _cheapest(arms, limit_ms, "simulated")
        yield Choice(limit_ms, best, middle, _cheapest(safe, limit_ms, "simulated"), at_ends == {middle})


def _cheapest(arms: Iterable[Arm], limit_ms: float, servers: str) -> Row | None:
    """The cheapest row within the limit on servers of this speed, as published. None: no row is within the limit."""
    rows = [(getattr(arm, servers), arm.published) for arm in arms]
    found = [(row.gpu_s, row.name, published) for row, published in rows if row.tpot_ms <= limit_ms]
    return min(found)[2] if found else None


def cells_of(row: Row | None, choice: Choice, group: str) -> str:
    """A choice, what it costs beyond the best, and its TPOT as published."""
    if row is None:
        return "none | | "
    missed = row.tpot_ms / choice.limit_ms - 1
    miss = f", misses by {missed:.1%}" if missed > 0 else ""
    return f"{row.name.removeprefix(f'{group}-')} | {row.gpu_s / choice.best.gpu_s - 1:+.0%} | {row.tpot_ms:.1f}{miss}"


def counted(kind: str, rows: list[tuple[Row | None, Choice]]) -> str:
    made = [(row, choice) for row, choice in rows if row is not None]
    kept = [row.gpu_s / choice.best.gpu_s - 1 for row, choice in made if row.tpot_ms <= choice.limit_ms]
    near, dearest = sum(more <= NEAR for more in kept), max(kept, default=0.0)
    return f"| {kind} | {len(made)} | {len(kept)} | {near} | {dearest:+.0%} |"


def main() -> None:
    print("| configurations | limit, ms | cheapest | choice | cost | TPOT, ms | safe choice | cost | TPOT, ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    found = [(group, len(arms), choice) for group, arms in groups().items() for choice in choices(arms)]
    for group, num_arms, choice in found:
        head = f"| {group}, {num_arms} | {choice.limit_ms:.1f} | {choice.best.name.removeprefix(f'{group}-')}"
        print(f"{head} | {cells_of(choice.middle, choice, group)} | {cells_of(choice.safe, choice, group)} |")
    print(f"\n| of {len(found)} | made | keep the limit | and cost at most {NEAR:.0%} more | dearest of them |")
    print("|---|---|---|---|---|")
    print(counted("choice", [(choice.middle, choice) for _, _, choice in found]))
    print(counted("safe choice", [(choice.safe, choice) for _, _, choice in found]))
    known = Counter(choice.verdict for _, _, choice in found if choice.is_known)
    unknown = Counter(choice.verdict for _, _, choice in found if not choice.is_known)
    print(
        f"\nSaid to be known: {known['right']} right, {known['wrong']} wrong; said unknown: {unknown.total()}, ", end=""
    )
    print(f"of which {unknown['right']} right in the middle.")


if __name__ == "__main__":
    main()
