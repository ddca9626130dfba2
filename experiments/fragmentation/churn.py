"""Descriptors and transfer time as a cluster grows old, with pages of 1 and of 64 tokens.

python experiments/fragmentation/churn.py             fills the tables of README.md and draws churn.png

Prompts share more prefixes than decode's pool holds, so pages come and go for two hours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from pdsim import load_scenario, simulate
from pdsim.metrics.records import TransferRecord
from pdsim.sim.result import RunResult

HERE = Path(__file__).parent
README = HERE / "README.md"
NUM_BINS = 24
YOUNG, OLD = 50, 500
"""Transfers at the start and at the end."""
ARMS = {
    "whole prompts, pages of 64": ("page_size=64", "decode.radix_cache=false"),
    "whole prompts, pages of 1": ("page_size=1", "decode.radix_cache=false"),
    "increments, pages of 64": ("page_size=64",),
    "increments, pages of 1": ("page_size=1",),
}
"""Without and with a radix cache on decode."""


@dataclass(frozen=True)
class Age:
    """Transfers of one stretch of time."""

    hours: float
    """Its middle."""
    descriptors: float
    """A request, of one pair of ranks."""
    transfer_ms: float
    """A request's units, one after another."""


def ages(transfers: Sequence[TransferRecord], num_pairs: int, num_bins: int = NUM_BINS) -> Iterator[Age]:
    """Equal stretches of time, up to the last transfer."""
    length_ns = (max(t.start_ns for t in transfers) + 1) / num_bins
    for i in range(num_bins):
        some = [t for t in transfers if i * length_ns <= t.start_ns < (i + 1) * length_ns]
        num_requests = max(1, sum(t.is_last for t in some))
        yield Age(
            (i + 0.5) * length_ns / 3.6e12,
            sum(t.num_descriptors for t in some) / num_pairs / num_requests,
            sum(t.end_ns - t.start_ns for t in some) / 1e6 / num_requests,
        )


def row(name: str, result: RunResult, young: Age, old: Age) -> str:
    summary = result.summary()
    cells = [
        name,
        f"{young.descriptors:,.0f}",
        f"{old.descriptors:,.0f}",
        f"{young.transfer_ms:,.1f}",
        f"{old.transfer_ms:,.1f}",
        f"{summary['median_ttft_ms']:,.0f}",
        f"{summary['output_throughput']:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def draw(found: dict[str, list[Age]]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, some in found.items():
        style = {"linestyle": "--" if "whole" in name else "-", "color": "C0" if name.endswith("64") else "C1"}
        left.plot([age.hours for age in some], [age.descriptors for age in some], label=name, **style)
        right.plot([age.hours for age in some], [age.transfer_ms for age in some], label=name, **style)
    for ax, title in ((left, "descriptors a request"), (right, "transfer of a request, ms")):
        ax.set_yscale("log")
        ax.set_xlabel("time, h")
        ax.set_title(title, fontsize=10)
        ax.grid(alpha=0.3)
    left.legend(fontsize=8)
    return figure


def fill(text: str, rows: Sequence[str]) -> str:
    """Between the markers."""
    start, end = "<!-- churn -->\n", "<!-- churn ends -->"
    head = (
        "| | descriptors, young | old | transfer, young, ms | old, ms | median TTFT, ms | tokens/s |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    before, rest = text.split(start)
    return before + start + head + "\n".join(rows) + "\n" + end + rest.split(end, 1)[1]


def main() -> None:
    rows, found = [], {}
    for name, changes in ARMS.items():
        result = simulate(load_scenario(HERE / "scenario.yaml", changes))
        num_pairs = result.scenario.pair.decode.tp
        transfers = result.records.transfers
        found[name] = list(ages(transfers, num_pairs))
        young, old = (next(ages(some, num_pairs, 1)) for some in (transfers[:YOUNG], transfers[-OLD:]))
        rows.append(row(name, result, young, old))
        print(rows[-1], flush=True)
    README.write_text(fill(README.read_text(encoding="utf-8"), rows), encoding="utf-8")
    draw(found).savefig(HERE / "churn.png", dpi=110)


if __name__ == "__main__":
    main()
