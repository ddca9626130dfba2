"""Runs real clusters for tests: processes on this machine with a tiny model. Compares their outputs with those of one
process without a cache.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.clients import Clients, Tokens
from pdreal.control.requests import Request
from pdreal.launcher import Launcher
from pdreal.run import RealRun
from pdreal.run import run as run_real
from pdreal.settings.options import Options
from pdreal.settings.scenario import real_scenario

from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.schema import Scenario
from pdsim.workload.request_spec import RequestSpec, Streams

DEFAULT: dict[str, Any] = {
    "model": "tiny-qwen3",
    "page_size": 4,
    "prefill": {"gpu": "h100", "pool_tokens": 4096, "max_running_requests": 8, "chunked_prefill_tokens": 64},
    "decode": {"gpu": "h100", "pool_tokens": 4096, "max_running_requests": 8},
    "network": {"transport": "shared-memory"},
    "workload": {
        "use": "prefix_pool",
        "num_requests": 20,
        "num_prefixes": 3,
        "prefix_tokens": 40,
        "input_tokens": {"use": "uniform", "low": 3, "high": 90},
        "output_tokens": {"use": "uniform", "low": 1, "high": 10},
    },
    "client": {"use": "closed_loop", "concurrency": 6, "warm_up_requests": 0},
}


def scenario(**changes: Any) -> Scenario:
    """A scenario with one prefill and one decode instance. changes: values by field path, with two underscores for each
    dot, such as decode__tp=2. None: the field is left out.
    """
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in DEFAULT.items()}
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = data
        for key in parents:
            at = at.setdefault(key, {})
        at[last] = value
    return parse_scenario({key: value for key, value in data.items() if value is not None}, base=Path())


def run(
    scenario: Scenario, *, logs: Path | None = None, check_kv: bool = True, options: Options | None = None
) -> tuple[RealRun, Scenario]:
    """Runs a scenario to its end. Returns the run and the resolved scenario. With drafts, those that are accepted
    repeat the outputs of one process without a cache.
    """
    options = options or Options(check_kv=check_kv)
    resolved, requests = real_scenario(scenario, options)
    reference = {} if resolved.acceptance is None else _outputs(resolved, requests)
    return asyncio.run(run_real(resolved, requests, options, logs=logs, reference=reference)), resolved


def run_restarting(scenario: Scenario, instance_id: str, num_last: int, *, logs: Path) -> tuple[RealRun, Scenario]:
    """Runs a scenario in which a fault kills the instance and restarts it. The last `num_last` requests are sent when
    all others have ended and the instance answers again. Returns the run and the resolved scenario.
    """
    options = Options(check_kv=True)
    resolved, requests = real_scenario(scenario, options)
    unharmed = resolved.model_copy(update={"faults": ()})

    async def play() -> RealRun:
        first = Clients(resolved, requests[:-num_last], options, progress=lambda _: None)
        last = Clients(unharmed, requests[-num_last:], options, progress=lambda _: None)
        late = {spec.request_id for spec in requests[-num_last:]}

        def on_end(request: Request) -> None:
            (last if request.request_id in late else first).on_end(request)

        launcher = Launcher(resolved, options, folder=logs, on_end=on_end)
        await launcher.start()
        await _until(instance_id, True, launcher)
        serving = asyncio.create_task(first.serve(launcher))
        await _until(instance_id, False, launcher)
        await _until(instance_id, True, launcher)
        await serving
        await last.serve(launcher)
        return RealRun(first.outputs | last.outputs, await launcher.stop(), launcher.failure)

    return asyncio.run(play()), resolved


async def _until(instance_id: str, answers: bool, launcher: Launcher) -> None:
    async with asyncio.timeout(60):
        while (instance_id in launcher.load()) is not answers:  # noqa: ASYNC110  the launcher tells nobody
            await asyncio.sleep(0.02)


def run_killing(scenario: Scenario, instance_id: str, rank: int, *, logs: Path) -> tuple[RealRun, Scenario]:
    """Runs a scenario, and kills one rank of an instance when requests are under way. Returns the run and the resolved
    scenario.
    """
    resolved, requests = real_scenario(scenario, Options())

    async def play() -> RealRun:
        clients = Clients(resolved, requests, Options(), progress=lambda _: None)
        launcher = Launcher(resolved, Options(), folder=logs, on_end=clients.on_end)
        await launcher.start()
        launcher.timeline.after(100_000_000, lambda _: launcher.kill(instance_id, rank=rank))
        await clients.serve(launcher)
        return RealRun(clients.outputs, await launcher.stop(), launcher.failure)

    return asyncio.run(play()), resolved


def run_scribbling(scenario: Scenario) -> str:
    """Runs a scenario, and overwrites the memory of the first decode rank while it serves, until the cluster notices.
    Returns the cluster's error; "nothing" if the cluster does not notice.
    """
    options = Options(check_kv=True)
    resolved, requests = real_scenario(scenario, options)

    async def play() -> str:
        clients = Clients(resolved, requests, options, progress=lambda _: None)
        launcher = Launcher(resolved, options, on_end=clients.on_end)
        await launcher.start()
        peer = json.loads(launcher._instances.bootstrap.memories["decode-0"][0]["address"])
        (_, num_bytes, file), *_ = peer["regions"]
        opened = os.open(f"/proc/{peer['pid']}/fd/{file}", os.O_RDWR)
        with mmap(opened, num_bytes) as memory:
            serving = asyncio.create_task(clients.serve(launcher))
            while launcher.failure is None and not serving.done():
                memory[:] = os.urandom(1) * num_bytes
                await asyncio.sleep(0.001)
        await serving
        await launcher.stop()
        return launcher.failure or "nothing"

    return asyncio.run(play())


def skip_without(transport: str) -> None:
    """Skips the test, with the engine's reason, if this machine cannot run the transfer engine."""
    import torch
    from pdreal.transports.opening import open_transport
    from pdreal.transports.protocol import UnavailableError

    try:
        open_transport(transport, torch.device("cpu")).close()
    except UnavailableError as missing:
        pytest.skip(str(missing))


def _outputs(scenario: Scenario, requests: Sequence[RequestSpec]) -> dict[int, list[int]]:
    from tests.real.models import generate

    model = _model(scenario.model)
    prompts = Tokens(model.config.vocab_size)
    return {spec.request_id: generate(model, prompts.ids(spec.prompt).ids(), len(spec.output)) for spec in requests}


def wrong_outputs(scenario: Scenario, outputs: dict[int, list[int]], options: Options | None = None) -> list[int]:
    """Ids of the requests that did not get all the tokens that the model makes from their prompt. The workload must
    have no sessions.

    Each token must be the token that one process without a cache finds likeliest after the prompt and the tokens
    before.
    """
    specs = {spec.request_id: spec for spec in scenario.workload.requests(Streams(scenario.seed))}
    options = options or Options()
    model = _model(scenario.model, options.quantization)
    narrow_kv = options.kv_cache_dtype == "fp8"
    prompts = Tokens(model.config.vocab_size)

    def is_wrong(spec: Any, tokens: list[int]) -> bool:
        prompt = prompts.ids(spec.prompt).ids()
        return len(tokens) != len(spec.output) or not is_greedy(prompt, tokens, model, narrow_kv)

    return [i for i, tokens in outputs.items() if is_wrong(specs[i], tokens)]


def is_greedy(prompt: Sequence[int], output: list[int], model: Any = None, narrow_kv: bool = False) -> bool:
    import torch

    from tests.real.models import WholeSequence

    model = model or _model(DEFAULT["model"])
    sequence = torch.tensor([*prompt, *output[:-1]])
    rows = torch.arange(len(prompt) - 1, len(sequence))
    with torch.inference_mode():
        logits = model.logits(sequence, torch.arange(len(sequence)), WholeSequence(narrow_kv), rows)
        return bool(model.best_tokens(logits).tolist() == output)


@cache
def _model(name: str, quantization: str | None = None) -> Any:
    import torch
    from pdreal.model.transformer import Transformer
    from pdreal.model.weights import weight_source
    from pdreal.settings.model import from_catalog

    device = torch.device("cpu")
    source = weight_source("seed:0", device, quantization)
    return Transformer.load(from_catalog(name), source, dtype=torch.float32, device=device)
