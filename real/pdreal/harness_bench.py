"""What a decode step takes besides the model: everything between the end of one batch and the begin of the next.

A leader runs as in any cluster: core, executor, control channel, threads, logbooks; only its model answers at once. The
time of a step less the time inside the model is the harness.
"""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from pdreal.launcher import Launcher
from pdreal.logbook import read_records
from pdreal.options import Options
from pdreal.real_scenario import real_scenario
from pdreal.requests import Sampling
from pdreal.scratch_folder import ScratchFolder
from pdsim.scenario.loading import parse_scenario

_PROMPT_TOKENS = 256
_OUTPUT_TOKENS = 300
_NUM_REQUESTS = 32


def harness_ms(*, tp: int = 1) -> dict[str, float]:
    """Of decode steps with all requests in the batch: median, 90th and 99th percentile."""
    with ScratchFolder() as logs:
        asyncio.run(_run(_scenario(tp), logs))
        steps = [
            step for step in read_records(logs).steps if step.kind == "decode" and step.num_requests == _NUM_REQUESTS
        ]
    gaps = [(b.start_ns - a.start_ns - a.duration_ns) / 1e6 for a, b in pairwise(steps)]
    cuts = quantiles(gaps, n=100)
    return {"steps": len(gaps), "median_ms": median(gaps), "p90_ms": cuts[89], "p99_ms": cuts[98]}


def _scenario(tp: int) -> dict[str, Any]:
    server = {"gpu": "h100", "tp": tp, "pool_tokens": 24576, "max_running_requests": _NUM_REQUESTS}
    return {
        "model": "tiny-qwen3",
        "page_size": 16,
        "prefill": {**server, "chunked_prefill_tokens": 2048},
        "decode": {**server, "admission": {"use": "reserve_decode_tokens", "reserved_tokens": 8}},
        "network": {"transport": "shared-memory"},
        "workload": {"use": "random_lengths", "num_requests": 1, "input_tokens": 8, "output_tokens": 1},
    }


async def _run(data: dict[str, Any], logs: Path) -> None:
    options = Options(model_answers_at_once=True)
    scenario, _ = real_scenario(parse_scenario(data, base=Path()), options)
    launcher = Launcher(scenario, options, folder=logs)
    await launcher.start()
    sampling = Sampling(_OUTPUT_TOKENS, ignore_eos=True)
    requests = [launcher.submit([i % 512] * _PROMPT_TOKENS, sampling) for i in range(_NUM_REQUESTS)]
    for request in requests:
        async for _ in request:
            pass
    await launcher.stop()


if __name__ == "__main__":
    print(json.dumps(harness_ms()))
