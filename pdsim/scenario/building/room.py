"""Checks that requests fit the model's context, the KV pools and the staging ring, that decode would grant them pages,
and that the run itself fits the memory of this machine.

Commands refuse a run that does not fit this machine unless the user gives `--yes`. The Python API refuses none.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

from pdsim.dataclass import dataclass
from pdsim.policy.pages import ReserveDecodeTokens, ReserveMaxOutput, num_pages
from pdsim.policy.protocols import Admitted
from pdsim.policy.views import Candidate, QueuedDecode
from pdsim.scenario.building.sizing import layout_of
from pdsim.scenario.building.wiring import planner
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.fields import SIZE
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.memory import Role
from pdsim.workload.request_spec import RequestSpec
from pdsim.workload.trace_file import InputWarning

_LIMITED: ContextVar[bool] = ContextVar("extent_limited", default=False)

# Measured on one core, of small models and short answers: longer ones take more.
_REQUEST_BYTES, _REQUEST_S = 7_000, 200e-6
_INSTANCE_BYTES, _INSTANCE_S = 13_000, 800e-6
_PAIR_BYTES = 50
"""Memory in bytes that pdsim needs for each pair of a prefill and a decode instance."""
POINT_BYTES, POINT_S = 6_000, 2e-3
"""Memory in bytes and time in s that a sweep needs for one point and seed, besides its run."""
_LONG_S = 20
_COUNTS = ("num_requests", "num_sessions", "num_groups", "prompts_per_group")
"""Fields of generated workloads. The product of those that a workload has is the minimum number of its requests."""


@contextmanager
def limited(is_limited: bool, /) -> Iterator[None]:
    """Context in which runs are refused that would not fit the memory of this machine. is_limited: False: no run is
    refused.
    """
    token = _LIMITED.set(is_limited)
    try:
        yield
    finally:
        _LIMITED.reset(token)


def require_room_for_run(scenario: Scenario) -> None:
    """Raises ConfigError if the instances and the requests of a generated workload together do not fit this machine's
    memory. A trace's requests are not counted. Does nothing outside the context manager `limited`.
    """
    counts = [servers.instances * servers.dp for servers in scenario.roles.values()]
    workload = scenario.workload
    requests = 0 if hasattr(workload, "path") else prod(getattr(workload, name, 1) for name in _COUNTS)
    num_bytes = sum(counts) * _INSTANCE_BYTES + requests * _REQUEST_BYTES
    num_bytes += prod(counts) * _PAIR_BYTES if len(counts) > 1 else 0
    time_s = sum(counts) * _INSTANCE_S + requests * _REQUEST_S
    require_room(f"{scenario.name}: {sum(counts):,} instances, {requests:,} requests", num_bytes, time_s)


def require_room(what: str, num_bytes: float, time_s: float) -> None:
    """Raises ConfigError if a run needs more memory than this machine has. Warns if the run takes more than 20 s. Does
    nothing outside the context manager `limited`.

    what: names the run in messages. num_bytes: estimated memory of the run. time_s: estimated time of the run in s.
    """
    if not _LIMITED.get():
        return
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    estimate = f"{what}: about {num_bytes / 1e9:,.1f} GB and {_shown(time_s)} at least"
    if num_bytes > memory_bytes:
        raise ConfigError(f"{estimate}; this machine has {memory_bytes / 1e9:,.1f} GB: --yes runs it anyway")
    if time_s > _LONG_S:
        warnings.warn(estimate, InputWarning, stacklevel=2)


def _shown(time_s: float) -> str:
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
    return next((f"{time_s / unit_s:,.1f} {unit}" for unit_s, unit in units if time_s > unit_s), "less than a second")


def check_requests(scenario: Scenario, requests: Sequence[RequestSpec]) -> None:
    """Raises ConfigError if the workload has no request, if a request does not fit the model's context or a KV pool, if
    decode would never grant it pages, or if the staging ring is too small. The scenario must be resolved.
    """
    if not requests:
        raise ConfigError("the workload has no requests")
    prompts, outputs = [len(spec.prompt) for spec in requests], [len(spec.output) for spec in requests]

    def require(sizes: list[int], role: Role, spare_tokens: int, what: str) -> None:
        pool = scenario.roles[role].capacity_tokens
        states = _state_tokens(scenario, role)
        if (most := max(sizes)) > (room := max(0, pool - spare_tokens - states)):
            request_id = requests[sizes.index(most)].request_id
            beside = f" beside its states, which take pages of {states} tokens" if states else ""
            raise ConfigError(
                f"request {request_id} {what} {most} tokens; with {role}.pool_tokens {pool} an instance has room for "
                f"{room}{beside}: give it a larger GPU, tp, mem_fraction or pool_tokens, or leave the request out"
            )

    totals = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    context = layout_of(scenario, "prefill" if scenario.aggregated is None else "aggregated").model.max_context_tokens
    if (most := max(totals)) > context:
        index = totals.index(most)
        server = "refuses its prompt" if prompts[index] >= context else "cuts off its answer there"
        raise ConfigError(
            f"request {requests[index].request_id} has a prompt of {prompts[index]} tokens and an output of "
            f"{outputs[index]}; {scenario.model} has a context of {context}, and a server {server}: leave such "
            "requests out, or say with context_tokens how far the context is extended"
        )
    if (aggregated := scenario.aggregated) is not None:
        page = scenario.page_tokens("aggregated")
        # as SGLang counts: whole pages of the prompt, the output, a page, and a step's tokens
        grown = [-(-prompt // page) * page + output for prompt, output in zip(prompts, outputs, strict=True)]
        require(grown, "aggregated", page + aggregated.num_ahead_tokens(page), "grows to")
        return
    page = scenario.page_size
    require(prompts, "prefill", 1 + page, "has a prompt of")
    ahead = scenario.pair.decode.num_ahead_tokens(page)
    grown = [total - 2 + ahead for total in totals]
    require(grown, "decode", 0, "grows to")
    _check_grants(scenario, requests)
    _check_ring(scenario, min(prompts))


def _state_tokens(scenario: Scenario, role: Role) -> int:
    """Number of KV tokens that would take as many pages as a request's states of linear-attention layers. vLLM keeps
    two states per request: the state that the running forward reads, and the state that it writes. 0: the model has no
    such layers, or the engine keeps states outside of pages.
    """
    layout = layout_of(scenario, role)
    if scenario.engine != "vllm" or not layout.state_bytes:
        return 0
    return 2 * layout.state_blocks.pages_per_state * scenario.page_tokens(role)


@dataclass(frozen=True)
class _Lone:
    """A request alone in the queue of an idle decode instance, as an admission policy sees it."""

    request_id: int
    num_prompt_tokens: int
    max_output_tokens: int
    num_output_tokens: int = 0
    arrival_ns: int = 0
    priority: int = 0


@dataclass(frozen=True)
class _IdleDecode:
    """What an admission policy sees of an idle decode instance."""

    page_size: int
    num_available_pages: int
    """Number of pages of the KV pool, all of which are free."""
    num_ahead_tokens: int
    """Number of tokens beyond its present KV for which a running request needs pages."""
    now_ns: int = 0
    num_active: int = 0
    num_running_tokens: int = 0
    resume_unit_tokens: int = 1
    running: tuple[QueuedDecode, ...] = ()
    active: tuple[QueuedDecode, ...] = ()
    retracted: tuple[QueuedDecode, ...] = ()


def _check_grants(scenario: Scenario, requests: Sequence[RequestSpec]) -> None:
    """Raises ConfigError if an idle decode instance would never grant pages to a request. All later requests would then
    wait forever.

    Only the policies reserve_decode_tokens and reserve_max_output are checked. Answers of a user's own admission policy
    may change with time.
    """
    decode, page = scenario.pair.decode, scenario.page_tokens("decode")
    policy = decode.admission
    if not isinstance(policy, ReserveDecodeTokens | ReserveMaxOutput):
        return
    longest: dict[int, RequestSpec] = {}
    for spec in requests:
        known = longest.setdefault(spec.max_output_tokens, spec)
        if len(spec.prompt) > len(known.prompt):
            longest[spec.max_output_tokens] = spec
    view = _IdleDecode(page, decode.capacity_tokens // page, decode.num_ahead_tokens(page))
    for spec in longest.values():
        tokens = len(spec.prompt)
        lone = _Lone(spec.request_id, tokens, spec.max_output_tokens)
        if not isinstance(policy.admit(Candidate(lone, tokens, 0, num_pages(tokens, page)), view), Admitted):
            kept = getattr(policy, "reserved_tokens", 0)
            reserve = f" and keeps decode.admission.reserved_tokens {kept} free" if kept else ""
            raise ConfigError(
                f"request {spec.request_id} has a prompt of {tokens} tokens and up to {spec.max_output_tokens} of "
                f"output; an idle decode instance holds {decode.capacity_tokens}{reserve}, so it never grants pages: "
                "give it a larger GPU, tp or mem_fraction, or reserve less"
            )


def _check_ring(scenario: Scenario, prompt_tokens: int) -> None:
    """Raises ConfigError if the staging ring is too small for a cell (the KV of a prompt's part that is staged
    together) of the shortest prompt. No request could then be staged.
    """
    if (staging := scenario.network.staging) is None:
        return
    cell_bytes = planner(scenario, "prefill-0").largest_cell_bytes(num_pages(prompt_tokens, scenario.page_size))
    if cell_bytes > staging.ring:
        raise ConfigError(
            f"network.staging.ring: {SIZE.show(staging.ring)}; the shortest prompt, of {prompt_tokens} tokens, has a "
            f"cell of {SIZE.show(cell_bytes)}, so every request would fail: give the ring at least as much"
        )
