"""The requests that pdsim's web page simulates: a part of the scenario's load, or of a trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.scenario.building.cluster import requests_of
from pdsim.scenario.loading import Changes
from pdsim.scenario.starter import workload_of_trace
from pdsim.study.base import Base, trace_lines
from pdsim.web.choice import Part
from pdsim.workload.request_spec import RequestSpec


@dataclass(frozen=True)
class Load:
    part: Part
    """Which requests are simulated: those of a trace or of the scenario's own load, from which request on, and how
    many.
    """
    base: Base
    """The user's scenario, with this load in place of the scenario's own load."""
    requests: Sequence[RequestSpec]
    """The requests that the workload of `base` yields: those to simulate."""

    def __str__(self) -> str:
        """Describes the requests, for example "requests 1 to 500 of 2,000 in bursts.csv"."""
        workload: Any = self.base.scenario.workload
        if not hasattr(workload, "path"):
            return f"{len(self.requests):,} made-up requests"
        last = self.part.first + len(self.requests) - 1
        words = f"requests {self.part.first:,} to {last:,} of"
        if not hasattr(workload, "speedup"):
            return f"{words} {workload.path.name}"
        words += f" {max(last, trace_lines(workload.path)):,} in {workload.path.name}"
        if not self.base.keeps_times:
            return words
        times_ns = [one.arrival_ns for one in self.requests]
        seconds = (max(times_ns) - min(times_ns)) * workload.speedup / 1e9
        return f"{words}, which arrived within {seconds:,.0f} s"


def whole_part(base: Base) -> Part:
    """Returns the part that has all requests of the scenario. If the scenario skips requests of a trace, the part does
    not have these.
    """
    workload = base.scenario.workload
    path = getattr(workload, "path", None)
    count = getattr(workload, "num_requests", None) or len(requests_of(base.scenario))
    return Part("" if path is None else str(path.absolute()), getattr(workload, "skip_requests", 0) + 1, count)


def load_of(base: Base, part: Part) -> Load:
    """The load that consists of the requests that the user chose on the page. part: the trace (empty: the scenario's
    own requests), and which of the requests to simulate. If the trace is not the scenario's own and has arrival times,
    an open loop sends its requests at these times. Raises ConfigError if a trace cannot be read.
    """
    workload, whole = base.scenario.workload, whole_part(base)
    fields = {"skip_requests": part.first - 1, "num_requests": part.count}
    if part.trace not in ("", whole.trace):
        made, has_times = workload_of_trace(Path(part.trace))
        client: Changes = {"client": "open_loop"} if has_times else {}
        base = base.with_changes({"workload": {**made, **fields}, **client})
    elif part != whole:
        own = {f"workload.{name}": value for name, value in fields.items() if hasattr(workload, name)}
        base = base.with_changes(own)
    return Load(part, base, requests_of(base.scenario))
