"""An answer: its table of candidates, and its text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any

from pdsim.metrics.run_folder import load_pandas
from pdsim.metrics.summary_rows import markdown_table, markdown_text
from pdsim.scenario.loading import Changes
from pdsim.sim.result import RunResult
from pdsim.sim.uncertainty.sensitivity import Limit
from pdsim.study.base import Base
from pdsim.study.measurement import Measurement
from pdsim.study.points.estimate import Estimate, number
from pdsim.study.questions.study import SLO, Study
from pdsim.study.verdict.confidence import Confidence


@dataclass(frozen=True)
class Column:
    title: str
    field: str = ""
    """Field of a run's row. Empty: `read` computes the number."""
    scale: float = 1.0
    is_latency: bool = True
    """True: the column is empty for a saturated candidate."""
    per: str = ""
    """Field by which the number is divided. Empty: none."""
    read: Callable[[Study, str], Estimate | None] | None = None
    digits: int = 3

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
"""Columns of answers, by name. {ttft} and {tpot} in titles are the percentiles that the SLO limits."""


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RANGES_SHOWN = 4
"""Number of columns, the first ones, whose ranges the text mentions."""
SATURATED = "saturated"
"""Remark of a saturated row, which has no latency."""


@dataclass(frozen=True)
class AnswerRow:
    """The numbers of one candidate."""

    arm: str
    changes: Changes
    """Changes of the scenario."""
    x: float | None
    """Position on the figure's axis. None: the candidate has no number."""
    estimates: Mapping[str, Estimate | None]
    """Estimates by column. None: no number, or a latency of a saturated system."""
    remark: str
    """Fault of the candidate, such as a missed SLO. Empty: none."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value by column, over both ends of unmeasured times, if all of them have the number."""

    def to_json(self) -> dict[str, Any]:
        estimates = {name: None if value is None else value._asdict() for name, value in self.estimates.items()}
        return {**asdict(self), "estimates": estimates}


@dataclass(frozen=True)
class Answer:
    name: str
    asks: str
    load: str
    """Setting of the answer: cluster, load, SLO, replications."""
    winner: str
    """The recommended candidate. Without a recommendation: the candidate nearest to the SLO, or the one that the
    question is about."""
    is_recommended: bool
    text: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    """Warnings about times outside what was measured."""
    limit: Limit | None
    """Limiting resource of the winner, for throughput or for the latency with the least headroom. None: the run
    stalled."""
    run: RunResult = field(repr=False)
    """Run of the winner, with levels."""
    percentiles: Mapping[str, str]
    """Percentiles that the SLO limits, by metric."""
    axis: str
    """Meaning of x, with its unit. Empty: the figure has dots side by side."""
    columns: tuple[str, ...]
    rows: tuple[AnswerRow, ...] = field(repr=False)
    limits: Sequence[Sequence[str]] = ()
    """Rows of the SLO's limits: name, limit, the winner's value, and its range if it has one."""
    as_good: Sequence[str] = ()
    """Candidates that do not differ measurably from the recommended one."""
    confidence: Confidence = field(default_factory=lambda: Confidence("", ""))
    measure: Measurement | None = None
    """The measurement on which the answer depends. None: it depends on none."""

    @property
    def titles(self) -> list[str]:
        return ["", *map(self.title, self.columns), ""]

    def title(self, column: str) -> str:
        return COLUMNS[column].title.format(**self.percentiles)

    def cells(self, row: AnswerRow) -> list[str]:
        values = [(row.estimates[name], COLUMNS[name].digits) for name in self.columns]
        cells = ["" if value is None else value.spread(digits) for value, digits in values]
        return [row.arm, *cells, row.remark]

    def remarks(self) -> list[str]:
        """Sentences about the answer: first the winner's limiting resource, then all other notes."""
        limit = [] if self.limit is None else [f"'{self.winner}': {self.limit}."]
        return [*limit, *self._range(), *self.notes, *(f"Warning: {warning}" for warning in self.warnings)]

    def _range(self) -> list[str]:
        found = next((row.ranges for row in self.rows if row.arm == self.winner), {})
        ranges = [
            f"{self.title(name).replace(',', '')} {number(least)} to {number(most)}"
            for name, (least, most) in list(found.items())[:_RANGES_SHOWN]
        ]
        return [f"'{self.winner}' at both ends of the predicted range: {', '.join(ranges)}."] if ranges else []

    def to_json(self) -> dict[str, Any]:
        limit = None if self.limit is None else self.limit._asdict()
        said = {
            "ask": self.name,
            "load": self.load,
            "recommendation": self.winner if self.is_recommended else None,
            "answer": self.text,
        }
        notes: dict[str, Any] = {
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "as_good": list(self.as_good),
        }
        notes |= {"confidence": self.confidence._asdict()}
        return {**said, **notes, "limit": limit, "arms": [row.to_json() for row in self.rows]}

    @property
    def table(self) -> Any:
        """A pandas DataFrame of the means, a row for each candidate; NaN: no number. Raises PandasMissingError."""
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            means = {self.title(name): nan if one is None else one.mean for name, one in row.estimates.items()}
            rows.append({"arm": row.arm, **means, "remark": row.remark})
        return load_pandas().DataFrame(rows).set_index("arm")

    @property
    def figure(self) -> "Figure":
        """Figure of the table's numbers, with their intervals. Each call draws a new figure."""
        from pdsim.study.questions.figure import draw  # noqa: PLC0415  matplotlib takes long to load

        return draw(self)

    def to_markdown(self) -> str:
        """The answer as a Markdown page, which refers to the figure beside it."""
        return f"# {self.asks}\n\n{self._repr_markdown_()}\n![The numbers of the table](answer.png)\n"

    def _repr_markdown_(self) -> str:
        """Markdown for Jupyter."""
        parts = [
            markdown_text(self.load),
            f"**{markdown_text(self.text)}**",
            "\n".join(f"- {markdown_text(remark)}" for remark in self.remarks()),
            markdown_table(self.titles, map(self.cells, self.rows)),
        ]
        return "\n\n".join(parts) + "\n"
