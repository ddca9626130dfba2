"""Why fp8_hi waits longer than its rows say: python experiments/sglang-llama/lengths.py

Prints what forwards of one prompt took in that load, beside the rows of round lengths; then mean TTFT, simulated with
three profiles. The last profile is fitted to the forwards of the load itself: it shows a cause, and predicts nothing.
"""

from collections import defaultdict
from csv import DictReader, DictWriter
from gzip import open as open_gzip
from math import inf
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from pdsim import simulate
from pdsim.calibration.fit.profile import calibrate, profile_of
from pdsim.calibration.fit.rows import read_rows
from pdsim.calibration.validate.case import load_case
from pdsim.scenario.yaml_file import read_yaml, write_yaml

HERE = Path(__file__).parent
ROWS = HERE / "data" / "rows_fp8.csv.gz"
FORWARDS = HERE / "data" / "forwards_fp8_hi.csv.gz"
"""Each forward of the prefill server under `fp8_hi`, timed by events of the GPU."""
HOST = read_yaml(HERE.parent / "sglang-h200" / "profile.yaml")["cost"]["host"]
"""Times of SGLang's loop, measured with another model on another machine."""
ROUND_TOKENS = 1024
BIN_TOKENS = 256
QUARTER_TOKENS = BIN_TOKENS // 4
PAUSE_S = 0.05


def lines(path: Path) -> list[dict[str, str]]:
    with open_gzip(path, "rt") as file:
        return list(DictReader(file))


class Forward(NamedTuple):
    """A forward of one whole prompt without a prefix, in that load."""

    tokens: int
    measured_ms: float
    row_ms: float
    """Time by rows of round lengths, interpolated."""
    pause_s: float
    """Time since the end of the forward before."""


def forwards() -> list[Forward]:
    alone: dict[int, list[float]] = defaultdict(list)
    for row in lines(ROWS):
        if (row["kind"], row["prompts"]) == ("prefill", "1"):
            alone[int(row["new_tokens"])].append(float(row["time_us"]) / 1e3)
    round_ms = {tokens: median(times) for tokens, times in sorted(alone.items()) if tokens % ROUND_TOKENS == 0}
    found, last_end_s = [], inf
    for row in lines(FORWARDS):
        tokens, time_s, end_s = int(row["prefill_kv_tokens"]), float(row["gpu_s"]), float(row["end_unix_s"])
        if row["num_prefill"] == "1" and ROUND_TOKENS < tokens <= int(row["prefill_tokens"]):
            row_ms = float(np.interp(tokens, list(round_ms), list(round_ms.values())))
            found.append(Forward(tokens, 1e3 * time_s, row_ms, end_s - time_s - last_end_s))
        last_end_s = end_s
    return found


def by_length() -> list[tuple[int, int, float, float]]:
    """For each bin of lengths: its first length in tokens, number of forwards, and medians in ms, measured in the load
    and interpolated between rows of round lengths.
    """
    bins: dict[int, list[Forward]] = defaultdict(list)
    for one in forwards():
        bins[(one.tokens - 1) // BIN_TOKENS * BIN_TOKENS].append(one)
    return [
        (first, len(same), median(one.measured_ms for one in same), fmean(one.row_ms for one in same))
        for first, same in sorted(bins.items())
    ]


def by_place() -> list[tuple[str, int, float]]:
    """For forwards behind a pause, behind no pause, and by the place of their length between two multiples of 256
    tokens: number of forwards, and the median time in ms that they take more than rows of round lengths.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for one in forwards():
        beyond_ms = one.measured_ms - one.row_ms
        groups["behind a pause of 50 ms or more" if one.pause_s >= PAUSE_S else "behind a shorter pause"].append(
            beyond_ms
        )
        quarter = (one.tokens - 1) % BIN_TOKENS // QUARTER_TOKENS * QUARTER_TOKENS
        groups[f"{quarter + 1} to {quarter + QUARTER_TOKENS} above a multiple of {BIN_TOKENS}"].append(beyond_ms)
    return [
        (name, len(found), median(found)) for name, found in sorted(groups.items(), key=lambda item: _order(item[0]))
    ]


def _order(name: str) -> tuple[bool, int]:
    first = name.partition(" ")[0]
    return (first.isdigit(), int(first) if first.isdigit() else 0)


def rows_of_the_load(folder: Path) -> Path:
    """A file with the load's own forwards and the decode steps of the rows."""
    rows = [row for row in lines(ROWS) if row["kind"] == "decode"]
    for row in lines(FORWARDS):
        if int(row["prefill_kv_tokens"]) > int(row["prefill_tokens"]):  # the end of a prompt, behind its other chunks
            continue
        sizes = {"new_tokens": row["prefill_kv_tokens"], "prompts": row["num_prefill"], "context_tokens": "0"}
        rows.append({**rows[0], **sizes, "kind": "prefill", "batch": "", "time_us": str(1e6 * float(row["gpu_s"]))})
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def mean_ttft_ms(rows: Path, host: dict[str, Any] | None = None) -> float:
    """Of the load, simulated with a profile of the rows."""
    case = load_case(HERE)
    (arm,) = [one for one in case.arms if one.name == "fp8_hi"]
    profile = profile_of(calibrate(read_rows([rows])), "fp8", "")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        write_yaml({**profile, "cost": {**profile["cost"], **({"host": host} if host else {})}}, path)
        scenario = case.scenario(arm, case.seeds[0], (f"cost={{profile: {path}}}",))
        requests = simulate(scenario).records.requests
    return fmean(one.first_token_ns - one.arrival_ns for one in requests) / 1e6


def main() -> None:
    print("| prompt, tokens | forwards | measured, ms | rows of round lengths, ms | |\n|---|---|---|---|---|")
    for first, number, found_ms, row_ms in by_length():
        cells = (
            f"{first + 1:,} to {first + BIN_TOKENS:,}",
            number,
            f"{found_ms:.1f}",
            f"{row_ms:.1f}",
            f"{found_ms / row_ms - 1:+.0%}",
        )
        print("|", " | ".join(map(str, cells)), "|")
    print("\n| forwards | number | beyond rows of round lengths, ms |\n|---|---|---|")
    for name, number, beyond_ms in by_place():
        print(f"| {name} | {number} | {beyond_ms:.1f} |")
    with TemporaryDirectory() as folder:
        own = rows_of_the_load(Path(folder))
        for name, ttft_ms in (
            ("rows", mean_ttft_ms(ROWS)),
            ("rows, and the loop's times of sglang-h200", mean_ttft_ms(ROWS, HOST)),
            ("the load's own forwards", mean_ttft_ms(own)),
            ("the load's own forwards, and the loop's times of sglang-h200", mean_ttft_ms(own, HOST)),
        ):
            print(f"{name}: mean TTFT {ttft_ms:.0f} ms")


if __name__ == "__main__":
    main()
