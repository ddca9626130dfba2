"""Times between measured ones: what straight lines miss, such as waves of thread blocks and CUDA graph sizes."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from pdsim.cost.affine import Affine, AffineModel
from pdsim.cost.model import CostModel
from pdsim.system.memory import Layout


@dataclass(frozen=True, kw_only=True)
class Table(Affine):
    """Affine, with entries by the tokens of a forward and by the requests of a step on top of its lines.

    Between two entries times lie on a straight line; outside they are those of the nearest entry.
    """

    prefill_ns: Mapping[int, float] | None = None
    """By new tokens; they must not fall."""
    decode_ns: Mapping[int, float] | None = None
    """By requests."""

    def __post_init__(self) -> None:
        for name, entries in (("prefill", self.prefill_ns), ("decode", self.decode_ns)):
            times = [(entries or {})[size] for size in sorted(entries or {})]
            if times != sorted(times):
                raise ValueError(f"Table needs {name} times that do not fall, found {times} ns")

    def model(self, layout: Layout) -> CostModel:
        del layout
        return TableModel(self)


class TableModel(AffineModel):
    """The table, for one GPU."""

    def __init__(self, settings: Table) -> None:
        super().__init__(settings)
        self._prefill = Entries(settings.prefill_ns or {})
        self._decode = Entries(settings.decode_ns or {})

    def _tokens_ns(self, num_tokens: int) -> float:
        return super()._tokens_ns(num_tokens) + self._prefill.at(num_tokens)

    def _batch_ns(self, num_requests: int) -> float:
        return super()._batch_ns(num_requests) + self._decode.at(num_requests)


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
