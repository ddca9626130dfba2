"""Real clusters for tests: processes on this machine, a tiny model, and what one process without a cache would say."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

from pdreal.options import Options
from pdreal.real_scenario import real_scenario
from pdreal.run import RealRun
from pdreal.run import run as run_real
from pdreal.tokens import Tokens
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
        "output_tokens": {"use": "uniform", "low": 1, "high": 16},
    },
    "client": {"use": "closed_loop", "concurrency": 6},
}


def scenario(**changes: Any) -> Scenario:
    """1P1D; dotted names, with two underscores for a dot, change fields."""
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in DEFAULT.items()}
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = data
        for key in parents:
            at = at.setdefault(key, {})
        at[last] = value
    return parse_scenario({key: value for key, value in data.items() if value is not None}, base=Path())


def run(scenario: Scenario, *, logs: Path | None = None, check_kv: bool = True) -> tuple[RealRun, Scenario]:
    """To the end, and the scenario as it was resolved."""
    options = Options(check_kv=check_kv)
    resolved, requests = real_scenario(scenario, options)
    return asyncio.run(run_real(resolved, requests, options, logs=logs)), resolved


def expected_outputs(scenario: Scenario) -> dict[int, list[int]]:
    """Of requests that stand alone: no turn of a session."""
    specs = scenario.workload.requests(Streams(scenario.seed))
    return {spec.request_id: _expected(spec) for spec in specs}


def _expected(spec: RequestSpec) -> list[int]:
    return list(continuation(tuple(Tokens(_model().config.vocab_size).ids(spec.prompt).ids()), len(spec.output)))


@cache
def continuation(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    from pdreal.model.reference import generate

    return tuple(generate(_model(), prompt, num_tokens))


@cache
def _model() -> Any:
    import torch
    from pdreal.model.config import from_catalog
    from pdreal.model.transformer import Transformer
    from pdreal.model.weights import weight_source

    device = torch.device("cpu")
    return Transformer.load(
        from_catalog("tiny-qwen3"), weight_source("seed:0", device), dtype=torch.float32, device=device
    )
