"""The result of a run."""

from dataclasses import dataclass, field
from typing import Any

from pdsim.metrics.records import RunRecords
from pdsim.metrics.run_folder import RunTables, arrow_table
from pdsim.metrics.summary import elastic_fields, host_cache_fields, storage_fields, summarize
from pdsim.scenario.cost_warnings import cost_warnings
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import host_caches


@dataclass
class RunResult(RunTables):
    """The records of a run, the same as DataFrames, and its summary."""

    scenario: Scenario
    """Resolved: every default filled in."""
    records: RunRecords
    num_events: int
    stall: list[str] = field(default_factory=list)
    """A line for each request that waits, if the run came to a halt before its last request ended."""

    def summary(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"events": self.num_events, "stalled": bool(self.stall)}
        extra["device"] = self.scenario.device
        if warnings := self.warnings():
            extra["warnings"] = warnings
        if host_caches(self.scenario):
            extra |= host_cache_fields(self.records.host_copies, self.scenario.page_size)
        if self.scenario.storage is not None:
            extra |= storage_fields(self.records.host_copies, self.scenario.page_size)
        if self.scenario.elastic is not None:
            end_ns = max((r.end_ns or 0 for r in self.records.requests), default=0)
            extra |= elastic_fields(self.records.servers, self.scenario.pair.prefill.tp, end_ns)
        speculative = self.scenario.acceptance is not None
        return {
            **self.scenario.benchmark_fields("pdsim"),
            **summarize(self.records, speculative=speculative, extra=extra),
        }

    def _table(self, name: str) -> Any:
        return arrow_table(self.records, name)

    def warnings(self) -> list[str]:
        """Warns of steps outside the range that step times were measured on; empty if all are inside."""
        return cost_warnings(self.scenario, self.records.steps)
