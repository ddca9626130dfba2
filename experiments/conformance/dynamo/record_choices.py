"""Record what Dynamo's own router chooses: python record_choices.py SITE

SITE: a folder with ai-dynamo-runtime 1.6.1, as pip install --no-deps --target SITE ai-dynamo ai-dynamo-runtime makes,
and with pyzmq and msgpack.
The router is the SelectionService of its wheel: indexer, sequence tracking and selector are those of the frontend. It
needs no GPU, no model and no worker.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from arrivals import (
    LOADS,
    NUM_DRAWS,
    NUM_WORKERS,
    ONE_MORE,
    TIERS,
    Change,
    Prompt,
    Tier,
    blocks_of,
    changes,
    events,
    prompts,
    token_ids,
)

LOGS = Path(__file__).with_name("logs")
INDEXING_S = 0.02
"""The indexer takes a choice in a thread of its own."""


class Publishers:
    """The workers' publishers of KV events, in the format of vLLM 0.33.0 (distributed/kv_events.py)."""

    def __init__(self, name: str) -> None:
        import zmq  # noqa: PLC0415

        self._block_size = LOADS[name].block_size
        self._prompts = prompts(name)
        self._sockets = [zmq.Context.instance().socket(zmq.PUB) for _ in range(NUM_WORKERS)]
        for worker, socket in enumerate(self._sockets):
            socket.bind(event_endpoint(worker))
        self._tiers = {(worker, tier): Tier() for worker in range(NUM_WORKERS) for tier in range(len(TIERS))}
        self._num_sent = [0] * NUM_WORKERS

    def tell(self, change: Change) -> None:
        import msgpack  # noqa: PLC0415

        tier, medium = self._tiers[change.worker, change.tier], TIERS[change.tier]
        tokens, size = self._prompts[change.number], self._block_size
        blocks = blocks_of(tokens, size)
        if change.num_kept is None:
            new = tier.store(change.number, blocks)
            first = len(blocks) - len(new)
            parent = blocks[first - 1] if first else None
            event = ["BlockStored", new, parent, tokens[first * size : len(blocks) * size], size, None, medium]
        else:
            new = tier.drop(change.number, change.num_kept)
            event = ["BlockRemoved", new, medium]
        if new:
            number = self._num_sent[change.worker].to_bytes(8, "big")
            self._num_sent[change.worker] += 1
            self._sockets[change.worker].send_multipart([b"", number, msgpack.packb([0.0, [event], 0])])


def event_endpoint(worker: int) -> str:
    return f"tcp://127.0.0.1:{5600 + worker}"


async def drive(name: str, site: str) -> None:
    """Prints a line for each choice; the router's own log goes to stderr."""
    sys.path.insert(0, site)
    from dynamo.llm import SelectionService  # noqa: PLC0415

    load = LOADS[name]
    service = SelectionService(session_affinity_ttl_secs=3600.0 if load.num_sessions else None)
    publishers, told = (Publishers(name), changes(name)) if load.has_events else (None, {})
    for worker in range(NUM_WORKERS):
        where: dict[str, Any] = {"endpoint": f"http://127.0.0.1:{9000 + worker}", "block_size": load.block_size}
        where |= {"kv_events_endpoint": event_endpoint(worker)} if publishers else {}
        await service.upsert_worker({"worker_id": worker, "model_name": "m", **where})
    await asyncio.sleep(2 if publishers else 0.5)  # it tracks them a little later
    for what, number, prompt in events(name):
        for change in told.get(number, ()) if publishers and prompt is not None else ():
            publishers.tell(change)
            await asyncio.sleep(INDEXING_S)
        if prompt is not None:
            chosen = await service.select_and_reserve(asked(load, number, prompt))
            print(json.dumps({"number": number, "worker": chosen["worker_id"]}))
            await asyncio.sleep(INDEXING_S)
        elif what == "computed":
            await service.prefill_complete(str(number))
        else:
            await service.free_reservation(str(number))
    if name == "temperature":
        for draw in range(NUM_DRAWS):
            chosen = await service.select(asked(load, load.num_requests + draw, ONE_MORE))
            print(json.dumps({"number": load.num_requests + draw, "worker": chosen["worker_id"]}))


def asked(load: Any, number: int, prompt: Prompt) -> dict[str, Any]:
    own = min(number, load.num_requests)
    request = {"model_name": "m", "selection_id": str(number), "token_ids": token_ids(own, prompt)}
    if load.num_sessions:
        request["session_id"] = str(load.session(own))
    return request if load.override is None else {**request, "router_config_override": load.override}


def cost_of(line: dict[str, Any]) -> float:
    """A pinned worker's cost stands in the text."""
    return line["logit"] if "logit" in line else float(re.findall(r"logit: ([0-9.]+)", line["message"])[0])


def record(name: str, site: str) -> None:
    logging = {"DYN_LOG": "warn,dynamo_kv_router::scheduling::selector=info", "DYN_LOGGING_JSONL": "1"}
    environment = {**os.environ, **logging, **LOADS[name].environment}
    command = [sys.executable, __file__, site, name]
    ran = subprocess.run(  # noqa: S603  this file
        command, env=environment, capture_output=True, text=True, check=True
    )
    said = [json.loads(line) for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("{")]
    chosen = ("Selected worker", "Selected pinned worker")
    costs = {int(line["request_id"]): cost_of(line) for line in said if line.get("message", "").startswith(chosen)}
    choices = [{**line, "cost": costs[line["number"]]} for line in said if "number" in line]
    lines = [f"{one['number']} {one['worker']} {one['cost']}\n" for one in choices]
    (LOGS / f"{name}.txt").write_text("".join(lines))


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for load_name in names:
        asyncio.run(drive(load_name, folder))
    if not names:
        for load_name in LOADS:
            record(load_name, folder)
