"""Stages of requests, measured and simulated: python experiments/sglang-stamps-h200/stages.py

Prints mean times of the stages of each load's requests, by the server's stamps and by three simulations; then what
forwards took on an idle GPU and behind another forward, and what the prefill loop did in each of its iterations.
"""

from csv import DictReader
from gzip import open as open_gzip
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdsim import simulate
from pdsim.calibration.fit.profile import calibrate, profile_of
from pdsim.calibration.fit.rows import read_rows, write_rows
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.yaml_file import write_yaml

HERE = Path(__file__).parent
DATA = HERE / "data"
LOADS = ("fp8_singles", "fp8_hi", "fp8_hi2", "bf16_hi")
BF16 = ("weight_dtype=bf16", "prefill.pool_tokens=845568", "decode.pool_tokens=845568")
ONE_CLIENT = "client={use: closed_loop, concurrency: 1}"
USUAL_WAY = ("front_end=sglang_gateway", "network.message_latency=0.75 ms")
"""Front end and messages as in other studies of SGLang, without this server's single requests."""
BEFORE_STALL_S = 13.9
"""Requests of fp8_hi2 that were sent later met a decode server whose HTTP process stood still."""
IDLE_MS = 0.3
LENGTHS = (300, 600, 900, 1300, 2000)
STAGES = ("until the GPU begins", "forward", "until decode has its KV", "until the first token")

Floats = NDArray[np.float64]


class Times(NamedTuple):
    """Columns of a table of data/, by name."""

    columns: dict[str, Floats]

    def __call__(self, begin: str, end: str) -> Floats:
        """Time of each row from one stamp to another, in ms."""
        return self.columns[f"{end}_ms"] - self.columns[f"{begin}_ms"]


def table(name: str) -> Times:
    with open_gzip(DATA / f"{name}.csv.gz", "rt") as file:
        rows = list(DictReader(file))
    columns = {key: np.array([float(row[key] or "nan") for row in rows]) for key in rows[0]}
    if "arrival_s" in columns:
        columns["sent_ms"] = 1e3 * columns["arrival_s"]
    return Times(columns)


def measured(load: str) -> Floats:
    """Stages of each request in ms: an array (stages, requests)."""
    times = table(f"requests_{load}")
    stamps = ("sent", "gpu_begin", "gpu_end", "d_kv", "first_token")
    return np.array([times(begin, end) for begin, end in pairwise(stamps)])


def simulated(load: str, knows: str) -> Floats:
    """Stages of each request in ms: an array (stages, requests). knows: a key of KNOWN."""
    dtype = load.partition("_")[0]
    changes = [f"workload.path=data/requests_{load}.csv.gz", *(BF16 if dtype == "bf16" else ())]
    changes += [ONE_CLIENT] if load.endswith("singles") else []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        rows = [DATA / f"rows_{dtype}.csv.gz", *([DATA / "rows_host.csv.gz"] if knows == "stamps" else [])]
        if knows == "sizes":
            rows = [without_ends(rows[0], Path(folder))]
        write_yaml(profile_of(calibrate(read_rows(rows)), load, ""), path)
        changes += [f"cost={{profile: {path}}}", *(USUAL_WAY if knows != "stamps" else ())]
        requests = simulate(load_scenario(HERE / "scenario.yaml", tuple(changes))).records.requests
    fields = ("arrival_ns", "prefill_start_ns", "prefill_end_ns", "transfer_end_ns", "first_token_ns")
    stamps = np.array([[getattr(one, field) / 1e6 for one in requests] for field in fields])
    found: Floats = np.diff(stamps, axis=0)
    return found


def without_ends(path: Path, folder: Path) -> Path:
    """Copies rows without the times at which forwards ended, so that nothing shows which of them found an idle GPU."""
    with open_gzip(path, "rt") as file:
        rows = [{**row, "end_s": ""} for row in DictReader(file)]
    write_rows(folder / "rows.csv.gz", rows, {key: rows[0][key] for key in ("device", "command", "date")})
    return folder / "rows.csv.gz"


KNOWN = {"sizes": "times of forwards", "log": "and their ends", "stamps": "and the loop's times by `fp8_singles`"}
"""What the simulations know, each with all before it."""


def report_stages() -> None:
    print(f"| load | | {' | '.join(STAGES)} | TTFT | |\n|---|---|{'---|' * len(STAGES)}---|---|")
    for load in LOADS:
        sent_s = table(f"requests_{load}").columns["arrival_s"]
        parts = {load: sent_s < np.inf}
        if load == "fp8_hi2":
            parts[f"{load}, until {BEFORE_STALL_S} s"] = sent_s < BEFORE_STALL_S
        real = measured(load)
        found = {name: simulated(load, knows) for knows, name in KNOWN.items()}
        for part, chosen in parts.items():
            times_ms = real[:, chosen].mean(axis=1)
            print(row(part, "measured", times_ms, ""))
            for name, stages in found.items():
                means_ms = stages[:, chosen].mean(axis=1)
                error = f"{100 * (means_ms.sum() / times_ms.sum() - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")
                print(row("", name, means_ms, error))


def row(load: str, name: str, times_ms: Floats, error: str) -> str:
    return f"| {' | '.join((load, name, *(f'{ms:.1f}' for ms in (*times_ms, times_ms.sum())), error))} |"


def report_forwards() -> None:
    print("\n| load | tokens | on an idle GPU | behind another forward |\n|---|---|---|---|")
    for load in LOADS[1:]:
        times = table(f"forwards_{load}")
        columns, gpu_ms = times.columns, times("gpu_begin", "gpu_end")
        pauses_ms = np.append(np.inf, columns["gpu_begin_ms"][1:] - columns["gpu_end_ms"][:-1])
        # launched 2 ms before the forward's end, so that the launch did not delay the end
        behind = (pauses_ms < IDLE_MS) & (times("launched", "gpu_end") > 2)  # noqa: PLR2004
        for low, high in pairwise(LENGTHS):
            here = (columns["prompts"] == 1) & (columns["new_tokens"] > low) & (columns["new_tokens"] <= high)
            groups = [gpu_ms[here & chosen] for chosen in (pauses_ms >= IDLE_MS, behind)]
            cells = (f"{median(group):.1f} ms ({len(group)})" if len(group) else "" for group in groups)
            print(f"| {load} | {low + 1:,} to {high:,} | {' | '.join(cells)} |")


def report_loop() -> None:
    print(f"\n| | {' | '.join(LOADS)} |\n|---|{'---|' * len(LOADS)}")
    forwards = {load: table(f"forwards_{load}") for load in LOADS}
    for name, begin, end in (
        ("from the choice to the launch", "chosen", "launch"),
        ("launch", "launch", "launched"),
        ("result and sends", "result", "sent"),
        ("looks at transfers", "sent", "looked"),
    ):
        print(f"| {name} | {' | '.join(f'{np.nanmean(forwards[load](begin, end)):.1f}' for load in LOADS)} |")
    prompts = (f"{fmean(forwards[load].columns['prompts']):.1f}" for load in LOADS)
    print(f"| prompts of a forward | {' | '.join(prompts)} |")


if __name__ == "__main__":
    report_stages()
    report_forwards()
    report_loop()
