"""Percentiles of the gaps between the tokens of one request, for SLOs that limit each request's own gaps."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pdsim.core.messages import DecodeStep, Verified
from pdsim.metrics.distribution import Run, RunSamples
from pdsim.metrics.records import StepRecord

OWN_ITL = ("itl_p50", "itl_p90", "itl_p95", "itl_p99", "itl_max")
"""Metrics of one request: percentiles of the gaps between its tokens, and its longest gap."""
_PERCENTILES = (50, 90, 95, 99)
_MS: Final = 1e6


class _Row(NamedTuple):
    """Consecutive decode steps of one batch. The first takes first_ns, and each further step growth_ns more than the
    step before. Times are in ns.
    """

    lead_ns: int
    """Gap in ns before the token of the row's first step, for requests that were in the batch before. Equal to first_ns
    unless these requests paused.
    """
    first_ns: int
    growth_ns: float
    num_steps: int
    """Number of decode steps in this row."""


class _Stay(NamedTuple):
    """Consecutive decode steps for which a request stays in a batch. rows: all decode steps of the instance so far, a
    list that grows. The stay begins with the item at index `begin`, and ends with the last item at the moment when the
    request leaves.
    """

    rows: list[_Row]
    begin: int
    lead_ns: int
    """Time in ns from the request's last token before it joined the batch to its first token in the batch."""


class OwnGaps:
    """Collects the gaps between the tokens of each attempt of a request. An attempt may join decode batches several
    times, for example after a retraction.

    With a stream interval above 1, a gap is the time between two groups of tokens that reach the client together.
    """

    def __init__(self, stream_interval: int = 1, *, has_percentiles: bool = True) -> None:
        """stream_interval: number of tokens that reach the client together. has_percentiles: False: `groups` is
        collected, but no percentiles of each request's gaps are computed.
        """
        self.groups: list[Run] | None = [] if stream_interval > 1 else None
        """Times in ns between the groups of tokens of finished requests, as `grouped` yields them: the weight of a Run
        is the number of tokens per group. None: each token reaches the client alone.
        """
        self._stream_interval = stream_interval
        self._has_percentiles = has_percentiles
        self._rows: defaultdict[str, list[_Row]] = defaultdict(list)
        self._batches: defaultdict[str, dict[int, None]] = defaultdict(dict)
        """Attempts in batch order, by instance, for instances that verify drafts."""
        self._stays: dict[int, _Stay] = {}
        self._gaps: defaultdict[int, list[Run]] = defaultdict(list)
        """Gaps in ns of running attempts, without the gaps of their present stay in a batch."""

    def on_pause(self, attempt: int, gap_ns: int) -> None:
        """Adds the gap of an attempt whose next token came from a prefill step, or from a decode step of a micro-batch.
        gap_ns: time since the token before.
        """
        self._gaps[attempt].append((gap_ns, 0.0, 1, 1))

    def on_decode(self, step: DecodeStep, row: StepRecord, joined_ns: Sequence[int], others_ns: int) -> None:
        """Adds decode steps of one batch. row: their record.

        joined_ns: for each request that joined with these steps, the time from its last token to its first token in
        this batch. others_ns: the same time for each of the other requests, whose last tokens came together.
        """
        rows = self._rows[row.instance_id]
        for attempt in step.left:
            self._close(attempt)
        for attempt, lead_ns in zip(step.joined, joined_ns, strict=True):
            self._stays[attempt] = _Stay(rows, len(rows), lead_ns)
        rows.append(_Row(others_ns, row.first_ns, row.growth_ns, row.num_steps))

    def on_verified(self, step: DecodeStep, row: StepRecord, gaps_ns: Sequence[int], verified: Verified) -> None:
        """Adds a decode step that verified drafted tokens. row: record of the step. verified: the requests' numbers of
        new tokens.

        gaps_ns: for each request in batch order, the time since its last token. The request's new tokens share this
        time equally.
        """
        batch = self._batches[row.instance_id]
        if len(step.joined) == step.num_requests:
            batch.clear()
        for attempt in step.left:
            batch.pop(attempt, None)
        batch.update(dict.fromkeys(step.joined))
        for attempt, gap_ns, num_tokens in zip(batch, gaps_ns, verified.num_tokens, strict=True):
            self._gaps[attempt].append((gap_ns / num_tokens, 0.0, 1, num_tokens))
        for attempt, _ in verified.ended:
            batch.pop(attempt, None)

    def forget(self, attempt: int) -> None:
        """Drops the gaps of an attempt that failed."""
        self._stays.pop(attempt, None)
        self._gaps.pop(attempt, None)

    def finished_ms(self, attempt: int, num_output_tokens: int) -> tuple[float, ...]:
        """Ends the record of a finished request, and returns the values of the metrics OWN_ITL in ms: percentiles and
        maximum of the gaps between the request's tokens (with a stream interval above 1: between its groups of tokens).
        A request of one token has zeros. Empty: percentiles are not collected. attempt: id of the request's last
        attempt.
        """
        self._close(attempt)
        runs = _first(self._gaps.pop(attempt, ()), num_output_tokens - 1)
        if self.groups is not None:
            groups = list(grouped(runs, self._stream_interval))
            self.groups += groups
            runs = ((first, growth, length, 1) for first, growth, length, _ in groups)
        if not self._has_percentiles:
            return ()
        gaps = RunSamples((first / _MS, growth / _MS, length, weight) for first, growth, length, weight in runs)
        return (*(gaps.percentile(percent) for percent in _PERCENTILES), gaps.max())

    def _close(self, attempt: int) -> None:
        """Adds the gaps before an attempt's tokens in a batch that the attempt leaves. No effect if the attempt is in
        no batch. If the request ended before the batch's last recorded step, gaps after its end are added, too;
        `finished_ms` removes them.
        """
        if (stay := self._stays.pop(attempt, None)) is not None:
            self._gaps[attempt].extend(_gaps(stay))


def grouped(runs: Iterable[Run], interval: int) -> Iterator[Run]:
    """Groups tokens as a server sends them to the client: whenever at least `interval` tokens are unsent, and the rest
    at the end.

    A Run (first, growth, length, weight) stands for `length` values that grow evenly (pdsim.metrics.distribution).
    runs: gaps between successive tokens, in order. Each value is the time per token of a step that yields `weight`
    tokens. Yields the times between groups; weight is then the number of tokens per group.
    """
    unsent_time, num_unsent = 0.0, 0
    for first, growth, length, weight in runs:
        used = 0
        if num_unsent:
            used = min(length, -((num_unsent - interval) // weight))
            unsent_time += weight * _sum(first, growth, used)
            num_unsent += weight * used
            if num_unsent < interval:
                continue
            yield unsent_time, 0.0, 1, num_unsent
        num_steps = -(-interval // weight)
        num_groups, rest = divmod(length - used, num_steps)
        if num_groups:
            time = weight * _sum(first + growth * used, growth, num_steps)
            yield time, weight * growth * num_steps**2, num_groups, weight * num_steps
        unsent_time, num_unsent = weight * _sum(first + growth * (length - rest), growth, rest), weight * rest
    if num_unsent:
        yield unsent_time, 0.0, 1, num_unsent


def _sum(first: float, growth: float, length: int) -> float:
    return length * first + growth * length * (length - 1) / 2


def _gaps(stay: _Stay) -> Iterator[Run]:
    for index in range(stay.begin, len(stay.rows)):
        row = stay.rows[index]
        lead_ns = stay.lead_ns if index == stay.begin else row.lead_ns
        if lead_ns == row.first_ns:
            yield row.first_ns, row.growth_ns, row.num_steps, 1
            continue
        yield lead_ns, 0.0, 1, 1
        if row.num_steps > 1:
            yield row.first_ns + row.growth_ns, row.growth_ns, row.num_steps - 1, 1


def _first(runs: Sequence[Run], count: int) -> Iterator[Run]:
    """Yields the runs of the first `count` gaps in `runs`. A run is an arithmetic progression (see
    pdsim.metrics.distribution), whose weight is the number of gaps of each value. The last run is cut, so that there
    are at most `count` gaps.
    """
    for first, growth, length, weight in runs:
        if count <= 0:
            return
        if length == 1:
            yield first, growth, 1, min(weight, count)
        else:
            yield first, growth, min(length, count), weight
        count -= length * weight
