"""The ways between instances, and between clients and the router."""

from pydantic import Field

from pdsim.scenario.fields import Bandwidth, Duration, FineDuration, Section, Size


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
