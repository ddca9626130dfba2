"""The answer to a question, with the table of its candidates and its text."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from math import nan
from typing import TYPE_CHECKING, Any

from pdsim.dataclass import dataclass
from pdsim.metrics.run_folder import load_pandas
from pdsim.metrics.summary_rows import markdown_table, markdown_text
from pdsim.sim.result import RunResult
from pdsim.sim.uncertainty.sensitivity import Limit
from pdsim.study.measurement import Measurement
from pdsim.study.points.estimate import number
from pdsim.study.questions.rows import COLUMNS, AnswerRow
from pdsim.study.verdict.confidence import Confidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RANGES_SHOWN = 4
"""Maximum number of the table's columns for which the answer's remarks give a range. The first columns that have a
range are taken.
"""


@dataclass(frozen=True)
class Answer:
    name: str
    """Name of the question, such as pd-ratio."""
    asks: str
    """The question as a sentence."""
    load: str
    """Text on the cluster, the load, the SLO and the number of runs for which the answer holds."""
    winner: str
    """Label of the recommended candidate. If none is recommended: the candidate that comes nearest to the SLO (by
    Study.best), or the candidate that the question is about.
    """
    is_recommended: bool
    """True: the answer recommends the candidate `winner`. False: the answer recommends no candidate."""
    text: str
    """The answer in one or more sentences, with the numbers that support it."""
    notes: tuple[str, ...]
    """Further sentences on the answer, which the terminal prints with --details."""
    warnings: tuple[str, ...]
    """Warnings about the candidates: those of their runs (PointResult.warnings, such as costs that were not measured),
    and those about failed requests.
    """
    limit: Limit | None
    """The resource that limits one number of the winner. This number is the winner's throughput if the winner is
    saturated, or meets the SLO in a closed loop. Otherwise it is the latency that is nearest to its limit in the SLO.
    None: the winner's run stalled, which means that some requests never ended."""
    run: RunResult = field(repr=False)
    """The run of the candidate `winner` with the first seed, and the load of its instances over time."""
    percentiles: Mapping[str, str]
    """For ttft and for tpot: the percentile that the SLO limits, such as "p90". "p99": the SLO does not limit the
    metric.
    """
    axis: str
    """Meaning of the figure's horizontal axis, with its unit. Empty: candidates have no positions on an axis, and are
    listed one below another.
    """
    columns: tuple[str, ...]
    """Names of the columns of numbers in the table of candidates, as in COLUMNS."""
    rows: tuple[AnswerRow, ...] = field(repr=False)
    """One row per candidate, in the order of the table."""
    limits: Sequence[Sequence[str]] = ()
    """Rows of the SLO's limits: name, limit, the winner's value, and the range of that value if there is one."""
    as_good: Sequence[str] = ()
    """Labels of other candidates that meet the SLO, and whose goodput and mean latency differ from the winner's by no
    more than chance. Empty: there are none, candidates were run only once, nothing is recommended, or the
    verdict is about some classes of requests.
    """
    confidence: Confidence = field(default_factory=lambda: Confidence("", ""))
    """Confidence in the answer (high, medium or low) with its reason. Two empty texts until `ask` sets the confidence.
    """
    measure: Measurement | None = None
    """The measurement that would settle the answer. None: the answer is the same with the fastest and with the slowest
    step times, or step times were measured on a server.
    """

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
        """Sentences that go with the answer: the winner's limiting resource, the range of the winner's numbers, the
        notes, and the warnings. Resource and range are left out if they are not known.
        """
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
        """A pandas DataFrame with the means of each candidate in a row. NaN: no number. Raises PandasMissingError
        without pandas.
        """
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            means = {self.title(name): nan if one is None else one.mean for name, one in row.estimates.items()}
            rows.append({"arm": row.arm, **means, "remark": row.remark})
        return load_pandas().DataFrame(rows).set_index("arm")

    @property
    def figure(self) -> "Figure":
        """The figure of the candidates' numbers and their intervals. Each access draws a new figure."""
        from pdsim.study.questions.figure import draw  # noqa: PLC0415  matplotlib takes long to load

        titles = {name: self.title(name) for name in self.columns}
        return draw(self.asks, titles, self.rows, winner=self.winner, axis=self.axis)

    def to_markdown(self) -> str:
        """The answer as a Markdown page. The page expects the figure as answer.png in the same folder."""
        return f"# {self.asks}\n\n{self._repr_markdown_()}\n![The numbers of the table](answer.png)\n"

    def _repr_markdown_(self) -> str:
        """The answer as Markdown, for Jupyter."""
        parts = [
            markdown_text(self.load),
            f"**{markdown_text(self.text)}**",
            "\n".join(f"- {markdown_text(remark)}" for remark in self.remarks()),
            markdown_table(self.titles, map(self.cells, self.rows)),
        ]
        return "\n\n".join(parts) + "\n"
