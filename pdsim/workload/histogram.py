"""Lengths that follow a histogram in a file."""

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from random import Random

from pdsim.dataclass import dataclass
from pdsim.inputs import finite
from pdsim.workload.trace_file import TraceError, csv_lines


@dataclass(frozen=True)
class Empirical:
    """Draws lengths from a histogram. The histogram is a CSV file with the columns tokens (a length) and count (the
    number of requests with this length).
    """

    path: Path
    """Path of the CSV file. A row with no count, or with an empty count, stands for one request."""

    def sampler(self, random: Random) -> Callable[[], int]:
        tokens, limits = self._histogram
        return lambda: random.choices(tokens, cum_weights=limits)[0]

    @cached_property
    def _histogram(self) -> tuple[list[int], list[float]]:
        """Reads the file. Returns two lists with one entry per row: the length in tokens, and the number of requests in
        this and all earlier rows. Raises TraceError if a number is wrong or no count is above 0.
        """
        tokens, counts = [], []
        for line in csv_lines(self.path):
            tokens.append(line.count("tokens"))
            found = line.get("count")
            try:
                counts.append(1.0 if found in (None, "") else finite(found))
            except ValueError:
                raise line.error("count", found, "a number of requests") from None
            if counts[-1] < 0:
                raise line.error("count", found, "a number of requests, 0 or more")
        if not sum(counts):
            raise TraceError(f"{self.path}: no requests in this histogram; it needs the columns tokens and count")
        return tokens, list(accumulate(counts))
