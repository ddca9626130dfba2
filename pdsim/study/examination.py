"""Examines the cluster of a plan or of an answer: whether requests meet the SLO without queues, and which measurement
is missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.metrics.records import RequestRecord
from pdsim.scenario.loading import Changes
from pdsim.sim.simulation import Observation, simulate
from pdsim.study.measurement import Measurement, measurement
from pdsim.study.trials import Trials
from pdsim.study.verdict.outcome import finite
from pdsim.study.verdict.readings import Reading, Times
from pdsim.study.verdict.slo import Slo, Term


@dataclass(frozen=True)
class LoneRequest:
    """A request that misses the SLO although requests are sent one at a time. If the SLO's most-missed term limits a
    percentile, such as a p99, this is the fastest request that is at least as slow as the percentile.
    """

    cluster: str
    """Name of the simulated cluster, for messages."""
    term: Term
    """The term of the SLO that is missed most: of the missed terms, that with the largest Term.ratio."""
    reading: Reading
    """The value that `term` limits, with its limit, over all requests of the run to which the term applies."""
    ratio: float
    """Term.ratio of `term` over the same requests as `reading`: for a percentile, the value divided by its limit.
    Infinite if too many requests fail.
    """
    request: RequestRecord
    """The record of the request itself: its lengths, stages and times."""

    def __str__(self) -> str:
        request, lack = self.request, self.term.lack(self.reading.value)
        return (
            f"With one request at a time on {self.cluster}, {lack}: request {request.request_id}, with "
            f"{request.num_prompt_tokens:,} tokens in and {request.num_output_tokens:,} out. Such requests miss "
            "the SLO on all other servers, too, so more instances do not help"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "term": str(self.term),
            "of_limit": finite(self.ratio),
            "request": self.request.request_id,
            "input_tokens": self.request.num_prompt_tokens,
            "output_tokens": self.request.num_output_tokens,
        }


def lone_request(cluster: str, slo: Slo, requests: Sequence[RequestRecord]) -> LoneRequest | None:
    """Returns the request that decides the most-missed term of the SLO. For a term "ttft p99 < 2 s" this is the request
    with the lowest TTFT that is not below the p99. None: the requests meet the SLO. cluster: name of the cluster in
    messages. requests: records of a run in which no request waits for another.
    """
    judged = slo.judge_requests(requests)
    if judged.meets:
        return None
    term = max(judged.missed, key=judged.ratios.__getitem__)
    ratios = [
        (term.ratio(Times.of_requests([replace(request, request_class=term.request_class)])), place)
        for place, request in enumerate(requests)
        if term.covers(request.request_class) and term.is_about(request.num_output_tokens)
    ]
    above = [(ratio, place) for ratio, place in ratios if ratio >= judged.ratios[term]]
    _, place = min(above, default=max(ratios))
    return LoneRequest(cluster, term, judged.readings[term], judged.ratios[term], requests[place])


def requests_alone(trials: Trials, changes: Changes) -> Sequence[RequestRecord]:
    """Simulates the cluster that `changes` make with the requests of `trials` (first seed), sent one at a time, so that
    no request waits for another. Returns the records of the requests.
    """
    observation = Observation(own_itl=trials.slo.needs_own_itl)
    return simulate(trials.scenario(trials.base.one_at_a_time(changes)), observation).records.requests


def deciding_measurement(
    trials: Trials, changes: Changes, holds: Callable[[Sequence[Changes]], bool]
) -> Measurement | None:
    """The measurement that would settle a finding. It covers each group of step times that alone can change the
    finding. If no single group can, it covers all groups that were not measured. None: all step times were measured on
    a server.

    changes: make the cluster. holds: called for each group with two changes, which set this group alone to its fastest
    and to its slowest times. Returns True if the finding stays the same with either change.
    """
    base = trials.base
    deciding = [group for group, ends in base.alone.items() if not holds(ends)]
    return measurement(deciding or base.scenario.uncertain, base.scenario, trials.sizes(changes))
