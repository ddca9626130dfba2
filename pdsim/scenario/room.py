"""Room: whether each request fits the model's context and the pools, and a run the memory of this machine.

Programs refuse a run that would not fit this machine, but for `--yes`; in Python nothing is refused.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import layout_of
from pdsim.scenario.yaml_file import ConfigError
from pdsim.workload.request_spec import RequestSpec
from pdsim.workload.trace_file import InputWarning

_LIMITED: ContextVar[bool] = ContextVar("extent_limited", default=False)

# Measured on one core, of small models and short answers: longer ones take more.
_REQUEST_BYTES, _REQUEST_S = 7_000, 200e-6
_INSTANCE_BYTES, _INSTANCE_S = 13_000, 200e-6
_PAIR_BYTES = 50
"""Memory that a prefill and a decode instance keep of each other."""
POINT_BYTES, POINT_S = 6_000, 2e-3
"""Memory and time of a sweep's point and seed, before its run."""
_LONG_S = 60
_COUNTS = ("num_requests", "num_sessions", "num_groups", "prompts_per_group")
"""Fields of generated workloads whose product is the least number of requests."""


@contextmanager
def limited(is_limited: bool, /) -> Iterator[None]:
    """Runs that do not fit this machine are refused, or not, for as long as this lasts."""
    token = _LIMITED.set(is_limited)
    try:
        yield
    finally:
        _LIMITED.reset(token)


def require_room_for_run(scenario: Scenario) -> None:
    """Raises ConfigError for more instances or requests than fit; of a trace its file has the requests."""
    counts = [servers.instances * servers.dp for servers in scenario.roles.values()]
    workload = scenario.workload
    requests = 0 if hasattr(workload, "path") else prod(getattr(workload, name, 1) for name in _COUNTS)
    num_bytes = sum(counts) * _INSTANCE_BYTES + requests * _REQUEST_BYTES
    num_bytes += prod(counts) * _PAIR_BYTES if len(counts) > 1 else 0
    time_s = sum(counts) * _INSTANCE_S + requests * _REQUEST_S
    require_room(f"{scenario.name}: {sum(counts):,} instances, {requests:,} requests", num_bytes, time_s)


def require_room(what: str, num_bytes: float, time_s: float) -> None:
    """Raises ConfigError if it does not fit this machine, and warns if it takes long."""
    if not _LIMITED.get():
        return
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    estimate = f"{what}: about {num_bytes / 1e9:,.1f} GB and {_shown(time_s)} at least"
    if num_bytes > memory_bytes:
        raise ConfigError(f"{estimate}; this machine has {memory_bytes / 1e9:,.1f} GB: --yes begins all the same")
    if time_s > _LONG_S:
        warnings.warn(estimate, InputWarning, stacklevel=2)


def _shown(time_s: float) -> str:
    unit_s, unit = next(one for one in ((86400, "days"), (3600, "hours"), (60, "minutes"), (0, "")) if time_s > one[0])
    return f"{time_s / unit_s:,.1f} {unit}" if unit else "less than a minute"


def check_requests(scenario: Scenario, requests: Sequence[RequestSpec]) -> None:
    """Raises ConfigError if a request alone does not fit the model's context or the pools, in a resolved scenario.

    Raises it if there is no request, too.
    """
    if not requests:
        raise ConfigError("workload: it has no requests")
    prompts, outputs = [len(spec.prompt) for spec in requests], [len(spec.output) for spec in requests]

    def require(sizes: list[int], room: int, what: str, where: str) -> None:
        if (most := max(sizes)) > room:
            request_id = requests[sizes.index(most)].request_id
            raise ConfigError(
                f"request {request_id} {what} {most} tokens; {where} {room}: give it a larger GPU, tp or mem_fraction, "
                "or leave the request out"
            )

    totals = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    context = layout_of(scenario, "prefill" if scenario.aggregated is None else "aggregated").model.max_context_tokens
    if (most := max(totals)) > context:
        index = totals.index(most)
        server = "refuses its prompt" if prompts[index] >= context else "ends its answer there"
        raise ConfigError(
            f"request {requests[index].request_id} has a prompt of {prompts[index]} tokens and an output of "
            f"{outputs[index]}; {scenario.model} has a context of {context}, and a server {server}: leave such "
            "requests out, or say with context_tokens how far the context is extended"
        )
    page = scenario.page_size
    if (aggregated := scenario.aggregated) is not None:
        # as SGLang counts: whole pages of the prompt, the output, a page, and a step's tokens
        grown = [-(-prompt // page) * page + output for prompt, output in zip(prompts, outputs, strict=True)]
        room = (aggregated.pool_tokens or 0) - page - aggregated.num_ahead_tokens
        require(grown, room, "grows to", "an aggregated instance has room for")
        return
    prefill, decode = scenario.pair
    require(prompts, (prefill.pool_tokens or 0) - 1 - page, "has a prompt of", "a prefill instance has room for")
    grown = [total - 2 + decode.num_ahead_tokens for total in totals]
    require(grown, decode.pool_tokens or 0, "grows to", "a decode instance holds")
