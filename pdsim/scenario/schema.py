"""The fields of a scenario. A field that SGLang has, too, has SGLang's name and default. `pdsim.schema.json` is made
from this module.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema

from pdsim.core.engine_rules import RELEASES, EngineRules
from pdsim.inputs import MOST_CONTEXT_TOKENS, shown
from pdsim.policy import protocols
from pdsim.policy.routing import CacheAware
from pdsim.scenario.defaults import Engine, with_defaults_of_engine, with_drafts_of_engine, with_priority_policy
from pdsim.scenario.rules import RULES
from pdsim.scenario.sections.component import Component
from pdsim.scenario.sections.cost import ENDS, GROUPS, CostChoice, End, Group, Setup
from pdsim.scenario.sections.encoding import EncodeSettings
from pdsim.scenario.sections.faults import Fault, HealthSettings, Kill, SlowLink
from pdsim.scenario.sections.fields import FolderName, Section, Seed, base_folder
from pdsim.scenario.sections.front_end import FrontEndSettings
from pdsim.scenario.sections.network import NetworkSettings
from pdsim.scenario.sections.profile import cost_by_role, front_end_of_profile, network_of_profile, with_profile
from pdsim.scenario.sections.servers import (
    AggregatedSettings,
    ComputingSettings,
    DecodeSettings,
    DecodingSettings,
    ElasticSettings,
    Pair,
    PrefillSettings,
    ServerSettings,
    StorageSettings,
)
from pdsim.scenario.sections.speculation import num_draft_layers
from pdsim.scenario.yaml_file import did_you_mean
from pdsim.system.catalog import CatalogError, Kind, load_gpu, load_model
from pdsim.system.memory import A2aBackend, Role
from pdsim.system.model import Dtype, KvDtype, StateDtype
from pdsim.workload.client import Client, ClosedLoop, OpenLoop
from pdsim.workload.lengths import Acceptance
from pdsim.workload.request_spec import Workload


class RouterSettings(Section):
    """Policies that choose instances. `router: NAME` sets both roles. An aggregated cluster has `prefill` alone."""

    prefill: Annotated[protocols.RoutingPolicy, Component("cache_aware")] = CacheAware()
    """Routing policy for prefill instances, or for aggregated instances."""
    decode: Annotated[protocols.RoutingPolicy, Component("cache_aware")] = CacheAware()
    """Routing policy for decode instances."""
    disaggregation: Annotated[protocols.DisaggregationPolicy, Component()] | None = None
    """Disaggregation policy: which prompts prefill instances compute, and which decode instances compute themselves.
    With engine vllm only. None: prefill instances compute all prompts.
    """
    counts: Literal["routed", "streams"] = "routed"
    """How the router counts the load of an instance. routed: requests that were routed to it. streams: requests whose
    clients receive tokens, as SGLang's gateway counts for prefill and decode (engine sglang only).
    """
    shedding: Annotated[protocols.SheddingPolicy, Component("queue_limit")] | None = None
    """Shedding policy: which requests the router refuses when too many wait. In an open loop only. None: the router
    refuses no request.
    """
    queue: Annotated[protocols.QueuePolicy, Component("busy_threshold")] | None = None
    """Queue policy: which requests wait in the router while all instances are busy. None: the router sends each request
    to an instance at once.
    """


def a_name(value: Any) -> Any:
    if isinstance(value, dict):
        beside = "weight_dtype, kv_dtype, state_dtype and context_tokens are fields beside model"
        raise ValueError(f"expected a name, found {shown(value)}; {beside}")
    return value


def by_role(value: Any) -> Any:
    """Expands the settings of one component, NAME or {use: NAME, ...}, to {prefill: ..., decode: ...} with equal
    settings for both roles. If the settings have a key `measured`, this key stands next to prefill and decode in the
    result. A value that is neither a name nor a mapping with `use` is returned unchanged.
    """
    if isinstance(value, dict) and "use" in value:
        one = {key: setting for key, setting in value.items() if key != "measured"}
        beside = {"measured": value["measured"]} if "measured" in value else {}
        return {"prefill": one, "decode": one, **beside}
    return {"prefill": value, "decode": value} if isinstance(value, str) else value


def of_all_groups(value: Any) -> Any:
    """Expands `fastest` or `slowest`, the ends of the range of step times, to a mapping from each group of times
    (GROUPS) to this end. A value that is not a text is returned unchanged. Raises ValueError for a text that is neither
    `fastest` nor `slowest`.
    """
    if not isinstance(value, str):
        return value
    if value not in ENDS:
        raise ValueError(f"no end of a range {value!r}{did_you_mean(value, ENDS)}; there are {' and '.join(ENDS)}")
    return dict.fromkeys(GROUPS, value)


def of_kind(value: Any) -> Any:
    """Expands the name of a kind, such as `dynamo`, to {kind: NAME}, the settings of a front end of this kind. A value
    that is not a text is returned unchanged.
    """
    return {"kind": value} if isinstance(value, str) else value


class OrShort:
    """Marks a section whose JSON schema also allows a short form: a name, or an object that has one of these keys."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        short = [{"type": "object", "required": [key]} for key in self.keys]
        return {"anyOf": [{"type": "string"}, *short, handler(schema)]}


SHORTHANDS = {"router": by_role, "cost": by_role, "corner": of_all_groups, "front_end": of_kind}
"""Fields that may be written as a plain value, each with the function that expands the value."""


def with_kv_of_checkpoint(data: Any) -> Any:
    """Returns a scenario's plain data. If `kv_dtype` is missing, fills in the KV data type that the model's checkpoint
    names, as engines do with --kv-cache-dtype auto. Returns the data unchanged if the checkpoint names no type, or the
    model is not in the catalog.
    """
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, str) or "kv_dtype" in data:
        return data
    try:
        found = load_model(model).kv_dtype
    except CatalogError:  # whoever loads it next says so
        return data
    return data if found is None else {**data, "kv_dtype": found}


class Scenario(Section):
    """A cluster, its load, and the seed. A run depends on these, and on files and catalog entries that they name."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prefill", "decode"]}, {"required": ["aggregated"]}]}
    )

    name: FolderName = "scenario"
    """Name of the scenario in tables, and of its run folder in a comparison."""
    description: str = ""
    """Description of the scenario, as free text."""
    seed: Seed = 0
    """Seed of workload, arrivals, aborts and backoffs. Policies have their own seeds."""
    model: Annotated[str, BeforeValidator(a_name)]
    """Model by its name in the catalog (`pdsim catalog` lists the names)."""
    checkpoint: str | None = Field(default=None, min_length=1)
    """Path of the model, or its name on Hugging Face, with which `pdsim launch` starts servers (--model-path). None:
    the name in `model`. Simulations do not use it.
    """
    weight_dtype: Dtype | None = None
    """Data type of the weights: bf16, fp8, fp4, or int4 and int8 (computed in bf16). None: the checkpoint's type."""
    kv_dtype: KvDtype = "bf16"
    """Data type of the KV: bf16, fp8, fp4, or fp32 for CPUs. If left out: the checkpoint's KV type if it has one,
    otherwise bf16.
    """
    state_dtype: StateDtype = "fp32"
    """Data type of the state of linear-attention layers: fp32, fp16 or bf16 (--mamba-ssm-dtype)."""
    context_tokens: int | None = Field(default=None, ge=1, le=MOST_CONTEXT_TOKENS)
    """Maximum number of tokens of prompt and output together (--context-length). None: the model's context. Larger
    values need scaled RoPE."""
    page_size: int = Field(default=1, ge=1)
    """Number of tokens of a KV page. The default is 16 with engine vllm."""
    engine: Engine = "sglang"
    """Engine whose rules and default sizes instances follow: sglang or vllm.

    With vllm, the defaults of decode are radix_cache true, allocation prefill_complete, admission free_pages and
    preemption last_admitted_first. Aggregated instances have the same preemption.
    """
    engine_version: str | None = None
    """Release of the engine whose rules the schedulers follow: 0.5.23 or 0.5.12 of sglang, 0.33.0 of vllm.

    None: the newest release of these.
    """
    prefill: PrefillSettings | None = None
    """Prefill servers. A cluster with prefill also needs decode."""
    decode: DecodeSettings | None = None
    """Decode servers. A cluster with decode also needs prefill."""
    aggregated: AggregatedSettings | None = None
    """Servers that both prefill and decode, instead of `prefill` and `decode`."""
    encode: EncodeSettings | None = None
    """Encode instances, which encode images and audio of prompts (EPD). None: servers that compute prompts encode media
    themselves, within their forwards."""
    router: Annotated[RouterSettings, BeforeValidator(by_role), OrShort("use")] = RouterSettings()
    """Policies that choose the instances of a request. `router: NAME` sets one policy for both roles."""
    network: Annotated[NetworkSettings, BeforeValidator(network_of_profile), OrShort("profile")] = NetworkSettings()
    """Links and messages between instances. {profile: FILE} reads measured values."""
    front_end: Annotated[
        FrontEndSettings | None, BeforeValidator(front_end_of_profile), BeforeValidator(of_kind), OrShort("profile")
    ] = None
    """HTTP server, tokenizer and gateway, by kind or by times. None: with the cost model kernels, the engine's own HTTP
    server (kind engine); with other cost models, no front end.
    """
    cost: Annotated[CostChoice, BeforeValidator(by_role), BeforeValidator(cost_by_role), OrShort("use", "profile")] = (
        CostChoice()
    )
    """Times of steps. One cost model sets both roles; {profile: FILE} reads measured times."""
    profile: Annotated[str | dict[Literal["prefill", "decode"], str] | None, Field(exclude=True)] = None
    """File of a profile. Its step times, CPU times of the host, transfer times and front end replace those of `cost`,
    `network` and `front_end`. {prefill: FILE, decode: FILE} gives each role its own.
    """
    corner: Annotated[dict[Group, End] | None, BeforeValidator(of_all_groups), OrShort()] = None
    """Which step times to simulate if they have a range, because they were not measured on a server: `slowest`,
    `fastest`, or by group {prefill: slowest}. The groups are prefill, decode, and outside (time outside the GPUs).
    """
    workload: Annotated[Workload, Component()]
    """The requests that clients send: generated or from a trace, with lengths of prompts and outputs."""
    client: Annotated[Client, Component("open_loop")] = OpenLoop()
    """Client: when requests are sent, in an open or a closed loop."""
    ignore_eos: bool = True
    """True: clients send ignore_eos with each request whose output is as long as its maximum, as bench_serving and
    `pdsim launch` do. An aggregated instance then expects the maximum output when it admits the request.
    """
    priorities: dict[str, int] = Field(default={})
    """Priorities of request classes: {chat: 1, batch: 0}. Higher priorities go first; other classes have 0. With
    priorities the default of `policy` is priority, and that of vLLM's `preemption` lowest_priority_first.
    """
    storage: StorageSettings | None = None
    """Storage behind the host caches. None: KV that host caches evict is lost."""
    elastic: ElasticSettings | None = None
    """Rules by which servers change their roles, start and stop. None: servers keep their roles."""
    faults: tuple[Annotated[Fault, Component(by_field=True)], ...] = ()
    """Faults and their times."""
    health: HealthSettings | None = None
    """Detection of failures, and retries. None: the defaults if there are faults; otherwise no detection and no
    retries."""

    @model_validator(mode="before")
    @classmethod
    def _has_defaults_of_its_engine(cls, data: Any, info: ValidationInfo[Any]) -> Any:
        data = with_profile(data, base_folder(info))
        return with_defaults_of_engine(with_priority_policy(with_drafts_of_engine(with_kv_of_checkpoint(data))))

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        if wrong := next(filter(None, (rule(self) for rule in RULES)), ""):
            raise ValueError(wrong)
        return self

    @property
    def engine_rules(self) -> EngineRules:
        """Rules of the instances' schedulers in the engine's release."""
        releases = RELEASES[self.engine]
        return releases[self.engine_version or next(iter(releases))]

    @property
    def engine_warnings(self) -> list[str]:
        """Warnings about known crashes of the engine's release under the scenario's settings. The simulation goes on
        where a server would crash.
        """
        if self.decode is None or not self.decode.radix_cache or self.engine_rules != RELEASES["sglang"]["0.5.12"]:
            return []
        dies = "decode.radix_cache: a server of SGLang 0.5.12 crashes when a retracted request continues"
        return [f"{dies} (mem_cache/radix_cache.py:612, pull request 29471); the simulation goes on"]

    @property
    def roles(self) -> dict[Role, ServerSettings]:
        """The settings of the servers of each role that the cluster has."""
        roles: dict[Role, ServerSettings | None]
        roles = {"prefill": self.prefill, "decode": self.decode, "aggregated": self.aggregated}
        return {role: servers for role, servers in roles.items() if servers is not None}

    def page_tokens(self, role: Role) -> int:
        """Number of tokens that a page of this role holds. If GPUs divide the KV of a request (dcp), each of them holds
        page_size tokens of a page.

        Sources: SGLang 0.5.23, mem_cache/kv_cache_configurator.py, attn_dcp_size; vLLM 0.33.0,
        v1/core/kv_cache_utils.py, resolve_dcp_kv_block_size.
        """
        return self.page_size * self.roles[role].split.dcp

    @property
    def max_servers(self) -> int:
        """Maximum number of prefill and decode servers together, at any time. The cluster must be disaggregated."""
        prefill, decode = self.pair
        at_first = prefill.instances + decode.instances
        return at_first if self.elastic is None else self.elastic.max_servers or at_first

    @property
    def pair(self) -> Pair:
        """Settings of the prefill and of the decode servers. The cluster must be disaggregated."""
        assert self.prefill is not None
        assert self.decode is not None
        return Pair(self.prefill, self.decode)

    @property
    def entries(self) -> list[tuple[Kind, str]]:
        """Kind and name of the catalog entries of model, transports and GPUs. The draft model's entry is left out."""
        found: list[tuple[Kind, str]] = [("models", self.model), ("transports", self.network.transport)]
        found += [("gpus", servers.gpu) for servers in self.roles.values()]
        if (draft := self.servers[1].speculative_draft_model) is not None:
            found.append(("models", draft))
        if self.encode is not None:
            found += [("transports", self.encode.transport), ("gpus", self.encode.gpu)]
        return found

    @property
    def num_gpus(self) -> int:
        if self.elastic is not None:
            return self.max_servers * self.pair.prefill.tp
        return self.num_role_gpus + (0 if self.encode is None else self.encode.instances)

    @property
    def num_role_gpus(self) -> int:
        """Number of GPUs of the servers of all roles, without encode instances."""
        return sum(servers.num_gpus for servers in self.roles.values())

    @property
    def has_server_faults(self) -> bool:
        """True if the scenario lets instances die or links slow down, so that requests may fail."""
        return any(isinstance(fault, Kill | SlowLink) for fault in self.faults)

    @property
    def acceptance(self) -> Acceptance | None:
        """How many drafted tokens a decode step accepts. None: each step gives a request one token."""
        return self.servers[1].acceptance

    @property
    def num_draft_layers(self) -> int:
        """Number of the draft model's layers that have KV. 0: there is no speculation, or the draft model has no such
        layers.
        """
        decoding = self.servers[1]
        named = decoding.speculative_draft_model
        return num_draft_layers(decoding, None if named is None else load_model(named))

    @property
    def setup(self) -> Setup:
        """The model, the hardware, and the parallel sizes of the instances. If the cost was measured on one role only,
        that role's GPU and sizes stand for both roles, and sizes that only the other role has keep their defaults.
        """
        prefill: ServerSettings
        decode: ServerSettings
        prefill, decode = self.servers
        role = None if self.cost.measured is None else self.cost.measured.role
        if role is not None:  # which alone was measured
            prefill = decode = prefill if role == "prefill" else decode
        return Setup(
            model=self.model,
            weight_dtype=self.weight_dtype or load_model(self.model).weight_dtype,
            kv_dtype=self.kv_dtype,
            device=" and ".join(dict.fromkeys((prefill.gpu, decode.gpu))),
            tp=(prefill.tp, decode.tp),
            dp=(prefill.dp, decode.dp),
            ep=(prefill.resolved_ep, decode.resolved_ep),
            moe_a2a_backend=(self.a2a_backend(prefill), self.a2a_backend(decode)),
            pp=1 if role == "decode" else self.servers[0].split.pp,
            cp=1 if role == "decode" else self.servers[0].split.cp,
            dcp=1 if role == "prefill" else self.servers[1].dcp,
            draft_tokens=None if role == "prefill" else self.servers[1].num_verified_tokens,
        )

    def a2a_backend(self, servers: ServerSettings) -> A2aBackend:
        """Library that sends tokens to whole experts of other GPUs of these servers. none: each GPU gets all tokens, or
        holds no whole experts.
        """
        if not servers.has_whole_experts or load_model(self.model).experts is None:
            return "none"
        spans_domains = servers.dp > 1 and servers.tp > load_gpu(servers.gpu).gpus_per_server
        return servers.moe_a2a_backend or ("deepep" if spans_domains else "none")

    @property
    def uncertain(self) -> tuple[Group, ...]:
        """Groups of times (prefill, decode, outside) that have a range, from the fastest to the slowest server, because
        no server was measured. If `corner` fixes a group to one end of its range, the group is left out. If the cost
        was measured on another setup, the measured role is left out, or all groups if both roles were measured. Empty:
        no group is left.
        """
        outside: tuple[Group, ...] = ("outside",) if self.uncertain_front_end else ()
        found = tuple(group for group in (*self.cost.uncertain, *outside) if group not in (self.corner or {}))
        if found and self.foreign_setup:
            role = None if self.cost.measured is None else self.cost.measured.role
            return tuple(group for group in found if role not in (None, group))
        return found

    @property
    def ends(self) -> "tuple[Scenario, ...]":
        """Two copies of this scenario: with the fastest times, and with the slowest times. Groups that `corner` names
        keep their end. Empty: `uncertain` is empty.
        """
        return tuple(self.at({**dict.fromkeys(GROUPS, end), **(self.corner or {})}) for end in ENDS if self.uncertain)

    def at(self, corner: Mapping[Group, End]) -> "Scenario":
        return self.model_copy(update={"corner": dict(corner)})

    @property
    def at_corner(self) -> "Scenario":
        """This scenario with the times (of steps and front end) at the ends of ranges that its field `corner` names,
        and without the field `corner`.
        """
        if not self.corner:
            return self
        update: dict[str, Any] = {"corner": None, "cost": self.cost.at(self.corner)}
        if "outside" in self.corner and (front_end := self.uncertain_front_end):
            update["front_end"] = front_end.ends[ENDS.index(self.corner["outside"])]
        return self.model_copy(update=update)

    @property
    def uncertain_front_end(self) -> FrontEndSettings | None:
        """The front end, if only its kind is given, because the times of a kind have a range. With cost `kernels` and
        no front end in the scenario: the engine's HTTP server. None: times are given, or there is no front end.
        """
        if self.front_end is None:
            return FrontEndSettings(kind="engine") if self.cost.is_of_kernels else None
        return self.front_end if self.front_end.is_uncertain else None

    @property
    def device(self) -> str:
        """Device on which the cost of both roles was measured, if known; else the servers' GPUs, joined by "and"."""
        measured = self.cost.measured
        gpus = dict.fromkeys(servers.gpu for servers in self.servers)
        return (measured and measured.role is None and measured.device) or " and ".join(gpus)

    @property
    def foreign_setup(self) -> list[str]:
        """Differences between the scenario's setup and the setup on which its cost was measured, each as text. Empty:
        none, or the measured setup is not known.
        """
        measured = self.cost.measured
        return [] if measured is None or measured.model is None else measured.differences(self.setup)

    @property
    def servers(self) -> tuple[ComputingSettings, DecodingSettings]:
        """Settings of the servers that compute prompts, and of the servers that decode."""
        return (self.aggregated, self.aggregated) if self.aggregated else self.pair

    def benchmark_fields(self, backend: str) -> dict[str, Any]:
        """The fields of this scenario that SGLang's bench_serving writes into its results: tag, backend, dataset_name,
        request_rate, max_concurrency. backend: name of the serving engine, such as sglang.
        """
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
