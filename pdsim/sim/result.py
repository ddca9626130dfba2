"""The result of a run, with warnings about costs that were not measured on a server."""

from dataclasses import field
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.metrics.explanation.failures import failure_rows
from pdsim.metrics.records import RunRecords
from pdsim.metrics.run_folder import RunTables
from pdsim.metrics.summary import elastic_fields, host_cache_fields, storage_fields, summarize
from pdsim.metrics.tables import arrow_table
from pdsim.scenario.building.caches import stored_page_tokens
from pdsim.scenario.building.sizing import host_caches
from pdsim.scenario.schema import Scenario
from pdsim.sim.uncertainty import unmeasured
from pdsim.workload.client import warm_up_requests


@dataclass
class RunResult(RunTables):
    """Records of a run. Also gives its tables as DataFrames, and its summary."""

    scenario: Scenario
    """The scenario with all defaults filled in."""
    records: RunRecords
    """All records of the run: of requests, steps, transfers and others. Warm-up requests are included."""
    num_events: int
    """Number of events that the simulation scheduled."""
    stall: list[str] = field(default_factory=list)
    """One line for each request that never ended. Empty: the run did not stall."""
    num_primes: int = 0
    """Number of priming requests in the workload, which are sent first to fill caches. They count as warm-up."""

    @property
    def judged(self) -> RunRecords:
        """The records without those of warm-up requests: the workload's priming requests or, if there are none, the
        client's warm-up requests. An SLO judges the requests in these records. Steps, transfers and all other records
        are those of the whole run.
        """
        return self.records.without_first(self._num_warm_up)

    @property
    def _num_warm_up(self) -> int:
        return warm_up_requests(self.scenario.client, len(self.records.requests), self.num_primes)

    def summary(self, skip: int = 0) -> dict[str, Any]:
        """Returns the summary of the run. skip: number of requests, in order of arrival, to leave out in addition to
        warm-up requests.
        """
        num_warm_up = self._num_warm_up
        extra: dict[str, Any] = {"events": self.num_events, "stalled": bool(self.stall)}
        extra["device"] = self.scenario.device
        if warnings := self.warnings():
            extra["warnings"] = warnings
        if host_caches(self.scenario):
            page = self.scenario.page_tokens(next(iter(self.scenario.roles)))  # decode's with divided KV has none
            extra |= host_cache_fields(self.records.host_copies, page)
        if self.scenario.storage is not None:
            extra |= storage_fields(self.records.host_copies, stored_page_tokens(self.scenario))
        if self.scenario.elastic is not None:
            end_ns = max((r.end_ns or 0 for r in self.records.requests), default=0)
            extra |= elastic_fields(self.records.servers, self.scenario.pair.prefill.tp, end_ns)
        if num_warm_up:
            extra["warm_up_requests"] = num_warm_up
        judged = self.records.without_first(num_warm_up + skip)
        if failures := failure_rows(judged.requests, has_faults=self.scenario.has_server_faults):
            extra["failures"] = failures
        speculative = self.scenario.acceptance is not None
        return {
            **self.scenario.benchmark_fields("pdsim"),
            **summarize(judged, speculative=speculative, extra=extra),
        }

    def _table(self, name: str) -> Any:
        return arrow_table(self.records, name)

    def warnings(self) -> list[str]:
        """Returns one line for each crash of a real server that the run does not model, for each cost that was not
        measured or is used outside its measured sizes, and for each kind of media (images, audio) in the requests.
        """
        return [*self.scenario.engine_warnings, *self._cost_warnings(), *self._media_warnings()]

    def _media_warnings(self) -> list[str]:
        requests = self.records.requests
        has_media = {
            "image": any(request.num_image_tokens for request in requests),
            "audio": any(request.num_audio_tokens for request in requests),
        }
        return [unmeasured.of_media(self.scenario, modality) for modality, is_there in has_media.items() if is_there]

    def _cost_warnings(self) -> list[str]:
        """Returns one line for each cost that was not measured, or that is used outside its measured sizes."""
        cost, measured = self.scenario.cost, self.scenario.cost.measured
        servers = dict(zip(("prefill", "decode"), self.scenario.servers, strict=True))
        if measured is None:
            return [unmeasured.of_costs(self.scenario, servers, self.records.steps)]
        setup = self.scenario.foreign_setup
        outside = ", ".join([*setup, *measured.exceeded(self.records.steps)])
        found = []
        if outside:
            has_interval = any(measured.role in (None, role) for role in cost.uncertain)
            interval = "; its interval is left out" if setup and has_interval else ""
            found = [f"cost: {measured}; this run: {outside}: outside{interval}"]
        elif measured.model is None or measured.scaled_from is not None:
            found = [f"cost: {measured}"]
        others = {role: server for role, server in servers.items() if measured.role not in (None, role)}
        steps = self.records.steps
        return [*found, *(unmeasured.of_costs(self.scenario, {role: one}, steps) for role, one in others.items())]
