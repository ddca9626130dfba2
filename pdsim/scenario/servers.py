"""Servers of each role, and how they change their roles."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from pdsim.policy import protocols
from pdsim.policy.decode import FewestOutputsFirst, ReserveDecodeTokens
from pdsim.policy.eviction import LeastRecentlyUsed
from pdsim.policy.prefill import EveryChunk, FirstComeFirstServed
from pdsim.policy.scaling import LoadThresholds
from pdsim.scenario.component import Component
from pdsim.scenario.fields import Duration, Section
from pdsim.scenario.storage import HostCacheSettings
from pdsim.workload.acceptance import Acceptance


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


class Pair(NamedTuple):
    """The two roles of a disaggregated cluster."""

    prefill: PrefillSettings
    decode: DecodeSettings


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
