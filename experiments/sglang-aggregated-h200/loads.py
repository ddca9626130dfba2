"""Loads of aggregated servers, measured and simulated: python experiments/sglang-aggregated-h200/loads.py

Prints mean TTFT, TPOT and output tokens/s of each load, as measured and as simulated from the catalog and from the
server's own rows; then the loads of the server that had to compile kernels.
"""

from csv import DictReader
from functools import cache
from gzip import open as open_gzip
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdsim import simulate
from pdsim.calibration.fit.profile import calibrate, profile_of
from pdsim.calibration.fit.rows import read_rows
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.yaml_file import write_yaml

HERE = Path(__file__).parent
LOADS = ("first", "singles", "hi", "hi2", "half")
STALLS_S = {("fp8", "half"): (1.75, 2.4)}
"""Parts of loads that are left out once more: the HTTP process stood still for the requests sent between these times in
s.
"""
COLD = ("first", "hi")
"""Loads in which the fp8 server compiled kernels."""
ONE_CLIENT = "client={use: closed_loop, concurrency: 1}"
STAMPS = ("arrival_ns", "first_token_ns", "end_ns", "num_output_tokens")

Floats = NDArray[np.float64]
Table = dict[str, Floats]


class Load(NamedTuple):
    """Means over the requests of a load."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


@cache
def table(name: str) -> Table:
    """Columns of a table of data/, by name."""
    with open_gzip(HERE / "data" / f"{name}.csv.gz", "rt") as file:
        rows = list(DictReader(file))
    return {key: np.array([float(row[key] or "nan") for row in rows]) for key in rows[0]}


def load_of(stamps: Floats) -> Load:
    """stamps: an array (4, requests) of the times in ms at which requests were sent, had their first token and ended,
    and of their output tokens.
    """
    sent_ms, first_ms, end_ms, tokens = stamps
    speed = 1e3 * tokens.sum() / (end_ms.max() - sent_ms.min())
    return Load(float(np.mean(first_ms - sent_ms)), float(np.mean((end_ms - first_ms) / (tokens - 1))), float(speed))


def measured(dtype: str, load: str) -> Floats:
    """What load_of needs."""
    columns = table(f"requests_{dtype}_{load}")
    stamps = [1e3 * columns["arrival_s"], columns["first_token_ms"], columns["end_ms"], columns["out_tokens"]]
    return np.array(stamps)


def life(dtype: str) -> dict[str, Table]:
    """The loads of a server by name, in order, with arrival_s since the server's first request."""
    with (HERE / "data" / "lives.csv").open() as file:
        begins_s = {row["load"]: float(row["begin_s"]) for row in DictReader(file) if row["dtype"] == dtype}
    loads = {load: table(f"requests_{dtype}_{load}") for load in begins_s}
    return {load: {**one, "arrival_s": one["arrival_s"] + begins_s[load]} for load, one in loads.items()}


def simulated(dtype: str, cost: str, *changes: str) -> dict[str, Floats]:
    """The single requests, sent by one client; and all other loads of the server in one simulation, so that a load
    finds the server as the loads before left it. Returns what load_of needs, by load. cost: the scenario's section.
    """
    fields = ("arrival_s", "in_tokens", "out_tokens")
    loads = life(dtype)
    single = stamps_of(HERE / f"data/requests_{dtype}_singles.csv.gz", dtype, cost, ONE_CLIENT, *changes)
    rows = sorted(
        (*row, load)
        for load, one in loads.items()
        if load != "singles"
        for row in zip(*(one[key] for key in fields), strict=True)
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "life.csv"
        lines = [f"{sent_s:.6f},{in_tokens:.0f},{out_tokens:.0f}" for sent_s, in_tokens, out_tokens, _ in rows]
        path.write_text("\n".join([",".join(fields), *lines]) + "\n")
        stamps = stamps_of(path, dtype, cost, *changes)
    names = np.array([row[-1] for row in rows])
    return {load: single if load == "singles" else stamps[:, names == load] for load in LOADS}


def stamps_of(path: Path, dtype: str, cost: str, *changes: str) -> Floats:
    """What load_of needs, of the simulated requests of a table, in order."""
    sets = f"workload.path={path}", f"weight_dtype={dtype}", f"cost={cost}", *changes
    requests = simulate(load_scenario(HERE / "scenario.yaml", sets)).records.requests
    found = np.array([[getattr(one, key) for one in requests] for key in STAMPS], dtype=float)
    found[:3] /= 1e6
    return found[:, np.argsort(found[0], kind="stable")]


def own(dtype: str, cold: str = "") -> dict[str, Floats]:
    """The loads by the server's own rows. cold: cold_kernels."""
    made = calibrate(read_rows([HERE / "data" / f"rows_{dtype}.csv.gz"]))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        write_yaml(profile_of(made, dtype, ""), path)
        beside = f", cold_kernels: {cold}" if cold else ""
        return simulated(dtype, f"{{profile: {path}{beside}}}", front_end(dtype, made.host_ns["decode_prefill"]))


def front_end(dtype: str, pauses_ns: float) -> str:
    """The front end by single requests. pauses_ns: what the simulation adds to each forward."""
    one = table(f"requests_{dtype}_singles")
    slope_ms, base_ms = np.polyfit(one["in_tokens"], one["received_ms"] - 1e3 * one["arrival_s"], 1)
    rest_ms = np.mean(one["first_token_ms"] - one["gpu_end_ms"] + one["gpu_begin_ms"] - one["received_ms"])
    out_ms = max(0, rest_ms - pauses_ns / 1e6)
    return (
        f"front_end={{service_per_token: {max(0, 1e3 * slope_ms):.3f} us, latency_in: {max(0, base_ms):.2f} ms, "
        f"latency_out: {out_ms:.2f} ms}}"
    )


def kernels() -> dict[str, str]:
    """cold_kernels of this server and of two machines of ../sglang-stamps-h200, by the words of the page."""
    with (HERE / "data" / "slow_phases.csv").open() as file:
        rows = [row for row in DictReader(file) if row["dtype"] == "fp8" and row["kernel"].startswith("alloc")]
    seen = {role: [float(row["time_ms"]) for row in rows if row["role"] == role] for role in ("prefill", "decode")}
    own_ms = {role: fmean(times_ms[1:]) for role, times_ms in seen.items()}  # the first one starts Triton
    return {
        "the second machine's": "{prefill: 249 ms, decode: 87 ms}",
        "the third machine's": "{prefill: 200 ms, decode: 66 ms}",
        "its own": f"{{prefill: {own_ms['prefill']:.0f} ms, decode: {own_ms['decode']:.0f} ms}}",
    }


def error(found: float, real: float) -> str:
    return f"{100 * (found / real - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")


def row(load: str, name: str, found: Load, real: Load | None = None) -> str:
    cells = f"{found.ttft_ms:.1f} ms", f"{found.tpot_ms:.2f} ms", f"{found.tokens_per_s:,.0f}"
    misses = ("", "", "") if real is None else map(error, found, real)
    return f"| {load} | {name} | {' | '.join(f'{cell} | {miss}' for cell, miss in zip(cells, misses, strict=True))} |"


def report(dtype: str, known: dict[str, dict[str, Floats]], loads: tuple[str, ...] = LOADS) -> None:
    """known: simulated requests by load, by the words of the page."""
    print("\n| load | | mean TTFT | | mean TPOT | | output tokens/s | |\n|---|---|---|---|---|---|---|---|")
    for load in loads:
        stamps = measured(dtype, load)
        for part, kept in parts_of(dtype, load, stamps[0]).items():
            real = load_of(stamps[:, kept])
            print(row(part, "measured", real))
            for name, found in known.items():
                print(row("", name, load_of(found[load][:, kept]), real))


def parts_of(dtype: str, load: str, sent_ms: Floats) -> dict[str, NDArray[np.bool_]]:
    """The requests of a load, and those that met no stall of the HTTP process."""
    name = f"{dtype}_{load}"
    parts = {name: sent_ms > -np.inf}
    if (dtype, load) in STALLS_S:
        begin_s, end_s = STALLS_S[dtype, load]
        parts[f"{name}, without the collection"] = (sent_ms < 1e3 * begin_s) | (sent_ms > 1e3 * end_s)
    return parts


if __name__ == "__main__":
    for dtype in ("fp8", "bf16"):
        report(dtype, {"catalog": simulated(dtype, "kernels"), "own rows": own(dtype)})
    colds: dict[str, dict[str, Floats]] = {}
    for whose, cold in kernels().items():
        colds[f"catalog, {whose} compiles"] = simulated("fp8", f"{{cold_kernels: {cold}}}")
        colds[f"own rows, {whose} compiles"] = own("fp8", cold)
    report("fp8", colds, COLD)
