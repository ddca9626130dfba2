"""The fields of a scenario. Names and defaults are SGLang's where it has them; `pdsim.schema.json` is made of this."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from pdsim.core.host_cache import WritePolicy
from pdsim.core.prefetcher import PrefetchPolicy
from pdsim.cost.kernels import has_kernels
from pdsim.cost.model import CostSettings
from pdsim.cost.settings import Kernels
from pdsim.metrics.records import StepRecord
from pdsim.policy import protocols
from pdsim.policy.decode import FewestOutputsFirst, ReserveDecodeTokens
from pdsim.policy.eviction import LeastRecentlyUsed
from pdsim.policy.prefill import EveryChunk, FirstComeFirstServed
from pdsim.policy.routing import CacheAware
from pdsim.policy.scaling import LoadThresholds
from pdsim.scenario.component import Component, component_name
from pdsim.scenario.faults import Fault, HealthSettings
from pdsim.scenario.fields import Bandwidth, Duration, FineDuration, Rate, Section, Size
from pdsim.scenario.profile import MeasuredSettings, Setup, cost_by_role, front_end_of_profile, network_of_profile
from pdsim.scenario.yaml_file import did_you_mean
from pdsim.system.catalog import Kind, load_model
from pdsim.system.model import Dtype, KvDtype, StateDtype
from pdsim.workload.acceptance import Acceptance
from pdsim.workload.client_driver import Client, ClosedLoop, OpenLoop
from pdsim.workload.request_spec import Workload


class HostCacheSettings(Section):
    """Host memory behind the prefix cache (--enable-hierarchical-cache)."""

    size: Size | None = Field(default=None, ge=0)
    """Memory for the KV of each GPU (--hicache-size); None: twice that of its pool (--hicache-ratio 2)."""
    write: WritePolicy = "write_through"
    """Moment when KV is copied there (--hicache-write-policy)."""


class StorageSettings(Section):
    """Storage behind the host caches (--hicache-storage-backend): a file system, or a store such as Mooncake's."""

    shared: bool = False
    """One store for all instances; false: each server has its own."""
    drives: int = Field(default=1, ge=1)
    """Drives of each server; of a shared store, or nodes that lend it memory."""
    size: Size = 3_840_000_000_000
    """Size of one drive, as the next three are of one."""
    read_bandwidth: Bandwidth = Field(default=6.9e9, gt=0)
    write_bandwidth: Bandwidth = Field(default=4.1e9, gt=0)
    io_limit: Rate = Field(default=1e6, gt=0)
    """Reads and writes together, one of each page and rank."""
    client_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one instance, in each direction; None: no limit."""
    latency: Duration = 100_000
    """Time of each batch of up to 128 pages before its first byte, and of looking up as many."""
    prefetch: PrefetchPolicy = "timeout"
    """How long a prompt waits for what is read (--hicache-storage-prefetch-policy)."""
    prefetch_threshold: int = Field(default=256, ge=1)
    """Fewer tokens are computed rather than read."""


class ServerSettings(Section):
    """Servers of every kind."""

    instances: int = Field(default=1, ge=1)
    gpu: str
    tp: int = Field(default=1, ge=1)
    """GPUs of one server."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel attention (--enable-dp-attention): so many instances share the server's GPUs and its experts."""
    expert_skew: float = Field(default=0, ge=0)
    """Excess of tokens of the busiest GPU's experts over the mean; with redundant_experts: before they help."""
    redundant_experts: int | None = Field(default=None, ge=0)
    """Copies of popular experts, placed by their load (--enable-eplb --ep-num-redundant-experts); None: no balancer."""
    mem_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory for weights and KV; None: the engine's rule."""
    pool_tokens: int | None = Field(default=None, ge=1)
    """Tokens of KV; None: what the memory fraction leaves (--max-total-tokens)."""
    radix_cache: bool = True
    eviction: Annotated[protocols.EvictionPolicy, Component("lru")] = LeastRecentlyUsed()
    host_cache: HostCacheSettings | None = None
    """None: what is evicted is lost."""
    max_running_requests: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_something_to_keep(self) -> Self:
        if self.host_cache is not None and not self.radix_cache:
            raise ValueError("host_cache lies behind the prefix cache: it needs radix_cache: true")
        return self

    @property
    def resolved_max_running(self) -> int:
        assert self.max_running_requests is not None, "the scenario is not resolved"
        return self.max_running_requests

    @property
    def num_gpus(self) -> int:
        """GPUs of all servers together."""
        return self.instances * self.tp


class ComputingSettings(ServerSettings):
    """Servers that compute prompts."""

    chunked_prefill_tokens: int | None = Field(default=None, ge=-1)
    """Tokens of one forward, of all data-parallel ranks together. None: by the GPU's memory; 0 or -1: no chunking."""
    max_prefill_tokens: int = Field(default=16384, ge=1)
    policy: Annotated[protocols.PrefillPolicy, Component("fcfs")] = FirstComeFirstServed()

    @property
    def rank_chunk_tokens(self) -> int:
        """Chunk of one data-parallel rank, in resolved settings; 0: no chunking."""
        return (self.chunked_prefill_tokens or 0) // self.dp


class DecodingSettings(ServerSettings):
    """Servers that decode. With drafts a step verifies several tokens of each request."""

    preemption: Annotated[protocols.PreemptionPolicy, Component("fewest_outputs_first")] = FewestOutputsFirst()
    speculative_draft_tokens: int | None = Field(default=None, ge=2)
    """Tokens that a step verifies of each request, its last among them (--speculative-num-draft-tokens); None: one."""
    speculative_accept_length: float | None = Field(default=None, ge=1)
    """Tokens that such a step gives a request, in the mean."""
    speculative_drafting: Duration = 0
    """Time of all drafting in one step."""

    @model_validator(mode="after")
    def _accepts_what_is_drafted(self) -> Self:
        tokens, length = self.speculative_draft_tokens, self.speculative_accept_length
        if (tokens is None) != (length is None):
            raise ValueError("speculative_draft_tokens and speculative_accept_length: one needs the other")
        if tokens is not None and length is not None and length > tokens:
            raise ValueError(f"speculative_accept_length {length:g} is more than the {tokens} speculative_draft_tokens")
        return self

    @property
    def acceptance(self) -> Acceptance | None:
        """None: a step gives each request one token."""
        if self.speculative_draft_tokens is None or self.speculative_accept_length is None:
            return None
        return Acceptance(draft_tokens=self.speculative_draft_tokens, accept_length=self.speculative_accept_length)

    @property
    def num_ahead_tokens(self) -> int:
        """Tokens beyond its KV for which a request needs pages before a decode step: drafts of two steps."""
        return 2 * (self.speculative_draft_tokens or 0) or 1


class PrefillSettings(ComputingSettings):
    """The prefill instances, all alike."""

    overlap: bool = True
    """Choose a forward while the one before it runs; false: --disable-overlap-schedule."""
    layer_groups: int = Field(default=0, ge=0)
    """KV of so many groups of layers is sent while the forward computes the others; 0: when the forward is done."""
    transfer: Annotated[protocols.TransferPolicy, Component("every_chunk")] = EveryChunk()
    optimistic_attempts: int | None = Field(default=None, ge=0)
    """Times that a prompt may be begun before decode has granted it pages (--optimistic-prefill-attempts).

    None: 0, or 1 where decode.allocation is prefill_complete.
    """
    hold_timeout: Duration | None = Field(default=None, gt=0)
    """Time for which a computed prompt waits to be read, with engine vllm (VLLM_NIXL_ABORT_REQUEST_TIMEOUT).

    None: as long as it takes, for decode renews its lease (0.33.0).
    """


class DecodeSettings(DecodingSettings):
    """The decode instances, all alike."""

    radix_cache: bool = False
    """--disaggregation-decode-enable-radix-cache"""
    extra_slots: int | None = Field(default=None, ge=0)
    """None: 0, or twice max_running_requests where that is given and at most 32."""
    polling_interval: int = Field(default=1, ge=1)
    """Steps from one look at queue and transfers to the next (--disaggregation-decode-polling-interval)."""
    allocation: Literal["early", "prefill_complete"] = "early"
    """Grant pages before prefill computes a prompt, or when it is done (--disaggregation-decode-allocation-policy)."""
    admission: Annotated[protocols.AdmissionPolicy, Component("reserve_decode_tokens")] = ReserveDecodeTokens()
    returns_kv: bool = False
    """KV of a request that has ended goes back to its prefill instance (vLLM's bidirectional_kv_xfer)."""
    retraction_backup: bool = True
    """False: copying the KV of retracted requests to host memory and back takes no time."""

    @model_validator(mode="after")
    def _has_what_servers_accept(self) -> Self:
        if self.radix_cache and self.speculative_draft_tokens is not None:
            raise ValueError(
                "radix_cache: true and speculative_draft_tokens exclude each other: SGLang's servers refuse the pair "
                "(arg_groups/pd_disaggregation_hook.py). Leave one of them out"
            )
        return self


class AggregatedSettings(ComputingSettings, DecodingSettings):
    """The instances of a cluster without disaggregation, all alike: each prefills and decodes on the same GPUs."""

    schedule_conservativeness: float = Field(default=1.0, gt=0)
    """Above 1, running requests are expected to grow more (--schedule-conservativeness)."""
    priority_preemption_threshold: int | None = Field(default=None, ge=0)
    """Running requests give way to those whose priority is higher by more than this.

    None: 10 where there are priorities (--priority-scheduling-preemption-threshold), else nobody does.
    """
    overlap: bool = True
    """Choose a step when the one before it begins; false: --disable-overlap-schedule."""


class RouterSettings(Section):
    """Policies that choose instances. `router: NAME` sets both roles. An aggregated cluster has `prefill` alone."""

    prefill: Annotated[protocols.RoutingPolicy, Component("cache_aware")] = CacheAware()
    decode: Annotated[protocols.RoutingPolicy, Component("cache_aware")] = CacheAware()
    disaggregation: Annotated[protocols.DisaggregationPolicy, Component()] | None = None
    """Chooses prompts that a prefill instance computes, with engine vllm; None: all."""
    shedding: Annotated[protocols.SheddingPolicy, Component("queue_limit")] | None = None
    """Whom the router refuses when too many wait; None: nobody."""


class StagingSettings(Section):
    """KV between unequal tensor-parallel sizes goes through staging memory (SGLANG_DISAGG_STAGING_BUFFER)."""

    ring: Size = 4 * 2**30
    """Memory of one decode rank (SGLANG_DISAGG_STAGING_POOL_SIZE_MB)."""
    prefill_buffer: Size | None = None
    """Memory of one prefill worker; a larger cell is sent as slices. None: one forward's KV, as 0.5.23 does."""
    gather_host: Duration = 840_000
    """Python and launch of one gather, during which its worker does nothing else (SGLang PR 19890, GB200)."""
    scatter_host: Duration = 678_000
    """The same of one scatter."""
    gather_efficiency: float = Field(default=0.65, gt=0, le=1)
    """Share of the memory bandwidth, counting bytes read and written (SGLang's kernels, measured on H200)."""
    scatter_efficiency: float = Field(default=0.40, gt=0, le=1)
    transfer_latency: Duration | None = None
    """Time of a staged batch before its first byte; None: the engine's."""


class ElasticSettings(Section):
    """Servers that change their roles, start and stop. `instances` of prefill and decode are those at first."""

    policy: Annotated[protocols.ScalingPolicy, Component("load_thresholds")] = LoadThresholds()
    max_servers: int | None = Field(default=None, ge=2)
    """Servers of both roles together; None: as many as at first."""
    interval: Duration = Field(default=180_000_000_000, gt=0)
    """Time between two decisions (adjustment_interval of Dynamo's planner)."""
    start_up: Duration = 120_000_000_000
    """Time from the decision until a new server serves; its GPUs are paid for from the decision on."""
    switch: Duration = 5_000_000_000
    """Time from the moment that a server is drained until it serves in its new role."""
    drain_timeout: Duration | None = Field(default=None, gt=0)
    """A server that is not drained by then goes on in its old role; None: it has all the time it needs."""


class NetworkSettings(Section):
    """The network between instances."""

    transport: str = "mooncake-rdma"
    """The engine and the kind of link it uses, by name in the catalog."""
    bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one link, per direction; None: what the engine reaches of the GPU's nominal bandwidth."""
    shared_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one more link, which all transfers cross."""
    gpus_per_nic: int = Field(default=1, ge=1)
    """Neighbouring GPUs that share a NIC."""
    transfer_latency: Duration | None = None
    """Time of each batch before its first byte; None: the engine's. Staging has its own."""
    descriptor_latency: Duration | None = None
    """Time of each descriptor; None: the engine's."""
    serial: bool | None = None
    """The workers of a prefill rank post descriptors and move bytes one at a time; None: as the engine does."""
    staging: StagingSettings | None = None
    """None: unequal tensor-parallel sizes send a slice of each token's heads."""
    message_latency: Duration = Field(default=50_000, ge=1)
    """Time of every message between instances: half of a ZeroMQ round trip between two Python processes, 105 us."""
    handover: Duration = 0
    """Beyond the message, from the end of a request's transfer until decode has taken its KV in."""


class HostSettings(Section):
    """Times of the instances' loops on their CPU, besides what the GPU takes; all but two are of prefill loops."""

    start: Duration = 0
    """Time from the choice of a forward to its first kernel, on a GPU that waits for it."""
    launch: Duration = 0
    """The loop launches a forward for so long and sees no result meanwhile."""
    result: Duration = 0
    """Taking in the result of a forward."""
    send: Duration = 0
    """Handing one unit to the transfer workers, one after another."""
    decode_step: Duration = 0
    """Time between two steps of a decode loop, while its GPU rests."""
    decode_request: Duration = 0
    """Added to it for each request of the batch."""
    slowdown: float = Field(default=1, gt=0)
    """Factor of all host work: of the loops, launches of forwards, batches and descriptors of transfers."""

    @property
    def is_none(self) -> bool:
        """True if a prefill loop takes no time."""
        return not (self.start or self.launch or self.result or self.send)

    def slowed(self) -> "HostSettings":
        """Times of a prefill loop with the slowdown applied to them."""
        times = {name: round(self.slowdown * getattr(self, name)) for name in ("start", "launch", "result", "send")}
        return self.model_copy(update={**times, "slowdown": 1})


class FrontEndSettings(Section):
    """The way between the client and the router: HTTP, tokenizer, gateway. Per-token times are of prompts."""

    service: Duration = 0
    """Time of each request, one after another."""
    service_per_token: FineDuration = 0
    latency_in: Duration = 0
    """Delay on the way in, of all requests at once."""
    latency_out: Duration = 0
    """Delay from decode to the client, of the first token and of the last."""
    ending: Duration = 0
    """Time of each answer's end, one after another, if the client is in the same thread."""
    holds_client: bool = False
    """The client is in the thread that serves: what it sends and sees waits until the request before is served."""
    waits_for_prefill: bool = False
    """The decode stream is forwarded only after the prefill instance has answered (SGLang's Rust gateway)."""
    stall: Duration = 0
    """A first token held back on a connection that was used a moment ago: Nagle against delayed acknowledgement."""

    @property
    def is_none(self) -> bool:
        return self == FrontEndSettings()


FRONT_END, *FRONT_END_ENDS = (
    FrontEndSettings.model_construct(latency_in=latency_ns) for latency_ns in (40_000_000, 10_000_000, 160_000_000)
)
"""HTTP, tokenizer and scheduler of most servers, and between what it lies: chosen on half of the points of
experiments/default-cost. A prompt waits for it, and the next is not held up."""

Interval = tuple[Annotated[CostSettings, Component()], Annotated[CostSettings, Component()]]

End = Literal["fastest", "slowest"]
ENDS: tuple[End, ...] = get_args(End)
Group = Literal["prefill", "decode", "outside"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""Times that are off together: forwards, decode steps, and those outside the GPUs."""


class CostChoice(Section):
    """Times of steps. `cost: X` sets both roles; `cost: {profile: FILE}` reads fitted settings."""

    prefill: Annotated[CostSettings, Component("kernels")] = Kernels()
    decode: Annotated[CostSettings, Component("kernels")] = Kernels()
    prefill_interval: Interval | None = None
    """Fastest and slowest, as `pdsim scale` writes them; None: steps take what they take."""
    decode_interval: Interval | None = None
    host: HostSettings = HostSettings()
    graph_sizes: tuple[int, ...] | Literal["sglang"] | None = None
    """Batches that CUDA graphs were captured for (--cuda-graph-bs); larger ones run without graphs.

    sglang: SGLang's sizes. None: a decode step is as large as its batch. Fitted profiles have their own.
    """
    graph_empty_row_kv: float = Field(default=0, ge=0)
    """Time of each empty row of a graph, as a share of what a row takes to read its KV: parts of the context are dealt
    out as if all rows had one."""
    eager_layer: Duration = 310_000
    """The least that a layer takes without a graph: Qwen3-8B on H200, as prefill_layer_ns of the roofline."""
    attention_sm_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """KV that one SM takes in at most. Decode attention then runs in waves of one thread block for each SM, and reads a
    shared prefix once in each wave; None: that of an H200's with kernels, else without waves."""
    attention_merge: Duration = 0
    """Time of a layer in which contexts are split among SMs."""
    cold_start: dict[Annotated[int, Field(ge=1)], Duration] = Field(default={})
    """Stall of an instance's first decode step of so many requests, or of more up to the next entry: kernels that a
    server loads when it needs them. SGLang 0.5.12 on H200, decode TP2: 231 and 284 ms at 2 requests
    (experiments/sglang-h200); with TP1 none."""
    measured: MeasuredSettings | None = None
    """None: whatever a run asks for is taken as known."""

    @model_validator(mode="after")
    def _is_whole(self) -> "CostChoice":
        sizes = self.graph_sizes
        if isinstance(sizes, tuple) and (not sizes or min(sizes) < 1):
            raise ValueError(f"graph_sizes are batch sizes, at least one and each at least 1, found {list(sizes)}")
        return self

    def at(self, corner: "Mapping[Group, End]") -> "CostChoice":
        """This cost with roles at an end of their interval, where they have one."""
        update: dict[str, Any] = {}
        for role, end in corner.items():
            if role != "outside" and (ends := self._ends(role)):
                update |= {role: ends[ENDS.index(end)], f"{role}_interval": None}
        return self.model_copy(update=update)

    @property
    def uncertain(self) -> "tuple[Group, ...]":
        """Roles whose times have an interval."""
        return tuple(role for role in GROUPS if role != "outside" and self._ends(role))

    def _ends(self, role: str) -> "Interval | None":
        settings = getattr(self, role)
        found: Interval | None = getattr(self, f"{role}_interval")
        return settings.ends if found is None and isinstance(settings, Kernels) else found

    @property
    def is_of_kernels(self) -> bool:
        """True if no server was measured."""
        return isinstance(self.prefill, Kernels) or isinstance(self.decode, Kernels)


def a_name(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError(
            f"expected a name, found {value!r}; weight_dtype, kv_dtype, state_dtype and context_tokens stand beside it"
        )
    return value


def by_role(value: Any) -> Any:
    """Lets a component stand for both roles; what was measured may stand beside it."""
    if isinstance(value, dict) and "use" in value:
        one = {key: setting for key, setting in value.items() if key != "measured"}
        beside = {"measured": value["measured"]} if "measured" in value else {}
        return {"prefill": one, "decode": one, **beside}
    return {"prefill": value, "decode": value} if isinstance(value, str) else value


def of_all_groups(value: Any) -> Any:
    """Lets one end stand for all groups of times."""
    if not isinstance(value, str):
        return value
    if value not in ENDS:
        raise ValueError(f"no end {value!r}{did_you_mean(value, ENDS)}; there are {' and '.join(ENDS)}")
    return dict.fromkeys(GROUPS, value)


class OrShort:
    """Marks a section that something shorter may stand for, in the JSON schema: a name, or an object with a key."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        short = [{"type": "object", "required": [key]} for key in self.keys]
        return {"anyOf": [{"type": "string"}, *short, handler(schema)]}


class Pair(NamedTuple):
    """The two roles of a disaggregated cluster."""

    prefill: PrefillSettings
    decode: DecodeSettings


SHORTHANDS = {"router": by_role, "cost": by_role, "corner": of_all_groups}
"""Fields that a plain value may stand for."""

Engine = Literal["sglang", "vllm"]
ENGINE_DEFAULTS: dict[str, dict[str, Any]] = {
    "vllm": {
        "page_size": 16,
        "decode": {
            "radix_cache": True,
            "allocation": "prefill_complete",
            "admission": "free_pages",
            "preemption": "last_arrived_first",
        },
    }
}
"""Defaults of an engine where they are not those of the fields (page_size: vLLM 0.33.0, config/cache.py)."""


PREEMPTION_THRESHOLD = 10
"""SGLang's default."""


def with_priority_policy(data: Any) -> Any:
    """Prompts are computed by priority where requests have one, unless the scenario says otherwise."""
    if not isinstance(data, dict) or not data.get("priorities"):
        return data
    roles = {role: data[role] for role in ("prefill", "aggregated") if isinstance(data.get(role), dict)}
    filled = {role: {"policy": "priority", **given} for role, given in roles.items()}
    if "aggregated" in filled:
        filled["aggregated"] = {"priority_preemption_threshold": PREEMPTION_THRESHOLD, **filled["aggregated"]}
    return {**data, **filled}


def with_defaults_of_engine(data: Any) -> Any:
    """Fill in what a scenario leaves to its engine."""
    if not isinstance(data, dict) or not isinstance(data.get("engine"), str):
        return data
    filled = dict(data)
    for field, default in ENGINE_DEFAULTS.get(data["engine"], {}).items():
        if not isinstance(default, dict):
            filled.setdefault(field, default)
        elif isinstance(given := data.get(field), dict):
            filled[field] = {**default, **given}
    return filled


def _wrong_for_sglang(scenario: "Scenario") -> str:
    prefill = scenario.prefill
    if prefill is not None and prefill.hold_timeout is not None:
        return "prefill.hold_timeout is vLLM's; leave it out, or say engine: vllm"
    if scenario.router.disaggregation is not None:
        return "router.disaggregation: decode computes no prompts in SGLang; leave it out, or say engine: vllm"
    return ""


def _wrong_for_vllm(scenario: "Scenario") -> str:
    prefill, decode = scenario.prefill, scenario.decode
    if decode is not None and decode.allocation != "prefill_complete":
        return f"decode.allocation: {decode.allocation}: decode allocates pages for computed prompts; leave it out"
    if decode is not None and decode.speculative_draft_tokens is not None:
        return "decode.speculative_draft_tokens: decoding with drafts is SGLang's only here; leave it out"
    if (prefill is not None and prefill.host_cache) or (decode is not None and decode.host_cache):
        return "host_cache is SGLang's; leave it out"
    if scenario.network.staging is not None:
        return "network.staging is SGLang's; leave it out"
    return ""


class Scenario(Section):
    """A cluster, what arrives, and the seed: everything that a run depends on."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prefill", "decode"]}, {"required": ["aggregated"]}]}
    )

    name: str = Field(default="scenario", pattern=r"^[^/\\]+$")
    """Also of the run's folder, in a comparison."""
    description: str = ""
    seed: int = 0
    model: Annotated[str, BeforeValidator(a_name)]
    """Name in the catalog."""
    weight_dtype: Dtype | None = None
    """None: the catalog's."""
    kv_dtype: KvDtype = "bf16"
    state_dtype: StateDtype = "fp32"
    """Type of the state of linear-attention layers (--mamba-ssm-dtype)."""
    context_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the longest request; None: the catalog's. More where RoPE is scaled (--context-length)."""
    page_size: int = Field(default=1, ge=1)
    """Tokens."""
    engine: Engine = "sglang"
    """Engine of prefill and decode instances; aggregated ones are SGLang's with either."""
    prefill: PrefillSettings | None = None
    decode: DecodeSettings | None = None
    aggregated: AggregatedSettings | None = None
    """Instead of prefill and decode."""
    router: Annotated[RouterSettings, BeforeValidator(by_role), OrShort("use")] = RouterSettings()
    network: Annotated[NetworkSettings, BeforeValidator(network_of_profile), OrShort("profile")] = NetworkSettings()
    front_end: Annotated[FrontEndSettings | None, BeforeValidator(front_end_of_profile), OrShort("profile")] = None
    """None: what most servers take where the cost is `kernels`; else nothing."""
    cost: Annotated[CostChoice, BeforeValidator(by_role), BeforeValidator(cost_by_role), OrShort("use", "profile")] = (
        CostChoice()
    )
    corner: Annotated[dict[Group, End] | None, BeforeValidator(of_all_groups), OrShort()] = None
    """Groups of times at an end of their range, where no server was measured: `slowest`, or {prefill: slowest}."""
    workload: Annotated[Workload, Component()]
    client: Annotated[Client, Component("open_loop")] = OpenLoop()
    priorities: dict[str, int] = Field(default={})
    """Priorities of classes of requests, the larger first; a class that is not here has 0."""
    storage: StorageSettings | None = None
    """None: what host caches evict is lost."""
    elastic: ElasticSettings | None = None
    """None: servers keep their roles."""
    faults: tuple[Annotated[Fault, Component(by_field=True)], ...] = ()
    """Things that go wrong, and when."""
    health: HealthSettings | None = None
    """None: nothing is watched, unless there are faults; then the defaults."""

    @model_validator(mode="before")
    @classmethod
    def _has_defaults_of_its_engine(cls, data: Any) -> Any:
        return with_priority_policy(with_defaults_of_engine(data))

    @model_validator(mode="after")
    def _is_of_its_engine(self) -> "Scenario":
        if self.aggregated is not None:
            return self
        wrong = _wrong_for_vllm(self) if self.engine == "vllm" else _wrong_for_sglang(self)
        if wrong:
            raise ValueError(f"engine {self.engine}: {wrong}")
        return self

    @model_validator(mode="after")
    def _sheds_from_an_open_loop(self) -> "Scenario":
        if self.router.shedding is not None and isinstance(self.client, ClosedLoop):
            raise ValueError(
                "router.shedding: a client of a closed loop that is refused sends its next request at once; "
                "use: open_loop, or leave shedding out"
            )
        return self

    @model_validator(mode="after")
    def _can_return_kv(self) -> "Scenario":
        if self.decode is None or self.prefill is None or not self.decode.returns_kv:
            return self
        wrong = ""
        if not (self.decode.radix_cache and self.prefill.radix_cache):
            wrong = "it needs radix_cache: true on prefill and decode"
        elif (self.prefill.tp, self.prefill.dp) != (self.decode.tp, self.decode.dp):
            wrong = "it needs the same tp and dp on prefill and decode"
        elif self.faults or self.health is not None or self.elastic is not None:
            wrong = "not with faults, health or elastic; leave one of the two out"
        if wrong:
            raise ValueError(f"decode.returns_kv: {wrong}")
        return self

    @model_validator(mode="after")
    def _stores_what_host_caches_have(self) -> "Scenario":
        if self.storage is None:
            return self
        if not any(one.host_cache for one in (self.prefill, self.decode, self.aggregated) if one is not None):
            raise ValueError("storage lies behind host caches: give a role one (prefill: {host_cache: {}})")
        return self

    @model_validator(mode="after")
    def _can_be_elastic(self) -> "Scenario":
        if self.elastic is None:
            return self
        if self.prefill is None or self.decode is None:
            raise ValueError("elastic: servers of prefill and decode change roles; this cluster is aggregated")
        pair, wrong = (self.prefill, self.decode), ""
        if len({(servers.gpu, servers.tp) for servers in pair}) > 1:
            wrong = "servers that change roles need the same gpu and tp in both"
        elif any(servers.dp > 1 for servers in pair):
            wrong = "dp: with data-parallel attention no server changes its role (as SGLang refuses)"
        elif self.network.staging is not None:
            wrong = "network.staging is for unequal tp; leave it out"
        elif self.faults:
            wrong = "faults: an elastic cluster has none here; leave one of the two out"
        elif self.max_servers < (at_first := self.prefill.instances + self.decode.instances):
            wrong = f"max_servers {self.max_servers} is less than the {at_first} servers at first"
        if wrong:
            raise ValueError(f"elastic: {wrong}")
        return self

    @property
    def max_servers(self) -> int:
        """Servers of prefill and decode together, at most."""
        prefill, decode = self.pair
        at_first = prefill.instances + decode.instances
        return at_first if self.elastic is None else self.elastic.max_servers or at_first

    @model_validator(mode="after")
    def _is_one_kind_of_cluster(self) -> "Scenario":
        roles = {"prefill": self.prefill, "decode": self.decode}
        given = [name for name, settings in roles.items() if settings is not None]
        if self.aggregated is None and len(given) < len(roles):
            missing = " and ".join(name for name in roles if name not in given)
            raise ValueError(f"no {missing}: a cluster has prefill and decode instances, or aggregated ones")
        if self.aggregated is not None and given:
            both = " and ".join(given)
            raise ValueError(f"aggregated stands beside {both}: a cluster has one or the other; leave one out")
        return self

    @property
    def pair(self) -> Pair:
        """The roles of a disaggregated cluster."""
        assert self.prefill is not None
        assert self.decode is not None
        return Pair(self.prefill, self.decode)

    @property
    def entries(self) -> list[tuple[Kind, str]]:
        """Entries of the catalog that it names."""
        servers = (self.prefill, self.decode, self.aggregated)
        gpus: list[tuple[Kind, str]] = [("gpus", server.gpu) for server in servers if server is not None]
        return [("models", self.model), ("transports", self.network.transport), *gpus]

    @property
    def num_gpus(self) -> int:
        if self.elastic is not None:
            return self.max_servers * self.pair.prefill.tp
        roles = (self.prefill, self.decode, self.aggregated)
        return sum(servers.num_gpus for servers in roles if servers is not None)

    @property
    def acceptance(self) -> Acceptance | None:
        """Acceptance of those who decode; None: a step gives each request one token."""
        decoding = self.aggregated or self.decode
        assert decoding is not None
        return decoding.acceptance

    @property
    def setup(self) -> Setup:
        """The model, and what the instances run on."""
        prefill, decode = self._measured_servers
        return Setup(
            model=self.model,
            weight_dtype=self.weight_dtype or load_model(self.model).weight_dtype,
            kv_dtype=self.kv_dtype,
            device=" and ".join(dict.fromkeys((prefill.gpu, decode.gpu))),
            tp=(prefill.tp, decode.tp),
            dp=(prefill.dp, decode.dp),
        )

    @property
    def uncertain(self) -> tuple[Group, ...]:
        """Groups of times that have a range; none where all were measured, or on another setup."""
        outside: tuple[Group, ...] = ("outside",) if self._is_of_usual_front_end else ()
        found = tuple(group for group in (*self.cost.uncertain, *outside) if group not in (self.corner or {}))
        if found and self.foreign_setup:
            role = None if self.cost.measured is None else self.cost.measured.role
            return tuple(group for group in found if role not in (None, group))
        return found

    @property
    def ends(self) -> "tuple[Scenario, ...]":
        """This scenario at its fastest and at its slowest; none where its times are certain."""
        return tuple(self.at({**dict.fromkeys(GROUPS, end), **(self.corner or {})}) for end in ENDS if self.uncertain)

    def at(self, corner: Mapping[Group, End]) -> "Scenario":
        return self.model_copy(update={"corner": dict(corner)})

    @property
    def at_corner(self) -> "Scenario":
        """This scenario with its corner's times in place of the best known, and no corner any more."""
        if not self.corner:
            return self
        update: dict[str, Any] = {"corner": None, "cost": self.cost.at(self.corner)}
        if "outside" in self.corner and self._is_of_usual_front_end:
            update["front_end"] = FRONT_END_ENDS[ENDS.index(self.corner["outside"])]
        return self.model_copy(update=update)

    @property
    def _is_of_usual_front_end(self) -> bool:
        return self.cost.is_of_kernels and self.front_end in (None, FRONT_END)

    @property
    def device(self) -> str:
        """The device whose step times a run has."""
        measured = self.cost.measured
        return (measured and measured.role is None and measured.device) or self._gpus

    @property
    def foreign_setup(self) -> list[str]:
        """Parts of the setup that the profile was not measured on."""
        measured = self.cost.measured
        return [] if measured is None or measured.model is None else measured.differences(self.setup)

    def cost_warnings(self, steps: Iterable[StepRecord]) -> list[str]:
        """A line about a run that is not within what was measured; else none."""
        measured = self.cost.measured
        if measured is None:
            return [self._unmeasured_warning({"prefill": self._servers[0], "decode": self._servers[1]})]
        setup = self.foreign_setup
        outside = ", ".join([*setup, *measured.exceeded(steps)])
        found = []
        if outside:
            interval = "; its interval is left out" if setup and self._has_interval(measured) else ""
            found = [f"cost: {measured}; this run: {outside}: outside{interval}"]
        elif measured.model is None or measured.scaled_from is not None:
            found = [f"cost: {measured}"]
        others = {"prefill": self._servers[0], "decode": self._servers[1]} if measured.role else {}
        others.pop(measured.role or "", None)
        return [*found, *(self._unmeasured_warning({role: server}) for role, server in others.items())]

    def _has_interval(self, measured: MeasuredSettings) -> bool:
        return any(measured.role in (None, role) for role in self.cost.uncertain)

    def _unmeasured_warning(self, servers: Mapping[str, ServerSettings]) -> str:
        """Says what the costs of roles are made of that no server was measured for."""
        costs = (self.cost.prefill if role == "prefill" else self.cost.decode for role in servers)
        names = " and ".join(dict.fromkeys(map(component_name, costs)))
        cost = "cost" if len(servers) > 1 else f"cost of {next(iter(servers))}"
        if names == "kernels":
            gpus = dict.fromkeys(server.gpu for server in servers.values())
            unknown = " and ".join(gpu for gpu in gpus if not has_kernels(gpu))
            kernels = f"kernels of {'other GPUs than ' if unknown else ''}{unknown or ' and '.join(gpus)}"
            return f"{cost}: only {kernels} were measured, no server: look at the range; a profile makes it narrow"
        if names == "roofline":
            return f"{cost}: nothing here was measured: roofline, which compares configurations; fit a profile for more"
        return f"{cost}: {names}: the scenario does not say what it was measured on"

    @property
    def _gpus(self) -> str:
        return " and ".join(dict.fromkeys(server.gpu for server in self._servers))

    @property
    def _servers(self) -> tuple[ServerSettings, ServerSettings]:
        """The servers that prefill, and those that decode."""
        return (self.aggregated, self.aggregated) if self.aggregated else self.pair

    @property
    def _measured_servers(self) -> tuple[ServerSettings, ServerSettings]:
        """The same, or the servers of the role that alone was measured."""
        prefill, decode = self._servers
        role = None if self.cost.measured is None else self.cost.measured.role
        return (prefill if role != "decode" else decode, decode if role != "prefill" else prefill)

    def benchmark_fields(self, backend: str) -> dict[str, Any]:
        """The arguments that SGLang's bench_serving writes in front of its results."""
        closed = self.client.concurrency if isinstance(self.client, ClosedLoop) else None
        arrivals = None if isinstance(self.client, ClosedLoop) else self.client.arrivals
        trace_rate = "inf" if closed else "trace"
        return {
            "tag": self.name,
            "backend": backend,
            "dataset_name": type(self.workload).__name__,
            "request_rate": getattr(arrivals, "rate_per_s", trace_rate),
            "max_concurrency": closed,
        }
