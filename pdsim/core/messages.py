"""Everything that crosses an instance's boundary: immutable, and made of ids and numbers, so that it can cross
processes.

Messages go to an instance. Commands come from an instance, and its driver carries them out. Steps are what an instance
asks its executor to run.
"""

from dataclasses import dataclass
from typing import Any

from pdsim.core.transfer.staging_ring import Span, Watermark
from pdsim.core.transfer.transfer_plan import TransferUnit
from pdsim.policy.views import TokenSequence


@dataclass(frozen=True, slots=True)
class Arrival:
    """Client to router: a request has arrived."""

    request_id: int
    prompt: TokenSequence
    max_output_tokens: int
    priority: int = 0
    """Requests with a higher number are served first."""
    ignores_eos: bool = False
    """True if only the longest output ends the request (ignore_eos)."""
    session: int = -1
    """The session that its client names, for a router that asks. -1: none."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Router to both instances of the chosen pair, or to the aggregated instance: a request to serve."""

    request_id: int
    arrival_ns: int
    prompt: TokenSequence
    max_output_tokens: int
    prefill_id: str
    decode_id: str
    priority: int = 0
    ignores_eos: bool = False

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """Ids of the request's instances: decode first; an aggregated instance once."""
        return tuple(dict.fromkeys((self.decode_id, self.prefill_id)))


@dataclass(frozen=True, slots=True)
class KvGranted:
    """Decode to prefill: these pages wait for the KV of tokens [num_cached_tokens, prompt end)."""

    request_id: int
    num_cached_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """Prefill to decode: all KV of this prompt is computed, and waits on prefill until pages are granted."""

    request_id: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """Transport to decode: all KV and the first token have arrived."""

    request_id: int
    first_token_ends: bool


@dataclass(frozen=True, slots=True)
class KvOffered:
    """Decode to prefill: a request ended, and decode offers the cached KV of these tokens of its prompt and output."""

    request_id: int
    decode_id: str
    sequence: TokenSequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvWanted:
    """Prefill to decode: these pages wait for the offered KV after the first cached tokens. No pages: prefill wants no
    KV.
    """

    request_id: int
    num_cached_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvReturned:
    """Transport to both instances: the KV that prefill wanted has arrived in prefill's pages."""

    request_id: int


@dataclass(frozen=True, slots=True)
class LoadedBack:
    """Host link to instance: the part of this prompt that host memory had is loaded."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Host link to a vLLM instance: the copy with this number to host memory is done."""

    store: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Storage to instance: storage has num_found pages of a prefetch, and the first num_read of these have been
    read.
    """

    request_id: int
    num_found: int
    num_read: int
    is_over: bool
    """True: no further page is read, because the prefetch was stopped or all found pages have been read."""


@dataclass(frozen=True, slots=True)
class KvSent:
    """Transport to prefill: no transfer reads pages of this request any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class UnitSent:
    """Transport to sender: the bytes of this unit have arrived."""

    unit: TransferUnit


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """Executor to sender: this number of layer groups of the step is computed."""

    step_id: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class AskStaging:
    """Prefill to receiver, before the first forward of a prompt: request a span of the ring for each cell."""

    request_id: int
    prefill_id: str
    cell_bytes: tuple[int, ...]
    """Bytes of each cell, over all ranks that write into one decode rank."""


@dataclass(frozen=True, slots=True)
class StagingLent:
    """Receiver to sender: the span of each cell. A span may be written once the watermark has passed."""

    request_id: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StagingWatermark:
    """Receiver to every sender: the ring is free before this position."""

    decode_id: str
    watermark: Watermark


@dataclass(frozen=True, slots=True)
class CellWritten:
    """Sender to receiver: a cell's KV is in the ring. num_bytes: of one writer."""

    request_id: int
    cell: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CellScattered:
    """Executor to receiver, which passes the message to the decode instance: a cell's KV is in its pages."""

    request_id: int
    cell: int
    completes: KvArrived | None = None
    """Message that the receiver passes to the decode instance with the last cell."""


@dataclass(frozen=True, slots=True)
class FreeCells:
    """Decode instance to receiver: its loop has seen that these spans are scattered."""

    cells: tuple[CellScattered, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """One side of a pair to the other: the sender of this message will not serve the request. No KV of the request is
    or will be under way.
    """

    request_id: int
    reason: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Client to router, router to both instances, decode to prefill: drop the request, whatever is under way.

    A decode instance keeps granted pages until the sender's Abort says that nothing writes to them.
    """

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopSending:
    """Prefill to sender: finish transfers under way, send no more, and tell both sides when nothing is under way."""

    request_id: int
    decode_id: str
    """Decode instance of the request. Empty: prefill does not know the request."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Transport to sender: the transfer of this unit failed."""

    unit: TransferUnit
    reason: str


@dataclass(frozen=True, slots=True)
class TransferLost:
    """Transport to sender: the outcome of this unit's transfer is unknown, and its bytes may still arrive."""

    unit: TransferUnit
    reason: str


@dataclass(frozen=True, slots=True)
class KvLost:
    """Sender to decode: prefill will not serve this request, but its bytes may still arrive."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Instance to health monitor: the number of the instance's life, which each restart raises. None: the instance does
    not answer.
    """

    instance_id: str
    life: int | None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Health monitor to instances and routers: this instance has failed, and its memory is lost."""

    instance_id: str
    has_restarted: bool = False
    """True: the instance has restarted already, so it may be serving new requests."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Health monitor: this instance answers again, with empty memory."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Woken:
    """Driver to instance or router: the time of a WakeAt has come."""


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """The state of an instance as the autoscaler knows it."""

    instance_id: str
    num_requests: int
    """Number of requests that were routed to the instance and have not ended."""
    num_queued: int
    page_use: float
    """Share of the instance's pages that requests hold. On decode, shared pages count once per request."""
    is_empty: bool
    """True: the instance holds nothing of any request, and nothing is on its way to it."""


@dataclass(frozen=True, slots=True)
class InstanceMetrics:
    """Metrics of an instance, such as vLLM's num_requests_waiting and kv_cache_usage_perc."""

    instance_id: str
    num_queued: int
    """Number of waiting requests, including retracted ones."""
    page_use: float
    """Share of the instance's pages that requests hold."""


@dataclass(frozen=True, slots=True)
class MetricsSeen:
    """Driver to a router whose policies read metrics: the metrics of living instances."""

    instances: tuple[InstanceMetrics, ...]


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """The instances, and counts since the run began, for the autoscaler."""

    instances: tuple[InstanceSeen, ...]
    num_arrived: int
    num_arrived_tokens: int
    """Prompt tokens of all arrived requests."""
    num_finished: int
    num_output_tokens: int
    """Output tokens of finished requests. ttft_ns and tpot_ns are sums over finished requests, too."""
    ttft_ns: int
    tpot_ns: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Autoscaler to router: this instance takes requests from now on. Its caches are empty."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Autoscaler to router: send no more requests to this instance. The instance finishes its requests."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Client to router, router to every instance: drop cached KV that no request uses."""


@dataclass(frozen=True, slots=True)
class PutOut:
    """Driver to instance: the output tokens that the instance asked for (AskOutput)."""

    request_id: int
    output: TokenSequence


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token is streamed: by decode, or by the aggregated instance."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Retracted:
    """A request lost its pages. Its KV waits in host memory, or will be recomputed."""

    request_id: int


@dataclass(frozen=True, slots=True)
class AskOutput:
    """Asks the driver for the first output tokens of a request before the next step, because their KV will be
    cached.
    """

    instance_id: str
    request_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SaveKv:
    """Copy these pages of a retracted request to host memory before the next step, because other requests will write
    into the pages. The copy is kept until LoadKv, or until the request is cancelled.
    """

    request_id: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadKv:
    """Copy the request's KV from host memory into these pages before the next step begins."""

    request_id: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteBackup:
    """Copy these pages to the given pages of host memory, after all earlier copies of this kind.

    The instance's host cache counts the pages as present from now on.
    """

    pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    blocks: bool
    """True: the loop waits for the copy, because the pages go to other requests."""


@dataclass(frozen=True, slots=True)
class LoadBack:
    """Copy these pages of host memory into pages of the GPU, for a prompt that continues with their KV. SGLang's
    prefill may begin the forward at once; each layer waits until its own KV is loaded. Decode, and vLLM's instances,
    wait for LoadedBack.
    """

    request_id: int
    host_pages: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy these pages to the given pages of host memory, after all earlier copies of this kind, and send Offloaded."""

    store: int
    """Number of the copy, unique in its instance."""
    pages: tuple[int, ...]
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadChunks:
    """Copy these chunks of host memory into these pages of the GPU, after all earlier copies of this kind. The step
    that is chosen with the copy begins when the copy has ended.
    """

    request_id: int
    host_chunks: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveChunks:
    """Copy these pages to the given chunks of host memory when the step that is chosen with the copy is computed. The
    step ends when the copy has ended.
    """

    pages: tuple[int, ...]
    host_chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadRetracted:
    """Copy the KV of a retracted request from these pages of host memory back to the GPU. The loop waits for
    the copy.
    """

    request_id: int
    host_pages: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreKv:
    """Copy these pages of host memory, with the KV of tokens from start_tokens on, to storage.

    The copy begins when earlier copies are done.
    """

    sequence: TokenSequence
    start_tokens: int
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefetchKv:
    """Read the KV that storage has of a prompt after the first start_tokens into these pages of host memory."""

    request_id: int
    prompt: TokenSequence
    start_tokens: int
    host_pages: tuple[int, ...]
    least_pages: int
    """Minimum number of pages. If storage has fewer, none is read."""


@dataclass(frozen=True, slots=True)
class StopPrefetch:
    """Finish the reads that are under way for this prompt, begin no further read, and report the end."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Prefill has seen the end of the request's transfer, and holds neither pages nor a slot of the request any
    more.
    """

    request_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token is streamed, and all memory of the request is free."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: int
    reason: str
    retryable: bool = False
    """True if another attempt may succeed, because an instance or a transfer failed and not the request itself."""


Outcome = PrefillDone | Finished | Failed
RequestMessage = Arrival | NewRequest | KvGranted | PromptComputed | KvArrived | KvSent | FirstToken | PutOut | Outcome
CopyMessage = LoadedBack | Offloaded | Prefetched | KvOffered | KvWanted | KvReturned
TransferMessage = TransferUnit | UnitSent | LayersComputed | StopSending | TransferFailed | TransferLost
StagingMessage = AskStaging | StagingLent | StagingWatermark | CellWritten | CellScattered | FreeCells
FaultMessage = Abort | Cancel | KvLost | Heartbeat | PeerDown | PeerUp
ScalingMessage = ClusterSeen | MetricsSeen | Serve | Drain
Message = (
    RequestMessage | CopyMessage | TransferMessage | StagingMessage | FaultMessage | ScalingMessage | Woken | FlushCache
)


@dataclass(frozen=True, slots=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message without latency to another state machine of the same instance."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Start the transfer of this unit: its worker is free, and its layers are computed. A staged unit is gathered
    first.
    """

    unit: TransferUnit
    staging_offset_bytes: int | None


@dataclass(frozen=True, slots=True)
class ReturnKv:
    """Move this KV from decode to prefill, without the transfer workers."""

    unit: TransferUnit


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy a cell from this offset of the ring into its pages. num_bytes: of one writer."""

    decode_id: str
    request_id: int
    cell: int
    num_bytes: int
    staging_offset_bytes: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send Woken to this instance, or to the router, at this time."""

    who: str
    time_ns: int


StorageCopy = StoreKv | PrefetchKv | StopPrefetch
HostCopy = WriteBackup | LoadBack | Offload | LoadChunks | SaveChunks | LoadRetracted | StorageCopy
TransferCommand = TransferUnit | StartTransfer | ReturnKv | Scatter
Command = (
    Send | Tell | WakeAt | TransferCommand | FirstToken | Retracted | AskOutput | SaveKv | LoadKv | HostCopy | Outcome
)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute num_tokens of a prompt after num_context_tokens whose KV exists."""

    request_id: int
    num_context_tokens: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class PrefillStep:
    step_id: int
    chunks: tuple[PrefillChunk, ...]
    num_decode_tokens: int = 0
    """Number of tokens of running requests that the same forward computes."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the forward computes."""
        return sum([chunk.num_tokens for chunk in self.chunks]) + self.num_decode_tokens


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token for every running request, up to max_steps times before the instance must be asked again.

    With speculative decoding: one step, which gives each request one or more tokens. The batch is the previous step's,
    without requests that ended or are in `left`, plus `joined`.
    """

    step_id: int
    joined: tuple[int, ...]
    left: tuple[int, ...]
    num_requests: int
    num_context_tokens: int
    """KV tokens that the first step reads: for each request all its KV, including the tokens that the step writes."""
    num_distinct_tokens: int
    """As num_context_tokens, but a cached prefix that several requests share counts once, or once per wave of
    attention."""
    max_steps: int


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A forward over chunks of prompts and one token of every running request."""

    prefill: PrefillStep
    decode: DecodeStep


PureStep = PrefillStep | DecodeStep
Step = PureStep | MixedStep


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of steps, from the executor.

    `ended` has (request_id, output) for each sequence that stopped, with its whole output. A prefill step reports
    sequences that stop with their first token.
    """

    num_steps: int = 1
    ended: tuple[tuple[int, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a decode step that verified drafts. `ended` as in StepResult."""

    num_tokens: tuple[int, ...]
    """Number of tokens that each request gained, at least 1, in batch order."""
    ended: tuple[tuple[int, Any], ...] = ()

    @property
    def num_steps(self) -> int:
        return 1


Result = StepResult | Verified


@dataclass(frozen=True, slots=True)
class Pause:
    """The loop waits until the host has handled the messages that a result led to."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The instance has nothing to do until a message arrives, or until until_ns if that is sooner."""

    until_ns: int | None = None


def sender_of(prefill_id: str) -> str:
    return f"{prefill_id}.sender"


def receiver_of(decode_id: str) -> str:
    return f"{decode_id}.receiver"
