"""Everything that crosses an instance boundary: immutable, ids and numbers only, fit to cross a process boundary.

Messages go to an instance. Commands come out of it and are carried out by its driver. Steps are what an instance asks
its executor to run.
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
    """Requests of a higher number are served first."""
    ignores_eos: bool = False
    """True if only the longest output ends the request (ignore_eos)."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Router to both instances of the chosen pair, or to the aggregated one that is both."""

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
        """Decode first; an aggregated one once."""
        return tuple(dict.fromkeys((self.decode_id, self.prefill_id)))


@dataclass(frozen=True, slots=True)
class KvGranted:
    """Decode to prefill: these pages wait for the KV of tokens [num_cached_tokens, prompt end)."""

    request_id: int
    num_cached_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """Prefill to decode: all KV of this prompt is there, and waits on prefill for pages to be granted."""

    request_id: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """Transport to decode: all KV is in place, and so is the first token."""

    request_id: int
    first_token_ends: bool


@dataclass(frozen=True, slots=True)
class KvOffered:
    """Decode to prefill: a request ended, and the KV of these tokens of its prompt and output is cached here."""

    request_id: int
    decode_id: str
    sequence: TokenSequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvWanted:
    """Prefill to decode: these pages wait for the offered KV behind the first tokens. No pages: for nothing."""

    request_id: int
    num_cached_tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvReturned:
    """Transport to both instances: the KV that prefill wanted is in prefill's pages."""

    request_id: int


@dataclass(frozen=True, slots=True)
class LoadedBack:
    """Host link to decode: the cached part of this prompt that lay in host memory is in place."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Storage to instance: so many pages of a prefetch were found, and the first of them are read."""

    request_id: int
    num_found: int
    num_read: int
    is_over: bool
    """No more is read: it was stopped, or all that was found is there."""


@dataclass(frozen=True, slots=True)
class KvSent:
    """Transport to prefill: no transfer reads pages of this request any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class UnitSent:
    """Transport to sender: the bytes of this unit are in place on the other side."""

    unit: TransferUnit


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """Executor to sender: so many groups of layers of this step are computed."""

    step_id: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class AskStaging:
    """Prefill to receiver, before the first forward of a prompt: lend a span for each cell of its grid."""

    request_id: int
    prefill_id: str
    cell_bytes: tuple[int, ...]
    """Bytes of all ranks that write into one decode rank."""


@dataclass(frozen=True, slots=True)
class StagingLent:
    """Receiver to sender: where each cell goes, once the watermark has passed."""

    request_id: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StagingWatermark:
    """Receiver to every sender: everything before this place of the ring is free."""

    decode_id: str
    watermark: Watermark


@dataclass(frozen=True, slots=True)
class CellWritten:
    """Sender to receiver: a cell's KV lies in the ring. Bytes are those of one writer."""

    request_id: int
    cell: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CellScattered:
    """Executor to receiver, and on to the decode instance: a cell's KV lies in its pages."""

    request_id: int
    cell: int
    completes: KvArrived | None = None
    """Message to pass on to the decode instance: this was the last that was missing."""


@dataclass(frozen=True, slots=True)
class FreeCells:
    """Decode instance to receiver: spans that its loop has seen scattered."""

    cells: tuple[CellScattered, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """A side of a pair will not serve the request. Nothing of it is under way, nor will be."""

    request_id: int
    reason: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Client to router, router to both instances, decode to prefill: give it up, whatever is under way.

    A decode instance that had granted pages to it keeps them until the sender's Abort says that nobody writes to them.
    """

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopSending:
    """Prefill to sender: let what is under way end, send no more, and tell both sides when nothing is under way."""

    request_id: int
    decode_id: str
    """Empty if the prefill instance does not know the request."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Transport to sender: the transfer of this unit failed."""

    unit: TransferUnit
    reason: str


@dataclass(frozen=True, slots=True)
class TransferLost:
    """Transport to sender: the outcome of this unit is unknown, and its bytes may still arrive."""

    unit: TransferUnit
    reason: str


@dataclass(frozen=True, slots=True)
class KvLost:
    """Sender to decode: prefill will not serve this request, but bytes of it may still arrive."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An instance's answer to the health monitor, or its absence, and in which of its lives."""

    instance_id: str
    life: int | None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Health monitor to those who work with an instance: what it held is lost."""

    instance_id: str
    has_restarted: bool = False
    """It is back already: what it does now may be of its new life."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Health monitor: this instance answers again, with nothing in its memory."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Woken:
    """It is the time of a WakeAt, or later."""


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """An instance as an autoscaler sees it."""

    instance_id: str
    num_requests: int
    """Requests that were routed to the instance and have not ended."""
    num_queued: int
    page_use: float
    """Share of its pages that requests hold; on decode what several share counts for each."""
    is_empty: bool
    """It holds nothing of any request, nor is anything on its way to it."""


@dataclass(frozen=True, slots=True)
class InstanceMetrics:
    """What an instance says of itself, as vLLM's num_requests_waiting and kv_cache_usage_perc."""

    instance_id: str
    num_queued: int
    """Requests that wait, retracted ones included."""
    page_use: float
    """Share of its pages that requests hold."""


@dataclass(frozen=True, slots=True)
class MetricsSeen:
    """Metrics of living instances; sent to a router whose policies read them."""

    instances: tuple[InstanceMetrics, ...]


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """The instances, and counts since the run began; sent to the autoscaler."""

    instances: tuple[InstanceSeen, ...]
    num_arrived: int
    num_arrived_tokens: int
    """Tokens of their prompts."""
    num_finished: int
    num_output_tokens: int
    """Outputs of finished requests; the next two are their sums, too."""
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
    """Driver to instance: the output tokens that it asked for (AskOutput)."""

    request_id: int
    output: TokenSequence


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token is streamed, by decode if there is one."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Retracted:
    """The request gave its pages back: its KV waits in host memory, or will be computed again."""

    request_id: int


@dataclass(frozen=True, slots=True)
class AskOutput:
    """Request the first output tokens of a request from the driver before the next step, because their KV will be
    cached.
    """

    instance_id: str
    request_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SaveKv:
    """Copy these pages of a retracted request to host memory before the next step begins: others will write into them.

    The copy is kept until LoadKv, or until the request is cancelled.
    """

    request_id: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadKv:
    """Copy it back into these pages, before the next step begins."""

    request_id: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteBackup:
    """Copy these pages to as many pages of host memory, behind all such copies before it.

    The host cache of an instance has them from now on.
    """

    pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    blocks: bool
    """The loop stands still until it is done: the pages go to others."""


@dataclass(frozen=True, slots=True)
class LoadBack:
    """Copy these pages of host memory into pages of the GPU, for a prompt that continues them.

    A prefill forward that is begun later computes a layer when its KV is there; a decode instance waits for LoadedBack.
    """

    request_id: int
    host_pages: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadRetracted:
    """Copy the KV of a retracted request from these pages of host memory back, while the loop stands still."""

    request_id: int
    host_pages: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreKv:
    """Copy to storage what lies in these pages of host memory: KV of tokens from start_tokens on.

    It begins when the copies before it are done.
    """

    sequence: TokenSequence
    start_tokens: int
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefetchKv:
    """Read into these pages of host memory what storage has of a prompt behind the first start_tokens."""

    request_id: int
    prompt: TokenSequence
    start_tokens: int
    host_pages: tuple[int, ...]
    least_pages: int
    """Read nothing if storage has fewer pages."""


@dataclass(frozen=True, slots=True)
class StopPrefetch:
    """Read no more for this prompt than what is under way, and say when that is there."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Prefill has seen the end of the request's transfer and holds nothing of the request any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token is streamed, and what the request held is free."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: int
    reason: str
    retryable: bool = False
    """True if another attempt may succeed, because an instance or a transfer failed and not the request."""


Outcome = PrefillDone | Finished | Failed
RequestMessage = Arrival | NewRequest | KvGranted | PromptComputed | KvArrived | KvSent | FirstToken | PutOut | Outcome
CopyMessage = LoadedBack | Prefetched | KvOffered | KvWanted | KvReturned
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
    """The unit's worker is free and nothing is missing: gather if it is staged, and write."""

    unit: TransferUnit
    staging_offset_bytes: int | None


@dataclass(frozen=True, slots=True)
class ReturnKv:
    """Move this KV from decode to prefill, beside the transfer workers."""

    unit: TransferUnit


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy a cell from the ring, where it begins at this offset, into its pages. Bytes are those of one writer."""

    decode_id: str
    request_id: int
    cell: int
    num_bytes: int
    staging_offset_bytes: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Post Woken to this instance, or to the router, at that time."""

    who: str
    time_ns: int


HostCopy = WriteBackup | LoadBack | LoadRetracted | StoreKv | PrefetchKv | StopPrefetch
TransferCommand = TransferUnit | StartTransfer | ReturnKv | Scatter
Command = (
    Send | Tell | WakeAt | TransferCommand | FirstToken | Retracted | AskOutput | SaveKv | LoadKv | HostCopy | Outcome
)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute num_tokens of a prompt behind num_context_tokens whose KV exists."""

    request_id: int
    num_context_tokens: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class PrefillStep:
    step_id: int
    chunks: tuple[PrefillChunk, ...]
    num_decode_tokens: int = 0
    """Tokens of running requests that the same forward computes."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward computes."""
        return sum([chunk.num_tokens for chunk in self.chunks]) + self.num_decode_tokens


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A token for every running request, up to max_steps times before the instance must be asked again.

    With speculative decoding it is one step, which gives each of them one token or more.
    The batch is the previous step's, less those that ended or are in `left`, and `joined`.
    """

    step_id: int
    joined: tuple[int, ...]
    left: tuple[int, ...]
    num_requests: int
    num_context_tokens: int
    """KV tokens that the first step reads: of each request all it has, and what it writes."""
    num_distinct_tokens: int
    """The same, with a cached prefix that several requests share counted once: where attention runs in waves, once in
    each of them."""
    max_steps: int


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A forward over chunks of prompts and a token of every running request."""

    prefill: PrefillStep
    decode: DecodeStep


PureStep = PrefillStep | DecodeStep
Step = PureStep | MixedStep


@dataclass(frozen=True, slots=True)
class StepResult:
    """Report of the executor.

    `ended` has (request_id, output) for each sequence that stopped; the output is the whole of it. A prefill step
    reports sequences that stop with their first token.
    """

    num_steps: int = 1
    ended: tuple[tuple[int, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """Report of a decode step that verified drafts; `ended` as in StepResult."""

    num_tokens: tuple[int, ...]
    """Tokens that each request gained, at least 1, in the order of the batch."""
    ended: tuple[tuple[int, Any], ...] = ()

    @property
    def num_steps(self) -> int:
        return 1


Result = StepResult | Verified


@dataclass(frozen=True, slots=True)
class Pause:
    """The host handles the consequences of a result. The loop continues when the host is done."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The instance has nothing to do until a message arrives, or until until_ns if that is sooner."""

    until_ns: int | None = None


def sender_of(prefill_id: str) -> str:
    return f"{prefill_id}.sender"


def receiver_of(decode_id: str) -> str:
    return f"{decode_id}.receiver"
