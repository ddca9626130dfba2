"""Rows and columns of an answer's table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.scenario.loading import Changes
from pdsim.study.base import Base
from pdsim.study.points.estimate import Estimate
from pdsim.study.questions.study import SLO, Study

SATURATED = "saturated"
"""Remark on a saturated candidate, whose latencies are not shown."""


@dataclass(frozen=True)
class Column:
    title: str
    """Title of the column, with the unit of its numbers."""
    field: str = ""
    """The number's column in a run's row of results. Empty: the function `read` computes the number."""
    scale: float = 1.0
    """Factor by which the number of a run's row is multiplied before it is shown."""
    is_latency: bool = True
    """True: the number is a latency, which is not shown for a saturated candidate."""
    per: str = ""
    """Column of a run's row of results by which the column's number is divided. Empty: the number is not divided."""
    read: Callable[[Study, str], Estimate | None] | None = None
    """Function that computes the column's number from the study and a candidate's label. None: the number is read from
    the column `field` of a run's row.
    """
    digits: int = 3
    """Number of significant digits that are shown."""

    def value(self, study: Study, label: str) -> Estimate | None:
        point = study[label]
        if study.error(label) or (self.is_latency and point.is_saturated):
            return None
        if self.read is not None:
            return self.read(study, label)
        if any(replication.row[self.field] is None for replication in point.replications):
            return None
        found = point.metric(self.field)
        return found.scaled(self.scale / (point.metric(self.per).mean or 1.0) if self.per else self.scale)


def _of_classes(classes: Callable[[Base], Sequence[str]]) -> Callable[[Study, str], Estimate]:
    return lambda study, arm: study.attained_by(arm, classes(study.base)).scaled(100)


_OF_SLO: Any = {"is_latency": False, "digits": 4}
COLUMNS = {
    "attained": Column("meet SLO, %", read=lambda study, arm: study[arm].attainment(SLO).scaled(100), **_OF_SLO),
    "first": Column("first class meets SLO, %", read=_of_classes(lambda base: base.first_classes), **_OF_SLO),
    "others": Column("others meet SLO, %", read=_of_classes(lambda base: base.other_classes), **_OF_SLO),
    "gpu_hours": Column("GPU-hours", "gpu_hours", is_latency=False),
    "failed": Column("failed", "failed", is_latency=False),
    "goodput": Column(
        "goodput, requests/s, per GPU", read=lambda study, arm: study[arm].goodput_per_gpu(SLO), is_latency=False
    ),
    "rate": Column("requests/s", "request_throughput", is_latency=False),
    "tokens": Column("output tokens/s", "output_throughput", is_latency=False),
    "ttft": Column("TTFT, mean, ms", "mean_ttft_ms"),
    "median_ttft": Column("TTFT, median, ms", "median_ttft_ms"),
    "p99_ttft": Column("TTFT, p99, ms", "p99_ttft_ms"),
    "tail_ttft": Column("TTFT, {ttft}, ms", read=lambda study, arm: study.tail_ms(arm, "ttft")),
    "tpot": Column("TPOT, mean, ms", "mean_tpot_ms"),
    "tail_tpot": Column("TPOT, {tpot}, ms", read=lambda study, arm: study.tail_ms(arm, "tpot")),
    "itl": Column("ITL, mean, ms", "mean_itl_ms"),
    "latency": Column("latency, mean, ms", "mean_e2e_latency_ms"),
    "running": Column("decoding at once", "mean_running_requests", is_latency=False),
    "retractions": Column("retractions", "retractions", is_latency=False),
    "prefill_hits": Column("hits on prefill, %", "prefill_cache_hit_rate", 100, is_latency=False),
    "decode_hits": Column("hits on decode, %", "decode_cache_hit_rate", 100, is_latency=False),
    "gigabytes": Column("KV sent, GB", "transfer_bytes", 1e-9, is_latency=False),
    "descriptors": Column("descriptors a request", "descriptors", is_latency=False, per="completed"),
    "admission": Column("wait for decode, ms", "mean_decode_bootstrap_ms"),
    "queue": Column("wait for prefill, ms", "mean_prefill_waiting_ms"),
    "forward": Column("forward, ms", "mean_prefill_forward_ms"),
    "transfer": Column("exposed transfer, ms", "mean_prefill_transfer_kv_cache_ms"),
    "merge": Column("wait for merge, ms", "mean_decode_transferred_ms"),
    "outside": Column("front end, ms", "mean_front_end_ms"),
}
"""Columns of answers, by name. In titles, {ttft} and {tpot} stand for the percentile that the SLO limits, such
as p99.
"""


@dataclass(frozen=True)
class AnswerRow:
    """A candidate's row in the table of an answer."""

    arm: str
    """The candidate's label."""
    changes: Changes
    """Changes of the scenario that make the candidate."""
    x: float | None
    """The candidate's position on the figure's axis. None: the candidate has no position."""
    estimates: Mapping[str, Estimate | None]
    """The candidate's numbers, by column. None: the number is not known, or is a latency of a saturated candidate."""
    remark: str
    """Says what is wrong with the candidate, such as a missed SLO. Empty: nothing."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of each number over the range of step times, by column. Empty: a run with the fastest
    or slowest step times gave no result, or step times were measured on a server.
    """

    def to_json(self) -> dict[str, Any]:
        estimates = {name: None if value is None else value._asdict() for name, value in self.estimates.items()}
        return {**asdict(self), "estimates": estimates}
