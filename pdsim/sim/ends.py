"""The ends of a run's range: its load with the fastest and with the slowest times, where no server was measured.

Where there is another core, ends are simulated by processes of their own while the run goes on. Of a long load an end
is simulated until a part of the requests has ended, and what it changes there is taken to change of the whole. That
holds where the part is like the whole, and the change is steady along the part: elsewhere an end goes on.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from pdsim.scenario.build import build
from pdsim.scenario.schema import Scenario
from pdsim.sim.part import LEAST_REQUESTS, Numbers, Part, PartWatch, change_of, numbers_of, part_size
from pdsim.sim.simulation import Observation, Simulation
from pdsim.workload.request_spec import RequestSpec

Ranging = Literal["part", "whole", "none"]
"""What of a long load the ends are simulated on; of a short one part is the whole."""
_TOLERANCE = 0.02
"""Of the error and of the drift of what an end changes."""

Judge = Callable[[Part], Numbers | None]
"""Numbers of an end as of the whole load, by its part. None: the part does not tell."""


class Ends:
    """The ends of one run, which is made while they are started."""

    def __init__(self, scenario: Scenario, requests: Sequence[RequestSpec], *, whole: bool = False) -> None:
        """whole: simulate ends over all requests, however many there are."""
        size = None if whole else part_size(len(requests))
        self.watch = PartWatch(size)
        """Observes the run."""
        self.part_requests: int | None = None
        """Requests that an end was simulated on; None: all."""
        self.error = 0.0
        """Relative standard error of the largest change that was taken from a part."""
        self._size = size
        self._is_long = len(requests) >= LEAST_REQUESTS
        self._ends = [_End(end, requests, size) for end in scenario.ends]

    @contextmanager
    def started(self) -> Iterator[None]:
        """In processes of their own, where there are cores for them; these are gone at the end."""
        with ExitStack() as stack:
            if self._is_long and _can_fork():
                self._ends = [stack.enter_context(_forked(end)) for end in self._ends]
            yield

    def numbers(self, summary: Mapping[str, Any]) -> list[Numbers]:
        """Numbers of each end, as of the whole load. summary: of the run."""
        judge = self._judge_by(summary)
        for end in self._ends:
            end.look(judge)  # all, so that those that go on do so together
        return [end.numbers() for end in self._ends]

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
    """The judge of a part of which nobody has asked."""


class _Told(Exception):  # noqa: N818  no error: the part tells all
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers


class _End:
    """An end that is simulated here, when somebody asks."""

    def __init__(self, scenario: Scenario, requests: Sequence[RequestSpec], part_requests: int | None) -> None:
        self._scenario = scenario
        self._requests = requests
        self._part_requests = part_requests
        self._judge: Judge = _undecided

    def look(self, judge: Judge) -> None:
        """Judge its part, as soon as there is one."""
        self._judge = judge

    def numbers(self) -> Numbers:
        return self.simulated(self._judge)

    def simulated(self, judge: Judge) -> Numbers:
        def seen(part: Part) -> None:
            if (numbers := judge(part)) is not None:
                raise _Told(numbers)

        watch = PartWatch(self._part_requests, seen)
        watch.simulation = Simulation(build(self._scenario, self._requests), Observation(ended=watch))
        try:
            return numbers_of(watch.simulation.run().summary())
        except _Told as told:
            return told.numbers


class _ForkedEnd(_End):
    """An end that a forked process simulates: it says its part and waits to be judged, and then says its numbers."""

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

    def numbers(self) -> Numbers:
        """Simulates it here if the process died, so that what is wrong is raised here, too."""
        if isinstance(self._said, Part):
            self.look(self._judge)
        found: Numbers | None = self._said
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
    """All that a forked process does. Nothing of its parent's is closed or written by it."""
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
    """Whether there is another core, and no other thread, whose locks a child would find taken for ever."""
    if not hasattr(os, "fork") or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) > 1
