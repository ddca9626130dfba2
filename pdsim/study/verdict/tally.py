"""Ends a run as soon as it can no longer meet its SLO."""

from collections.abc import Sequence
from heapq import heappop, heappush

from pdsim.metrics.records import RequestRecord
from pdsim.study.verdict.slo import Slo, Term
from pdsim.workload.request_spec import RequestSpec, classes_of


class MissedError(Exception):
    """Raised as soon as it is certain that a run misses its SLO. term: the missed term, which the message names.
    num_ended: number of requests that had finished or failed by then, including warm-up requests.
    """

    def __init__(self, term: Term, num_ended: int) -> None:
        super().__init__(term.missed)
        self.num_ended = num_ended


class Tally:
    """Counts requests as they end. Raises MissedError as soon as so many requests miss a term that the run cannot meet
    its SLO.
    """

    def __init__(self, slo: Slo, requests: Sequence[RequestSpec], num_left_out: int = 0) -> None:
        """num_left_out: number of requests that do not count, because they warm up. These are the first that clients
        send.
        """
        self._missed_left: dict[Term, int] = {}
        self._lost_left: dict[Term, int] = {}
        for term in slo.terms:
            count = sum(term.covers(s.request_class) and term.is_about(len(s.output)) for s in requests)
            self._missed_left[term] = term.num_allowed(count)
            self._lost_left[term] = term.num_lost_allowed(count)
        self._classes = classes_of(requests)
        self._num_ended = 0
        self._num_left_out = num_left_out
        self._first: list[tuple[int, int]] = []
        """Heap of (minus sending time in ns, minus id) of the ended requests that were sent first: at most
        num_left_out. Of these requests, the first in the heap was sent last.
        """
        self._waiting: list[RequestRecord] = []
        """Ended requests that are not counted yet, because fewer than num_left_out requests that were sent earlier have
        ended. They may be warm-up requests.
        """

    def __call__(self, request: RequestRecord) -> None:
        self._num_ended += 1
        if not self._num_left_out:
            self._count(request)
            return
        self._waiting.append(request)
        heappush(self._first, (-request.arrival_ns, -request.request_id))
        if len(self._first) <= self._num_left_out:
            return
        heappop(self._first)
        last = self._first[0]
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if (-one.arrival_ns, -one.request_id) < last:
                self._count(one)
            else:
                self._waiting.append(one)

    def _count(self, request: RequestRecord) -> None:
        request_class = self._classes.get(request.request_id, "")
        for term in self._missed_left:
            if term.covers(request_class) and term.is_missed(request):
                self._missed_left[term] -= 1
                self._lost_left[term] -= request.outcome != "finished"
                if self._missed_left[term] < 0 or self._lost_left[term] < 0:
                    raise MissedError(term, self._num_ended)
