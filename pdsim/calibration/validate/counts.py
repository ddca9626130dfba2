"""Bytes that each request sends do not depend on time, and must be equal on both sides.

How much of a prompt was cached may depend on when requests came: a request that found another prefix cached is counted,
and its bytes are not compared. Descriptors also depend on which pages were free: they are shown, not compared.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pdsim.metrics.records import RunRecords


class Count(NamedTuple):
    """A total of a whole run."""

    measured: int
    simulated: int


@dataclass(frozen=True)
class Counts:
    num_requests: int
    transfer_bytes: Count
    descriptors: Count
    prefill_cached_tokens: Count
    decode_cached_tokens: Count
    other_prefix_cached: tuple[int, ...]
    """Requests that found another prefix cached."""
    unequal: tuple[int, ...]
    """Requests that differ without such a reason."""

    @property
    def are_equal(self) -> bool:
        """Equal but for what timing decides."""
        return not self.unequal

    def to_json(self) -> dict[str, Any]:
        totals = {name: value._asdict() for name, value in vars(self).items() if isinstance(value, Count)}
        return {**asdict(self), **totals, "equal": self.are_equal}


class _Sent(NamedTuple):
    """What one request sent."""

    cached_tokens: tuple[int, int]
    num_bytes: int


def compare_counts(measured: RunRecords, simulated: RunRecords) -> Counts:
    ours, theirs = _by_request(measured), _by_request(simulated)
    both = ours.keys() & theirs.keys()
    other_prefix = {i for i in both if ours[i].cached_tokens != theirs[i].cached_tokens}
    unequal = {i for i in both - other_prefix if ours[i] != theirs[i]}
    return Counts(
        len(ours),
        Count(*(sum(row.num_bytes for row in records.transfers) for records in (measured, simulated))),
        Count(*(sum(row.num_descriptors for row in records.transfers) for records in (measured, simulated))),
        Count(*(sum(r.num_prefill_cached_tokens for r in records.requests) for records in (measured, simulated))),
        Count(*(sum(r.num_decode_cached_tokens for r in records.requests) for records in (measured, simulated))),
        other_prefix_cached=tuple(sorted(other_prefix)),
        unequal=tuple(sorted((ours.keys() ^ theirs.keys()) | unequal)),
    )


def _by_request(records: RunRecords) -> dict[int, _Sent]:
    """Requests that finished."""
    num_bytes = Counter[int]()
    for row in records.transfers:
        num_bytes[row.request_id] += row.num_bytes
    return {
        r.request_id: _Sent((r.num_prefill_cached_tokens, r.num_decode_cached_tokens), num_bytes[r.request_id])
        for r in records.requests
        if r.outcome == "finished"
    }
