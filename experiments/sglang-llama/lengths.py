"""Why fp8_hi waits longer than its rows say: python experiments/sglang-llama/lengths.py

Prints what forwards of one prompt took in that load, beside the rows of round lengths; pauses of the GPU while requests
waited; then mean TTFT, simulated with several profiles. Profiles of the load's own forwards show a cause, and predict
nothing.
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
ROWS_BF16 = HERE / "data" / "rows_llama.csv.gz"
FORWARDS = HERE / "data" / "forwards_fp8_hi.csv.gz"
"""Each forward of the prefill server under `fp8_hi`, timed by events of the GPU."""
HOST = read_yaml(HERE.parent / "sglang-h200" / "profile.yaml")["cost"]["host"]
"""Times of SGLang's loop, measured with another model on another machine."""
ROUND_TOKENS = 1024
BIN_TOKENS = 256
QUARTER_TOKENS = BIN_TOKENS // 4
PAUSE_S = 0.05
STALL_S = 0.1
BEHIND_STALLS_S = 3.2
"""Requests sent later than this did not wait for the stalls of the load's begin."""


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


def stalls() -> list[tuple[float, float]]:
    """Pauses of at least STALL_S between forwards, for which a request sent before waited: begin in s from
    the load's first forward, and duration in s.
    """
    sent = [(float(row["send_s"]), int(row["in_tokens"])) for row in lines(HERE / "data" / "requests_fp8_hi.csv.gz")]
    found, begin_s, last_end_s, done = [], 0.0, inf, 0
    for row in lines(FORWARDS):
        end_s, time_s = float(row["end_unix_s"]), float(row["gpu_s"])
        begin_s = begin_s or end_s - time_s
        in_tokens = sum(tokens for send_s, tokens in sent if send_s < end_s - time_s - begin_s - STALL_S)
        if end_s - time_s - last_end_s >= STALL_S and in_tokens > done:
            found.append((last_end_s - begin_s, end_s - time_s - last_end_s))
        last_end_s = end_s
        done += min(int(row["prefill_tokens"]), int(row["prefill_kv_tokens"]))
    return found


def rows_of_the_load(folder: Path) -> Path:
    """A file with the load's own forwards and the decode steps of the rows."""
    rows = [row for row in lines(ROWS) if row["kind"] == "decode"]
    for row in lines(FORWARDS):
        if int(row["prefill_kv_tokens"]) > int(row["prefill_tokens"]):  # the end of a prompt, behind its other chunks
            continue
        sizes = {"new_tokens": row["prefill_kv_tokens"], "prompts": row["num_prefill"], "context_tokens": "0"}
        times = {"time_us": str(1e6 * float(row["gpu_s"])), "end_s": row["end_unix_s"]}
        rows.append({**rows[0], **sizes, **times, "kind": "prefill", "batch": ""})
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def ttft_ms(load: str, rows: Path, host: dict[str, Any] | None = None) -> tuple[float, float]:
    """Mean TTFT of a load, simulated with a profile of the rows: of all requests, and of those behind the stalls."""
    case = load_case(HERE)
    (arm,) = [one for one in case.arms if one.name == load]
    profile = profile_of(calibrate(read_rows([rows])), load, "")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        write_yaml({**profile, "cost": {**profile["cost"], **({"host": host} if host else {})}}, path)
        scenario = case.scenario(arm, case.seeds[0], (f"cost={{profile: {path}}}",))
        requests = simulate(scenario).records.requests
    times_ms = [(one.arrival_ns / 1e9, (one.first_token_ns - one.arrival_ns) / 1e6) for one in requests]
    return fmean(ms for _, ms in times_ms), fmean(ms for sent_s, ms in times_ms if sent_s >= BEHIND_STALLS_S)


def measured_ttft_ms(load: str) -> tuple[float, float]:
    requests = lines(HERE / "data" / f"requests_{load}.csv.gz")
    times_ms = [(float(one["send_s"]), 1e3 * (float(one["first_token_s"]) - float(one["send_s"]))) for one in requests]
    return fmean(ms for _, ms in times_ms), fmean(ms for sent_s, ms in times_ms if sent_s >= BEHIND_STALLS_S)


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
    for begin_s, time_s in stalls():
        print(f"\nrequests waited {1e3 * time_s:.0f} ms for the GPU, {begin_s:.1f} s from the first forward")
    with TemporaryDirectory() as folder:
        own = rows_of_the_load(Path(folder))
        print("\n| load | forwards | mean TTFT, ms | behind the stalls |\n|---|---|---|---|")
        for load, name, times_ms in (
            ("fp8_hi", "measured", measured_ttft_ms("fp8_hi")),
            ("fp8_hi", "rows", ttft_ms("fp8_hi", ROWS)),
            ("fp8_hi", "the load's own", ttft_ms("fp8_hi", own)),
            ("fp8_hi", "the load's own, and the loop of sglang-h200", ttft_ms("fp8_hi", own, HOST)),
            ("llama_hi", "measured", measured_ttft_ms("llama_hi")),
            ("llama_hi", "rows", ttft_ms("llama_hi", ROWS_BF16)),
        ):
            print(f"| {load} | {name} | {times_ms[0]:.0f} | {times_ms[1]:.0f} |")


if __name__ == "__main__":
    main()
