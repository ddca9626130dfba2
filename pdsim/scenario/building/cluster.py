"""Builds what a scenario describes: instances, router, cost models and requests. These objects have no clock and do no
I/O.
"""

from collections.abc import Mapping, Sequence

from pdsim.core.autoscaler import Autoscaler
from pdsim.core.health import HealthMonitor
from pdsim.core.invariants import AnyInstance
from pdsim.core.routing.router import Router
from pdsim.cost.cold_server import ColdServer
from pdsim.cost.copies import HostCopies, StorageCosts
from pdsim.cost.drafts import Drafting
from pdsim.cost.kernels import is_blackwell
from pdsim.cost.step_times import (
    DecodeHostOverhead,
    Graphs,
    KvReads,
    PipelineTimes,
    StepTimes,
    captured_batches,
    captured_by_vllm,
    pipeline_times,
)
from pdsim.dataclass import dataclass
from pdsim.inputs import InputError
from pdsim.scenario.building import wiring
from pdsim.scenario.building.cost_models import decode_model, draft_times, prefill_model
from pdsim.scenario.building.encoding import Encoding, encoding, with_own_media
from pdsim.scenario.building.machines import (
    Agent,
    build_agents,
    build_autoscaler,
    build_instances,
    build_monitor,
    build_router,
)
from pdsim.scenario.building.room import check_requests, require_room_for_run
from pdsim.scenario.building.sizing import attention_waves, host_caches, layout_of, resolve, roles
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.cost import ColdKernels, HostSettings
from pdsim.scenario.sections.faults import ClientAbort, Kill, SlowLink
from pdsim.scenario.sections.front_end import FrontEndSettings
from pdsim.scenario.sections.servers import AggregatedSettings, DecodingSettings
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.system.catalog import load_model, lookups_remembered
from pdsim.system.memory import Layout, Role, memory_tier
from pdsim.workload.client import Client
from pdsim.workload.request_spec import RequestSpec, Streams


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All objects that a simulation runs. Each call of `build` makes new instances."""

    scenario: Scenario
    """The scenario as `resolve` returns it, with sizes filled in, such as the pool size."""
    instances: Sequence[AnyInstance]
    """The schedulers of all servers but encode servers; with data-parallel attention, one for each rank of a server. If
    servers change roles (`elastic`), each server has one for each role.
    """
    agents: Sequence[Agent]
    """State machines beside the instances: senders and receivers of KV, and with encode instances receivers of
    embeddings (SGLang) or proxies that divide a request's media among encode instances (vLLM).
    """
    encoding: Encoding | None
    """Encode instances. None: the scenario has none, so servers that compute prompts encode media themselves."""
    router: Router
    """Chooses the instances that serve a request."""
    monitor: HealthMonitor | None
    """The monitor that detects dead instances. None: dead instances are not detected."""
    autoscaler: Autoscaler | None
    """Decides how many servers prefill and decode. None: servers keep their roles."""
    costs: Mapping[str, StepTimes]
    """Step times of each instance, by the instance's name."""
    hosts: Mapping[str, HostSettings]
    """CPU times of the scheduler loop of each prefill instance, by the instance's name."""
    host_copies: HostCopies | None
    """Times of copying retracted KV between decode GPUs and host memory. None: these copies take no time."""
    host_links: Mapping[str, HostCopies]
    """Times of copies between GPU and host cache, by the name of each instance that has a host cache."""
    storage: StorageCosts | None
    """Capacity and times of the storage behind host caches. None: there is no storage."""
    front_end: FrontEndSettings
    """Times of the front end (gateway, tokenizer, HTTP server) in front of the router."""
    interconnect: wiring.Interconnect | None
    """The network between prefill and decode instances. None: the cluster is aggregated and sends no KV."""
    host_nics: wiring.HostNics
    """NICs between the hosts of one server, for servers on several hosts."""
    num_layers: int
    """Number of layers of the model."""
    pipelines: Mapping[str, PipelineTimes]
    """Times of the pipeline stages of each instance that has several stages, by the instance's name."""
    message_latency_ns: int
    """Time in ns that a message between two processes takes."""
    handover_ns: int
    """Further time in ns of the message by which decode learns that a request's KV is complete (network.handover)."""
    grant_wait_ns: int | None
    """Mean time in ns from the arrival of decode's grant at prefill until prefill may send KV. 0: prefill may send at
    once. None: prefill gets no grant, because decode reads the KV itself.
    """
    requests: Sequence[RequestSpec]
    """The requests of the scenario's workload, in the order of their ids."""
    client: Client
    """Decides when each request is sent: an open or a closed loop."""


def requests_of(scenario: Scenario) -> Sequence[RequestSpec]:
    """Returns the requests of the scenario's workload. Raises ConfigError if the workload is wrong, such as a trace
    that cannot be read, or if `require_room_for_run` refuses the run.
    """
    require_room_for_run(scenario)
    try:
        return scenario.workload.requests(Streams(scenario.seed))
    except InputError as wrong:
        raise ConfigError(f"workload: {wrong}") from None


@lookups_remembered()
def build(scenario: Scenario, requests: Sequence[RequestSpec] | None = None) -> Cluster:
    """Builds the cluster of a scenario. Raises ConfigError if a part of the scenario is impossible, such as parallel
    sizes, a trace, a request, a fault or a priority class.

    requests: the result of `requests_of` for this scenario. None: `build` calls `requests_of`.
    """
    scenario = resolve(scenario)
    if requests is None:
        requests = requests_of(scenario)
    check_requests(scenario, requests)
    _check_faults(scenario, len(requests))
    _check_priorities(scenario, requests)
    costs = {i: _step_times(scenario, role) for role, ids in roles(scenario).items() for i in ids}
    is_aggregated, num_layers = scenario.aggregated is not None, load_model(scenario.model).num_layers
    return Cluster(
        scenario=scenario,
        instances=build_instances(scenario),
        agents=build_agents(scenario),
        router=build_router(scenario),
        monitor=build_monitor(scenario),
        autoscaler=build_autoscaler(scenario),
        encoding=encoding(scenario),
        costs=with_own_media(scenario, requests, costs),
        hosts=dict.fromkeys(roles(scenario).get("prefill", ()), scenario.cost.host.slowed()),
        host_copies=None if is_aggregated else wiring.host_copies(scenario),
        host_links={i: wiring.copies_over_host_link(scenario, role) for role, i in host_caches(scenario)},
        storage=wiring.storage_costs(scenario),
        front_end=scenario.front_end or FrontEndSettings(),
        interconnect=None if is_aggregated else wiring.interconnect(scenario),
        host_nics=wiring.host_nics(scenario),
        num_layers=num_layers,
        pipelines={
            i: pipeline_times(layout_of(scenario, role), num_layers)
            for role, ids in roles(scenario).items()
            if scenario.roles[role].split.pp > 1
            for i in ids
        },
        message_latency_ns=scenario.network.message_latency,
        handover_ns=scenario.network.handover,
        grant_wait_ns=wiring.grant_wait_ns(scenario),
        requests=requests,
        client=scenario.client,
    )


def _check_priorities(scenario: Scenario, requests: Sequence[RequestSpec]) -> None:
    classes = sorted({spec.request_class for spec in requests} - {""}) if scenario.priorities else []
    for name in scenario.priorities:
        if name not in classes:
            known = f"there are {', '.join(classes)}" if classes else "its requests have no classes"
            raise ConfigError(f"priorities: the workload has no class {name!r}{did_you_mean(name, classes)}; {known}")


def _check_faults(scenario: Scenario, num_requests: int) -> None:
    """Raises ConfigError if a fault names an instance, link or request that the run does not have."""
    instances = [i for ids in roles(scenario).values() for i in ids]
    links = [] if scenario.aggregated is not None else list(instances)
    if links and scenario.network.shared_bandwidth is not None:
        links.append("shared")

    def missing(what: str, name: str, among: Sequence[str]) -> ConfigError:
        ranks = [one for one in among if one.startswith(f"{name}.")]  # of the server that was named
        return ConfigError(f"{what} {name!r}{did_you_mean(name, ranks[:1] or among)}; there are {', '.join(among)}")

    for i, fault in enumerate(scenario.faults):
        if isinstance(fault, Kill) and fault.kill not in instances:
            raise missing(f"faults.{i}.kill: no instance", fault.kill, instances)
        if isinstance(fault, SlowLink) and not links:
            raise ConfigError(f"faults.{i}.link: an aggregated cluster has no links, because it sends no KV")
        if isinstance(fault, SlowLink) and fault.link not in links:
            raise missing(f"faults.{i}.link: no link of", fault.link, links)
        if isinstance(fault, ClientAbort) and not 0 <= fault.abort < num_requests:
            raise ConfigError(f"faults.{i}.abort: no request {fault.abort}; there are 0 to {num_requests - 1}")


def _step_times(scenario: Scenario, role: Role) -> StepTimes:
    """Returns the step times of one instance of this role. Decode and aggregated instances have times of prefill
    forwards and of decode steps. For prefill instances the cost model of prefill stands in both places.
    """
    host, settings, layout = scenario.cost.host, getattr(scenario, role), layout_of(scenario, role)
    cold = _cold_server(scenario)
    prefill = prefill_model(scenario, role)
    if not isinstance(settings, DecodingSettings):
        slows_prefill = wiring.transport(scenario).slows_prefill
        kv_reads = KvReads(slows_prefill) if slows_prefill else None
        drafting = Drafting(model=draft_times(scenario, role))
        return StepTimes(prefill=prefill, decode=prefill, drafting=drafting, kv_reads=kv_reads, cold=cold)
    measured_ns = settings.speculative_drafting or 0
    drafting = Drafting(settings.num_verified_tokens, measured_ns, draft_times(scenario, role))
    return StepTimes(
        prefill=prefill,
        decode=decode_model(scenario, role),
        drafting=drafting,
        graphs=_graphs(scenario, settings, layout),
        waves=attention_waves(scenario, role),
        swaps=wiring.swaps(scenario, role),
        cold=cold,
        host_overhead=DecodeHostOverhead(
            step_ns=host.slowdown * host.decode_step,
            request_ns=host.slowdown * host.decode_request,
            prefill_ns=host.slowdown * host.decode_prefill,
            launch_ns=host.slowdown * host.launch,
            launches_ahead=isinstance(settings, AggregatedSettings) and settings.overlap,
        ),
    )


def _cold_server(scenario: Scenario) -> ColdServer | None:
    """Times by which the first steps of an instance are longer than later steps (cost.cold_start and
    cost.cold_kernels). None: the scenario has no such times.
    """
    cost = scenario.cost
    if not cost.is_cold:
        return None
    kernels = cost.cold_kernels or ColdKernels()
    return ColdServer(
        steps=cost.cold_start,
        prefill_kernel_ns=kernels.prefill,
        decode_kernel_ns=kernels.decode,
        num_variants=scenario.engine_rules.num_allocation_kernels,
        page_size=scenario.page_size,
    )


def _graphs(scenario: Scenario, settings: DecodingSettings, layout: Layout) -> Graphs | None:
    """CUDA graphs of an instance's decode steps. None: the scenario models no graphs, so a step takes the time of its
    exact number of requests.
    """
    cost = scenario.cost
    sizes: Sequence[int] | str | None = cost.graph_sizes
    if sizes is None and cost.is_of_kernels and layout.model.experts is not None:
        sizes = scenario.engine
    if sizes is None:
        return None
    if sizes == "vllm":
        sizes = captured_by_vllm(settings.resolved_max_running, blackwell=is_blackwell(layout.gpu.name))
    elif sizes == "sglang":
        largest = memory_tier(layout.gpu, settings.tp).max_graph_batch
        speculative = scenario.acceptance is not None
        sizes = captured_batches(largest, settings.resolved_max_running, speculative=speculative)
    launch_ns = cost.host.slowdown * cost.eager_layer * layout.model.num_layers
    assert not isinstance(sizes, str)
    are_free = cost.graph_empty_rows_free or _masks_empty_rows(scenario, layout)
    return Graphs(sorted(sizes), launch_ns, cost.graph_empty_row_kv, are_free)


def _masks_empty_rows(scenario: Scenario, layout: Layout) -> bool:
    """True if the experts of an instance skip the padding of a CUDA graph: empty rows, which the graph computes in
    addition to the batch's requests.

    An empty row contains the token of an earlier step, so without a mask it chooses experts as a request does (SGLang
    0.5.12, model_executor/cuda_graph_runner.py:296; vLLM 0.33.0, v1/worker/gpu_model_runner.py:3366). SGLang masks
    empty rows if each GPU holds whole experts (model_executor/forward_batch_info.py:1088, layers/moe/topk.py:978). vLLM
    has no mask. The kernel flashinfer_trtllm ignores the mask in SGLang 0.5.12, and obeys it in 0.5.23
    (layers/moe/moe_runner/flashinfer_trtllm.py:888). SGLang uses this kernel on Blackwell, if GPUs with whole experts
    get all tokens.
    """
    knows_mask = scenario.engine_rules.masks_empty_rows or not is_blackwell(layout.gpu.name) or layout.sends_to_experts
    return scenario.engine == "sglang" and layout.has_whole_experts and knows_mask
