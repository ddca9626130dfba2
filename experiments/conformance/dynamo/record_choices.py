"""Record what Dynamo's own router chooses: python record_choices.py SITE

SITE: a folder with ai-dynamo-runtime 1.6.1, as pip install --no-deps --target SITE ai-dynamo ai-dynamo-runtime makes.
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

from arrivals import LOADS, NUM_DRAWS, NUM_WORKERS, ONE_MORE, Prompt, events

LOGS = Path(__file__).with_name("logs")
INDEXING_S = 0.02
"""The indexer takes a choice in a thread of its own."""


def token_ids(number: int, prompt: Prompt) -> list[int]:
    return [stream * 10_000 + start + i for stream, start, count in prompt.spans(number) for i in range(count)]


async def drive(name: str, site: str) -> None:
    """Prints a line for each choice; the router's own log goes to stderr."""
    sys.path.insert(0, site)
    from dynamo.llm import SelectionService  # noqa: PLC0415

    load = LOADS[name]
    service = SelectionService(session_affinity_ttl_secs=3600.0 if load.num_sessions else None)
    for worker in range(NUM_WORKERS):
        where = {"endpoint": f"http://127.0.0.1:{9000 + worker}", "block_size": load.block_size}
        await service.upsert_worker({"worker_id": worker, "model_name": "m", **where})
    await asyncio.sleep(0.5)  # it tracks them a little later
    for what, number, prompt in events(name):
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
