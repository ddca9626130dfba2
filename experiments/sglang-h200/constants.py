"""What the CPU, the gateway and the transfers take, and which measurement says so.

Only runs that are fitted count here: single requests (s128 to s16384), c1, c8, q4, tp2to2_c1, tp2to2_c16, and the two
tp2to1 runs for slices and staging. The values are rounded; `report` prints what the rows say beside them, and fails if
scenario.yaml or the catalog's transport has others.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rows import HERE, Floats, Served, columns, forwards, served, stages
from scipy.optimize import least_squares

from pdsim.scenario.loading import load_scenario
from pdsim.system.catalog import load_transport

HOST_OF_STEP_MS = 0.05
"""Between the GPU's ends of two decode steps, beyond the second one's GPU time."""
START_MS = 0.6
"""From the choice of a forward to its first kernel. Single requests show 1.9 ms around the GPU's time until the first
send is done: this, RESULT_MS and SEND_MS; how it divides was not measured."""
LAUNCH_TP2_MS = 20.3
"""Halfway from what single requests allow, the least time of a forward of 17.5, to what bursts of tp2to2_c16 show."""
RESULT_MS = 0.3
RESULT_TP2_MS = 1.3
"""Single requests of the TP2 runs show 2.9 ms around the GPU's time: ranks agree before they go on."""
SEND_MS = 1.0
"""Of a batch's transfers. c8 says 0.9; any value from 0.6 to 1.0 fits it, and this one was kept after c256 and q32."""
LAUNCH_8B_MS = 14.2
"""c8: from the choice of a forward to the loop's next look at its messages, while requests come in. On an idle server
it is no more than the least time of a forward, 11.8 ms, so the shortest prompts come out 2 ms late."""
IN_OUT_MS = 5.6
"""What the client measures beyond the decode instance's own time, single requests of 1,024 tokens."""
PER_TOKEN_US = 1.19
"""By how much that grows per token, s128 to s16384. Counted as work on one request after another (tokenizer, HTTP)."""
BURST_MS = 1.95
"""Between requests of 1,024 tokens as they enter decode, when 8 or 16 are sent at once (c8, tp2to2_c16)."""
MESSAGE_MS = 0.75
"""Half of what decode sees of a transfer beyond the time from prefill's choice of the batch to the end of its transfer:
the grant on its way there, and the notice on its way back."""
OUT_MS = 2.1
"""Of what the client adds; only the sum with the way in can be measured, and only the sum matters."""
STALL_MS = 41.0
"""c1 and q4: TTFT beyond decode's time of the first token, less what the client adds at the end of the request."""
BATCH_MS = 3.0
"""Of a transfer before its first byte, single requests: thread wake-up and polls. 2.5 to 3.5 fit them; c256 was
looked at before this one was kept."""
BANDWIDTH_GB_PER_S = 240.0
"""The same rows, by size."""
DESCRIPTOR_US = 2.9
"""tp2to1_slice_c1 against tp2to2_c1: 36 layers, K and V, 1,024 tokens, 73,728 descriptors a rank."""
TURN_MS = 5.0
"""CPython's switch interval: a thread that wants to go on waits so long for one that does not wait for anything."""
LOOP_TURN_MS = 0.7
"""tp2to1_slice_c16 against tp2to1_slice_c1: beside four workers that post, each descriptor takes less than with one,
for each turn of theirs is followed by a quarter of the loop's instead of all of it."""

SLICES = 36 * 2 * 1024
SINGLES = ("s128", "s512", "s1024", "s2048", "s4096", "s8192")
"""s16384 is left out where it matters that a prompt is one chunk."""


class Host(NamedTuple):
    """Fields of a profile's `host`, in ms."""

    start: float
    launch: float
    result: float
    send: float


def hosts(least_ms: Mapping[str, float]) -> dict[str, Host]:
    """By the least times of forwards, which are those of launches. With 32B nothing was sent behind a launch."""
    return {
        "8b": Host(START_MS, LAUNCH_8B_MS, RESULT_MS, SEND_MS),
        "tp2": Host(START_MS, LAUNCH_TP2_MS, RESULT_TP2_MS, SEND_MS),
        "32b": Host(START_MS, round(least_ms["32b"], 1), RESULT_MS, SEND_MS),
    }


def scenario_fields() -> dict[str, float]:
    """What scenario.yaml must say, in ns."""
    service_ms = BURST_MS - PER_TOKEN_US * 1.024
    ms, us = 1e6, 1e3
    return {
        "front_end.service": round(service_ms, 2) * ms,
        "front_end.service_per_token": PER_TOKEN_US * us,
        "front_end.latency_in": round(IN_OUT_MS - BURST_MS - MESSAGE_MS - OUT_MS, 2) * ms,
        "front_end.latency_out": OUT_MS * ms,
        "front_end.stall": STALL_MS * ms,
        "network.message_latency": MESSAGE_MS * ms,
    }


def transport_fields() -> dict[str, float]:
    """What the catalog must say of its transport."""
    return {
        "batch_ns": BATCH_MS * 1e6,
        "descriptor_ns": DESCRIPTOR_US * 1e3,
        "max_bandwidth": BANDWIDTH_GB_PER_S * 1e9,
        "turn_ns": TURN_MS * 1e6,
        "loop_turn_ns": LOOP_TURN_MS * 1e6,
    }


# What the rows say.


def together(runs: Sequence[str]) -> Served:
    return Served(*(np.concatenate(column) for column in zip(*(served(run) for run in runs), strict=True)))


def line(x: Floats, y: Floats) -> tuple[float, float]:
    """Intercept and slope, robust against a few late ones."""
    found = least_squares(lambda c: c[0] + c[1] * x - y, (float(np.median(y)), 1.0), loss="soft_l1", f_scale=0.5)
    return float(found.x[0]), float(found.x[1])


def burst_ms(run: str, num_requests: int) -> float:
    entries = served(run).decode_entry[:num_requests]
    return float(entries[-1] - entries[0]) / (num_requests - 1)


def in_out_ms() -> float:
    """The first request of a run meets cold servers."""
    values = [served("c1")] + [served(run) for run in ("tp2to2_c1", "tp2to1_slice_c1", "tp2to1_staging1g_c1")]
    return float(np.median(np.concatenate([(run.latency - run.decoded)[-4:] for run in values])))


def stall_ms() -> float:
    both = together(("c1", "q4"))
    late = both.ttft - both.ready - (both.latency - both.decoded)
    return float(np.median(late[late > 20]))  # noqa: PLR2004  either 0 or about 41


def gpu_ms_of_singles() -> Floats:
    """Of the forwards of SINGLES, in their order; those of one token are warm-ups."""
    rows = forwards("lot2_p0")
    return rows.where(rows.num_tokens > 1).gpu_ms[: 3 * len(SINGLES)]


def beside_gpu_ms(singles: Served, gpu_ms: Floats) -> Floats:
    """From the choice of a forward to its first send, without the GPU's time."""
    return singles.prefill_forward - gpu_ms - singles.sent


def beside_gpu_tp2_ms() -> Floats:
    runs = ("tp2to2_c1", "tp2to1_staging1g_c1")
    return np.concatenate([beside_gpu_ms(served(run), forwards(f"{run}_p0").gpu_ms[:5])[1:] for run in runs])


def send_ms() -> float:
    """Seven requests of c8 in one forward: their transfers end one after another."""
    ends = np.sort(served("c8").prefill_forward[1:8])
    return float(ends[-1] - ends[0]) / 6


def launch_ms(run: str, chosen: int, next_taken: int) -> float:
    """From the choice of a forward to the loop's next look at its messages: rows of two requests, by entry."""
    table = stages(run, "p0")
    start = 1e3 * table["entry_unix_s"] + table["bootstrap_ms"] + table["queue_ms"]
    return float(1e3 * table["entry_unix_s"][next_taken] - start[chosen])


def host_of_step_ms() -> float:
    """Steps of batches of 1 to 16 behind one of the same batch size; a longer gap is a pause."""
    table = columns("steps_lot2_d0")
    gaps = 1e3 * (np.diff(table["t_unix_s"]) - table["gpu_s"][1:])
    same = (np.diff(table["num_decode"]) == 0) & (table["num_decode"][1:] <= 16) & (np.abs(gaps) < 1)  # noqa: PLR2004
    return float(gaps[same].mean())


def descriptor_us() -> float:
    def beyond_gpu(run: str) -> float:
        """Warm requests only."""
        return float(np.median(served(run).ready[1:] - forwards(f"{run}_p0").gpu_ms[1:5]))

    return 1e3 * (beyond_gpu("tp2to1_slice_c1") - beyond_gpu("tp2to2_c1")) / SLICES


def loop_turn_ms() -> float:
    """From x = (turn + loop turn / 4) / (turn + loop turn), a descriptor's time with four workers over that with one.

    Decode gets all prompts of the run one after another, nearly always with four workers at work.
    """
    table, num_workers = stages("tp2to1_slice_c16", "d0"), 4
    waits_ms = sum(table[key] for key in ("bootstrap_ms", "alloc_wait_ms", "transfer_ms"))
    ready_ms = 1e3 * table["entry_unix_s"] + waits_ms
    x = 1e3 * float(np.ptp(ready_ms)) / (len(ready_ms) - 1) / SLICES / descriptor_us()
    return TURN_MS * (1 - x) / (x - 1 / num_workers)


def report() -> None:
    """What is used beside what the rows say; an error if the scenario says something else."""
    singles, everyone = together(SINGLES), together((*SINGLES, "s16384"))
    gpu = gpu_ms_of_singles()
    batch, per_gb = line(singles.gb, singles.sent)
    _, per_thousand = line(everyone.tokens / 1e3, everyone.ttft - everyone.ready)
    turns_8b = launch_ms("c8", 0, 7), launch_ms("c8", 9, 15)
    turns_tp2 = launch_ms("tp2to2_c16", 0, 5), launch_ms("tp2to2_c16", 17, 19)
    beside = float(np.median(beside_gpu_ms(singles, gpu)))
    beside_tp2 = float(np.median(beside_gpu_tp2_ms()))
    rows: list[tuple[str, float, Sequence[float]]] = [
        ("host work of a decode step, ms", HOST_OF_STEP_MS, [host_of_step_ms()]),
        ("in and out at 1,024 tokens, ms", IN_OUT_MS, [in_out_ms()]),
        ("growth per token, us", PER_TOKEN_US, [per_thousand]),
        ("gap in a burst, ms: c8, tp2to2_c16", BURST_MS, [burst_ms("c8", 8), burst_ms("tp2to2_c16", 16)]),
        ("stall, ms", STALL_MS, [stall_ms()]),
        ("two messages, ms", 2 * MESSAGE_MS, [float(np.median(singles.ready - singles.prefill_forward))]),
        ("start, result and send, ms", START_MS + RESULT_MS + SEND_MS, [beside]),
        ("the same with TP2", START_MS + RESULT_TP2_MS + SEND_MS, [beside_tp2]),
        ("send, ms: c8", SEND_MS, [send_ms()]),
        ("launch, ms: c8, two bursts", LAUNCH_8B_MS, turns_8b),
        ("launch with TP2, ms: single requests, two bursts", LAUNCH_TP2_MS, [17.5, *turns_tp2]),
        ("transfer without its bytes, ms", BATCH_MS + 72e-3 * DESCRIPTOR_US, [batch]),
        ("bandwidth, GB/s", BANDWIDTH_GB_PER_S, [1e3 / per_gb]),
        ("descriptor, us", DESCRIPTOR_US, [descriptor_us()]),
        ("the loop's turn, ms", LOOP_TURN_MS, [loop_turn_ms()]),
    ]
    print("\nconstants: used, measured")
    for name, used, found in rows:
        print(f"  {name:50} {used:6.2f}   {', '.join(f'{value:.2f}' for value in found)}")
    check_scenario()


def check_scenario() -> None:
    scenario = load_scenario(HERE / "scenario.yaml")
    for field, value in scenario_fields().items():
        section, name = field.split(".")
        said = getattr(getattr(scenario, section), name)
        if said is None or abs(said - value) > 1:
            raise ValueError(f"scenario.yaml: {field} is {said} ns, constants.py says {value:g} ns")
    transport = load_transport(scenario.network.transport)
    for field, value in transport_fields().items():
        if (said := getattr(transport, field)) != value:
            raise ValueError(f"{transport.name}: {field} is {said}, constants.py says {value:g}")
