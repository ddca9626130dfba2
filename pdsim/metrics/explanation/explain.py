"""Explains where requests spend their time. Stages follow one another; critical paths divide each stage by the resource
or message for which the request waited.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

import numpy as np

from pdsim.dataclass import dataclass
from pdsim.metrics.columns import NEVER, Array, Columns, columns
from pdsim.metrics.explanation.stages import (
    AGGREGATED_STAGES,
    ALL_STAGES,
    COMPUTED_FIRST_STAGES,
    HIDDEN_BOOTSTRAP_STAGES,
    STAGES,
    Stages,
    after_encoding,
)
from pdsim.metrics.explanation.time_spans import TimeSpans
from pdsim.metrics.records import Records, RequestRecord


@dataclass(frozen=True)
class StageTimes:
    """Time in ms that finished requests spend in one stage. share: the stage's share of the mean latency."""

    stage: str
    meaning: str
    """Description of the stage, for users."""
    mean_ms: float
    median_ms: float
    slowest_ms: float
    """Mean time that the slowest requests spend in the stage. The slowest requests: the 1 % (at least one request) with
    the largest TTFT.
    """
    share: float


def _by_stages(requests: Columns) -> list[tuple[Stages, Array]]:
    """Groups requests by the stages that they pass through. Returns pairs: stages, and the row numbers of the requests
    with these stages. Without requests: one pair, STAGES without rows.
    """
    granted_ns = requests["admitted_ns"]
    is_aggregated = requests.are_same("prefill_id", "decode_id") & ~requests.having("prefill_id", "")
    is_late = granted_ns > requests["prefill_start_ns"]
    is_computed_first = granted_ns > requests["prefill_end_ns"]
    is_encoded = requests["embeddings_ns"] != NEVER
    is_hidden = is_encoded & ~is_aggregated & (granted_ns <= requests["embeddings_ns"])
    plain = (
        (STAGES, ~is_aggregated & ~is_late & ~is_hidden),
        (COMPUTED_FIRST_STAGES, ~is_aggregated & is_late & is_computed_first),
        (HIDDEN_BOOTSTRAP_STAGES, is_hidden | (~is_aggregated & is_late & ~is_computed_first)),
        (AGGREGATED_STAGES, is_aggregated),
    )
    masks = [(table, mask & ~is_encoded) for table, mask in plain]
    masks += [(after_encoding(table), mask & is_encoded) for table, mask in plain]
    found = [(table, np.flatnonzero(mask)) for table, mask in masks if mask.any()]
    return found or [(STAGES, np.zeros(0, dtype=np.int64))]


def stage_times(records: Records) -> list[StageTimes]:
    """Times of each stage over the finished requests. The requests must be all disaggregated, or all aggregated."""
    requests = finished(records)
    times_ns = _stage_times_ns(requests)
    order = np.argsort(requests["first_token_ns"] - requests["arrival_ns"], kind="stable")
    slowest = order[-max(1, len(order) // 100) :]
    means = {stage: _mean_ms(spent_ns) for stage, spent_ns in times_ns.items()}
    total = sum(means.values()) or 1.0
    return [
        StageTimes(
            stage,
            ALL_STAGES[stage][2],
            means[stage],
            float(np.median(spent_ns)) / 1e6 if len(spent_ns) else 0.0,
            _mean_ms(spent_ns[slowest]),
            means[stage] / total,
        )
        for stage, spent_ns in times_ns.items()
    ]


def mean_stage_ms(records: Records) -> dict[str, float]:
    """Mean time in ms of each stage over the finished requests."""
    return {stage: _mean_ms(spent_ns) for stage, spent_ns in _stage_times_ns(finished(records)).items()}


def finished(records: Records) -> Columns:
    requests = columns(records, "requests")
    return requests.where(np.flatnonzero(requests.having("outcome", "finished")))


def _stage_times_ns(requests: Columns) -> dict[str, Array]:
    """For each stage: the time in ns that each request spends in it, or 0. Stages that no request has are left out."""
    tables = _by_stages(requests)
    found = {
        stage: np.zeros(len(requests["arrival_ns"]), dtype=np.int64)
        for stage in ALL_STAGES
        if any(stage in table for table, _ in tables)
    }
    for table, rows in tables:
        for stage, (first, last, _) in table.items():
            found[stage][rows] = requests[last][rows] - requests[first][rows]
    return found


def _mean_ms(times_ns: Array) -> float:
    return int(times_ns.sum()) / 1e6 / max(1, len(times_ns))


PARTS = {
    "front end": "front end, failed attempts",
    "handshake": "messages between router, decode and prefill, while no resource is short",
    "encode queue": "the request's images or audio wait for an encode instance",
    "encode": "an encode instance encodes the request's images or audio",
    "embedding transfer": "the request's embeddings move over links",
    "admission wait": "the head of decode's queue lacks a slot or pages",
    "prefill queue": "prefill is full or computes other requests first",
    "compile": "prefill compiles a kernel for the first time",
    "prefill compute": "prefill computes the request's prompt",
    "transfer queue": "the request's KV waits for a transfer worker",
    "ring wait": "the request's KV waits for room in the staging ring",
    "transfer set-up": "the transfer engine sets up the batch and gathers staged KV",
    "transfer line": "the transfer engine is busy with other transfers, one at a time",
    "descriptors": "the transfer engine posts descriptors",
    "transfer": "the request's KV moves over links",
    "merge wait": "decode has yet to notice the KV, scatter staged heads and merge the request",
    "response": "the first token passes the gateway",
    "decode compute": "decode computes a step of its batch",
    "decode wait": "between decode steps: retraction, prompts of other requests, host work",
}
"""Parts of a critical path in the order of a request's life. Each text says what the request waits for in the part."""


_NAMES = {
    "front_end": "front end",
    "encode_waiting": "encode queue",
    "encode_forward": "encode",
    "embedding_transfer": "embedding transfer",
    "decode_transferred": "merge wait",
}
"""Names of parts by stage, for stages that are not divided into several parts. If a stage has no entry, its part has
the stage's name.
"""


class CriticalPaths:
    """Critical paths of the finished requests of a run: how long each request waited for which resource or message. If
    the run did not record the instances' queues and pools, waiting for admission counts for the part `handshake`.
    """

    def __init__(self, records: Records) -> None:
        self._requests = finished(records)
        self._ids = self._requests["request_id"]
        self._computing = _busy(records, "prefill")
        self._compiling = _compiling(records)
        self._decoding = _busy(records, "decode")
        self._blocked = blocked(records)
        self._last_units = _last_units(columns(records, "transfers"), self._ids)
        self.parts_ns = {part: np.zeros(len(self._ids), dtype=np.int64) for part in PARTS}
        """Time in ns of each finished request, by part."""
        for table, rows in _by_stages(self._requests):
            for stage, (first, last, _) in table.items():
                begin_ns, end_ns = self._requests[first][rows], self._requests[last][rows]
                for part, spent_ns in self._split(stage, rows, begin_ns, end_ns).items():
                    self.parts_ns[part][rows] += spent_ns

    @cached_property
    def _rows(self) -> dict[int, int]:
        """Maps the id of each finished request to the index of its row in the table of finished requests."""
        return {request_id: row for row, request_id in enumerate(self._ids.tolist())}

    @cached_property
    def _lists(self) -> dict[str, list[int]]:
        """For each part: a list of times in ns, one for each finished request. Single items of lists are read faster
        than those of arrays. Parts that take no time are left out.
        """
        return {part: spent_ns.tolist() for part, spent_ns in self.parts_ns.items() if spent_ns.any()}

    def of(self, request: RequestRecord) -> dict[str, int]:
        """Time in ns that a finished request spent in each part of its critical path. Parts that take no time are left
        out.
        """
        row = self._rows[request.request_id]
        return {part: spent_ns[row] for part, spent_ns in self._lists.items() if spent_ns[row]}

    def _split(self, stage: str, rows: Array, begin_ns: Array, end_ns: Array) -> dict[str, Array]:
        """Divides the time that requests spend in one stage. Returns the time in ns of each request, by part. rows: row
        numbers of the requests; begin_ns, end_ns: begin and end of the stage for each of them.
        """
        whole = end_ns - begin_ns
        match stage:
            case "decode_bootstrap":
                waited = self._within("decode_id", self._blocked, rows, begin_ns, end_ns)
                return {"admission wait": waited, "handshake": whole - waited}
            case "prefill_waiting":
                names = self._computing.keys() | self._blocked.keys()
                busy = {name: self._computing[name].united(self._blocked[name]) for name in names}
                queued = self._within("prefill_id", busy, rows, begin_ns, end_ns)
                waited = self._within("prefill_id", self._with_compiles(busy), rows, begin_ns, end_ns)
                return {"prefill queue": queued, "compile": waited - queued, "handshake": whole - waited}
            case "prefill_forward":
                computed = self._within("prefill_id", self._computing, rows, begin_ns, end_ns)
                held = self._within("prefill_id", self._with_compiles(self._computing), rows, begin_ns, end_ns)
                return {"prefill compute": computed, "compile": held - computed, "prefill queue": whole - held}
            case "prefill_transfer_kv_cache":
                return _transfer(self._last_units, rows, begin_ns, end_ns)
            case "decode_forward":
                decoded = self._within("decode_id", self._decoding, rows, begin_ns, end_ns)
                return {"decode compute": decoded, "decode wait": whole - decoded}
        return {_NAMES.get(stage, stage): whole}

    def _with_compiles(self, spans: Mapping[str, TimeSpans]) -> Mapping[str, TimeSpans]:
        """Returns, for each instance in `spans`: its time spans united with those in which it compiles a kernel."""
        return {name: own.united(self._compiling[name]) for name, own in spans.items()}

    def _within(self, place: str, spans: Mapping[str, TimeSpans], rows: Array, begin_ns: Array, end_ns: Array) -> Array:
        """For each request: how much of the time from begin_ns to end_ns lies in the time spans of its instance, in ns.
        place: name of the column with the instance's name. spans: time spans by instance. rows: row numbers of the
        requests.
        """
        codes, names = self._requests.words(place)
        spent_ns = np.zeros(len(rows), dtype=np.int64)
        for code, name in enumerate(names):
            if name in spans:
                here = codes[rows] == code
                spent_ns[here] = spans[name].within(begin_ns[here], end_ns[here])
        return spent_ns


def mean_parts_ms(records: Records) -> dict[str, float]:
    """Mean time in ms of each part of the critical paths of finished requests. Parts are in the order of PARTS; parts
    that take no time are left out.
    """
    return {part: _mean_ms(ns) for part, ns in CriticalPaths(records).parts_ns.items() if ns.any()}


def _last_units(transfers: Columns, request_ids: Array) -> dict[str, Array]:
    """Times of the last transfer unit of each request, in the order of `request_ids`. Returns columns of the table of
    transfers by name; `in_ring`: the unit waited for the staging ring; `known`: False if the request sent no unit, so
    that its other values mean nothing. If `transfers` is empty, only `known` has a value for each request.
    """
    last = np.flatnonzero(transfers["is_last"])
    last = last[np.argsort(transfers["request_id"][last], kind="stable")]
    ids = transfers["request_id"][last]
    at = np.searchsorted(ids, request_ids, side="right") - 1
    known = (at >= 0) & (ids[at] == request_ids) if len(ids) else np.zeros(len(request_ids), dtype=bool)
    unit = transfers.where(last[np.where(known, at, 0)] if len(ids) else np.zeros(0, dtype=np.int64))
    names = ("queued_ns", "start_ns", "setup_ns", "line_ns", "posting_ns")
    return {"known": known, "in_ring": unit.having("needs", "ring"), **{name: unit[name] for name in names}}


def _transfer(units: Mapping[str, Array], rows: Array, begin_ns: Array, end_ns: Array) -> dict[str, Array]:
    """Divides the time from begin_ns to end_ns by what the last transfer unit of each request waited for. Returns times
    in ns by part, one for each request. units: result of `_last_units`. rows: row numbers of the requests; begin_ns and
    end_ns have one value for each of them.

    The time before the unit was planned counts as waiting for a transfer worker. All time of a request that sent no
    unit counts for the part `transfer`.
    """
    known = units["known"][rows]
    if not known.any():
        return {"transfer": end_ns - begin_ns}
    unit = {name: values[rows] for name, values in units.items()}
    moments = [unit["start_ns"]]
    for name in ("setup_ns", "line_ns", "posting_ns"):
        moments.append(moments[-1] + unit[name])
    cuts = [begin_ns, *(np.clip(moment, begin_ns, end_ns) for moment in (unit["queued_ns"], *moments)), end_ns]
    queued, waited, setup, line, posting, moved = (end - start for start, end in pairwise(cuts))
    in_ring = unit["in_ring"]
    split = {
        "transfer queue": queued + np.where(in_ring, 0, waited),
        "ring wait": np.where(in_ring, waited, 0),
        "transfer set-up": setup,
        "transfer line": line,
        "descriptors": posting,
    }
    of_known = {part: np.where(known, spent_ns, 0) for part, spent_ns in split.items()}
    return {**of_known, "transfer": np.where(known, moved, end_ns - begin_ns)}


def _busy(records: Records, kind: str) -> Mapping[str, TimeSpans]:
    steps = columns(records, "steps")
    steps = steps.where(np.flatnonzero(steps.having("kind", kind)))
    return _of_instances(steps, steps["start_ns"], steps["start_ns"] + steps["duration_ns"])


def _compiling(records: Records) -> Mapping[str, TimeSpans]:
    """Times in which an instance compiled a kernel before a forward, by instance."""
    steps = columns(records, "steps")
    steps = steps.where(np.flatnonzero(steps["compiling_ns"]))
    return _of_instances(steps, steps["start_ns"] - steps["compiling_ns"], steps["start_ns"])


def _of_instances(steps: Columns, begin_ns: Array, end_ns: Array) -> Mapping[str, TimeSpans]:
    """Returns the time spans of each instance, by its name. steps: table of steps. begin_ns, end_ns: begin and end of
    each step's span.
    """
    codes, names = steps.words("instance_id")
    spans = {name: TimeSpans(begin_ns[codes == code], end_ns[codes == code]) for code, name in enumerate(names)}
    return defaultdict(TimeSpans, spans)


def blocked(records: Records, kind: str = "") -> Mapping[str, TimeSpans]:
    """Times in which the first request of an instance's queue lacked pages or slots, by instance. kind: only times in
    which "pages" or "slots" were lacking; empty: times in which either was.
    """
    levels = columns(records, "levels")
    codes, names = levels.words("instance_id")
    lacks = levels.having("blocked_by", kind) if kind else ~levels.having("blocked_by", "")
    spans: dict[str, TimeSpans] = defaultdict(TimeSpans)
    for code, name in enumerate(names):
        here = codes == code
        times_ns, is_blocked = levels["time_ns"][here], lacks[here][:-1]
        spans[name] = TimeSpans(times_ns[:-1][is_blocked], times_ns[1:][is_blocked])
    return spans
