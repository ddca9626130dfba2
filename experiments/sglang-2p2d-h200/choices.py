"""What SGLang's gateway 0.3.2 chose, and what choices do to TTFT: python experiments/sglang-2p2d-h200/choices.py

Prints shares of the gateway's choices beside those of the simulated rule, then mean TTFT: measured, simulated with the
gateway's own choices, and simulated with the rule's choices for 30 seeds.
"""

from collections.abc import Iterator, Sequence
from csv import DictReader
from gzip import open as open_gzip
from itertools import pairwise
from pathlib import Path
from statistics import correlation, fmean
from typing import NamedTuple

from pdsim import Scenario, load_scenario, simulate
from pdsim.policy.views import RoutingView, TokenSequence

HERE = Path(__file__).parent
LOADS = ("round_robin", "cache_aware", "cache_aware_again")
SEEDS = range(30)
RULE = "router={{use: cache_aware, gateway: 0.3.2, seed: {}}}"


class Choice(NamedTuple):
    """Indices of the prefill and of the decode instance of one request."""

    prefill: int
    decode: int


class Logged:
    """Repeats logged choices of instances, which are in the order of requests."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = list(reversed(indices))

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        return view.instances[self._indices.pop()].instance_id


def requests(load: str) -> list[dict[str, str]]:
    with open_gzip(HERE / "data" / f"requests_{load}.csv.gz", "rt") as file:
        return list(DictReader(file))


def logged(load: str) -> list[Choice]:
    return [Choice(int(row["prefill"]), int(row["decode"])) for row in requests(load)]


def measured_ttft_ms(load: str) -> float:
    return 1e3 * fmean(float(row["first_token_s"]) - float(row["send_s"]) for row in requests(load))


def most_apart(load: str, role: str) -> int:
    """Largest difference between the numbers of unfinished requests of a role's two instances."""
    events = [(float(row[field]), change, int(row[role])) for row in requests(load) for field, change in ENDS]
    counts, most = [0, 0], 0
    for _, change, chosen in sorted(events):
        counts[chosen] += change
        most = max(most, abs(counts[0] - counts[1]))
    return most


ENDS = (("send_s", 1), ("end_s", -1))


def scenario(load: str, router: str) -> Scenario:
    return load_scenario(HERE / "scenario.yaml", (f"workload.path=data/requests_{load}.csv.gz", router))


def with_choices(load: str, choices: Sequence[Choice]) -> Scenario:
    """The scenario of a load, with these choices."""
    plain = scenario(load, "router=round_robin")
    policies = {role: Logged([getattr(one, role) for one in choices]) for role in Choice._fields}
    return plain.model_copy(update={"router": plain.router.model_copy(update=policies)})


def simulated(given: Scenario) -> tuple[float, list[Choice]]:
    """Mean TTFT in ms, and the choices."""
    result = simulate(given)
    found = sorted(result.records.requests, key=lambda request: request.request_id)
    return result.summary()["mean_ttft_ms"], [Choice(int(one.prefill_id[-1]), int(one.decode_id[-1])) for one in found]


def shares(choices: Sequence[Choice]) -> Iterator[float]:
    """Shares of requests: at the second prefill instance, at the second decode instance, and at the same prefill
    instance as the request before; then the correlation of the two choices.
    """
    prefill, decode = zip(*choices, strict=True)
    yield from (fmean(prefill), fmean(decode), fmean(one == other for one, other in pairwise(prefill)))
    yield correlation(prefill, decode)


def main() -> None:
    print("| choices | second prefill | second decode | prefill as before | correlation | most apart |")
    print("|---|---|---|---|---|---|")
    for load in LOADS:
        cells = " | ".join(f"{share:.3f}" for share in shares(logged(load)))
        print(f"| `{load}` | {cells} | {most_apart(load, 'prefill')}, {most_apart(load, 'decode')} |")
    drawn = [simulated(scenario("cache_aware", RULE.format(seed))) for seed in SEEDS]
    columns = zip(*(shares(choices) for _, choices in drawn), strict=True)
    print(f"| rule, {len(SEEDS)} seeds | {' | '.join(f'{min(one):.3f} to {max(one):.3f}' for one in columns)} | |")
    print("\n| load | measured | simulated with the gateway's choices | |\n|---|---|---|---|")
    for load in LOADS:
        measured_ms, (found_ms, _) = measured_ttft_ms(load), simulated(with_choices(load, logged(load)))
        print(f"| `{load}` | {measured_ms:.0f} | {found_ms:.0f} | {found_ms / measured_ms - 1:+.1%} |")
    times_ms = [time_ms for time_ms, _ in drawn]
    print(f"\nrule, {len(SEEDS)} seeds: {fmean(times_ms):.0f} ms, {min(times_ms):.0f} to {max(times_ms):.0f}")
    print(f"cache_aware of the newest gateway: {simulated(scenario('cache_aware', 'router=cache_aware'))[0]:.0f} ms")


if __name__ == "__main__":
    main()
