"""Rows that a run leaves behind, in simulation and in reality. Times are ns since the run began; None is "never"."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from pdsim.core.instance import Levels


@dataclass(slots=True)
class RequestRecord:
    """A request, stage by stage."""

    request_id: int
    """Number of the request, by arrival."""
    num_prompt_tokens: int
    """Length of its prompt."""
    num_output_tokens: int
    """Length of its output."""
    arrival_ns: int
    """Time when the client sent the request."""
    routed_ns: int | None = None
    """The router chose its instances. With retries, this and all below is of the last attempt."""
    prefill_id: str = ""
    """Instance that computed its prompt."""
    decode_id: str = ""
    """Instance that decoded it; the same twice if it is aggregated."""
    admitted_ns: int | None = None
    """Decode reserved its pages and asked prefill to compute."""
    prefill_start_ns: int | None = None
    """Time when its first forward began."""
    prefill_end_ns: int | None = None
    """Time when its last forward ended."""
    transfer_start_ns: int | None = None
    """Time when its first transfer unit left the queue."""
    transfer_end_ns: int | None = None
    """Time when its last transfer unit arrived."""
    streamed_ns: int | None = None
    """Decode streamed the first token."""
    first_token_ns: int | None = None
    """Time when the client received its first token."""
    end_ns: int | None = None
    """The client saw the last token, or the failure."""
    num_decode_cached_tokens: int = 0
    """Tokens cached on decode: not sent."""
    num_prefill_cached_tokens: int = 0
    """Tokens cached on prefill: not computed."""
    transfer_bytes: int = 0
    """Bytes of all ranks together."""
    num_retractions: int = 0
    """Times that it lost its pages while decoding."""
    num_retries: int = 0
    """Attempts after the first, because instances or transfers failed."""
    outcome: str = "unfinished"
    """unfinished, finished or failed"""
    reason: str = ""
    """Reason of a failure."""
    request_class: str = ""
    """Class of the request in its trace; empty: no class."""
    own_itl_ms: tuple[float, ...] = field(default=(), metadata={"in_table": False})
    """Values of own_gaps.OWN_ITL in ms; empty unless they are observed."""

    @property
    def is_aggregated(self) -> bool:
        """True if one instance did it all. Not known before it is routed."""
        return self.prefill_id == self.decode_id != ""


@dataclass(slots=True)
class StepRecord:
    """A prefill forward, or consecutive decode steps of one batch, each longer than the step before by growth_ns."""

    instance_id: str
    """Instance."""
    kind: str
    """prefill or decode."""
    start_ns: int
    """Time when the step, or the first of the steps, began."""
    duration_ns: int
    """Duration of all steps of the row."""
    first_ns: int
    """Duration of the first of the steps; of a forward, of its first pipeline stage."""
    num_steps: int
    """Number of steps; 1 for prefill."""
    num_requests: int
    """Requests in the batch."""
    num_tokens: int
    """Tokens computed or generated, of the whole row."""
    num_context_tokens: int
    """Prefill: cached or computed before. Decode: KV tokens that the first of the steps reads."""
    growth_ns: float
    """Time by which each step is longer than the one before."""
    num_resumed: int = 0
    """Requests whose first gap in the row is not its first step, but one of RunRecords.token_gaps."""
    copying_ns: int = 0
    """Time before it in which KV of retracted requests went to host memory or came back, or was written back."""


@dataclass(slots=True)
class TransferRecord:
    """A transfer unit on its way from a prefill to a decode instance.

    From start_ns on follow set-up, the line, posting and, until end_ns, bytes that nothing holds up but their links.
    """

    request_id: int
    """Id of the request."""
    source: str
    """Name of the sending instance."""
    target: str
    """Name of the receiving instance."""
    num_bytes: int
    """Bytes of all ranks, as are the descriptors; 0 if only the first token travels."""
    num_pages: int
    """Pages."""
    num_descriptors: int
    """Descriptors."""
    is_last: bool
    """Carries the first token."""
    queued_ns: int
    """It was planned."""
    start_ns: int
    """Time when a transfer worker took the unit."""
    end_ns: int
    """Time when its bytes had arrived, in pages or in the staging ring."""
    needs: str = ""
    """Condition beside a free worker: "ring", room in the staging ring; "layers", their forward."""
    setup_ns: int = 0
    """Time of the engine's batch, and with staging of the gather."""
    line_ns: int = 0
    """Behind transfers of other workers, where the engine serves one at a time."""
    posting_ns: int = 0
    """Time by which posting descriptors delayed its bytes, before or while they moved."""
    worker: int = 0
    """Worker of its source."""


class TokenGap(NamedTuple):
    """A gap between two tokens of some requests that is not one decode step: after a retraction, beside prompts, or
    before several tokens at once.
    """

    duration_ns: int
    num_requests: int
    num_tokens: int = 1
    """Number of tokens of each request that share the gap."""


class HostCopyRecord(NamedTuple):
    """A copy between an instance's pages and its host cache, or between that and storage."""

    instance_id: str
    kind: str
    """load or write; of storage, read or store"""
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
    """Role of the server; empty: the server is off."""
    state: str


class LevelRecord(NamedTuple):
    """The state of one instance from time_ns on, until its next record."""

    instance_id: str
    """Instance."""
    time_ns: int
    """Time from which the row holds, until its next row."""
    levels: Levels


@dataclass
class RunRecords:
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    transfers: list[TransferRecord] = field(default_factory=list)
    levels: list[LevelRecord] = field(default_factory=list)
    """Levels of instances; empty unless observed."""
    token_gaps: list[TokenGap] = field(default_factory=list)
    host_copies: list[HostCopyRecord] = field(default_factory=list)
    """Copies of host caches; empty without host caches."""
    servers: list[ServerRecord] = field(default_factory=list)
    """Roles of servers over time; empty unless the cluster is elastic."""


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


def without_first(records: RunRecords, num_requests: int) -> RunRecords:
    """Records without the first requests to arrive; steps and transfers stay those of the whole run."""
    requests = sorted(records.requests, key=lambda request: (request.arrival_ns, request.request_id))
    return replace(records, requests=requests[num_requests:])
