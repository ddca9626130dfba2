"""Records of a simulated or real run. Times are in ns since the run began; None means that the event never happened."""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from pdsim.core.instance import Levels
from pdsim.dataclass import dataclass
from pdsim.metrics.distribution import Run


@dataclass(slots=True)
class RequestRecord:
    """One request, with the times in ns at which its stages began and ended. None: the event never happened."""

    request_id: int
    """Number of the request in the order of arrival, from 0."""
    num_prompt_tokens: int
    """Length of the prompt in tokens."""
    num_output_tokens: int
    """Length of the output in tokens."""
    arrival_ns: int
    """Time when the client sent the request."""
    routed_ns: int | None = None
    """Time when the router chose the instances. After a retry, this field and all later fields are those of the last
    attempt, except num_retractions, which counts the retractions of all attempts.
    """
    prefill_id: str = ""
    """Instance that computed the prompt."""
    decode_id: str = ""
    """Instance that decoded the request. Equal to prefill_id on an aggregated instance."""
    admitted_ns: int | None = None
    """Time when decode reserved pages and asked prefill to compute."""
    prefill_start_ns: int | None = None
    """Time when the request's first forward began."""
    prefill_end_ns: int | None = None
    """Time when the forward with the last chunk of the prompt ended. Forwards that compute the prompt again after a
    retraction do not change this time.
    """
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
    """Prompt tokens whose KV decode had cached, so that it was not sent."""
    num_prefill_cached_tokens: int = 0
    """Prompt tokens whose KV prefill had cached, so that it was not computed."""
    transfer_bytes: int = 0
    """Bytes of transferred KV, over all ranks."""
    num_retractions: int = 0
    """Number of times that the request lost its pages while decoding."""
    num_retries: int = 0
    """Number of attempts after the first. Attempts fail if instances die or transfers time out."""
    outcome: str = "unfinished"
    """unfinished, finished or failed."""
    reason: str = ""
    """Why the request failed. Empty: it did not fail."""
    request_class: str = ""
    """Class of the request, from its trace. Empty: no class."""
    num_image_tokens: int = 0
    """Prompt tokens that stand for images."""
    num_audio_tokens: int = 0
    """Prompt tokens that stand for audio clips."""
    encode_id: str = ""
    """Encode instance whose embeddings arrived last. Empty: no encode instance encoded media of the request."""
    encode_start_ns: int | None = None
    """Time when the encode instance `encode_id` began to encode its part of the request's media, or found the
    embeddings in its cache.
    """
    encode_end_ns: int | None = None
    """Time when the encode instance `encode_id` had encoded its part of the request's media."""
    embeddings_ns: int | None = None
    """Time when the last embeddings arrived, so that prefill could begin the request."""
    own_itl_ms: tuple[float, ...] = field(default=(), metadata={"in_table": False})
    """Percentiles in ms of the gaps between the request's tokens, in the order of own_gaps.OWN_ITL. Empty: the run did
    not record them.
    """

    @property
    def is_aggregated(self) -> bool:
        """True if one instance both computed the prompt and decoded. False if the request was never routed."""
        return self.prefill_id == self.decode_id != ""


@dataclass(slots=True)
class StepRecord:
    """A forward of prefill or of an encode instance, or consecutive decode steps of one batch. Each of these decode
    steps takes growth_ns longer than the step before.
    """

    instance_id: str
    """Name of the instance."""
    kind: str
    """prefill, decode or encode."""
    start_ns: int
    """Time when the step began. A record of several steps has the time of the first of these steps."""
    duration_ns: int
    """Duration of all steps of the record together."""
    first_ns: int
    """Duration of the first decode step. For a forward, or a decode step with pipeline stages: duration of the first
    stage.
    """
    num_steps: int
    """Number of steps; 1 for prefill and encode."""
    num_requests: int
    """Number of requests in the batch."""
    num_tokens: int
    """Number of tokens that all steps of the record compute or generate."""
    num_context_tokens: int
    """Prefill: number of tokens that were cached or computed before. Decode: number of KV tokens that the first of the
    record's steps reads. Encode: 0.
    """
    growth_ns: float
    """Time by which each decode step takes longer than the step before."""
    num_resumed: int = 0
    """Number of requests whose gap before their token of the record's first step is in RunRecords.token_gaps,
    because their last token did not come directly before the step. If the step verified drafts or computed a
    micro-batch: all requests of the batch.
    """
    copying_ns: int = 0
    """Time before the step in which KV of retracted requests moves to or from host memory, or cached KV is written
    back.
    """
    compiling_ns: int = 0
    """Time before a forward of prefill in which its instance compiles a kernel for the forward."""


@dataclass(slots=True)
class TransferRecord:
    """A transfer unit: KV that one transfer worker sends from a prefill to a decode instance at once. Also KV of an
    ended request that returns from a decode to a prefill instance.

    The unit waits from queued_ns to start_ns. Then come the set-up, a wait while the engine serves other transfers
    (line), and the posting of descriptors. In the rest of the time until end_ns, the bytes move at the speed of their
    links.
    """

    request_id: int
    """Id of the request."""
    source: str
    """Name of the sending instance."""
    target: str
    """Name of the receiving instance."""
    num_bytes: int
    """Bytes over all ranks. 0: the unit carries only the first token."""
    num_pages: int
    """Number of pages."""
    num_descriptors: int
    """Number of descriptors over all ranks."""
    is_last: bool
    """True: the unit is the request's last, and carries the first token."""
    queued_ns: int
    """Time when the sending instance planned the unit. A unit from prefill then joins the queue of a transfer worker.
    """
    start_ns: int
    """Time when a transfer worker began with the unit."""
    end_ns: int
    """Time when all bytes of the unit had arrived, in pages or in the staging ring."""
    needs: str = ""
    """What the unit waited for besides a free worker. "ring": room in the staging ring. "layers": the end of the
    layers' computation. Empty: nothing.
    """
    setup_ns: int = 0
    """Time of setting up the batch in the transfer engine; with staging, also of gathering KV in the staging buffer."""
    line_ns: int = 0
    """Time of waiting for transfers of other workers, if the engine serves one transfer at a time."""
    posting_ns: int = 0
    """Time by which the posting of descriptors delays the bytes, before they move or while they move."""
    worker: int = 0
    """Number of the transfer worker at the source, from 0."""


class TokenGap(NamedTuple):
    """A gap between two tokens of some requests that StepRecord does not give. After a retraction, a prefill forward or
    a copy of KV, the gap is longer than the decode step that ends it. Each gap before a step that verified drafts, or
    before a step of a micro-batch, has a record, too.
    """

    duration_ns: int
    """Length of the gap in ns."""
    num_requests: int
    """Number of requests for which this gap begins and ends at the same times."""
    num_tokens: int = 1
    """Number of tokens per request that arrive together after the gap."""


class HostCopyRecord(NamedTuple):
    """A copy of KV between an instance's GPU pages and its host cache, or between the host cache and storage."""

    instance_id: str
    kind: str
    """load (from the host cache), write (to the host cache), read (from storage) or store (to storage)."""
    start_ns: int
    """Time when the copy began."""
    end_ns: int
    """Time when the copy ended."""
    num_pages: int
    num_bytes: int
    """Bytes of all ranks together."""


class ServerRecord(NamedTuple):
    """The role of one server of an elastic cluster, from time_ns until the server's next record."""

    server: int
    """Index of the server among all servers of the elastic cluster."""
    time_ns: int
    role: str
    """Role of the server. Empty: the server is off."""
    state: str
    """off, starting, serving or draining."""


class LevelRecord(NamedTuple):
    """Requests and pages of one instance, from time_ns until the instance's next record."""

    instance_id: str
    """Name of the instance."""
    time_ns: int
    """Time from which the record holds, until the instance's next record."""
    levels: Levels


@dataclass(eq=False)
class LevelRows:  # noqa: PLW1641  its rows change
    """Level records as columns of integers, which take a quarter of the memory of objects. Texts are stored as numbers.

    A row that repeats the levels of the instance's row before is left out, because a row holds until the next.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ("instance_id", "time_ns", *Levels._fields)

    _columns: "list[array[int]]" = field(default_factory=lambda: [array("q") for _ in LevelRows.COLUMNS])
    """Values of each column of COLUMNS, in the order of the rows."""
    _texts: dict[str, int] = field(default_factory=dict)
    """The number that stands for each text in the columns."""
    _new: list[tuple[str, int, Levels]] = field(default_factory=list)
    """Rows that are not in the columns yet."""
    _last: dict[str, Levels] = field(default_factory=dict)
    """Levels of each instance's last row."""

    def add(self, instance_id: str, time_ns: int, levels: Levels) -> None:
        if self._last.get(instance_id) == levels:
            return
        self._last[instance_id] = levels
        self._new.append((instance_id, time_ns, levels))
        if len(self._new) == _ROWS_AT_ONCE:
            self._store()

    def _store(self) -> None:
        if not self._new:
            return
        instance_ids, times_ns, levels = zip(*self._new, strict=True)
        *numbers, lacks = zip(*levels, strict=True)
        rows = [self._numbered(instance_ids), times_ns, *numbers, self._numbered(lacks)]
        for column, values in zip(self._columns, rows, strict=True):
            column.extend(array("q", values))
        self._new.clear()

    def _numbered(self, texts: Sequence[str]) -> list[int]:
        return [self._texts.setdefault(text, len(self._texts)) for text in texts]

    def column(self, name: str) -> Sequence[Any]:
        """The values of a column in the order of the rows. name: one of COLUMNS."""
        self._store()
        numbers = self._columns[self.COLUMNS.index(name)]
        return list(map(list(self._texts).__getitem__, numbers)) if name in _TEXT_COLUMNS else numbers

    def __len__(self) -> int:
        return len(self._columns[0]) + len(self._new)

    def __iter__(self) -> Iterator[LevelRecord]:
        for instance_id, time_ns, *levels in zip(*map(self.column, self.COLUMNS), strict=True):
            yield LevelRecord(instance_id, time_ns, Levels(*levels))

    def __contains__(self, record: object) -> bool:
        return record in list(self)

    def __eq__(self, other: object) -> bool:
        """True if the other collection, such as a list, has the same records."""
        return isinstance(other, Collection) and list(self) == list(other)


_TEXT_COLUMNS = ("instance_id", "blocked_by")
_ROWS_AT_ONCE = 1024


@dataclass
class RunRecords:
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    transfers: list[TransferRecord] = field(default_factory=list)
    levels: Collection[LevelRecord] = field(default_factory=LevelRows)
    """Requests and pages of each instance over time. Empty: the run did not record them."""
    token_gaps: list[TokenGap] = field(default_factory=list)
    """Gaps between tokens that `steps` does not give: `steps` has those that are the duration of one decode step. Empty
    if the records were read from a run folder.
    """
    token_groups: list[Run] | None = None
    """Times in ns between groups of tokens that a server sends together (stream interval), over all finished requests.
    Each item is a `Run` of pdsim.metrics.distribution, a series of times. Its weight is the number of tokens per group.
    None: each token is sent alone, or the records were read from a run folder.
    """
    host_copies: list[HostCopyRecord] = field(default_factory=list)
    """Copies to and from host caches and storage. Empty: there were none, or the records were read from a run folder.
    """
    servers: list[ServerRecord] = field(default_factory=list)
    """Roles of the servers over time. Empty: the cluster is not elastic, or the records were read from a run folder."""

    def without_first(self, num_requests: int) -> "RunRecords":
        """The records without the num_requests requests that arrived first. Steps, transfers and all other records stay
        those of the whole run.
        """
        requests = sorted(self.requests, key=lambda request: (request.arrival_ns, request.request_id))
        return replace(self, requests=requests[num_requests:])


class Records(Protocol):
    """The records of a run, either in memory or read from its folder."""

    @property
    def requests(self) -> list[RequestRecord]: ...

    @property
    def steps(self) -> list[StepRecord]: ...

    @property
    def transfers(self) -> list[TransferRecord]: ...

    @property
    def levels(self) -> Collection[LevelRecord]: ...

    def without_first(self, num_requests: int) -> "Records": ...


def judged_records(records: Records, summary: Mapping[str, Any]) -> Records:
    """The records without warm-up requests, which the run's summary leaves out, too. summary: has their number."""
    num_left_out = summary.get("pdsim", {}).get("warm_up_requests", 0)
    return records.without_first(num_left_out) if num_left_out else records
