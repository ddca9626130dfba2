"""Servers of each role, and how they change their roles. Also the memory and drives behind their caches."""

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from pdsim.core.host_cache import PrefetchPolicy, WritePolicy
from pdsim.inputs import MOST_TOKENS
from pdsim.policy import protocols
from pdsim.policy.pages import FewestOutputsFirst, LeastRecentlyUsed, ReserveDecodeTokens
from pdsim.policy.prefill import EveryChunk, FirstComeFirstServed
from pdsim.policy.scaling import LoadThresholds
from pdsim.scenario.component import Component
from pdsim.scenario.fields import SIZE, Bandwidth, Duration, Rate, Section, Size
from pdsim.workload.lengths import Acceptance


def size_or_auto(value: Any) -> int | Literal["auto"]:
    """Bytes. Raises ValueError with what is possible, and with the two fields that stand for a mapping."""
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
"""Bytes, or auto until they are known."""


class StorageSettings(Section):
    """Drives behind the host caches (--hicache-storage-backend): of each server, or a store such as Mooncake's.

    The defaults are round figures of a fast PCIe 4.0 drive; nothing was measured.
    """

    shared: bool = False
    """True: all instances have the same store; false: each server has its own."""
    drives: int = Field(default=1, ge=1)
    """Drives of each server; of a shared store, or nodes that lend it memory."""
    size: Size = 3_840_000_000_000
    """Size of one drive."""
    read_bandwidth: Bandwidth = Field(default=6.9e9, gt=0)
    """Read bandwidth of one drive."""
    write_bandwidth: Bandwidth = Field(default=4.1e9, gt=0)
    """Write bandwidth of one drive."""
    io_limit: Rate = Field(default=1e6, gt=0)
    """Reads and writes of one drive together, one of each page and rank."""
    client_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one instance, in each direction; None: no limit."""
    latency: Duration = 100_000
    """Time before the first byte of each batch of up to 128 pages, and of looking up as many."""
    prefetch: PrefetchPolicy = "timeout"
    """Rule for waiting for reads: best_effort, wait_complete or timeout (--hicache-storage-prefetch-policy)."""
    prefetch_threshold: int = Field(default=256, ge=1)
    """Fewer tokens are computed rather than read."""


class Split(NamedTuple):
    """Sizes of the groups in which the GPUs of a server share its work."""

    tp: int
    pp: int = 1
    cp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def words(self) -> str:
        return " ".join(f"{name.upper()}{size}" for name, size in self._asdict().items() if size > 1 or name == "tp")


class ServerSettings(Section):
    """Servers of every kind."""

    instances: int = Field(default=1, ge=1)
    """Servers. They are called prefill-0, prefill-1, …; with data-parallel attention prefill-0.dp0, prefill-0.dp1, …"""
    gpu: str
    """Name in the catalog (`pdsim catalog`)."""
    tp: int = Field(default=1, ge=1)
    """GPUs of one server (--tp); the size of one role must be a multiple of the other's."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel attention (--enable-dp-attention --dp): so many instances share the server's GPUs and its experts;
    divides tp."""
    ep: int | None = Field(default=None, ge=1)
    """GPUs that hold whole experts (--ep-size): tp, or 1, which divides each expert among all. None: tp with dp > 1,
    else 1."""
    expert_skew: float = Field(default=0, ge=0)
    """Excess of the busiest GPU's expert tokens over the mean, with whole experts, before redundant experts help."""
    redundant_experts: int | None = Field(default=None, ge=0)
    """Copies of popular experts, placed by load (--enable-eplb --ep-num-redundant-experts); None: no balancer."""
    mem_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of GPU memory for weights and KV (--mem-fraction-static); None: the engine's rule."""
    pool_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """KV tokens of an instance (--max-total-tokens); None: what mem_fraction leaves."""
    radix_cache: bool = True
    """Keep the KV of earlier prompts."""
    eviction: Annotated[protocols.EvictionPolicy, Component("lru")] = LeastRecentlyUsed()
    """Eviction policy: the order in which unused KV goes."""
    host_cache: SizeOrAuto | None = None
    """Host memory for the KV of each GPU, which keeps what is evicted (--enable-hierarchical-cache --hicache-size).

    Needs radix_cache. auto: twice the pool (--hicache-ratio 2). None: what is evicted is lost.
    """
    host_cache_write: WritePolicy = "write_through"
    """Rule for copying KV there: write_through, write_through_selective or write_back (--hicache-write-policy). No
    effect without host_cache."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Most running requests of a server (--max-running-requests); None: the engine's rule."""

    @model_validator(mode="after")
    def _has_something_to_keep(self) -> Self:
        if self.host_cache is not None and not self.radix_cache:
            raise ValueError("host_cache lies behind the prefix cache: it needs radix_cache: true")
        return self

    @property
    def has_whole_experts(self) -> bool:
        """True if each GPU holds some experts, and not a part of all."""
        return self.dp > 1 if self.ep is None else self.ep > 1

    @property
    def resolved_max_running(self) -> int:
        assert self.max_running_requests is not None, "the scenario is not resolved"
        return self.max_running_requests

    @property
    def host_cache_bytes(self) -> int | None:
        """Host memory of each GPU, in resolved settings; None: there is none."""
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
        """GPUs of all servers together."""
        return self.instances * self.num_server_gpus


class ComputingSettings(ServerSettings):
    """Servers that compute prompts."""

    chunked_prefill_tokens: int | None = Field(default=None, ge=-1)
    """Most tokens of one forward (--chunked-prefill-size), of all data-parallel ranks together. None: by the GPU's
    memory; 0 or -1: no chunking."""
    max_prefill_tokens: int = Field(default=16384, ge=1)
    """Most new tokens of one forward; its first prompt may have more. No effect with engine vllm."""
    long_prefill_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one prompt in a step, with engine vllm only (--long-prefill-token-threshold); None: all that are
    left."""
    policy: Annotated[protocols.PrefillPolicy, Component("fcfs")] = FirstComeFirstServed()
    """Prefill policy: which prompt is next."""

    @property
    def rank_chunk_tokens(self) -> int:
        """Chunk of one data-parallel rank, in resolved settings; 0: no chunking."""
        return (self.chunked_prefill_tokens or 0) // self.dp


class DecodingSettings(ServerSettings):
    """Servers that decode. With drafts a step verifies several tokens of each request."""

    preemption: Annotated[protocols.PreemptionPolicy, Component("fewest_outputs_first")] = FewestOutputsFirst()
    """Preemption policy: who gives pages back when a step does not fit."""
    speculative_draft_tokens: int | None = Field(default=None, ge=2)
    """Tokens that a step verifies of each request, its last among them (--speculative-num-draft-tokens); None: no
    drafts."""
    speculative_accept_length: float | None = Field(default=None, ge=1)
    """Mean number of tokens that such a step gives a request."""
    speculative_draft_layers: int = Field(default=1, ge=0)
    """Attention layers of the draft model, whose KV is kept, cached and sent beside the model's: 1 for EAGLE, EAGLE3
    and MTP. 0: drafts without KV, such as n-grams. No effect without speculative_draft_tokens."""
    speculative_drafting: Duration = 0
    """Time of all draft forwards of one step."""

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

    pp: int = Field(default=1, ge=1)
    """Pipeline stages (--pp-size): each has its share of the layers, on tp GPUs of its own. In simulation only."""
    cp: int = Field(default=1, ge=1)
    """Context parallelism (--attn-cp-size): so many groups of the server's GPUs share the tokens of a prompt, and each
    holds all its KV; divides tp. In simulation only."""
    dynamic_chunks: bool = False
    """With pp > 1, chunks behind a prompt's first are smaller, so that each takes about as long
    (--enable-dynamic-chunking)."""
    overlap: bool = True
    """Choose a forward while the one before it runs; false: --disable-overlap-schedule. No effect with pp > 1, where as
    many forwards are under way as there are stages."""
    layer_groups: int = Field(default=0, ge=0)
    """Groups of layers whose KV is sent while the forward computes the others; needs equal TP or latent KV. 0: KV is
    sent after the forward."""
    transfer: Annotated[protocols.TransferPolicy, Component("every_chunk")] = EveryChunk()
    """Transfer policy: how much KV is sent after each chunk."""
    optimistic_attempts: int | None = Field(default=None, ge=0)
    """Times that a prompt may be begun before decode has granted it pages (--optimistic-prefill-attempts).

    None: 0, or 1 where decode.allocation is prefill_complete.
    """
    hold_timeout: Duration | None = Field(default=None, gt=0)
    """Time for which a computed prompt waits to be read, with engine vllm (VLLM_NIXL_ABORT_REQUEST_TIMEOUT).

    None: as long as it takes, for decode renews its lease (0.33.0).
    """

    @property
    def split(self) -> Split:
        return Split(self.tp, self.pp, self.cp)


class DecodeSettings(DecodingSettings):
    """The decode instances, all alike."""

    radix_cache: bool = False
    """Keep the KV of prompts and outputs (--disaggregation-decode-enable-radix-cache)."""
    extra_slots: int | None = Field(default=None, ge=0)
    """Requests that may wait for KV beyond those running (--disaggregation-decode-extra-slots). None: 0, or twice
    max_running_requests where that is given and at most 32."""
    polling_interval: int = Field(default=1, ge=1)
    """Steps from one look at queue and transfers to the next (--disaggregation-decode-polling-interval)."""
    allocation: Literal["early", "prefill_complete"] = "early"
    """Grant pages before prefill computes a prompt, or when it is done (--disaggregation-decode-allocation-policy)."""
    admission: Annotated[protocols.AdmissionPolicy, Component("reserve_decode_tokens")] = ReserveDecodeTokens()
    """Admission policy: whether the head of the queue may have its pages."""
    returns_kv: bool = False
    """KV of a request that has ended goes back to its prefill instance (vLLM's bidirectional_kv_xfer). In simulation
    only."""
    retraction_backup: bool = True
    """Copies of retracted KV to host memory and back take time."""
    retracts_to_host_cache: bool = False
    """Retracted KV goes into the host cache's memory, and a request that finds no room there fails
    (--disaggregation-decode-retraction-backup host_pool). In simulation only."""

    @model_validator(mode="after")
    def _has_what_servers_accept(self) -> Self:
        if self.retracts_to_host_cache and self.host_cache is None:
            raise ValueError("retracts_to_host_cache needs a host_cache")
        if self.radix_cache and self.acceptance is not None and self.speculative_draft_layers == 0:
            raise ValueError(
                "radix_cache: true and speculative_draft_layers: 0 exclude each other: with a radix cache SGLang's "
                "decode takes EAGLE, EAGLE3 and DSPARK (0.5.23, arg_groups/speculative_hook.py:167)"
            )
        return self


class AggregatedSettings(ComputingSettings, DecodingSettings):
    """The instances of a cluster without disaggregation, all alike: each prefills and decodes on the same GPUs.

    Here cost.host, router.decode, front_end.waits_for_prefill and all of network but message_latency have no effect.
    """

    schedule_conservativeness: float = Field(default=1.0, gt=0)
    """Factor on the expected output of running requests (--schedule-conservativeness); times 0.3 with dp > 1."""
    priority_preemption_threshold: int | None = Field(default=None, ge=0)
    """A running request gives its slot to one whose priority is higher by more than this (--priority-scheduling-
    preemption-threshold). None: 10 where there are priorities, else nobody does."""
    overlap: bool = True
    """Choose a step when the one before it begins; false: --disable-overlap-schedule."""


class Pair(NamedTuple):
    """The two roles of a disaggregated cluster."""

    prefill: PrefillSettings
    decode: DecodeSettings


class ElasticSettings(Section):
    """Servers that change their roles, start and stop. `instances` of prefill and decode are those at first.

    Both roles need the same gpu and tp, and no dp, staging or faults.
    """

    policy: Annotated[protocols.ScalingPolicy, Component("load_thresholds")] = LoadThresholds()
    """Scaling policy: how many servers each role has."""
    max_servers: int | None = Field(default=None, ge=2)
    """Servers of both roles together; None: as many as at first."""
    interval: Duration = Field(default=180_000_000_000, gt=0)
    """Time between two decisions (adjustment_interval of Dynamo's planner)."""
    start_up: Duration = 120_000_000_000
    """Time from the decision until a new server serves; its GPUs are paid for from the decision on."""
    switch: Duration = 5_000_000_000
    """Time from the moment that a server is drained until it serves in its new role."""
    drain_timeout: Duration | None = Field(default=None, gt=0)
    """A server that is not drained by then keeps its role; None: it has all the time it needs."""
