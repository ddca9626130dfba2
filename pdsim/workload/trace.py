"""What readers of a file have in common."""

from dataclasses import dataclass
from pathlib import Path

from pdsim.workload.checks import above_zero, positive


@dataclass(frozen=True, kw_only=True)
class Trace:
    path: Path
    num_requests: int | None = None
    """The first so many; None reads all."""

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests)


@dataclass(frozen=True, kw_only=True)
class TimedTrace(Trace):
    speedup: float = 1.0
    """2 replays the arrivals in half the time; delays stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, speedup=self.speedup)


@dataclass(frozen=True, kw_only=True)
class BlockTrace(TimedTrace):
    """Prompts are hash ids, one for each block."""

    block_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, block_tokens=self.block_tokens)
