"""Settings of the servers of each role, of role changes, and of the host memory and drives behind prefix caches."""

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from pdsim.core.memory.host_cache import PrefetchPolicy, WritePolicy
from pdsim.inputs import MOST_TOKENS
from pdsim.policy import protocols
from pdsim.policy.pages import FewestOutputsFirst, LeastRecentlyUsed, ReserveDecodeTokens
from pdsim.policy.prefill import EveryChunk, FirstComeFirstServed
from pdsim.policy.ranks import LoadBalanceMethod
from pdsim.policy.scaling import LoadThresholds
from pdsim.scenario.sections.component import Component
from pdsim.scenario.sections.fields import SIZE, Bandwidth, Duration, Rate, Section, Size
from pdsim.scenario.sections.speculation import SpeculativeSettings
from pdsim.system.memory import A2aBackend
from pdsim.system.states import StateStrategy

HostCacheConnector = Literal["offloading", "lmcache", "kvbm"]


def size_or_auto(value: Any) -> int | Literal["auto"]:
    """Reads a size in bytes, or `auto`. Raises ValueError, which names the possible values."""
    if value == "auto":
        return "auto"
    if isinstance(value, dict):
        write = f" and host_cache_write: {value['write']}" if value.get("write") else ""
        raise ValueError(
            f"expected a size such as 64 GiB, or auto (twice the pool), found {value!r}: "
            f"write host_cache: {value.get('size') or 'auto'}{write}"
        )
    try:
        return round(SIZE.parse(value))
    except ValueError as wrong:
        raise ValueError(f"{wrong}; auto is twice the pool") from None


SizeOrAuto = Annotated[
    int | Literal["auto"],
    BeforeValidator(size_or_auto),
    PlainSerializer(lambda size: size if size == "auto" else SIZE.show(size)),
    WithJsonSchema({"type": "string", "description": "a size with its unit, or auto", "examples": ["64 GiB", "auto"]}),
]
"""A size in bytes, or `auto`: pdsim computes the size when it resolves the scenario."""


class StorageSettings(Section):
    """Drives behind the host caches (--hicache-storage-backend, or LMCache's remote_url with enable_async_loading):
    each server's own, or a shared store such as Mooncake's.

    The defaults are round figures of a fast PCIe 4.0 drive; nothing was measured.
    """

    shared: bool = False
    """True: all instances share one store. False: each server has drives of its own."""
    drives: int = Field(default=1, ge=1)
    """Number of drives of each server, or of the shared store. A store in memory: number of nodes that lend memory."""
    size: Size = 3_840_000_000_000
    """Capacity of one drive."""
    read_bandwidth: Bandwidth = Field(default=6.9e9, gt=0)
    """Read bandwidth of one drive."""
    write_bandwidth: Bandwidth = Field(default=4.1e9, gt=0)
    """Write bandwidth of one drive."""
    io_limit: Rate = Field(default=1e6, gt=0)
    """Reads and writes per second of one drive; each page (LMCache: chunk) of each rank is one operation."""
    client_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth between one instance and storage, in each direction. None: no limit."""
    latency: Duration = 100_000
    """Time of looking up a batch of up to 128 pages, and time until the first byte of a batch in a transfer."""
    prefetch: PrefetchPolicy = "timeout"
    """Rule for waiting for reads: best_effort, wait_complete or timeout (--hicache-storage-prefetch-policy). With
    engine sglang only."""
    prefetch_threshold: int = Field(default=256, ge=1)
    """Minimum number of tokens worth reading from storage. Fewer tokens are computed. With engine sglang only."""


class Split(NamedTuple):
    """Parallel sizes of a server. tp: number of GPUs of a pipeline stage. pp: number of stages. cp: number of groups of
    a stage's GPUs, each of which computes a part of a prompt. dcp: number of GPUs that divide each request's KV.
    """

    tp: int
    pp: int = 1
    cp: int = 1
    dcp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def words(self) -> str:
        return " ".join(f"{name.upper()}{size}" for name, size in self._asdict().items() if size > 1 or name == "tp")


class HiSparseSettings(Section):
    """HiSparse (--enable-hisparse): decode keeps all KV in host memory, and a buffer of each request's KV on the GPU.
    Prefill sends KV to the host memory. Steps copy the tokens that sparse attention chooses and the buffer lacks.
    """

    miss_rate: float = Field(ge=0, le=1)
    """Share of the chosen tokens that a step must copy from host memory, if a request's KV does not fit its buffer. The
    rate depends on model, prompts and buffer; there is no default."""
    device_buffer_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Number of tokens of each request's GPU buffer (device_buffer_size): whole pages, and at least as many tokens as
    sparse attention chooses. None: twice as many as that."""
    host_to_device_ratio: int = Field(default=2, ge=1)
    """Number of KV tokens in host memory for each token of pool_tokens, the KV on the GPU. The GPU also holds the
    indexer's keys of all tokens in host memory."""


class ServerSettings(Section):
    """Settings that servers of all roles have."""

    instances: int = Field(default=1, ge=1)
    """Number of servers. Their names are prefill-0, prefill-1, …; with data-parallel attention prefill-0.dp0,
    prefill-0.dp1, …"""
    gpu: str
    """GPU by its name in the catalog (`pdsim catalog` lists the names)."""
    tp: int = Field(default=1, ge=1)
    """Number of GPUs of one server (with pp: of one stage), over as many hosts as needed (--tp). tp / (dp x cp) of
    prefill must divide tp / dp of decode, or the other way round."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel attention (--enable-dp-attention --dp): number of instances that share the server's GPUs and
    experts. tp must be a multiple of dp."""
    ep: int | None = Field(default=None, ge=1)
    """Expert parallelism (--ep-size). If equal to tp, each GPU holds whole experts. If 1, all GPUs share each expert.
    None: tp if dp > 1, otherwise 1.
    """
    moe_a2a_backend: A2aBackend | None = None
    """Library that sends tokens to whole experts of other GPUs (--moe-a2a-backend; vLLM: --all2all-backend). none: each
    GPU gets all tokens. deepep, mori: a token goes to the GPUs of its experts. None: deepep if dp > 1 over several
    NVLink domains, otherwise none."""
    load_balance_method: Literal["auto", "router", LoadBalanceMethod] = "auto"
    """How a server picks the data-parallel rank of a request (--load-balance-method): round_robin,
    follow_bootstrap_room (a random rank), total_requests or total_tokens. router: the router picks among the ranks of
    all servers. auto: with engine sglang follow_bootstrap_room for prefill and round_robin for other roles; with vllm
    router. No effect with dp 1."""
    expert_skew: float = Field(default=0, ge=0)
    """Tokens of the experts on the busiest GPU, divided by the mean over all GPUs, minus 1. Applies to whole experts.
    Redundant experts reduce the skew."""
    redundant_experts: int | None = Field(default=None, ge=0)
    """Number of copies of popular experts, placed by load (--enable-eplb --ep-num-redundant-experts). None: no
    balancer."""
    attention_backend: Literal["flashinfer"] | None = None
    """Library of attention kernels (--attention-backend). None: the engine's choice for the GPU. The default cost has
    times of FlashInfer for B200, B300, GB200 and GB300, for models without latent attention.
    """
    two_batch_overlap: bool = False
    """True: half of a batch exchanges tokens between hosts while the other half computes (--enable-two-batch-overlap).
    No effect on servers within one NVLink domain.
    """
    mem_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of GPU memory for weights and KV (--mem-fraction-static). None: the engine's rule."""
    pool_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Number of KV tokens of an instance (--max-total-tokens). None: as many as mem_fraction leaves room for."""
    radix_cache: bool = True
    """True: keep the KV of earlier prompts in a prefix cache."""
    eviction: Annotated[protocols.EvictionPolicy, Component("lru")] = LeastRecentlyUsed()
    """Eviction policy: the order in which unused KV is evicted."""
    host_cache: SizeOrAuto | None = None
    """Host memory per GPU that keeps KV (--enable-hierarchical-cache --hicache-size; vLLM: --kv-offloading-size).

    With engine sglang it needs radix_cache. With engine vllm decode has none, and a model with states needs
    radix_cache. auto: twice the pool (--hicache-ratio 2). None: evicted KV is lost.
    """
    host_cache_write: WritePolicy = "write_through"
    """When KV is copied to the host cache: write_through, write_through_selective or write_back
    (--hicache-write-policy). No effect without host_cache. With engine vllm: write_through.
    """
    host_cache_connector: HostCacheConnector = "offloading"
    """With engine vllm, what keeps KV in the host cache: offloading (OffloadingConnector), lmcache (LMCacheConnectorV1)
    or kvbm (Dynamo's DynamoConnector). No effect without host_cache.
    """
    host_cache_chunk_tokens: int = Field(default=256, ge=1, le=MOST_TOKENS)
    """Number of tokens that LMCache saves and loads together (LMCACHE_CHUNK_SIZE). With lmcache only; a multiple of
    page_size."""
    host_cache_layerwise: bool = False
    """True: LMCache copies KV layer by layer, while other layers are computed (LMCACHE_USE_LAYERWISE). With lmcache
    only."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Maximum number of running requests of a server (--max-running-requests). None: the engine's rule."""
    mamba_radix_cache_strategy: StateStrategy | None = None
    """Strategy for states of linear-attention layers. It sets the number of state slots per running request, with those
    of the prefix cache: no_buffer (3) or extra_buffer (5; 4 without overlap). None: extra_buffer; no_buffer with
    engine_version 0.5.12.
    """
    mamba_track_interval: int | None = Field(default=None, ge=1)
    """Number of tokens between two states of a decoding request that can be kept (--mamba-track-interval). The prefix
    cache gets the last of these states when the request ends. None: 256."""

    @model_validator(mode="after")
    def _has_layers_to_copy(self) -> Self:
        if self.host_cache_layerwise and self.host_cache_connector != "lmcache":
            raise ValueError("host_cache_layerwise is a setting of LMCache: say host_cache_connector: lmcache")
        return self

    @property
    def has_whole_experts(self) -> bool:
        """True if each GPU holds whole experts instead of a part of every expert."""
        return self.dp > 1 if self.ep is None else self.ep > 1

    @property
    def resolved_ep(self) -> int:
        return self.tp if self.has_whole_experts else 1

    @property
    def hisparse_ratio(self) -> int | None:
        """Number of KV tokens in host memory for each token of pool_tokens, the KV on the GPU. None: all KV is on the
        GPU.
        """
        return None

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens whose KV an instance can hold. The settings must be resolved."""
        assert self.pool_tokens is not None, "the scenario is not resolved"
        return self.pool_tokens * (self.hisparse_ratio or 1)

    @property
    def resolved_max_running(self) -> int:
        """Maximum number of running requests of one data-parallel rank. The settings must be resolved."""
        assert self.max_running_requests is not None, "the scenario is not resolved"
        return max(1, self.max_running_requests // self.dp)

    @property
    def host_cache_bytes(self) -> int | None:
        """Host memory in bytes per GPU that keeps KV. None: no host cache. The settings must be resolved."""
        assert self.host_cache != "auto", "the scenario is not resolved"
        return self.host_cache

    @property
    def split(self) -> Split:
        return Split(self.tp)

    @property
    def num_server_gpus(self) -> int:
        return self.split.num_gpus

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that all servers of the role have together."""
        return self.instances * self.num_server_gpus


class ComputingSettings(ServerSettings):
    """Servers that compute prompts."""

    cp: int = Field(default=1, ge=1)
    """Context parallelism (--attn-cp-size): number of groups of the server's GPUs that share the tokens of a prompt.
    Each group holds all KV of the prompt, and computes all decode steps. tp is a multiple of cp. Simulation only."""
    chunked_prefill_tokens: int | None = Field(default=None, ge=-1)
    """Maximum number of tokens of one forward (--chunked-prefill-size), for all data-parallel ranks together. None: the
    engine's default for the GPU's memory. 0 or -1: no chunking.
    """
    max_prefill_tokens: int = Field(default=16384, ge=1)
    """Maximum number of new tokens of one forward; its first prompt may exceed this. No effect with engine vllm."""
    prefill_max_requests: int | None = Field(default=None, ge=1)
    """Maximum number of prompts of one forward (--prefill-max-requests), with engine sglang only. None: no limit."""
    long_prefill_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one prompt in a step, with engine vllm only (--long-prefill-token-threshold). None:
    no limit."""
    long_prefill_adaptive: bool = False
    """True: long_prefill_tokens is at least chunked_prefill_tokens divided by the number of running and waiting
    requests (--long-prefill-token-threshold-adaptive). Only with engine vllm, and if long_prefill_tokens is given."""
    chunked_media: bool = True
    """False: no chunk ends within an image or audio clip, with engine vllm only (--disable-chunked-mm-input)."""
    policy: Annotated[protocols.PrefillPolicy, Component("fcfs")] = FirstComeFirstServed()
    """Prefill policy: which waiting prompt is computed next."""

    @property
    def rank_chunk_tokens(self) -> int:
        """Chunk size in tokens of one data-parallel rank. 0: prompts are not divided into chunks. The settings must be
        resolved.
        """
        return (self.chunked_prefill_tokens or 0) // self.dp


class DecodingSettings(SpeculativeSettings, ServerSettings):
    """Servers that decode. With speculation a step verifies several tokens of each request."""

    pp: int = Field(default=1, ge=1)
    """Number of pipeline stages (--pp-size; vLLM: --pipeline-parallel-size). Each stage has its share of the layers on
    its own tp GPUs. Decode has as many stages as prefill, or one; with engine vllm, one. Simulation only."""
    dcp: int = Field(default=1, ge=1)
    """Context parallelism of decode (--dcp-size; vLLM: --decode-context-parallel-size): number of GPUs that divide each
    request's KV, token by token, instead of holding copies. dcp divides tp / dp. Simulation only."""
    preemption: Annotated[protocols.PreemptionPolicy, Component("fewest_outputs_first")] = FewestOutputsFirst()
    """Preemption policy: which running request loses its pages when the pool has too few pages for a step."""
    stream_interval: int = Field(default=1, ge=1)
    """Number of tokens that reach the client together (--stream-interval). The first token, and the last tokens of an
    answer, are sent at once. Simulation only."""

    @property
    def split(self) -> Split:
        return Split(self.tp, self.pp, dcp=self.dcp)


class PrefillSettings(ComputingSettings):
    """The prefill servers, which are all equal."""

    pp: int = Field(default=1, ge=1)
    """Number of pipeline stages (--pp-size; vLLM: --pipeline-parallel-size). Each stage has its share of the layers on
    its own tp GPUs. Simulation only."""
    dynamic_chunks: bool = False
    """True, with pp > 1: later chunks of a prompt are smaller, so that each chunk takes about as long as the first
    (--enable-dynamic-chunking).
    """
    overlap: bool = True
    """True: the scheduler chooses a forward while the previous forward runs. False: --disable-overlap-schedule. No
    effect with pp > 1, because each pipeline stage then runs a forward of its own."""
    layer_groups: int = Field(default=0, ge=0)
    """Number of groups of layers whose KV is sent while the forward computes later layers. Needs equal TP or latent
    KV. 0: KV is sent after the forward."""
    transfer: Annotated[protocols.TransferPolicy, Component("every_chunk")] = EveryChunk()
    """Transfer policy: which KV is sent after each chunk."""
    optimistic_attempts: int | None = Field(default=None, ge=0)
    """Number of attempts to compute a prompt before decode has granted it pages (--optimistic-prefill-attempts).

    None: 0, or 1 if decode.allocation is prefill_complete.
    """
    hold_timeout: Duration | None = Field(default=None, gt=0)
    """Time for which prefill holds a computed prompt until decode reads it, with engine vllm (kv_lease_duration of
    NixlConnector, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT of MooncakeConnector).

    None: no limit, as in vLLM 0.33.0, whose decode asks prefill again and again to hold the prompt longer.
    """

    @property
    def split(self) -> Split:
        return Split(self.tp, self.pp, self.cp)


class DecodeSettings(DecodingSettings):
    """The decode servers, which are all equal."""

    radix_cache: bool = False
    """True: keep the KV of prompts and outputs in a prefix cache (--disaggregation-decode-enable-radix-cache)."""
    extra_slots: int | None = Field(default=None, ge=0)
    """Number of requests of an instance that may wait for KV in addition to running requests
    (--disaggregation-decode-extra-slots). None: twice the quotient max_running_requests / dp if max_running_requests is
    given and the quotient is at most 32, otherwise 0."""
    polling_interval: int = Field(default=1, ge=1)
    """Number of decode steps between two looks at waiting requests and arrived KV
    (--disaggregation-decode-polling-interval)."""
    allocation: Literal["early", "prefill_complete"] = "early"
    """When decode grants pages (--disaggregation-decode-allocation-policy). early: before prefill computes a prompt.
    prefill_complete: when prefill has computed the prompt."""
    admission: Annotated[protocols.AdmissionPolicy, Component("reserve_decode_tokens")] = ReserveDecodeTokens()
    """Admission policy: whether the first request of the queue gets its pages."""
    returns_kv: bool = False
    """True: decode sends the KV of an ended request back to its prefill instance (vLLM's bidirectional_kv_xfer).
    Simulation only.
    """
    hisparse: HiSparseSettings | None = None
    """KV in host memory, for models with sparse attention and engine sglang. None: all KV is on the GPU."""
    retraction_backup: bool = True
    """True: copies of retracted KV to host memory and back take time. False: they take none."""
    retracts_to_host_cache: bool = False
    """True: retracted KV goes into the host cache's memory, and a request fails if there is no room
    (--disaggregation-decode-retraction-backup host_pool). Simulation only.
    """

    @property
    def hisparse_ratio(self) -> int | None:
        return None if self.hisparse is None else self.hisparse.host_to_device_ratio

    @model_validator(mode="after")
    def _has_what_servers_accept(self) -> Self:
        if self.retracts_to_host_cache and self.host_cache is None:
            raise ValueError("retracts_to_host_cache needs a host_cache")
        without_kv = self.speculative_draft_layers == 0 or self.speculative_algorithm in ("NGRAM", "STANDALONE")
        if self.radix_cache and self.acceptance is not None and without_kv:
            found = self.speculative_algorithm or "speculative_draft_layers: 0"
            raise ValueError(
                f"radix_cache: true and {found} exclude each other: with a radix cache SGLang's decode takes EAGLE, "
                "EAGLE3 and DSPARK (0.5.23, arg_groups/speculative_hook.py:167)"
            )
        return self


class AggregatedSettings(ComputingSettings, DecodingSettings):
    """Servers of a cluster without disaggregation, which are all equal. Each server prefills and decodes on the same
    GPUs.

    In such a cluster router.decode and front_end.waits_for_prefill have no effect. Of network only message_latency has
    one; with encode instances or servers over several hosts, bandwidths and gpus_per_nic have one, too. Of cost.host
    only launch, loading, slowdown and the fields with decode in their name have one.
    """

    schedule_conservativeness: float = Field(default=1.0, gt=0)
    """Factor on the number of output tokens for which the scheduler leaves memory to running requests when it admits
    prompts (--schedule-conservativeness). With dp > 1 the factor is multiplied by 0.3.
    """
    priority_preemption_threshold: int | None = Field(default=None, ge=0)
    """A request preempts a running request whose priority is lower by more than this number
    (--priority-scheduling-preemption-threshold). None: 10 if the scenario has priorities; otherwise no preemption.
    """
    overlap: bool = True
    """True: the scheduler chooses a step when the step before begins. False: --disable-overlap-schedule."""
    mixed_chunk: bool = False
    """True: forwards that compute prompts also decode (--enable-mixed-chunk). chunked_prefill_tokens limits both
    together."""
    scheduler_recv_interval: int = Field(default=1, ge=1, le=1000)
    """N: while requests decode, the scheduler takes new requests only after every N-th step
    (--scheduler-recv-interval). A forward with prompts counts as 1000 steps (0.5.23, environ.py:675), and pdsim models
    no larger N.
    """
    prefill_schedule_interval: int = Field(default=1, ge=1, le=MOST_TOKENS)
    """N: while requests decode, only every N-th step computes prompts (vLLM's --prefill-schedule-interval)."""

    @model_validator(mode="after")
    def _receives_in_one_loop(self) -> Self:
        if self.scheduler_recv_interval > 1 and not (self.overlap and self.dp == self.pp == 1):
            raise ValueError("scheduler_recv_interval: pdsim models it with overlap, dp: 1 and pp: 1; leave it out")
        return self

    @property
    def split(self) -> Split:
        return Split(self.tp, self.pp, self.cp, self.dcp)


class Pair(NamedTuple):
    """The two roles of a disaggregated cluster."""

    prefill: PrefillSettings
    decode: DecodeSettings


class ElasticSettings(Section):
    """Servers that change their roles, start and stop. `instances` of prefill and decode are the initial numbers.

    Both roles need the same gpu and tp. dp, staging and faults are not possible.
    """

    policy: Annotated[protocols.ScalingPolicy, Component("load_thresholds")] = LoadThresholds()
    """Scaling policy: how many servers prefill, and how many decode."""
    max_servers: int | None = Field(default=None, ge=2)
    """Maximum number of servers of both roles together. None: the initial number."""
    interval: Duration = Field(default=180_000_000_000, gt=0)
    """Time between two decisions (adjustment_interval of Dynamo's planner)."""
    start_up: Duration = 120_000_000_000
    """Time from the decision until a new server serves. Its GPUs are paid for from the decision on."""
    switch: Duration = 5_000_000_000
    """Time from the end of draining until the server serves in its new role."""
    drain_timeout: Duration | None = Field(default=None, gt=0)
    """Maximum time in which a server drains, that is, ends its requests before it changes its role. A server that still
    has requests then keeps its role. None: no limit.
    """
