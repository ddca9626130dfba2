"""How a client sends a workload: what a scenario names. The driver carries it out."""

from dataclasses import dataclass

from pdsim.workload.arrivals import Arrivals


@dataclass(frozen=True)
class OpenLoop:
    """Sends each request at its time, whatever is still unanswered."""

    arrivals: Arrivals | None = None
    """None: at the times of the trace."""


@dataclass(frozen=True)
class ClosedLoop:
    """Keeps so many requests in flight: all at once at the start, then one for each that ends.

    A request's latency counts from when it is sent, so waiting in the client is not in it (as in SGLang's client).
    """

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"a closed loop needs concurrency >= 1, found {self.concurrency}")


Client = OpenLoop | ClosedLoop
