"""How many equal requests of a closed loop are sent together: python experiments/sglang-llama/together.py

Prints groups of requests that were sent within 4 ms of each other, of measured servers and of their simulation: their
number, mean size and largest size. The first round, which a client sends at once, is left out.
"""

from collections.abc import Iterable
from csv import DictReader
from gzip import open as open_gzip
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from pdsim import simulate
from pdsim.calibration.validate.case import load_case

HERE = Path(__file__).parent
GAP_S = 0.004
"""A decode step takes longer than this."""
ARMS = [
    *(("sglang-llama", f"llama_c{clients}", clients) for clients in (8, 32, 64)),
    *(("sglang-h200", f"c{clients}", clients) for clients in (32, 64, 128)),
    ("sglang-h200", "agg_c32", 32),
]
"""Study, arm, and clients. The last is an aggregated server."""


def groups(sent_s: Iterable[float], num_first: int) -> list[int]:
    """Sizes of groups of requests that were sent together, without the first requests."""
    later = sorted(sent_s)[num_first:]
    sizes = [1]
    for earlier, one in pairwise(later):
        if one - earlier < GAP_S:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


def measured(study: str, arm: str, clients: int) -> list[int]:
    with open_gzip(HERE.parent / study / "data" / f"requests_{arm}.csv.gz", "rt") as file:
        return groups([float(row["send_s"]) for row in DictReader(file)], clients)


def simulated(study: str, arm: str, clients: int) -> list[int]:
    case = load_case(HERE.parent / study)
    (found,) = [one for one in case.arms if one.name == arm]
    requests = simulate(case.scenario(found, case.seeds[0])).records.requests
    return groups([request.arrival_ns / 1e9 for request in requests], clients)


def main() -> None:
    print("| load | measured: groups, mean, largest | simulated |\n|---|---|---|")
    for arm in ARMS:
        cells = [f"{len(sizes)}, {fmean(sizes):.1f}, {max(sizes)}" for sizes in (measured(*arm), simulated(*arm))]
        print(f"| {arm[0]} {arm[1]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
