"""Settings of the network between instances, and of staging memory."""

from pydantic import Field

from pdsim.scenario.sections.fields import Bandwidth, Duration, Section, Size


class StagingSettings(Section):
    """Staging memory for KV between unequal tensor-parallel sizes (SGLANG_DISAGG_STAGING_BUFFER)."""

    ring: Size = 4 * 2**30
    """Staging memory of one decode rank (SGLANG_DISAGG_STAGING_POOL_SIZE_MB)."""
    prefill_buffer: Size | None = None
    """Staging memory of one prefill worker. A request with a larger cell (the KV of a prompt's part that is staged
    together) is sent as slices instead. None: no limit."""
    gather_host: Duration = 840_000
    """Host time of one gather, which collects heads of KV in prefill's staging memory. The transfer worker does nothing
    else meanwhile (SGLang PR 19890, GB200).
    """
    scatter_host: Duration = 678_000
    """Host time of one scatter, which distributes KV from decode's staging memory to its pages."""
    gather_efficiency: float = Field(default=0.65, gt=0, le=1)
    """Share of GPU memory bandwidth that a gather reaches; each byte is read and written once (SGLang's kernels on
    H200).
    """
    scatter_efficiency: float = Field(default=0.40, gt=0, le=1)
    """Share of GPU memory bandwidth that a scatter reaches."""
    transfer_latency: Duration | None = None
    """Time before the first byte of each transfer out of staging memory. None: the transport's value (0 for
    nixl-cuda-ipc-sglang), or the latency of transfers without staging if the transport has no such value.
    """


class NetworkSettings(Section):
    """The network between instances."""

    transport: str = "mooncake-rdma"
    """Transfer engine and kind of link, by name in the catalog."""
    bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one link in one direction, at most the transport's maximum. None: the GPU's nominal bandwidth times
    the transport's efficiency."""
    shared_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one additional link that all transfers share. None: no such link."""
    gpus_per_nic: int = Field(default=1, ge=1)
    """Number of GPUs with consecutive numbers that share a NIC. GPUs of prefill have the lowest numbers."""
    transfer_latency: Duration | None = None
    """Time before the first byte of each batch of descriptors that a worker starts together. None: the transport's
    value. `staging` can have another latency.
    """
    descriptor_latency: Duration | None = None
    """Time of each descriptor of a transfer. None: the transport's value."""
    nixl_push: bool = False
    """With engine vllm, True: prefill writes KV into the pages that decode has registered (NixlPushConnector). False:
    decode reads it.
    """
    serial: bool | None = None
    """True: a prefill rank's workers post descriptors and move bytes one at a time. None: as the transport does."""
    staging: StagingSettings | None = None
    """Staging between unequal TP sizes; `{}` takes the defaults. None: slices of each token's heads are sent."""
    message_latency: Duration = Field(default=50_000, ge=1)
    """Time of every message between instances. The default is half of a ZeroMQ round trip between two Python processes
    (105 us).
    """
    handover: Duration = 0
    """Additional time from the end of a transfer until decode has accepted the KV, beyond the time of the message."""
