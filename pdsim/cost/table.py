"""Times between measured ones: what straight lines miss, such as waves of thread blocks and CUDA graph sizes."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from pdsim.core.messages import PrefillStep
from pdsim.cost.gpu_clock import GpuClock
from pdsim.cost.model import CostModel, DecodeLine
from pdsim.cost.work import attended_pairs
from pdsim.system.memory import Layout


@dataclass(frozen=True, kw_only=True)
class Table:
    """A prefill forward: by its new tokens, + attended token pairs. A decode step: by its batch, + KV tokens.

    Between two entries times lie on a straight line; outside they are those of the nearest entry.
    """

    prefill_ns: Mapping[int, float] | None = None
    """By new tokens; they must not fall."""
    prefill_per_pair_ns: float = 0
    """Per pair of a new token and a token before it."""
    prefill_least_ns: float = 0
    """However little its work: the launch of its kernels."""
    prefill_slowdown: float = 0
    """Of a GPU that has been computing without pause (gpu_clock.py)."""
    prefill_slowdown_memory_ns: float = 100_000_000
    decode_ns: Mapping[int, float] | None = None
    """By requests."""
    decode_per_context_token_ns: float = 0

    def __post_init__(self) -> None:
        for name, entries in (("prefill", self.prefill_ns), ("decode", self.decode_ns)):
            times = [(entries or {})[size] for size in sorted(entries or {})]
            if times != sorted(times):
                raise ValueError(f"Table needs {name} times that do not fall, found {times} ns")

    def model(self, layout: Layout) -> CostModel:
        del layout
        return TableModel(self)


class TableModel:
    """The table, for one GPU."""

    def __init__(self, settings: Table) -> None:
        self._settings = settings
        self._prefill = Entries(settings.prefill_ns or {})
        self._decode = Entries(settings.decode_ns or {})
        self._clock = GpuClock(settings.prefill_slowdown, settings.prefill_slowdown_memory_ns)

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
        pairs = sum(attended_pairs(chunk) for chunk in step.chunks)
        of = self._settings
        rested_ns = self._prefill.at(num_tokens) + of.prefill_per_pair_ns * pairs
        return max(1, round(max(of.prefill_least_ns, self._clock.stretch(start_ns, rested_ns))))

    def decode_line(self, num_requests: int) -> DecodeLine:
        return DecodeLine.of_ns(max(1, self._decode.at(num_requests)), self._settings.decode_per_context_token_ns, 0)


class Entries:
    """Straight lines from one entry to the next."""

    def __init__(self, times_ns: Mapping[int, float]) -> None:
        self._sizes = sorted(times_ns)
        self._times_ns = [times_ns[size] for size in self._sizes]

    def at(self, size: int) -> float:
        """0 without entries."""
        after = bisect_right(self._sizes, size)
        if after in {0, len(self._sizes)}:
            return self._times_ns[min(after, len(self._sizes) - 1)] if self._sizes else 0.0
        low, high = self._sizes[after - 1], self._sizes[after]
        first, last = self._times_ns[after - 1], self._times_ns[after]
        return first + (last - first) * (size - low) / (high - low)
