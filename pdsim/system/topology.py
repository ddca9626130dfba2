"""Which links lie between two instances, and what they carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Path = tuple[tuple[str, float], ...]
"""Links that a transfer crosses, and how many of its bytes cross each per byte that one prefill rank sends."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Links by name, and the way from each prefill to each decode instance, for one prefill rank."""

    capacity: Mapping[str, float]
    """Bytes per second."""
    ways_out: Mapping[str, Path]
    ways_in: Mapping[str, Path]
    _paths: dict[tuple[str, str], Path] = field(default_factory=dict, init=False)

    def path(self, source: str, target: str) -> Path:
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = self.ways_out[source] + self.ways_in[target]
        return path
