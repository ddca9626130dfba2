"""Messages, commands and steps of state machines: instances, router, senders, receivers and others. They are immutable
and consist of ids, numbers, strings and token sequences, so that they can cross processes.

Messages go to a state machine. Commands come from a state machine, and its driver carries them out. A step is work that
an instance asks its executor to run.
"""

from typing import Any, NamedTuple

from pdsim.core.encode.media_item import MediaItem, Modality
from pdsim.core.transfer.staging_ring import Span, Watermark
from pdsim.dataclass import dataclass
from pdsim.policy.views import TokenSequence


class CachedTokens(NamedTuple):
    """How many tokens of a prompt an instance has cached, as the instance's KV events tell the router."""

    instance_id: str
    num_device_tokens: int
    """Number of the prompt's first tokens in GPU memory."""
    num_host_tokens: int
    """Number of further tokens of the prompt, behind those in GPU memory, that are in host memory."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Client to router: a request has arrived."""

    request_id: int
    prompt: TokenSequence
    max_output_tokens: int
    priority: int = 0
    """Decode's queue takes requests of a higher priority first. Other queues do so if their policy reads priorities."""
    ignores_eos: bool = False
    """True: the request ends only at its maximum number of output tokens (ignore_eos)."""
    session: int = -1
    """Session that the client names. Only some routing policies read it. -1: no session, or no policy reads it."""
    media: tuple[MediaItem, ...] = ()
    """Images and audio clips that encode instances or a vLLM server must encode, in the prompt's order."""
    agent: int = 0
    """Agent of the session that sends the request. 0: the session's own agent. Sub-agents have other numbers."""
    cached: tuple[CachedTokens, ...] = ()
    """Instances that have cached tokens of the prompt when it arrives. Empty: none has, or no routing policy asks."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Router to both instances of the chosen pair, or to the aggregated instance: a request to serve. prefill_id and
    decode_id are equal if one instance computes the prompt and decodes.
    """

    request_id: int
    arrival_ns: int
    """Time in ns when the router routed this attempt or, with encode instances, when they were done with its media. A
    retry is an attempt of its own."""
    prompt: TokenSequence
    max_output_tokens: int
    prefill_id: str
    decode_id: str
    priority: int = 0
    """Priority of the request's Arrival, with the same meaning."""
    ignores_eos: bool = False
    """True: the request ends only at its maximum number of output tokens."""
    media: tuple[MediaItem, ...] = ()
    """Images and audio clips of the prompt that encode instances or a vLLM server must encode, or whose embeddings a
    vLLM server must read. Empty: the prompt has none, all embeddings have arrived, or an SGLang server encodes them
    itself."""
    encode_ids: tuple[str, ...] = ()
    """For each item of `media`: id of vLLM's encode instance that has encoded the item. Empty: no encode instance of
    vLLM has encoded an item of the request."""

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """Ids of the instances that serve the request, decode first. An aggregated instance appears once."""
        return tuple(dict.fromkeys((self.decode_id, self.prefill_id)))


@dataclass(frozen=True, slots=True)
class EncodeMedia:
    """SGLang's language server or vLLM's proxy to encode instance: encode these images or audio clips of a request."""

    request_id: int
    part: int
    """Index of this part among the parts of the request's media. An encode instance gets at most one part of images.
    SGLang: and at most one part of audio clips. vLLM: each audio clip is a part."""
    items: tuple[MediaItem, ...]
    """Items of one modality, in the prompt's order."""
    language_id: str
    """Prefill or aggregated instance that needs the embeddings."""

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.items])

    @property
    def modality(self) -> Modality:
        return self.items[0].modality


@dataclass(frozen=True, slots=True)
class EmbeddingsArrived:
    """Transport to language server: the embeddings of this part have arrived on all ranks of the server. With vLLM: the
    embeddings of one item have arrived in the server's host memory, and `part` is the item's index in the request's
    media.
    """

    request_id: int
    part: int


@dataclass(frozen=True, slots=True)
class MediaEncoded:
    """vLLM's encode instance to proxy: this part is encoded."""

    request_id: int
    part: int


@dataclass(frozen=True, slots=True)
class AskEmbeddings:
    """vLLM's language server to encode instance: may the embeddings of an item be read?"""

    request_id: int
    item: int
    """Index of the item in the request's media."""
    language_id: str


@dataclass(frozen=True, slots=True)
class EmbeddingsGranted:
    """vLLM's encode instance to language server: the embeddings of an item may be read."""

    request_id: int
    item: int


@dataclass(frozen=True, slots=True)
class KvGranted:
    """Decode to prefill: these pages are reserved for the KV of tokens [num_cached_tokens, prompt end)."""

    request_id: int
    num_cached_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """Prefill to decode: all KV of this prompt is computed, and waits on prefill for decode's grant of pages."""

    request_id: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """Sender to decode, through the receiver if decode has a staging ring: all KV and the first token of a request have
    arrived. first_token_ends: True: the first token is also the last token.
    """

    request_id: int
    first_token_ends: bool


@dataclass(frozen=True, slots=True)
class KvOffered:
    """Decode to prefill: a request has ended, and decode offers cached KV of its prompt and output: the first
    num_tokens tokens of `sequence`.
    """

    request_id: int
    decode_id: str
    sequence: TokenSequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvWanted:
    """Prefill to decode: prefill has reserved these pages for the KV that decode offered. The KV of the first
    num_cached_tokens is not needed. No pages: prefill wants no KV.
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
    """Host link to instance: the copy of a prompt's KV from host memory to the GPU has ended."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Host link to a vLLM instance: a copy to host memory has ended. store: number of the copy (Offload.store)."""

    store: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Storage to instance: storage has num_found pages of a prefetch, and has read the first num_read of them."""

    request_id: int
    num_found: int
    num_read: int
    is_over: bool
    """True: the prefetch ended: it was stopped, found too few pages, or read all found pages that storage still has."""


@dataclass(frozen=True, slots=True)
class KvSent:
    """Sender to prefill: all transfers of a request's KV have ended. Prefill may free the request's pages."""

    request_id: int


@dataclass(frozen=True, slots=True)
class TransferUnit:
    """Command to send a part of a prompt's KV from prefill to decode. The unit queues behind earlier units in a queue
    of prefill's transfer workers. In ReturnKv, the unit goes from decode to prefill, without a queue.

    source, target: ids of the sending and the receiving instance. source_pages, target_pages: page ids on each side.
    num_bytes and num_descriptors are those of one pair of a prefill rank and a decode rank. planned_ns: time in ns at
    which `source` planned the unit. is_last: True: the prompt's last unit.
    """

    request_id: int
    source: str
    target: str
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    num_bytes: int
    num_descriptors: int
    planned_ns: int
    is_last: bool
    first_token_ends: bool = False
    """True: the first token, which the last unit carries, is also the request's last token."""
    cell: int | None = None
    """Index of the unit's staging cell among the request's cells. None: the unit is not staged."""
    after_layers: tuple[int, int] | None = None
    """Step id, and index of the layer group that must be computed before the unit is sent. None: the KV is computed
    already."""


@dataclass(frozen=True, slots=True)
class UnitSent:
    """Transport to sender: all bytes of this unit have arrived."""

    unit: TransferUnit


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """Executor to sender: further layers of a prefill step are computed."""

    step_id: int
    num_groups: int
    """Number of the step's first layer groups that are computed so far."""


@dataclass(frozen=True, slots=True)
class AskStaging:
    """Prefill to receiver: asks for memory in decode's staging ring, one span for each cell of the request. Sent when
    the prompt's first forward begins or, if decode grants pages later, at the grant.
    """

    request_id: int
    prefill_id: str
    cell_bytes: tuple[int, ...]
    """Bytes of each cell, summed over all prefill ranks that write to one decode rank."""


@dataclass(frozen=True, slots=True)
class StagingLent:
    """Receiver to sender: places of the request's cells in the staging ring. The sender may write a cell as soon as the
    ring has freed its place (the watermark has passed the place).
    """

    request_id: int
    spans: tuple[Span, ...]
    """Span of each cell, in the order of the cells."""


@dataclass(frozen=True, slots=True)
class StagingWatermark:
    """Receiver to senders: all bytes of decode's staging ring before this watermark are free."""

    decode_id: str
    watermark: Watermark


@dataclass(frozen=True, slots=True)
class CellWritten:
    """Sender to receiver: the KV of a cell is in the ring. cell: index among the request's cells. num_bytes: bytes that
    one prefill rank wrote.
    """

    request_id: int
    cell: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CellScattered:
    """Executor to receiver: the KV of a cell is in its pages. The receiver passes the message to the decode instance,
    unless the request was aborted.
    """

    request_id: int
    cell: int
    """Index of the cell among the request's cells."""
    completes: KvArrived | None = None
    """KvArrived, which the receiver adds for the decode instance if it has come and the cell is the request's last to
    be scattered. None: KvArrived has not come, or the request waits for further cells."""


@dataclass(frozen=True, slots=True)
class FreeCells:
    """Decode instance to receiver: these cells are scattered, so their spans of the staging ring are free."""

    cells: tuple[CellScattered, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Prefill or its sender to decode, decode to prefill, sender to prefill: the request will not be served. An Abort
    to decode also says that no KV of the request is under way, now or later.
    """

    request_id: int
    reason: str
    retryable: bool = False
    """True: another attempt may succeed: an instance or a transfer failed, or a wait took too long."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Client to router, router to the request's instances, decode to prefill: drop the request in any state. Decode
    keeps pages whose KV has not arrived until the sender's Abort says that nothing writes to them, all KV has arrived,
    the prefill instance is down, or a timeout ends (Releases).
    """

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopSending:
    """Prefill to sender: send no more KV of this request. When the request's transfer under way has ended, the sender
    tells the prefill and the decode instance.
    """

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
    """Transport to sender: nobody knows whether this unit was transferred. Its bytes may still arrive in decode's
    memory.
    """

    unit: TransferUnit
    reason: str


@dataclass(frozen=True, slots=True)
class KvLost:
    """Sender to decode: prefill will not serve this request, but some of its bytes may still arrive."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Instance to health monitor: the number of times that the instance has restarted (`life`). None: the instance does
    not answer.
    """

    instance_id: str
    life: int | None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Health monitor to instances, receivers and router: this instance has failed, and its memory is lost."""

    instance_id: str
    has_restarted: bool = False
    """True: the instance has restarted already, so it may be serving new requests."""
    seen_ns: int = 0
    """Time in ns of the last heartbeat that the instance answered."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Health monitor to instances, receivers and router: this instance answers again. Its memory is empty. Real mode's
    launcher to router: this instance gets requests again, because its restart was given up.
    """

    instance_id: str


@dataclass(frozen=True, slots=True)
class Woken:
    """Driver to state machine: the time that a WakeAt asked for has come."""


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """State of an instance, as the autoscaler sees it."""

    instance_id: str
    num_requests: int
    """Number of requests that the router counts at the instance (RoutedLoad.num_requests)."""
    num_queued: int
    """Number of requests in the instance's queue (Levels.num_queued)."""
    page_use: float
    """Share of the instance's KV capacity that requests hold, at most 1. Decode: by tokens; a token that n requests
    share counts n times. Prefill: by pages; a shared page counts once."""
    is_empty: bool
    """True: the router counts no request at the instance, and the instance has none in any state."""


@dataclass(frozen=True, slots=True)
class InstanceMetrics:
    """Metrics of an instance, such as vLLM's num_requests_waiting and kv_cache_usage_perc."""

    instance_id: str
    num_queued: int
    """Number of waiting requests, including retracted requests."""
    page_use: float
    """Share of the instance's pages that requests hold."""


@dataclass(frozen=True, slots=True)
class MetricsSeen:
    """Simulator to router: metrics of all living instances. Sent only if a routing policy reads them."""

    instances: tuple[InstanceMetrics, ...]


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """Driver to autoscaler: the state of all serving and draining instances, and totals since the run began."""

    instances: tuple[InstanceSeen, ...]
    num_arrived: int
    num_arrived_tokens: int
    """Number of prompt tokens of all arrived requests."""
    num_finished: int
    num_output_tokens: int
    """Number of output tokens of all finished requests."""
    ttft_ns: int
    """Sum of the TTFTs of all finished requests in ns."""
    tpot_ns: int
    """Sum of the TPOTs of all finished requests in ns. A request with one output token adds 0."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Autoscaler to router: this instance accepts requests from now on. Its caches are empty."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Autoscaler or real mode's launcher to router: send no new requests to this instance. It finishes its requests."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Client to router, router to every instance, autoscaler to a drained one: drop cached KV that no request uses."""


@dataclass(frozen=True, slots=True)
class PutOut:
    """Driver to instance: output tokens for which the instance asked with AskOutput."""

    request_id: int
    output: TokenSequence


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Command of a decode or aggregated instance: send the request's first token to the client."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Retracted:
    """A request has lost its pages. Its KV waits in host memory, or will be recomputed."""

    request_id: int


@dataclass(frozen=True, slots=True)
class AskOutput:
    """Asks the driver, before the next step, for the first num_tokens output tokens of a request. The prefix cache
    needs the tokens.
    """

    instance_id: str
    request_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SaveKv:
    """Copy these pages of a retracted request to host memory before the next step overwrites the pages. Host memory
    keeps the copy until LoadKv, or until the request is cancelled.
    """

    request_id: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadKv:
    """Copy the request's KV from host memory into these pages before the next step."""

    request_id: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteBackup:
    """Copy these GPU pages to the given host pages, after all earlier copies of this kind. The instance already counts
    the KV as present in host memory.
    """

    pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    """Page ids in the host pool, in the order of `pages`."""
    blocks: bool
    """True: the instance's loop waits for the copy, because other requests will overwrite the pages."""


@dataclass(frozen=True, slots=True)
class LoadBack:
    """Copy these host pages into GPU pages, for a prompt whose cached prefix they continue. SGLang's prefill and
    aggregated instances may begin the forward at once: each layer waits only for its KV. Others wait for LoadedBack.
    """

    request_id: int
    host_pages: tuple[int, ...]
    """Page ids in the host pool, in the order of `pages`."""
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy these GPU pages to the given host pages, after all earlier copies of this kind. Then send Offloaded."""

    store: int
    """Number by which the instance knows this copy (a store of KV in host memory). Each copy has its own number."""
    pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    """Page ids in the host pool, in the order of `pages`."""


@dataclass(frozen=True, slots=True)
class LoadChunks:
    """Copy these chunks of tokens (LMCache) from host memory into GPU pages, in the prompt's order, after all earlier
    loads of chunks. The step that next_step returns with this command begins when the copy has ended or, if LMCache
    copies layer by layer, waits in each layer for the layer's KV.
    """

    request_id: int
    host_chunks: tuple[int, ...]
    """Page ids in the host pool. Each host page holds one chunk, which is the KV of one or more GPU pages."""
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveChunks:
    """Copy these GPU pages, in the prompt's order, to chunks of host memory (LMCache) when the step that next_step
    returns with this command is computed or, if LMCache copies layer by layer, when each layer is computed. The step
    ends when the copy has ended.
    """

    pages: tuple[int, ...]
    host_chunks: tuple[int, ...]
    """Page ids in the host pool, one for each chunk."""
    store: "StoreKv | None" = None
    """Command to copy the chunks from host memory to storage afterwards. None: the chunks are not stored."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """The instance's loop sleeps num_sleeps times, 10 ms each, before the step that it has just chosen. vLLM's loop
    does so while LMCache looks up a prompt and reads its chunks from storage.
    """

    num_sleeps: int


@dataclass(frozen=True, slots=True)
class LoadRetracted:
    """Copy the KV of a retracted request from host pages back to the GPU. The instance's loop waits for the copy."""

    request_id: int
    host_pages: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreKv:
    """Copy these host pages to storage when earlier copies to host memory have ended. The pages hold KV of the
    sequence's tokens from index start_tokens on.
    """

    sequence: TokenSequence
    start_tokens: int
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefetchKv:
    """Read KV of a prompt from storage into host memory: consecutive pages, the first of which begins at token
    start_tokens of the prompt.
    """

    request_id: int
    prompt: TokenSequence
    start_tokens: int
    host_pages: tuple[int, ...]
    """Host pages to read into, in the prompt's order. Empty with LMCache: the instance allocates host pages when the
    reads have ended."""
    least_pages: int
    """If storage has fewer than this number of the prompt's pages from start_tokens on, none of them is read."""
    most_pages: int
    """Maximum number of pages to read."""


@dataclass(frozen=True, slots=True)
class StopPrefetch:
    """Tells storage to begin no further read for this prompt, and to report when the reads under way have ended."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A request's transfer has ended, and prefill has released its pages and slot; or the prefill instance has died."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended with its last output token. The instance holds pages for it no longer, except to return KV to
    prefill or, on vLLM with pipeline stages, until the instance has chosen its next step.
    """

    request_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: int
    reason: str
    retryable: bool = False
    """True: another attempt may succeed: an instance or a transfer failed, or a wait took too long."""


Outcome = PrefillDone | Finished | Failed
RequestMessage = Arrival | NewRequest | KvGranted | PromptComputed | KvArrived | KvSent | FirstToken | PutOut | Outcome
CopyMessage = LoadedBack | Offloaded | Prefetched | KvOffered | KvWanted | KvReturned
TransferMessage = TransferUnit | UnitSent | LayersComputed | StopSending | TransferFailed | TransferLost
EncodeMessage = EncodeMedia | EmbeddingsArrived | MediaEncoded | AskEmbeddings | EmbeddingsGranted
StagingMessage = AskStaging | StagingLent | StagingWatermark | CellWritten | CellScattered | FreeCells
FaultMessage = Abort | Cancel | KvLost | Heartbeat | PeerDown | PeerUp
ScalingMessage = ClusterSeen | MetricsSeen | Serve | Drain
Message = (
    RequestMessage
    | CopyMessage
    | TransferMessage
    | EncodeMessage
    | StagingMessage
    | FaultMessage
    | ScalingMessage
    | Woken
    | FlushCache
)


@dataclass(frozen=True, slots=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message without latency to another state machine on the same server."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Start the transfer of this unit. A transfer worker is free, and the unit's layers are computed. KV of a staged
    unit is gathered first. staging_offset_bytes: where the unit's span begins in the staging ring; None: the unit is
    not staged.
    """

    unit: TransferUnit
    staging_offset_bytes: int | None


@dataclass(frozen=True, slots=True)
class ReturnKv:
    """Send a unit of KV from decode back to prefill. The transfer does not use the queues of prefill's transfer
    workers.
    """

    unit: TransferUnit


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy a cell from the ring, at this offset, into its pages. cell: index among the request's cells. num_bytes:
    bytes that one prefill rank wrote.
    """

    decode_id: str
    request_id: int
    cell: int
    num_bytes: int
    staging_offset_bytes: int


@dataclass(frozen=True, slots=True)
class SendEmbeddings:
    """Send the embeddings of one part of a request's media from an encode instance to each rank of a language server.
    With vLLM: copy the embeddings of one image or audio clip into the server's host memory; `part` is the item's index
    in the request's media.
    """

    request_id: int
    part: int
    source: str
    target: str
    num_bytes: int
    """Bytes that each rank of the target gets. With vLLM: bytes that the target's host memory gets."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send Woken to this state machine at this time. An autoscaler gets ClusterSeen instead."""

    who: str
    time_ns: int


StorageCopy = StoreKv | PrefetchKv | StopPrefetch
HostCopy = WriteBackup | LoadBack | Offload | LoadChunks | SaveChunks | Sleep | LoadRetracted | StorageCopy
TransferCommand = TransferUnit | StartTransfer | ReturnKv | Scatter | SendEmbeddings
Command = (
    Send | Tell | WakeAt | TransferCommand | FirstToken | Retracted | AskOutput | SaveKv | LoadKv | HostCopy | Outcome
)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute num_tokens tokens of a prompt. The num_context_tokens tokens before them have KV."""

    request_id: int
    num_context_tokens: int
    num_tokens: int
    is_last: bool
    """True: the chunk ends the prompt, so the forward also gives the next token."""

    @property
    def num_pairs(self) -> float:
        """Number of pairs of a new token and a token that it attends to. Each new token attends to all context tokens,
        and on average to half of the chunk's tokens.
        """
        return self.num_tokens * (self.num_context_tokens + self.num_tokens / 2)


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """A forward that computes chunks of prompts."""

    step_id: int
    chunks: tuple[PrefillChunk, ...]
    num_decode_tokens: int = 0
    """Number of tokens of running requests that the forward also computes."""
    media: tuple[MediaItem, ...] = ()
    """Images and audio clips that a vLLM instance encodes before the forward or, with encode instances, whose
    embeddings it loads. Empty with SGLang: servers encode the items of the chunks without this list."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the forward computes, of prompts and of running requests."""
        return sum([chunk.num_tokens for chunk in self.chunks]) + self.num_decode_tokens


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Decode one token of every running request, up to max_steps times, before the instance is asked again.

    With speculative decoding: one step, which gives each request at least one token. The batch is that of the previous
    step, without requests that ended or are in `left` (request ids), and with those in `joined` (request ids in the
    order in which they joined).
    """

    step_id: int
    joined: tuple[int, ...]
    left: tuple[int, ...]
    num_requests: int
    """Number of requests in the batch, including those in `joined`."""
    num_context_tokens: int
    """Number of tokens whose KV attention reads in the first step, summed over the batch. The tokens whose KV the step
    itself writes count, too."""
    num_distinct_tokens: int
    """Number of KV tokens that the first step reads, where a cached prefix that several requests share counts once, or
    once per wave (requests whose attention runs at the same time)."""
    max_steps: int


@dataclass(frozen=True, slots=True)
class MicroBatchStep(DecodeStep):
    """Decode one token of every running request of one micro-batch. The field `joined` lists all requests of the
    micro-batch, not only new ones.
    """


@dataclass(frozen=True, slots=True)
class HiSparseStep(DecodeStep):
    """Decode one token of every running request, and copy KV between host memory and GPU in each step. The numbers are
    those of one step.
    """

    num_filled_tokens: int
    """Number of tokens to copy to the GPU before the step: all KV of the requests that join (`joined`) and whose KV
    fits their buffers."""
    num_first_requests: int
    """Number of requests in `joined` whose KV does not fit their buffers. At the first step of such a request, no token
    that attention chooses is on the GPU yet."""
    num_long_requests: int
    """Number of requests that are not in `joined` and whose KV does not fit their buffers. Some of the tokens that
    attention chooses may be missing on the GPU."""
    num_saved_tokens: int
    """Number of tokens to copy to host memory: one of each request that is not in `joined`."""


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A forward that computes chunks of prompts and decodes one token of every running request."""

    prefill: PrefillStep
    decode: DecodeStep


@dataclass(frozen=True, slots=True)
class EncodeStep:
    """Encode images and audio clips of one or more requests in one forward of an encode instance. With SGLang, all
    items have the same modality; with vLLM, each part has only the items that this step encodes.
    """

    step_id: int
    parts: tuple[EncodeMedia, ...]


PureStep = PrefillStep | DecodeStep
Step = PureStep | MixedStep


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of num_steps steps.

    `ended` has (request_id, output) for each request that ended, with all its output tokens. A prefill step has the
    requests that end with their first token.
    """

    num_steps: int = 1
    ended: tuple[tuple[int, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of one decode step that verified draft tokens. `ended` has (request_id, all output tokens) for each
    request that ended.
    """

    num_tokens: tuple[int, ...]
    """For each request of the batch, in the order in which the requests joined: number of output tokens that it gets
    from this step, at least 1. These are the accepted drafts and the token that the target model adds."""
    ended: tuple[tuple[int, Any], ...] = ()

    @property
    def num_steps(self) -> int:
        return 1


Result = StepResult | Verified


@dataclass(frozen=True, slots=True)
class Pause:
    """The loop of an instance waits until the host has carried out the commands that followed the last result."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The instance waits for a message, but at most until the time until_ns in ns. None: no limit."""

    until_ns: int | None = None


def sender_of(prefill_id: str) -> str:
    return f"{prefill_id}.sender"


def receiver_of(decode_id: str) -> str:
    return f"{decode_id}.receiver"


def embeddings_of(language_id: str) -> str:
    """Returns the id of the state machine that sends media to encode instances for the instance language_id."""
    return f"{language_id}.embeddings"
