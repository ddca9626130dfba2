"""What does not depend on time must be equal on both sides: bytes and descriptors of each request.

How much of a prompt was cached, in which chunks it was computed, and which pages were free, may depend on when requests
came. A request for which that differs is counted: where another prefix was cached, its bytes are not compared, and
where it was sent in other units or from and to pages that lie otherwise, its descriptors are not.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pdsim.core.attempts import request_of
from pdsim.core.journal import Entry
from pdsim.core.messages import StartTransfer
from pdsim.core.transfer_plan import TransferUnit
from pdsim.core.wire import num_runs
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
    """Of the others, those sent in other units, or with pages that lie otherwise."""
    unequal: tuple[int, ...]
    """Requests that differ without such a reason."""

    @property
    def are_equal(self) -> bool:
        """But for what timing decides."""
        return not self.unequal

    def to_json(self) -> dict[str, Any]:
        totals = {name: value._asdict() for name, value in vars(self).items() if isinstance(value, Count)}
        return {**asdict(self), **totals, "equal": self.are_equal}


class _Shape(NamedTuple):
    """Of a transfer unit: what its descriptors follow from."""

    num_pages: int
    num_runs: int
    """Of pages that follow each other on both sides."""


class _Sent(NamedTuple):
    """One request."""

    cached_tokens: tuple[int, int]
    shapes: tuple[_Shape, ...]
    num_bytes: int
    num_descriptors: int


def compare_counts(
    measured: RunRecords, measured_journal: Iterable[Entry], simulated: RunRecords, simulated_journal: Iterable[Entry]
) -> Counts:
    ours, theirs = _by_request(measured, measured_journal), _by_request(simulated, simulated_journal)
    both = sorted(ours.keys() & theirs.keys())
    alike = [i for i in both if ours[i].cached_tokens == theirs[i].cached_tokens]
    return Counts(
        len(ours),
        Count(*(sum(row.num_bytes for row in records.transfers) for records in (measured, simulated))),
        Count(*(sum(row.num_descriptors for row in records.transfers) for records in (measured, simulated))),
        Count(*(sum(r.num_prefill_cached_tokens for r in records.requests) for records in (measured, simulated))),
        Count(*(sum(r.num_decode_cached_tokens for r in records.requests) for records in (measured, simulated))),
        otherwise_cached=tuple(sorted(set(both) - set(alike))),
        otherwise_sent=tuple(i for i in alike if ours[i].shapes != theirs[i].shapes),
        unequal=tuple(sorted({*(ours.keys() ^ theirs.keys()), *(i for i in alike if not _agree(ours[i], theirs[i]))})),
    )


def _agree(ours: _Sent, theirs: _Sent) -> bool:
    return ours == theirs if ours.shapes == theirs.shapes else ours.num_bytes == theirs.num_bytes


def _by_request(records: RunRecords, journal: Iterable[Entry]) -> dict[int, _Sent]:
    """Of those that finished."""
    num_bytes, num_descriptors = Counter[int](), Counter[int]()
    for row in records.transfers:
        num_bytes[row.request_id] += row.num_bytes
        num_descriptors[row.request_id] += row.num_descriptors
    shapes: dict[int, list[_Shape]] = {}
    for unit in _units(journal):
        shapes.setdefault(request_of(unit.request_id), []).append(
            _Shape(len(unit.source_pages), num_runs(unit.source_pages, unit.target_pages))
        )
    return {
        r.request_id: _Sent(
            (r.num_prefill_cached_tokens, r.num_decode_cached_tokens),
            tuple(sorted(shapes.get(r.request_id, ()))),
            num_bytes[r.request_id],
            num_descriptors[r.request_id],
        )
        for r in records.requests
        if r.outcome == "finished"
    }


def _units(journal: Iterable[Entry]) -> Iterable[TransferUnit]:
    for entry in journal:
        if isinstance(entry.returned, list | tuple):
            yield from (command.unit for command in entry.returned if isinstance(command, StartTransfer))
