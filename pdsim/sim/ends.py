"""The ends of a run's range: its load with the fastest and with the slowest times, where no server was measured.

If there is a free core, ends are simulated by processes of their own beside the run. For a long load, an end is first
simulated until a part of the requests has ended, and its change of this part is extrapolated to the whole load. If the
part is unlike the whole, or the change is not steady along the part, the end is simulated further.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

from pdsim.scenario.build import build
from pdsim.scenario.schema import Scenario
from pdsim.sim.part import LEAST_REQUESTS, Numbers, Part, PartWatch, change_of, numbers_of, part_size
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, Simulation
from pdsim.workload.request_spec import RequestSpec

Ranging = Literal["part", "whole", "none"]
"""Part of a long load for which the ends of the range are simulated. For a short load, `part` means the whole."""
_TOLERANCE = 0.02
"""Largest error, and largest drift, of a change between part and whole."""

Judge = Callable[[Part], Numbers | None]
"""Computes the numbers of an end for the whole load from its part. None: the part does not suffice."""
VerdictOf = Callable[[RunResult], Any]


class _Found(NamedTuple):
    """What the run of an end found."""

    numbers: Numbers
    verdict: Any = None


class Ends:
    """The ends of a run's range. They start before the run and proceed beside it."""

    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[RequestSpec],
        *,
        whole: bool = False,
        verdict_of: VerdictOf | None = None,
        own_itl: bool = False,
    ) -> None:
        """whole: simulate ends over all requests, however many there are.

        verdict_of: judges the run of each end, all requests of it.
        own_itl: the runs have percentiles of each request's own gaps between tokens.
        """
        size = None if whole or verdict_of else part_size(len(requests))
        self.watch = PartWatch(size)
        """Observes the run."""
        self.part_requests: int | None = None
        """Number of requests that an end was simulated for. None: all."""
        self.error = 0.0
        """Relative standard error of the largest change that was extrapolated from a part."""
        self._size = size
        self._is_long = len(requests) >= LEAST_REQUESTS
        self.verdicts: list[Any] = []
        """What `verdict_of` found at each end, in their order; empty before `numbers`, and without `verdict_of`."""
        self._ends = [_End(end, requests, size, verdict_of, own_itl=own_itl) for end in scenario.ends]

    @contextmanager
    def started(self) -> Iterator[None]:
        """Context with the ends in forked processes, if there are free cores. The processes end with the context."""
        with ExitStack() as stack:
            if self._is_long and _can_fork():
                self._ends = [stack.enter_context(_forked(end)) for end in self._ends]
            yield

    def numbers(self, summary: Mapping[str, Any]) -> list[Numbers]:
        """Numbers of each end, as of the whole load. summary: of the run."""
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
            if change is None or max(change.error, change.drift) > _TOLERANCE:
                return None
            self.part_requests, self.error = self._size, max(self.error, change.error)
            return {field: value and value * change.ratios.get(field, 1.0) for field, value in whole.items()}

        return judge


def _undecided(_part: Part) -> None:
    """Judge of a part without a decision."""


class _Told(Exception):  # noqa: N818  no error: the part tells all
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers


class _End:
    """An end of the range that this process simulates on demand."""

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
        """Judges the part of the end as soon as it is complete."""
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
    """An end of the range in a forked process, which sends its part, waits for the judgement, and then sends its
    numbers.
    """

    def __init__(self, end: _End) -> None:
        self._end = end
        self._judge = _undecided
        from_parent, to_child = os.pipe()
        from_child, to_parent = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            _answer(end, from_parent, to_parent)
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
        """Numbers of the end. If the process died, this process simulates the end, so that errors are raised here."""
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


def _answer(end: _End, from_parent: int, to_parent: int) -> None:
    """Main function of a forked process. It closes and writes nothing of its parent's."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent that is interrupted, and stops this
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
    """True if there is a free core, and no other thread: a forked child would find the locks of other threads taken
    for ever.
    """
    if not hasattr(os, "fork") or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) > 1
