"""Random clusters and loads, small enough to fill every pool and to hit every limit."""

from typing import Any

from hypothesis import strategies as st

from pdsim.core.sequence import Spans
from pdsim.policy.pages import FreePages, ReserveMaxOutput
from pdsim.policy.protocols import PrefillPolicy
from pdsim.scenario.building.sizing import instance_ids
from pdsim.scenario.rules import RULES
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import BUILT_IN, ROUTING_POLICIES
from pdsim.scenario.sections.faults import ClientAbort, ClientAborts, Fault, HealthSettings, Kill, SlowLink
from pdsim.scenario.sections.front_end import FrontEndSettings
from pdsim.workload.request_spec import RequestSpec, Streams
from tests.support import MILLISECOND, request, small, small_aggregated

page_sizes = st.sampled_from([1, 2, 4, 16])
KV_TOKEN_BYTES = 114_688
PREFILL_POLICIES = [name for name in BUILT_IN[PrefillPolicy] if name != "priority"]


@st.composite
def loads(draw: st.DrawFn) -> list[RequestSpec]:
    """Random requests with shared prefixes, sessions that fork and join, bursts and gaps."""
    specs: list[RequestSpec] = []
    for i in range(draw(st.integers(1, 14))):
        earlier = draw(st.sampled_from([None, *specs])) if draw(st.booleans()) and specs else None
        output = draw(st.integers(1, 40))
        if earlier is not None:
            history = earlier.prompt.then(earlier.output)
            prompt = history.then(Spans.of(20_000 + i, draw(st.integers(1, 20))))
            think = draw(st.integers(0, 50)) * MILLISECOND
            awaited = {earlier.request_id, draw(st.sampled_from(specs)).request_id}
            spec = request(i, prompt, output, after=tuple(awaited), think_ns=think)
        else:
            prefix = (draw(st.integers(0, 2)), 0, draw(st.integers(0, 60)))
            prompt = Spans((prefix, (30_000 + i, 0, draw(st.integers(1, 60)))))
            spec = request(i, prompt, output, arrival_ns=draw(st.integers(0, 300)) * MILLISECOND)
        if draw(st.booleans()):
            spec = spec._replace(max_output_tokens=output + draw(st.integers(0, 30)))
        specs.append(spec)
    return specs


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Random disaggregated clusters. Pools range from large ones to the smallest that hold each request alone."""
    specs = draw(loads())
    page = draw(page_sizes)
    reserved = draw(st.integers(0, 12))
    whole = max(len(s.prompt) + max(len(s.output), s.max_output_tokens) for s in specs)
    least = whole + reserved + 2 * page + 2
    decode_pool = least + draw(st.sampled_from([0, 3, 17, 60, 250, 4000]))
    prefill_pool = least + page + draw(st.sampled_from([0, 5, 30, 200, 4000]))
    chunk = draw(st.sampled_from([0, 16, 32, 64]))
    closed: dict[str, Any] = {"use": "closed_loop", "concurrency": draw(st.integers(1, 8))}
    policies: dict[str, Any] = {
        "prefill__policy": draw(st.sampled_from(PREFILL_POLICIES)),
        "prefill__transfer": draw(st.sampled_from(["every_chunk", "whole_prompt"])),
        "prefill__eviction": draw(st.sampled_from(["lru", "lfu", "fifo"])),
        "decode__eviction": draw(st.sampled_from(["lru", "lfu", "fifo"])),
        "decode__preemption": draw(st.sampled_from(["fewest_outputs_first", "last_arrived_first"])),
        "router": draw(st.sampled_from(ROUTING_POLICIES)),
        "client": draw(st.sampled_from(["open_loop", closed])),
        "decode__admission": draw(
            st.sampled_from([{"use": "reserve_decode_tokens", "reserved_tokens": reserved}, "reserve_max_output"])
        ),
    }
    prefill_tp, decode_tp = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (4, 1), (1, 2), (8, 4)]))
    shortest_bytes = min(-(-len(s.prompt) // page) for s in specs) * page * KV_TOKEN_BYTES
    staging: dict[str, Any] = {
        "ring": draw(st.sampled_from(["20 MB", "1 GB", *["8 MB"] * (shortest_bytes <= 8_000_000)])),
        "prefill_buffer": draw(st.sampled_from(["1 MB", "1 GB"])),
    }
    return small(
        *specs,
        prefill__tp=prefill_tp,
        decode__tp=decode_tp,
        prefill__layer_groups=draw(st.sampled_from([0, 1, 5, 28])) if prefill_tp == decode_tp else 0,
        network__staging=draw(st.sampled_from([None, staging])),
        page_size=page,
        prefill__instances=draw(st.integers(1, 3)),
        prefill__pool_tokens=prefill_pool,
        prefill__radix_cache=draw(st.booleans()),
        prefill__max_running_requests=draw(st.integers(1, 6)),
        prefill__chunked_prefill_tokens=chunk,
        prefill__max_prefill_tokens=draw(st.sampled_from([16, 50, 1000])),
        prefill__prefill_max_requests=draw(st.sampled_from([None, None, 1, 2])),
        prefill__overlap=draw(st.booleans()),
        decode__instances=draw(st.integers(1, 2)),
        decode__pool_tokens=decode_pool,
        decode__radix_cache=draw(st.booleans()),
        decode__max_running_requests=draw(st.integers(1, 6)),
        network__bandwidth=draw(st.sampled_from(["1 MB/s", "100 MB/s", "100 GB/s"])),
        cost=draw(st.sampled_from(COSTS)),
        **policies,
    )


@st.composite
def optimistic_scenarios(draw: st.DrawFn) -> Scenario:
    """Random clusters in which prompts begin before decode has granted pages, or get their pages when they are
    computed.
    """
    scenario = draw(scenarios())
    allocation, attempts = draw(st.sampled_from([("prefill_complete", None), ("early", 1), ("early", 3)]))
    prefill = scenario.pair.prefill.model_copy(update={"optimistic_attempts": attempts, "layer_groups": 0})
    decode = scenario.pair.decode.model_copy(update={"allocation": allocation})
    return scenario.model_copy(update={"prefill": prefill, "decode": decode})


@st.composite
def crowds(draw: st.DrawFn) -> list[RequestSpec]:
    """Random requests with short prompts and long outputs, one after another. Each finds room in a small pool, and
    together they outgrow it.
    """
    lengths = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(15, 40)), min_size=4, max_size=10))
    gap_ns = draw(st.integers(1, 60)) * MILLISECOND
    return [request(i, prompt, output, arrival_ns=i * gap_ns) for i, (prompt, output) in enumerate(lengths)]


@st.composite
def crowded_scenarios(draw: st.DrawFn) -> Scenario:
    """Random clusters with decode pools that running requests outgrow together."""
    specs = draw(crowds())
    page = draw(page_sizes)
    whole = max(len(s.prompt) + len(s.output) for s in specs)
    return small(
        *specs,
        page_size=page,
        prefill__pool_tokens=draw(st.sampled_from([20, 40, 4000])) + 2 * page,
        prefill__chunked_prefill_tokens=draw(st.sampled_from([0, 16, 32])),
        decode__pool_tokens=whole + 2 * page + draw(st.sampled_from([0, 17, 60])),
        decode__radix_cache=draw(st.booleans()),
        decode__max_running_requests=draw(st.sampled_from([3, 14])),
        decode__preemption=draw(st.sampled_from(["fewest_outputs_first", "last_arrived_first"])),
        network__bandwidth=draw(st.sampled_from(["1 MB/s", "100 GB/s"])),
        cost=draw(st.sampled_from([*COSTS, QUICK_PREFILL])),
    )


NEVER = st.none()
prompt_limits = st.sampled_from([None, None, 5, 12])


@st.composite
def vllm_scenarios(draw: st.DrawFn, hold_timeout_ms: st.SearchStrategy[int | None] = NEVER) -> Scenario:
    """Random clusters of vLLM, with the loads of the clusters of SGLang. hold_timeout_ms: draws prefill.hold_timeout in
    ms.
    """
    scenario = draw(st.one_of(scenarios(), crowded_scenarios()))
    timeout_ms = draw(hold_timeout_ms)
    timeout_ns = None if timeout_ms is None else timeout_ms * MILLISECOND
    changes = {"layer_groups": 0, "hold_timeout": timeout_ns, "long_prefill_tokens": draw(prompt_limits)}
    prefill = scenario.pair.prefill.model_copy(update=changes)
    admission = draw(st.sampled_from([FreePages(), FreePages(), ReserveMaxOutput()]))
    decode = scenario.pair.decode.model_copy(update={"allocation": "prefill_complete", "admission": admission})
    network = scenario.network.model_copy(update={"staging": None})
    return scenario.model_copy(update={"engine": "vllm", "prefill": prefill, "decode": decode, "network": network})


@st.composite
def divided_scenarios(draw: st.DrawFn) -> Scenario:
    """Random clusters whose decode GPUs divide the KV of each request (dcp), with the same loads and nearly as small
    pools.
    """
    scenario = draw(st.one_of(scenarios(), optimistic_scenarios(), crowded_scenarios(), vllm_scenarios()))
    prefill, decode = scenario.pair
    prefill_tp, tp, dcp = draw(st.sampled_from([(1, 2, 2), (4, 4, 4), (4, 2, 2), (2, 8, 8)]))
    dcp = draw(st.sampled_from([dcp, 2])) if scenario.engine == "sglang" else dcp
    pages = -(-decode.pool_tokens // (dcp * scenario.page_size)) + 2
    decode = decode.model_copy(update={"tp": tp, "dcp": dcp, "pool_tokens": pages * dcp * scenario.page_size})
    changes = {
        "model": "tiny-deepseek-v3",
        "prefill": prefill.model_copy(update={"tp": prefill_tp, "layer_groups": 0}),
        "decode": decode,
        "network": scenario.network.model_copy(update={"staging": None}),
    }
    scenario = scenario.model_copy(update=changes)
    roles = {role: servers.model_copy(update={"pp": 2}) for role, servers in scenario.roles.items()}
    staged = scenario.model_copy(update=roles)
    return staged if draw(st.booleans()) and not any(wrong(staged) for wrong in RULES) else scenario


@st.composite
def vllm_aggregated_scenarios(draw: st.DrawFn) -> Scenario:
    """Random aggregated clusters of vLLM, with the loads of aggregated clusters of SGLang."""
    scenario = draw(aggregated_scenarios())
    limits = {"long_prefill_tokens": draw(prompt_limits), "long_prefill_adaptive": draw(st.booleans())}
    changes = {**limits, "schedule_conservativeness": 1.0}
    aggregated = scenario.aggregated.model_copy(update=changes)
    return scenario.model_copy(update={"engine": "vllm", "engine_version": None, "aggregated": aggregated})


@st.composite
def aggregated_scenarios(draw: st.DrawFn) -> Scenario:
    """Random aggregated clusters. Pools range from large ones to the smallest that hold each request alone."""
    crowd = draw(st.booleans())
    specs = draw(crowds() if crowd else loads())
    page = draw(page_sizes)
    whole = max(-(-len(s.prompt) // page) * page + len(s.output) for s in specs)
    slack = draw(st.sampled_from([0, 17, 60] if crowd else [0, 3, 17, 60, 250, 4000]))
    policy = draw(st.sampled_from(PREFILL_POLICIES))
    releases = [None] if policy in ("hrrn", "shortest_prefill_first") else [None, "0.5.12"]
    closed: dict[str, Any] = {"use": "closed_loop", "concurrency": draw(st.integers(1, 8))}
    chunk_tokens = draw(st.sampled_from([0, 16, 32, 64]))
    return small_aggregated(
        *specs,
        page_size=page,
        aggregated__instances=1 if crowd else draw(st.integers(1, 3)),
        aggregated__pool_tokens=whole + 2 * page + 1 + slack,
        aggregated__radix_cache=draw(st.booleans()),
        aggregated__eviction=draw(st.sampled_from(["lru", "lfu", "fifo"])),
        aggregated__max_running_requests=14 if crowd else draw(st.integers(1, 6)),
        aggregated__chunked_prefill_tokens=chunk_tokens,
        aggregated__mixed_chunk=chunk_tokens > 0 and draw(st.booleans()),
        aggregated__max_prefill_tokens=draw(st.sampled_from([16, 50, 1000])),
        aggregated__schedule_conservativeness=0.01 if crowd else draw(st.sampled_from([0.1, 1.0, 2.0])),
        aggregated__overlap=draw(st.booleans()),
        aggregated__policy=policy,
        aggregated__preemption=draw(st.sampled_from(["fewest_outputs_first", "last_arrived_first"])),
        engine_version=draw(st.sampled_from(releases)),
        router=draw(st.sampled_from(ROUTING_POLICIES)),
        client=draw(st.sampled_from(["open_loop", closed])),
        cost=draw(st.sampled_from([*COSTS, QUICK_PREFILL])),
    )


@st.composite
def speculative_scenarios(draw: st.DrawFn) -> Scenario:
    """Random clusters of both kinds with drafts. Pools hold each request alone with its drafts."""
    draft_tokens = draw(st.integers(2, 6))
    drafts = {
        "speculative_draft_tokens": draft_tokens,
        "speculative_accept_length": draw(st.sampled_from([1, 1.5, 2])),
        "speculative_draft_layers": draw(st.integers(0, 2)),
        "speculative_drafting": draw(st.sampled_from([300_000, None])),
        "speculative_eagle_topk": draw(st.integers(1, 3)),
    }
    scenario = draw(st.one_of(scenarios(), aggregated_scenarios()))
    role = "decode" if scenario.aggregated is None else "aggregated"
    given = getattr(scenario, role)
    if role == "aggregated":
        drafts["mixed_chunk"] = False
    if role == "decode" and given.radix_cache:
        drafts["speculative_draft_layers"] = max(1, drafts["speculative_draft_layers"])
    given = given.model_copy(update=drafts)
    pool = given.pool_tokens + given.num_ahead_tokens(scenario.page_size)
    return scenario.model_copy(update={role: given.model_copy(update={"pool_tokens": pool})})


QUICK_PREFILL: dict[str, Any] = {"use": "affine", "prefill_per_token": "10 us", "decode_base": "10 ms"}

ODD: dict[str, Any] = {
    "use": "affine",
    "prefill_base": "3 ms",
    "prefill_per_token": "17.3 us",
    "prefill_per_pair": "0.7 us",
    "decode_base": "1.7 ms",
    "decode_per_request": "33.3 us",
    "decode_per_context_token": "0.37 ns",
    "decode_per_distinct_token": "0.11 ns",
}

COSTS: list[dict[str, Any]] = [
    {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"},
    ODD,
    {"prefill": ODD, "decode": ODD, "host": {"start": "0.7 ms", "send": "90 us", "slowdown": 1.3}},
]
"""Costs to draw from: whole milliseconds, with which many events happen at the same time, and odd fractions of ns, also
on a slow host.
"""


times_ms = st.integers(0, 1500)


@st.composite
def faults(draw: st.DrawFn, scenario: Scenario) -> Fault:
    """A random fault at a time when a small load is served."""
    roles = ["aggregated"] if scenario.aggregated else ["prefill", "decode"]
    instances = [name for role in roles for name in instance_ids(getattr(scenario, role), role)]
    at_ns = draw(times_ms) * MILLISECOND + draw(st.integers(0, 10**6))
    kinds = ["kill", "kill", "restart", "restart", "abort", "aborts", *([] if scenario.aggregated else ["link"])]
    kind = draw(st.sampled_from(kinds))
    if kind == "kill":
        return Kill(at_ns=at_ns, kill=draw(st.sampled_from(instances)))
    if kind == "restart":
        after_ns = draw(st.sampled_from([1, 300_000, 7 * MILLISECOND, 90 * MILLISECOND, 700 * MILLISECOND]))
        return Kill(at_ns=at_ns, kill=draw(st.sampled_from(instances)), restart_after_ns=after_ns)
    if kind == "link":
        factor = draw(st.sampled_from([0, 0, 0.01, 0.1, 0.5]))
        lasts_ns = draw(st.sampled_from([None, 3 * MILLISECOND, 50 * MILLISECOND, 400 * MILLISECOND]))
        return SlowLink(at_ns=at_ns, link=draw(st.sampled_from(instances)), bandwidth_factor=factor, lasts_ns=lasts_ns)
    if kind == "abort":
        return ClientAbort(at_ns=at_ns, abort=draw(st.integers(0, len(scenario.workload.requests(Streams(0))) - 1)))
    return ClientAborts(
        abort_fraction=draw(st.sampled_from([0.1, 0.5, 1])), within_ns=(1 + draw(times_ms)) * MILLISECOND
    )


@st.composite
def fault_schedules(draw: st.DrawFn, clusters: st.SearchStrategy[Scenario]) -> Scenario:
    """Random clusters and loads with faults, and with timeouts that range from far too short to long. clusters: draws
    the scenario without faults.
    """
    scenario = draw(clusters)
    timeouts = st.sampled_from(["20 ms", "150 ms", "1 s", "20 s"])
    health = HealthSettings(
        heartbeat_interval=draw(st.sampled_from(["5 ms", "40 ms", "300 ms"])),
        heartbeat_failures=draw(st.integers(1, 3)),
        bootstrap_timeout=draw(timeouts),
        waiting_timeout=draw(timeouts),
        release_timeout=draw(timeouts),
        transfer_timeout=draw(timeouts),
        max_retries=draw(st.integers(0, 4)),
    )
    wrong = tuple(draw(st.lists(faults(scenario), min_size=1, max_size=6)))
    front_end = draw(st.sampled_from([{}, {"latency_in": "2 ms", "latency_out": "1 ms", "waits_for_prefill": True}]))
    return scenario.model_copy(
        update={"faults": wrong, "health": health, "front_end": FrontEndSettings.model_validate(front_end)}
    )


def any_scenarios():
    """Random scenarios of all kinds in this module."""
    return st.one_of(
        scenarios(),
        optimistic_scenarios(),
        vllm_scenarios(),
        aggregated_scenarios(),
        speculative_scenarios(),
        fault_schedules(st.one_of(scenarios(), aggregated_scenarios())),
    )
