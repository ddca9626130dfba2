"""Records of a run, simulated or real. Times are ns since the run began; None means never."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from pdsim.core.instance import Levels
from pdsim.metrics.distribution import Run


@dataclass(slots=True)
class RequestRecord:
    """One request with the times of its stages."""

    request_id: int
    """Number of the request, in order of arrival."""
    num_prompt_tokens: int
    """Length of the prompt in tokens."""
    num_output_tokens: int
    """Length of the output in tokens."""
    arrival_ns: int
    """Time when the client sent the request."""
    routed_ns: int | None = None
    """Time when the router chose the instances. After a retry, this field and all below describe the last attempt."""
    prefill_id: str = ""
    """Instance that computed the prompt."""
    decode_id: str = ""
    """Instance that decoded the request. The same as prefill_id if the instance is aggregated."""
    admitted_ns: int | None = None
    """Time when decode reserved pages and asked prefill to compute."""
    prefill_start_ns: int | None = None
    """Time when the request's first forward began."""
    prefill_end_ns: int | None = None
    """Time when the request's last forward ended."""
    transfer_start_ns: int | None = None
    """Time when the request's first transfer unit left the queue."""
    transfer_end_ns: int | None = None
    """Time when the request's last transfer unit arrived."""
    streamed_ns: int | None = None
    """Time when decode streamed the first token."""
    first_token_ns: int | None = None
    """Time when the client received the first token."""
    end_ns: int | None = None
    """Time when the client saw the last token, or the failure."""
    num_decode_cached_tokens: int = 0
    """Prompt tokens cached on decode, whose KV was not sent."""
    num_prefill_cached_tokens: int = 0
    """Prompt tokens cached on prefill, which were not computed."""
    transfer_bytes: int = 0
    """Bytes of transferred KV, over all ranks."""
    num_retractions: int = 0
    """Number of times that the request lost its pages while decoding."""
    num_retries: int = 0
    """Number of attempts after the first, because instances or transfers failed."""
    outcome: str = "unfinished"
    """unfinished, finished or failed."""
    reason: str = ""
    """Reason of a failure."""
    request_class: str = ""
    """Class of the request in its trace. Empty: no class."""
    own_itl_ms: tuple[float, ...] = field(default=(), metadata={"in_table": False})
    """Values of own_gaps.OWN_ITL in ms. Empty unless the run observes them."""

    @property
    def is_aggregated(self) -> bool:
        """True if one instance computed the prompt and decoded. False before the request is routed."""
        return self.prefill_id == self.decode_id != ""


@dataclass(slots=True)
class StepRecord:
    """A prefill forward, or consecutive decode steps of one batch. Each decode step is longer than the one before by
    growth_ns.
    """

    instance_id: str
    """Name of the instance."""
    kind: str
    """prefill or decode."""
    start_ns: int
    """Time when the step, or the first of the steps, began."""
    duration_ns: int
    """Duration of all steps of the row."""
    first_ns: int
    """Duration of the first decode step, or of a forward's first pipeline stage."""
    num_steps: int
    """Number of steps; 1 for prefill."""
    num_requests: int
    """Number of requests in the batch."""
    num_tokens: int
    """Number of tokens computed or generated in the whole row."""
    num_context_tokens: int
    """Prefill: tokens that were cached or computed before. Decode: KV tokens that the first of the steps reads."""
    growth_ns: float
    """Time by which each step is longer than the step before."""
    num_resumed: int = 0
    """Number of requests whose first gap in the row is not the first step, but one of RunRecords.token_gaps."""
    copying_ns: int = 0
    """Time before the step in which KV of retracted requests was copied to or from host memory, or was written back."""


@dataclass(slots=True)
class TransferRecord:
    """A transfer unit on its way from a prefill to a decode instance.

    From start_ns on the unit passes these stages: set-up, queue of the engine (line), posting, and until end_ns the
    transfer of bytes at the speed of their links.
    """

    request_id: int
    """Id of the request."""
    source: str
    """Name of the sending instance."""
    target: str
    """Name of the receiving instance."""
    num_bytes: int
    """Bytes over all ranks; 0 if the unit only carries the first token."""
    num_pages: int
    """Number of pages."""
    num_descriptors: int
    """Number of descriptors over all ranks."""
    is_last: bool
    """True: the unit carries the first token."""
    queued_ns: int
    """Time when the unit was planned."""
    start_ns: int
    """Time when a transfer worker took the unit."""
    end_ns: int
    """Time when the unit's bytes had arrived, in pages or in the staging ring."""
    needs: str = ""
    """Condition other than a free worker that the unit waited for. "ring": room in the staging ring. "layers": the
    forward of its layers.
    """
    setup_ns: int = 0
    """Time of the engine's batch, and with staging of the gather."""
    line_ns: int = 0
    """Time behind transfers of other workers, if the engine serves one transfer at a time."""
    posting_ns: int = 0
    """Time by which posting descriptors delayed the bytes, before or while they moved."""
    worker: int = 0
    """Number of the worker at the source."""


class TokenGap(NamedTuple):
    """A gap between two tokens of some requests that differs from one decode step: after a retraction, beside prompts,
    or before several tokens at once.
    """

    duration_ns: int
    num_requests: int
    num_tokens: int = 1
    """Number of tokens of each request that share the gap."""


class HostCopyRecord(NamedTuple):
    """A copy between an instance's pages and its host cache, or between the host cache and storage."""

    instance_id: str
    kind: str
    """load or write for the host cache; read or store for storage."""
    start_ns: int
    end_ns: int
    num_pages: int
    num_bytes: int
    """Bytes of all ranks together."""


class ServerRecord(NamedTuple):
    """The state of one server of an elastic cluster from time_ns on, until its next record."""

    server: int
    time_ns: int
    role: str
    """Role of the server. Empty: the server is off."""
    state: str


class LevelRecord(NamedTuple):
    """The state of one instance from time_ns on, until its next record."""

    instance_id: str
    """Name of the instance."""
    time_ns: int
    """Time from which the row holds, until the instance's next row."""
    levels: Levels


@dataclass
class RunRecords:
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    transfers: list[TransferRecord] = field(default_factory=list)
    levels: list[LevelRecord] = field(default_factory=list)
    """Levels of instances. Empty unless the run observes them."""
    token_gaps: list[TokenGap] = field(default_factory=list)
    token_groups: list[Run] | None = None
    """Groups in which the tokens of finished requests reach the client, with a stream interval: times in ns between
    groups, whose weight is the number of tokens in each group. None: each token reaches the client alone."""
    host_copies: list[HostCopyRecord] = field(default_factory=list)
    """Copies of host caches. Empty without host caches."""
    servers: list[ServerRecord] = field(default_factory=list)
    """Roles of servers over time. Empty unless the cluster is elastic."""

    def without_first(self, num_requests: int) -> "RunRecords":
        """Records without the first requests to arrive; steps and transfers stay those of the whole run."""
        requests = sorted(self.requests, key=lambda request: (request.arrival_ns, request.request_id))
        return replace(self, requests=requests[num_requests:])


class Records(Protocol):
    """Records of a run, in memory or in its folder."""

    @property
    def requests(self) -> list[RequestRecord]: ...

    @property
    def steps(self) -> list[StepRecord]: ...

    @property
    def transfers(self) -> list[TransferRecord]: ...

    @property
    def levels(self) -> list[LevelRecord]: ...

    def without_first(self, num_requests: int) -> "Records": ...


def judged_records(records: Records, summary: Mapping[str, Any]) -> Records:
    """Records without the requests that the run's summary leaves out."""
    num_left_out = summary.get("pdsim", {}).get("warm_up_requests", 0)
    return records.without_first(num_left_out) if num_left_out else records
