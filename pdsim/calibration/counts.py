"""What does not depend on time must be equal on both sides: bytes and descriptors of each request.

How much of a prompt was cached, and in which chunks it was computed, may depend on when requests came: a request for
which that differs is counted, and its bytes and descriptors are not compared.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pdsim.metrics.records import RunRecords


class Count(NamedTuple):
    """Of a whole run."""

    measured: int
    simulated: int


@dataclass(frozen=True)
class Counts:
    num_requests: int
    transfer_bytes: Count
    descriptors: Count
    prefill_cached_tokens: Count
    decode_cached_tokens: Count
    otherwise_cached: tuple[int, ...]
    """Requests that found another prefix cached."""
    otherwise_sent: tuple[int, ...]
    """Of the others, those sent in other units."""
    unequal: tuple[int, ...]
    """Requests whose bytes or descriptors differ though the same was cached and sent in the same units."""

    @property
    def are_equal(self) -> bool:
        """But for what timing decides."""
        return not self.unequal

    def to_json(self) -> dict[str, Any]:
        totals = {name: value._asdict() for name, value in vars(self).items() if isinstance(value, Count)}
        return {**asdict(self), **totals, "equal": self.are_equal}


class _Sent(NamedTuple):
    cached: tuple[int, int]
    units: tuple[tuple[int, bool], ...]
    num_bytes: int
    num_descriptors: int


def compare_counts(measured: RunRecords, simulated: RunRecords) -> Counts:
    ours, theirs = _by_request(measured), _by_request(simulated)
    both = sorted(ours.keys() & theirs.keys())
    otherwise_cached = [i for i in both if ours[i].cached != theirs[i].cached]
    same = [i for i in both if ours[i].cached == theirs[i].cached]
    otherwise_sent = [i for i in same if ours[i].units != theirs[i].units]
    one_sided = ours.keys() ^ theirs.keys()
    unequal = [i for i in same if not _agree(ours[i], theirs[i])]
    return Counts(
        len(ours),
        Count(*(sum(row.num_bytes for row in records.transfers) for records in (measured, simulated))),
        Count(*(sum(row.num_descriptors for row in records.transfers) for records in (measured, simulated))),
        Count(*(sum(r.num_prefill_cached_tokens for r in records.requests) for records in (measured, simulated))),
        Count(*(sum(r.num_decode_cached_tokens for r in records.requests) for records in (measured, simulated))),
        tuple(otherwise_cached),
        tuple(otherwise_sent),
        tuple(sorted({*unequal, *one_sided})),
    )


def _agree(ours: _Sent, theirs: _Sent) -> bool:
    """Bytes are the same in whatever units; descriptors follow from the units."""
    if ours.units == theirs.units:
        return ours == theirs
    return ours.num_bytes == theirs.num_bytes


def _by_request(records: RunRecords) -> dict[int, _Sent]:
    num_bytes, num_descriptors = Counter[int](), Counter[int]()
    units: dict[int, list[tuple[int, bool]]] = {}
    for row in sorted(records.transfers, key=lambda row: row.queued_ns):
        num_bytes[row.request_id] += row.num_bytes
        num_descriptors[row.request_id] += row.num_descriptors
        units.setdefault(row.request_id, []).append((row.num_pages, row.is_last))
    return {
        r.request_id: _Sent(
            (r.num_prefill_cached_tokens, r.num_decode_cached_tokens),
            tuple(sorted(units.get(r.request_id, ()))),
            num_bytes[r.request_id],
            num_descriptors[r.request_id],
        )
        for r in records.requests
        if r.outcome == "finished"
    }
