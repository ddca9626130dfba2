"""Stages of requests, measured and simulated: python experiments/sglang-stamps-h200/stages.py

Prints what forwards took on an idle GPU and behind another forward; then, for each machine, mean times of the stages
of each load's requests, by the server's stamps and by simulations, and what the prefill loop did in its iterations;
then the first loads of a server that has to compile kernels.
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
BF16 = ("weight_dtype=bf16", "prefill.pool_tokens=845568", "decode.pool_tokens=845568")
ONE_CLIENT = "client={use: closed_loop, concurrency: 1}"
USUAL_WAY = ("front_end=sglang_gateway", "network.message_latency=0.75 ms")
"""Front end and messages as in other studies of SGLang, without this server's single requests."""


class Machine(NamedTuple):
    """Loads of two GPUs of a host, with tables in a folder."""

    data: Path
    loads: tuple[str, ...]
    knows: dict[str, str]
    """What the simulations know, by key: the words of the page."""
    parts: dict[str, tuple[str, float]]
    """Parts of loads without their longest stalls: the side of a time in s."""
    way: tuple[str, ...] = ()
    """Changes for front end and messages by this machine's fp8_singles. None: those of scenario.yaml."""


FIRST = Machine(
    HERE / "data",
    ("fp8_singles", "fp8_hi", "fp8_hi2", "bf16_hi"),
    {
        "sizes": "times of forwards",
        "log": "and their ends",
        "singles": "and the loop's times, idle",
        "loop": "and the loop's times, busy",
    },
    # the HTTP process of the decode server stood still
    {"fp8_hi2": ("until", 13.9)},
)
SECOND = Machine(
    HERE / "second",
    ("fp8_singles", "bf16_singles", "fp8_hi", "bf16_hi"),
    {"first": "the first machine's times", "singles": "its own times, idle", "loop": "its own times, busy"},
    {"fp8_hi": ("from", 2.4), "bf16_hi": ("until", 21.8)},
    (
        "network.message_latency=1.5 ms",
        "front_end={kind: sglang_gateway, service_per_token: 1.77 us, latency_in: 2 ms, stall: 42.6 ms}",
    ),
)
LIFE_S = {"the first load": (17.5, 21), "fp8_hi": (21, np.inf)}
"""Parts of the loads of fp8_life, by the times in s between which their requests are sent."""
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


def table(name: str, machine: Machine = FIRST) -> Times:
    with open_gzip(machine.data / f"{name}.csv.gz", "rt") as file:
        rows = list(DictReader(file))
    columns = {key: np.array([float(row[key] or "nan") for row in rows]) for key in rows[0]}
    if "arrival_s" in columns:
        columns["sent_ms"] = 1e3 * columns["arrival_s"]
    return Times(columns)


def measured(load: str, machine: Machine = FIRST) -> Floats:
    """Stages of each request in ms: an array (stages, requests)."""
    times = table(f"requests_{load}", machine)
    stamps = ("sent", "gpu_begin", "gpu_end", "d_kv", "first_token")
    return np.array([times(begin, end) for begin, end in pairwise(stamps)])


def records(load: str, knows: str, machine: Machine = FIRST, cold: str = "") -> Sequence[RequestRecord]:
    """The simulated requests of a load. knows: a key of machine.knows. cold: further settings of the cost."""
    dtype = load.partition("_")[0]
    changes = [f"workload.path={machine.data.name}/requests_{load}.csv.gz", *(BF16 if dtype == "bf16" else ())]
    changes += [ONE_CLIENT] if load.endswith("singles") else []
    changes += USUAL_WAY if knows in ("sizes", "log") else () if knows == "first" else machine.way
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        made = calibrate(read_rows(rows_of(dtype, knows, machine, Path(folder))))
        write_yaml(profile_of(made, load, ""), path)
        scenario = load_scenario(HERE / "scenario.yaml", (*changes, f"cost={{profile: {path}{cold}}}"))
        return simulate(scenario).records.requests


def rows_of(dtype: str, knows: str, machine: Machine, folder: Path) -> list[Path]:
    """Files with the rows to fit."""
    data = (FIRST if knows == "first" else machine).data
    forwards = data / f"rows_{dtype}.csv.gz"
    if knows == "sizes":
        return [without_ends(forwards, folder)]
    loop = {"log": (), "singles": ("rows_host",)}.get(knows, (f"rows_loop_{dtype}",))
    return [forwards, *(data / f"{name}.csv.gz" for name in loop)]


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


def report_stages(machine: Machine) -> None:
    print(f"\n{HEADER}")
    for load in machine.loads:
        real = measured(load, machine)
        found = {name: stages_of(records(load, knows, machine)) for knows, name in machine.knows.items()}
        for part, chosen in parts_of(load, machine).items():
            times_ms = real[:, chosen].mean(axis=1)
            print(row(part, "measured", times_ms, ""))
            for name, stages in found.items():
                means_ms = stages[:, chosen].mean(axis=1)
                print(row("", name, means_ms, error(means_ms.sum(), times_ms.sum())))


def parts_of(load: str, machine: Machine) -> dict[str, NDArray[np.bool_]]:
    """Requests of a load and of its part without the longest stalls."""
    sent_s = table(f"requests_{load}", machine).columns["arrival_s"]
    parts = {load: sent_s < np.inf}
    if load in machine.parts:
        side, time_s = machine.parts[load]
        parts[f"{load}, {side} {time_s} s"] = (sent_s < time_s) == (side == "until")
    return parts


def error(found: float, real: float) -> str:
    return f"{100 * (found / real - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")


def row(load: str, name: str, times_ms: Floats, miss: str) -> str:
    return f"| {' | '.join((load, name, *(f'{ms:.1f}' for ms in (*times_ms, times_ms.sum())), miss))} |"


def report_forwards() -> None:
    print("\n| load | tokens | on an idle GPU | behind another forward |\n|---|---|---|---|")
    for load in FIRST.loads[1:]:
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


def report_loop(machine: Machine) -> None:
    print(f"\n| | {' | '.join(machine.loads)} |\n|---|{'---|' * len(machine.loads)}")
    forwards = {load: table(f"forwards_{load}", machine) for load in machine.loads}
    for name, begin, end in (
        ("messages and choice, until the launch", "look", "launch"),
        ("launch", "launch", "launched"),
        ("result and sends", "result", "sent"),
        ("looks at transfers", "sent", "looked"),
    ):
        print(f"| {name} | {' | '.join(f'{np.nanmean(times(begin, end)):.1f}' for times in forwards.values())} |")
    waits_ms = (times.columns["result_ms"][:-1] - times.columns["launched_ms"][1:] for times in forwards.values())
    shares = (f"{100 * np.mean(one < 1):.0f} %" for one in waits_ms)
    print(f"| iterations that do not wait for the GPU | {' | '.join(shares)} |")
    prompts = (f"{fmean(times.columns['prompts']):.1f}" for times in forwards.values())
    print(f"| prompts of a forward | {' | '.join(prompts)} |")


def report_speed(machine: Machine) -> None:
    print("\n| load | | TPOT | | output tokens/s | |\n|---|---|---|---|---|---|")
    for load in machine.loads:
        if load.endswith("singles"):
            continue
        tpot_ms, speed = measured_speed(load, machine)
        print(f"| {load} | measured | {tpot_ms:.2f} ms | | {speed:,.0f} | |")
        for knows, name in machine.knows.items():
            own_ms, own = simulated_speed(records(load, knows, machine))
            print(f"| | {name} | {own_ms:.2f} ms | {error(own_ms, tpot_ms)} | {own:,.0f} | {error(own, speed)} |")


def report_cold() -> None:
    """Prints the first loads of a server of the second machine, and what they miss without the compiled kernels."""
    sent_s = table("requests_fp8_life", SECOND).columns["arrival_s"]
    real = measured("fp8_life", SECOND)
    colds = {
        "warm": "",
        "cold, its own times": f", cold_kernels: {compiles('second')}",
        "cold, the third machine's times": f", cold_kernels: {compiles('third')}",
    }
    found = {name: stages_of(records("fp8_life", "loop", SECOND, cold)) for name, cold in colds.items()}
    print(f"\n{HEADER}")
    for part, (since_s, until_s) in LIFE_S.items():
        chosen = (sent_s >= since_s) & (sent_s < until_s)
        times_ms = real[:, chosen].mean(axis=1)
        print(row(part, "measured", times_ms, ""))
        for name, stages in found.items():
            means_ms = stages[:, chosen].mean(axis=1)
            print(row("", name, means_ms, error(means_ms.sum(), times_ms.sum())))


def compiles(machine: str) -> str:
    """The setting cold_kernels by the mean times of a machine's compiles."""
    with (FIRST.data / "compiles.csv").open() as file:
        rows = [one for one in DictReader(file) if one["machine"] == machine]
    times = {role: [float(one["time_ms"]) for one in rows if one["role"] == role] for role in ("prefill", "decode")}
    return f"{{{', '.join(f'{role}: {fmean(times_ms):.0f} ms' for role, times_ms in times.items())}}}"


def measured_speed(load: str, machine: Machine) -> tuple[float, float]:
    """Mean TPOT in ms, and output tokens/s."""
    times = table(f"requests_{load}", machine)
    tokens = times.columns["out_tokens"]
    span_ms = times.columns["end_ms"].max() - times.columns["sent_ms"].min()
    return float(np.mean(times("first_token", "end") / (tokens - 1))), 1e3 * tokens.sum() / span_ms


def simulated_speed(requests: Sequence[RequestRecord]) -> tuple[float, float]:
    """Mean TPOT in ms, and output tokens/s."""
    fields = ("arrival_ns", "first_token_ns", "end_ns", "num_output_tokens")
    sent_ns, first_ns, end_ns, tokens = (np.array([getattr(one, field) for one in requests]) for field in fields)
    return float(np.mean((end_ns - first_ns) / (tokens - 1))) / 1e6, 1e9 * tokens.sum() / (end_ns.max() - sent_ns.min())


if __name__ == "__main__":
    report_forwards()
    for machine in (FIRST, SECOND):
        report_stages(machine)
        report_loop(machine)
    report_speed(SECOND)
    report_cold()
