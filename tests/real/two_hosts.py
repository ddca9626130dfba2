"""Runs random scenarios on two hosts whose link is slowed and cut, and writes the outcome of every run:

    python -m tests.real.two_hosts --count 50 --out outcomes.csv

Each host is a network namespace of this machine. The second host's clock is hours ahead of the first host's.
"""

import argparse
import asyncio
import csv
import json
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from pdreal.clients import Clients
from pdreal.control.logbook import read_journal, read_records
from pdreal.launcher import Launcher
from pdreal.settings.host import Hosts
from pdreal.settings.options import Options
from pdreal.settings.scenario import real_scenario

from pdsim.core.journal.replay import replay
from pdsim.core.messages import TransferLost
from pdsim.scenario.building.machines import restarted, state_machines
from pdsim.workload.client import ClosedLoop
from tests.real import clusters
from tests.real.namespaces import AWAY, HOME, Namespaces, missing

HEALTH = {
    "heartbeat_interval": "500 ms",
    "bootstrap_timeout": "8 s",
    "waiting_timeout": "20 s",
    "release_timeout": "8 s",
    "transfer_timeout": "8 s",
}
LIMIT_S = 240.0
MIDDLE = -1
"""Number that takes the place of a seed: a slow link is then cut twice in the middle of transfers, for longer than
Mooncake's time limit.
"""
_LONG_TRANSFERS: dict[str, Any] = {
    "network__transport": "mooncake-tcp",
    "prefill__instances": 2,
    "health": HEALTH | {"heartbeat_failures": 40, "waiting_timeout": "60 s", "bootstrap_timeout": "60 s"},
    "router": "round_robin",
    "workload__num_requests": 30,
    "workload__input_tokens": {"use": "uniform", "low": 100, "high": 300},
    "client__concurrency": 8,
}
_CUTS = [
    (0.1, "slow", 8.0),
    (2.0, "cut", 0.0),
    (9.0, "join", 0.0),
    (10.0, "slow", 8.0),
    (13.0, "cut", 0.0),
    (20.0, "join", 0.0),
]


def random_scenario(draw: Random) -> dict[str, Any]:
    """Random changes of the scenario clusters.DEFAULT, by field path with two underscores for each dot."""
    num_prefill, num_decode = draw.choice([(1, 1), (2, 1), (1, 2)])
    changes: dict[str, Any] = {
        "seed": draw.randrange(1000),
        "network__transport": "mooncake-tcp",
        "prefill__instances": num_prefill,
        "decode__instances": num_decode,
        "prefill__layer_groups": draw.choice([0, 0, 1]),
        "prefill__radix_cache": draw.random() < 0.8,
        "decode__radix_cache": draw.random() < 0.5,
        "health": HEALTH | {"heartbeat_failures": draw.choice([3, 15])},
        "router": "round_robin",
        "workload__num_requests": draw.randrange(20, 40),
        "workload__output_tokens": draw.choice([12, {"use": "uniform", "low": 1, "high": 40}]),
    }
    if num_prefill + num_decode == 2 and draw.random() < 0.5:
        changes["decode__tp" if draw.random() < 0.5 else "prefill__tp"] = 2
        changes["prefill__layer_groups"] = 0  # these need equal sizes
        if draw.random() < 0.5:
            changes["network__staging"] = {"ring": "4 MiB"}
    if draw.random() < 0.7:
        changes |= random_tiers(draw, [role for role in ("prefill", "decode") if changes[f"{role}__radix_cache"]])
    rate = f"{draw.uniform(5, 25):.1f}/s"
    changes["client"] = draw.choice(
        [
            {"use": "closed_loop", "concurrency": draw.randrange(2, 13)},
            {"use": "open_loop", "arrivals": {"use": "poisson", "rate": rate}},
        ]
    )
    faults: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        role, count = draw.choice([("prefill", num_prefill), ("decode", num_decode)])
        kill = {"at": f"{draw.uniform(0.2, 4):.2f} s", "kill": f"{role}-{draw.randrange(count)}"}
        faults.append({**kill, "restart_after": f"{draw.uniform(0.1, 1):.2f} s"})
    if draw.random() < 0.4:
        faults.append({"abort_fraction": draw.uniform(0.05, 0.3), "within": "1 s"})
    if faults:
        changes["faults"] = faults
    return changes


def random_tiers(draw: Random, roles: list[str]) -> dict[str, Any]:
    """Changes that give these roles small pools with host memory behind their prefix caches, and prompts whose prefixes
    were evicted to host memory.
    """
    tight = {
        "workload__num_prefixes": 8,
        "prefill__pool_tokens": 320,
        "decode__pool_tokens": 320,
        "decode__admission": {"use": "reserve_decode_tokens", "reserved_tokens": 4},
    }
    write = ["write_through", "write_through_selective", "write_back"]
    for role in roles:
        tight |= {
            f"{role}__host_cache": draw.choice(["0.2 MB", "4 MB"]),
            f"{role}__host_cache_write": draw.choice(write),
        }
    return tight


def random_link(draw: Random) -> list[tuple[float, str, float]]:
    """Random events of the link: time in s; cut, slow or join; and rate in Mbit/s. At the end the link has its full
    speed.
    """
    events, at_s = [], draw.uniform(0.2, 1.5)
    for _ in range(draw.randrange(1, 4)):
        what, mbits_per_s = draw.choice([("cut", 0.0), ("slow", draw.choice([1.0, 5.0, 20.0]))])
        events.append((at_s, what, mbits_per_s))
        at_s += draw.choice([0.3, 1.0, 3.0, 7.0])
        events.append((at_s, "join", 0.0))
        at_s += draw.uniform(0.5, 2)
    return events


def hosts_of(draw: Random, namespaces: Namespaces, hours_ahead: int) -> Hosts:
    """The two hosts, each with the instances of one role."""
    here, there = draw.choice([("prefill-*", "decode-*"), ("decode-*", "prefill-*")])
    command = f"ip netns exec {namespaces.away} unshare --time --monotonic {hours_ahead * 3600} --fork"
    agent = {"address": AWAY, "instances": [there], "start": f"{command} {sys.executable} -m pdreal host"}
    return Hosts.model_validate({"hosts": {"home": {"address": HOME, "instances": [here]}, "away": agent}})


async def play(seed: int, namespaces: Namespaces, logs: Path) -> dict[str, Any]:
    """Runs one scenario to its end. Returns a row with its numbers and its problems."""
    draw = Random(seed)
    hours_ahead = draw.randrange(1, 1000)
    scenario = clusters.scenario(**(_LONG_TRANSFERS if seed == MIDDLE else random_scenario(draw)))
    events = _CUTS if seed == MIDDLE else random_link(draw)
    options = Options(check_kv=True, hosts=hosts_of(draw, namespaces, hours_ahead))
    resolved, requests = real_scenario(scenario, options)
    clients = Clients(resolved, requests, options, progress=lambda _: None)
    launcher = Launcher(resolved, options, folder=logs, on_end=clients.on_end)
    acts = {"cut": lambda _: namespaces.cut(), "join": lambda _: namespaces.join(), "slow": namespaces.slow}
    problems = []
    await launcher.start()
    timers = [
        launcher.timeline.after(round(at_s * 1e9), lambda _, act=acts[what], rate=mbits_per_s: act(rate))
        for at_s, what, mbits_per_s in events
    ]
    try:
        async with asyncio.timeout(LIMIT_S):
            await clients.serve(launcher)
    except TimeoutError:
        problems.append(f"{len(requests) - len(clients.outputs)} requests never ended")
    for timer in timers:
        timer.cancel()
    namespaces.join()
    problems += await launcher.stop()
    if launcher.failure:
        problems.append(launcher.failure)
    records = read_records(logs)
    finished = [record.request_id for record in records.requests if record.outcome == "finished"]
    failed = [record for record in records.requests if record.outcome == "failed"]
    if len(finished) + len(failed) != len(requests):
        problems.append("a request has no outcome")
    problems += [f"request {record.request_id} failed without a reason" for record in failed if not record.reason]
    outputs = {request_id: clients.outputs[request_id] for request_id in finished}
    problems += [f"request {i} has other tokens" for i in clusters.wrong_outputs(resolved, outputs)]
    clock = launcher.hosts["away"]
    if abs(clock["clock_offset_ms"] - hours_ahead * 3.6e6) > clock["clock_error_ms"] + 0.1:
        problems.append(f"the other clock is {hours_ahead} hours ahead, measured as {clock}")
    num_calls, lost = 0, set()
    try:
        entries = list(read_journal(logs))
        lost = {arg.unit for entry in entries for arg in entry.args if isinstance(arg, TransferLost)}
        num_calls = replay(entries, state_machines(resolved), partial(restarted, resolved))
    except Exception as different:  # noqa: BLE001  whatever is not as it was
        problems.append(f"replay: {different}")
    reasons = Counter(record.reason.split(":")[0] for record in failed)
    copied_pages: Counter[str] = Counter()
    for copy in records.host_copies:
        copied_pages[copy.kind] += copy.num_pages
    return {
        "seed": seed,
        "loop": "closed" if isinstance(scenario.client, ClosedLoop) else "open",
        "requests": len(requests),
        "finished": len(finished),
        "failed": len(failed),
        "cuts_s": " ".join(f"{b - a:.1f}" for (a, what, _), (b, *_) in pairwise(events) if what == "cut"),
        "slow_mbits": " ".join(f"{rate:g}" for _, what, rate in events if what == "slow"),
        "faults": len(resolved.faults),
        "restarts": sum(launcher._instances.fleet.lives.values()),
        "transfers_lost": len(lost),
        "pages_to_host": copied_pages["write"],
        "pages_from_host": copied_pages["load"],
        "retractions": sum(record.num_retractions for record in records.requests),
        "calls_replayed": num_calls,
        "clock_error_ms": round(clock["clock_error_ms"], 3),
        "reasons": "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()),
        "problems": "; ".join(problems),
    }


def outcome(seed: int) -> dict[str, Any]:
    """Runs the scenario of a seed in namespaces of its own. Returns the row of `play`."""
    with Namespaces(f"pdreal-{seed}") as namespaces:
        command = [sys.executable, "-m", "tests.real.two_hosts", "--play", str(seed)]
        inside = ["ip", "netns", "exec", namespaces.home, *command]
        done = subprocess.run(inside, capture_output=True, text=True, check=False, timeout=2 * LIMIT_S)
        left = namespaces.processes()
    if done.returncode:
        return {"seed": seed, "problems": done.stderr[-2000:]}
    row: dict[str, Any] = json.loads(done.stdout)
    if left:
        row["problems"] += f"; {left} processes are left"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.play is not None:
        with TemporaryDirectory() as logs:
            row = asyncio.run(play(told.play, Namespaces(f"pdreal-{told.play}"), Path(logs)))
        print(json.dumps(row))
        return
    if why := missing():
        raise SystemExit(why)
    rows = []
    for seed in range(told.first, told.first + told.count):
        rows.append(outcome(seed))
        print(rows[-1], flush=True)
        if told.out is not None:
            with told.out.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, max(rows, key=len).keys())
                writer.writeheader()
                writer.writerows(rows)
    wrong = [row for row in rows if row["problems"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} are as they should be")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
