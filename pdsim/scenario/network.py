"""The ways between instances, and between clients and the router."""

from pydantic import Field

from pdsim.scenario.fields import Bandwidth, Duration, FineDuration, Section, Size


class StagingSettings(Section):
    """KV between unequal tensor-parallel sizes goes through staging memory (SGLANG_DISAGG_STAGING_BUFFER)."""

    ring: Size = 4 * 2**30
    """Memory of one decode rank (SGLANG_DISAGG_STAGING_POOL_SIZE_MB)."""
    prefill_buffer: Size | None = None
    """Memory of one prefill worker; larger cells go as slices. None: any fits."""
    gather_host: Duration = 840_000
    """Host time of one gather, during which its worker does nothing else (SGLang PR 19890, GB200)."""
    scatter_host: Duration = 678_000
    """Host time of one scatter."""
    gather_efficiency: float = Field(default=0.65, gt=0, le=1)
    """Share of GPU memory bandwidth, each byte read and written once (SGLang's kernels, measured on H200)."""
    scatter_efficiency: float = Field(default=0.40, gt=0, le=1)
    """The same of a scatter."""
    transfer_latency: Duration | None = None
    """Time of a staged batch before its first byte; None: the engine's (0 for nixl-cuda-ipc-sglang)."""


class NetworkSettings(Section):
    """The network between instances."""

    transport: str = "mooncake-rdma"
    """The engine and the kind of link it uses, by name in the catalog."""
    bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one link in one direction, up to the engine's maximum; None: the GPU's nominal one times the
    engine's efficiency."""
    shared_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one more link, which all transfers cross; None: there is none."""
    gpus_per_nic: int = Field(default=1, ge=1)
    """Neighbouring GPUs that share a NIC; GPUs are numbered prefill first."""
    transfer_latency: Duration | None = None
    """Time of each batch before its first byte; None: the engine's. Staging has its own."""
    descriptor_latency: Duration | None = None
    """Time of each descriptor; None: the engine's."""
    serial: bool | None = None
    """The workers of a prefill rank post descriptors and move bytes one at a time; None: as the engine does."""
    staging: StagingSettings | None = None
    """Staging memory between unequal TP sizes; `{}` takes its defaults. None: slices of each token's heads are sent."""
    message_latency: Duration = Field(default=50_000, ge=1)
    """Time of every message between instances: half of a ZeroMQ round trip between two Python processes, 105 us."""
    handover: Duration = 0
    """Time from the end of a transfer until decode has taken the KV in, beyond the message."""


class FrontEndSettings(Section):
    """HTTP server, tokenizer and gateway between clients and router."""

    service: Duration = 0
    """Time of each request, one after another."""
    service_per_token: FineDuration = 0
    """Time added for each prompt token."""
    latency_in: Duration = 0
    """Delay after that, of all requests in parallel."""
    latency_out: Duration = 0
    """Delay from decode to the client, of the first token and of the end."""
    ending: Duration = 0
    """Time of each answer's end, one after another; needs holds_client."""
    holds_client: bool = False
    """Client and server share a thread: what the client sends and sees waits until the request before is served."""
    waits_for_prefill: bool | None = None
    """Hold the first token until prefill has seen its transfer end, as SGLang's Rust gateway does. None: true with
    engine sglang, false with vllm. Where no gateway stands before the router, or Dynamo's frontend does: false."""
    stall: Duration = 0
    """Delay of a first token on a connection used less than 40 ms before: Nagle against delayed acknowledgement."""

    @property
    def is_none(self) -> bool:
        return not self.waits_for_prefill and self._times == FrontEndSettings()

    @property
    def is_usual(self) -> bool:
        """True if its times are those of most servers."""
        return self._times == FRONT_END

    @property
    def _times(self) -> "FrontEndSettings":
        return self.model_copy(update={"waits_for_prefill": None})


FRONT_END, *FRONT_END_ENDS = (
    FrontEndSettings.model_construct(latency_in=latency_ns) for latency_ns in (40_000_000, 10_000_000, 160_000_000)
)
"""HTTP, tokenizer and scheduler of most servers, and between what it lies: chosen on half of the points of
experiments/default-cost. A prompt waits for it, and the next is not held up."""
