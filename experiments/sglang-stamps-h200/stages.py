"""Stages of requests, measured and simulated: python experiments/sglang-stamps-h200/stages.py

Prints mean times of the stages of each load's requests, by the server's stamps and by three simulations; then what
forwards took on an idle GPU and behind another forward, and what the prefill loop did in each of its iterations. Last
come the loads of a second machine.
"""

from collections.abc import Sequence
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
from pdsim.metrics.records import RequestRecord
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.yaml_file import write_yaml

HERE = Path(__file__).parent
DATA = HERE / "data"
SECOND = HERE / "second"
"""Tables of a second machine, made as those of DATA."""
LOADS = ("fp8_singles", "fp8_hi", "fp8_hi2", "bf16_hi")
BF16 = ("weight_dtype=bf16", "prefill.pool_tokens=845568", "decode.pool_tokens=845568")
ONE_CLIENT = "client={use: closed_loop, concurrency: 1}"
USUAL_WAY = ("front_end=sglang_gateway", "network.message_latency=0.75 ms")
"""Front end and messages as in other studies of SGLang, without this server's single requests."""
SECOND_LOADS = ("fp8_singles", "bf16_singles", "fp8_hi", "bf16_hi")
SECOND_WAY = (
    "network.message_latency=1.5 ms",
    "front_end={kind: sglang_gateway, service_per_token: 1.77 us, latency_in: 2 ms, stall: 42.6 ms}",
)
"""Front end and messages by fp8_singles of the second machine."""
BEFORE_STALL_S = 13.9
"""Requests of fp8_hi2 that were sent later met a decode server whose HTTP process stood still."""
SECOND_PARTS = {"fp8_hi": ("from", 2.4), "bf16_hi": ("until", 21.8)}
"""Parts of the second machine's loads without its longest stalls, in s."""
IDLE_MS = 0.3
LENGTHS = (300, 600, 900, 1300, 2000)
STAGES = ("until the GPU begins", "forward", "until decode has its KV", "until the first token")
HEADER = f"| load | | {' | '.join(STAGES)} | TTFT | |\n|---|---|{'---|' * len(STAGES)}---|---|"

Floats = NDArray[np.float64]


class Times(NamedTuple):
    """Columns of a table of data/, by name."""

    columns: dict[str, Floats]

    def __call__(self, begin: str, end: str) -> Floats:
        """Time of each row from one stamp to another, in ms."""
        return self.columns[f"{end}_ms"] - self.columns[f"{begin}_ms"]


def table(name: str, data: Path = DATA) -> Times:
    with open_gzip(data / f"{name}.csv.gz", "rt") as file:
        rows = list(DictReader(file))
    columns = {key: np.array([float(row[key] or "nan") for row in rows]) for key in rows[0]}
    if "arrival_s" in columns:
        columns["sent_ms"] = 1e3 * columns["arrival_s"]
    return Times(columns)


def measured(load: str, data: Path = DATA) -> Floats:
    """Stages of each request in ms: an array (stages, requests)."""
    times = table(f"requests_{load}", data)
    stamps = ("sent", "gpu_begin", "gpu_end", "d_kv", "first_token")
    return np.array([times(begin, end) for begin, end in pairwise(stamps)])


def simulated(load: str, knows: str, data: Path = DATA) -> Floats:
    """Stages of each request in ms: an array (stages, requests). knows: a key of KNOWN or SECOND_KNOWN."""
    return stages_of(records(load, knows, data))


def records(load: str, knows: str, data: Path = DATA) -> Sequence[RequestRecord]:
    dtype = load.partition("_")[0]
    changes = [f"workload.path={data.name}/requests_{load}.csv.gz", *(BF16 if dtype == "bf16" else ())]
    changes += [ONE_CLIENT] if load.endswith("singles") else []
    source = DATA if knows == "first" else data
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        names = (f"rows_{dtype}", *(("rows_host",) if knows in ("stamps", "first") else ()))
        rows = [source / f"{name}.csv.gz" for name in names]
        if knows == "sizes":
            rows = [without_ends(rows[0], Path(folder))]
        write_yaml(profile_of(calibrate(read_rows(rows)), load, ""), path)
        changes += [f"cost={{profile: {path}}}", *(USUAL_WAY if knows in ("sizes", "log") else ())]
        changes += SECOND_WAY if source == SECOND else ()
        return simulate(load_scenario(HERE / "scenario.yaml", tuple(changes))).records.requests


def stages_of(requests: Sequence[RequestRecord]) -> Floats:
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
SECOND_KNOWN = {"first": "the first machine's times", "stamps": "its own times"}


def report_stages() -> None:
    print(HEADER)
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
                print(row("", name, means_ms, error(means_ms.sum(), times_ms.sum())))


def error(found: float, real: float) -> str:
    return f"{100 * (found / real - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")


def row(load: str, name: str, times_ms: Floats, miss: str) -> str:
    return f"| {' | '.join((load, name, *(f'{ms:.1f}' for ms in (*times_ms, times_ms.sum())), miss))} |"


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


def report_loop(loads: Sequence[str] = LOADS, data: Path = DATA) -> None:
    print(f"\n| | {' | '.join(loads)} |\n|---|{'---|' * len(loads)}")
    forwards = {load: table(f"forwards_{load}", data) for load in loads}
    for name, begin, end in (
        ("from the choice to the launch", "chosen", "launch"),
        ("launch", "launch", "launched"),
        ("result and sends", "result", "sent"),
        ("looks at transfers", "sent", "looked"),
    ):
        print(f"| {name} | {' | '.join(f'{np.nanmean(forwards[load](begin, end)):.1f}' for load in loads)} |")
    prompts = (f"{fmean(forwards[load].columns['prompts']):.1f}" for load in loads)
    print(f"| prompts of a forward | {' | '.join(prompts)} |")


def report_second() -> None:
    print(f"\n{HEADER}")
    found = {
        load: {name: records(load, knows, SECOND) for knows, name in SECOND_KNOWN.items()} for load in SECOND_LOADS
    }
    for load, simulations in found.items():
        real = measured(load, SECOND)
        for part, chosen in parts_of_second(load).items():
            times_ms = real[:, chosen].mean(axis=1)
            print(row(part, "measured", times_ms, ""))
            for name, requests in simulations.items():
                means_ms = stages_of(requests)[:, chosen].mean(axis=1)
                print(row("", name, means_ms, error(means_ms.sum(), times_ms.sum())))
    print("\n| load | | TPOT | | output tokens/s | |\n|---|---|---|---|---|---|")
    for load in SECOND_PARTS:
        tpot_ms, speed = measured_speed(load)
        print(f"| {load} | measured | {tpot_ms:.2f} ms | | {speed:,.0f} | |")
        for name, requests in found[load].items():
            own_ms, own = simulated_speed(requests)
            print(f"| | {name} | {own_ms:.2f} ms | {error(own_ms, tpot_ms)} | {own:,.0f} | {error(own, speed)} |")


def parts_of_second(load: str) -> dict[str, NDArray[np.bool_]]:
    """Requests of a load and of its part without the longest stalls."""
    sent_s = table(f"requests_{load}", SECOND).columns["arrival_s"]
    parts = {load: sent_s < np.inf}
    if load in SECOND_PARTS:
        side, time_s = SECOND_PARTS[load]
        parts[f"{load}, {side} {time_s} s"] = (sent_s < time_s) == (side == "until")
    return parts


def measured_speed(load: str) -> tuple[float, float]:
    """Mean TPOT in ms, and output tokens/s, of a load of the second machine."""
    times = table(f"requests_{load}", SECOND)
    tokens = times.columns["out_tokens"]
    span_ms = times.columns["end_ms"].max() - times.columns["sent_ms"].min()
    return float(np.mean(times("first_token", "end") / (tokens - 1))), 1e3 * tokens.sum() / span_ms


def simulated_speed(requests: Sequence[RequestRecord]) -> tuple[float, float]:
    """Mean TPOT in ms, and output tokens/s."""
    fields = ("arrival_ns", "first_token_ns", "end_ns", "num_output_tokens")
    sent_ns, first_ns, end_ns, tokens = (np.array([getattr(one, field) for one in requests]) for field in fields)
    return float(np.mean((end_ns - first_ns) / (tokens - 1))) / 1e6, 1e9 * tokens.sum() / (end_ns.max() - sent_ns.min())


if __name__ == "__main__":
    report_stages()
    report_forwards()
    report_loop()
    report_second()
    report_loop(SECOND_LOADS, SECOND)
