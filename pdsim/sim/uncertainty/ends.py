"""Computes the range of a run whose costs were not measured on a server: simulates the same load with the fastest and
with the slowest durations.

Each end of the range of a long load is simulated in its own process if there is more than one CPU core. Of a long load,
only the first requests are simulated at each end, and their change in comparison with the run itself is extrapolated to
the whole load. The end is simulated completely if the first requests differ from the whole load, or if their change
drifts or has a large standard error. An end is always simulated completely if a function judges it (verdict_of), or if
the scenario models a cold start.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

from pdsim.scenario.building.cluster import build
from pdsim.scenario.schema import Scenario
from pdsim.signals import signals_deferred
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, Simulation
from pdsim.sim.uncertainty.part import LEAST_REQUESTS, Numbers, Part, PartWatch, change_of, numbers_of, part_size
from pdsim.workload.request_spec import RequestSpec

Ranging = Literal["part", "whole", "none"]
"""Which requests are simulated with the fastest and with the slowest step times, the ends of the range. part: only the
first requests of a long load if the whole load can be extrapolated from them, otherwise all requests. whole: all
requests. none: no requests, so that there is no range.
"""
_MAX_ERROR = 0.02
"""Maximum of Change.error for a change that may be extrapolated to all requests: the relative standard error of the
ratios between two runs, over their first requests. The two runs have the same load and different step times.
"""
_MAX_DRIFT = 2 * _MAX_ERROR
"""Maximum of Change.drift for a change that may be extrapolated: the relative difference between the ratios of two runs
over the first half and over the second half of the first requests. Twice _MAX_ERROR, because the difference of the two
halves has twice the standard error of their mean.
"""

Judge = Callable[[Part], Numbers | None]
"""Function that extrapolates the numbers of a run with the fastest or slowest step times. It gets the numbers after the
run's first requests, and returns the numbers for the whole load. None: the first requests do not suffice.
"""
VerdictOf = Callable[[RunResult], Any]


class _Found(NamedTuple):
    """Numbers of one end of the range. verdict: what the function `verdict_of` (see Ends) returned for the run at this
    end. None: there is no such function, or not all requests were simulated.
    """

    numbers: Numbers
    verdict: Any = None


class Ends:
    """The two ends of a run's range: runs of the same load with the fastest and with the slowest step times. Forked
    processes can simulate them while the run itself is simulated.
    """

    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[RequestSpec],
        *,
        whole: bool = False,
        verdict_of: VerdictOf | None = None,
        own_itl: bool = False,
    ) -> None:
        """whole: True: simulates all requests at each end, also of a long load.

        verdict_of: function that judges the complete run of each end; None: no verdict. own_itl: True: computes ITL
        percentiles of each single request.
        """
        may_stop = not (whole or verdict_of or scenario.cost.is_cold)  # cold: the first requests are unlike the others
        size = part_size(len(requests)) if may_stop else None
        self.watch = PartWatch(size)
        """Observer of the run itself. When `size` requests have ended, it notes means and percentiles over them (Part).
        """
        self.part_requests: int | None = None
        """Number of first requests that an end was simulated for. None: both ends were simulated completely."""
        self.error = 0.0
        """Highest relative standard error of a change that was extrapolated. 0: no change was extrapolated."""
        self._size = size
        self._is_long = len(requests) >= LEAST_REQUESTS
        self.verdicts: list[Any] = []
        """Results of `verdict_of`: first for the end with the fastest times, then for that with the slowest. Empty
        before `numbers` is called, and without `verdict_of`."""
        self._ends = [_End(end, requests, size, verdict_of, own_itl=own_itl) for end in scenario.ends]

    @contextmanager
    def started(self) -> Iterator[None]:
        """Context in which forked processes simulate the two runs with the fastest and with the slowest step times, if
        the load has at least LEAST_REQUESTS requests and _can_fork allows it. The processes end with the context.
        Without these processes, `numbers` simulates the two runs.
        """
        with ExitStack() as stack:
            if self._is_long and _can_fork():
                self._ends = [stack.enter_context(_forked(end)) for end in self._ends]
            yield

    def numbers(self, summary: Mapping[str, Any]) -> list[Numbers]:
        """Returns the results of each end of the range (latencies and throughputs) for the whole load. The end with the
        fastest times comes first. summary: summary of the original run.
        """
        judge = self._judge_by(summary)
        for end in self._ends:
            end.look(judge)  # all, so that those that go on do so together
        found = [end.found() for end in self._ends]
        self.verdicts = [one.verdict for one in found if one.verdict is not None]
        return [one.numbers for one in found]

    def _judge_by(self, summary: Mapping[str, Any]) -> Judge:
        run, whole = self.watch.part, numbers_of(summary)

        def judge(part: Part) -> Numbers | None:
            change = change_of(part, run) if run is not None and run.is_like(whole) else None
            if change is None or change.error > _MAX_ERROR or change.drift > _MAX_DRIFT:
                return None
            self.part_requests, self.error = self._size, max(self.error, change.error)
            return {field: value and value * change.ratios.get(field, 1.0) for field, value in whole.items()}

        return judge


def _undecided(_part: Part) -> None:
    """A Judge that never decides from a part of the load, so that the whole load is simulated."""


class _Told(Exception):  # noqa: N818  no error: the part tells all
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers


class _End:
    """One end of the range: a run of the same load with the fastest or the slowest step times. The process that made
    this object simulates the run when its numbers are needed. part_requests: number of first requests after which the
    run may end, if its numbers can be extrapolated to the whole load; None: all requests are simulated. verdict_of,
    own_itl: as for Ends.
    """

    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[RequestSpec],
        part_requests: int | None,
        verdict_of: VerdictOf | None,
        *,
        own_itl: bool,
    ) -> None:
        self._scenario = scenario
        self._own_itl = own_itl
        self._verdict_of = verdict_of
        self._requests = requests
        self._part_requests = part_requests
        self._judge: Judge = _undecided

    def look(self, judge: Judge) -> None:
        """Sets the judge of this end: a function that gets the numbers of the end's first requests, and extrapolates
        them to the whole load. If the end runs in a forked process, waits for the process's first message: the numbers
        of the first requests, for which this function calls the judge, or the numbers for the whole load if the end
        simulates all requests.
        """
        self._judge = judge

    def found(self) -> _Found:
        return self.simulated(self._judge)

    def simulated(self, judge: Judge) -> _Found:
        def seen(part: Part) -> None:
            if (numbers := judge(part)) is not None:
                raise _Told(numbers)

        watch = PartWatch(self._part_requests, seen)
        observation = Observation(ended=watch, own_itl=self._own_itl)
        watch.simulation = Simulation(build(self._scenario, self._requests), observation)
        try:
            result = watch.simulation.run()
        except _Told as told:
            return _Found(told.numbers)
        verdict = None if self._verdict_of is None else self._verdict_of(result)
        return _Found(numbers_of(result.summary()), verdict)


class _ForkedEnd(_End):
    """One end of a run's range (with the fastest or with the slowest step times), simulated in a forked process.

    When the first requests have ended, the process sends their numbers (Part) to the parent, and waits for the answer
    of the parent's judge: numbers extrapolated to the whole load, or None. After None, the process simulates the whole
    load. An end without `part_requests` skips these messages. At last the process sends the numbers for the whole load
    (_Found), and ends.
    """

    def __init__(self, end: _End) -> None:
        self._end = end
        self._judge = _undecided
        from_parent, to_child = os.pipe()
        from_child, to_parent = os.pipe()
        with signals_deferred():  # which the child, whose stack is its parent's, leaves to its parent
            self._pid = os.fork()
            if not self._pid:
                os.close(from_child)
                os.close(to_child)  # while it is open, the child would wait for ever for a parent that was killed
                _main_of_fork(end, from_parent, to_parent)
        os.close(from_parent)
        os.close(to_parent)
        self._input, self._output = os.fdopen(from_child, "rb"), os.fdopen(to_child, "wb")
        self._said: Any = None

    def look(self, judge: Judge) -> None:
        self._judge = judge
        try:
            self._said = pickle.load(self._input)  # noqa: S301  our own process
            if isinstance(self._said, Part):
                _say(judge(self._said), self._output)
        except (EOFError, OSError):
            self._said = None

    def found(self) -> _Found:
        """Returns the numbers of the end. If the forked process died, this process simulates the end, so that its
        errors appear here.
        """
        if isinstance(self._said, Part):
            self.look(self._judge)
        found: _Found | None = self._said
        return self._end.simulated(self._judge) if found is None else found

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._input.close()
        self._output.close()


@contextmanager
def _forked(end: _End) -> Iterator[_ForkedEnd]:
    forked = _ForkedEnd(end)
    try:
        yield forked
    finally:
        forked.stop()


def _main_of_fork(end: _End, from_parent: int, to_parent: int) -> None:
    """Simulates an end in a forked process, which then exits. Sends the parent the numbers that _ForkedEnd describes.
    from_parent, to_parent: file descriptors of the pipes to the parent. The process must not close its parent's files
    or write to them.
    """
    try:
        with os.fdopen(from_parent, "rb") as source, os.fdopen(to_parent, "wb") as target:

            def judged(part: Part) -> Numbers | None:
                _say(part, target)
                numbers: Numbers | None = pickle.load(source)  # noqa: S301  our own process
                return numbers

            _say(end.simulated(judged), target)
    finally:
        os._exit(0)


def _say(what: Any, target: Any) -> None:
    pickle.dump(what, target)
    target.flush()


def _can_fork() -> bool:
    """True if the operating system can fork, and this process may use more than one CPU core and has only one thread. A
    forked child could wait for ever for locks that other threads hold.
    """
    if not hasattr(os, "fork") or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) > 1
