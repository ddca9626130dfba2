"""Reports the progress of a search: runs that have ended, the best cluster so far, and the price below which no cluster
meets the SLO.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from pdsim.study.points.engine import Progress

_EVERY_S = 30.0


class Watch:
    """Reports the progress of a search, at most every 30 s, and the best cluster so far if the user interrupts the
    search. report: called with each line of text.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self.best = ""
        """Text on the cheapest cluster so far that meets the SLO: its label, its GPUs, their price if the user gave
        prices, and whether only the first seed was run. Empty: no cluster meets the SLO yet, or the best clusters are
        being run with all seeds.
        """
        self.undecided = ""
        """Text of the lowest price (without prices: number of GPUs) at which a cluster may still meet the SLO. Empty:
        even the cheapest candidate may still meet the SLO.
        """
        self._num_runs = 0
        self._last_s = monotonic()

    def over(self, progress: Progress | None) -> Progress:
        """Returns a callback that calls `progress` (None: nothing) and, at most every 30 s, reports the state of the
        search.
        """

        def advance(done: int, total: int) -> None:
            self._num_runs = done
            if progress is not None:
                progress(done, total)
            if monotonic() - self._last_s >= _EVERY_S:
                self._last_s = monotonic()
                self.report(self.state)

        return advance

    @property
    def state(self) -> str:
        best = f"best so far: {self.best}" if self.best else "no cluster meets the SLO yet"
        proved = f"; all clusters below {self.undecided} miss the SLO" if self.undecided else ""
        return f"{self._num_runs:,} runs done; {best}{proved}"

    @contextmanager
    def provisional(self) -> Iterator[None]:
        """Context in which KeyboardInterrupt first reports the state of the search, and is then raised again."""
        try:
            yield
        except KeyboardInterrupt:
            self.report(f"provisional: {self.state}")
            raise
