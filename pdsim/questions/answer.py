"""An answer, and how it is written down."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pdsim.metrics.limits import Limit
from pdsim.questions.columns import COLUMNS, cell
from pdsim.sweeps.design import Changes
from pdsim.sweeps.interval import Estimate


@dataclass(frozen=True)
class Row:
    """One way of doing it."""

    arm: str
    changes: Changes
    """Of the scenario."""
    estimates: Mapping[str, Estimate | None]
    """By column; None: it has none, or it says nothing of a saturated system."""
    remark: str
    """What is wrong with it."""

    def to_json(self) -> dict[str, Any]:
        estimates = {name: None if value is None else value._asdict() for name, value in self.estimates.items()}
        return {**asdict(self), "estimates": estimates}


@dataclass(frozen=True)
class Answer:
    name: str
    asks: str
    load: str
    """What it is about: cluster, load, SLO, replications."""
    winner: str
    """The arm that is recommended."""
    text: str
    notes: tuple[str, ...]
    limit: Limit | None
    """Of the recommended arm; None: it came to a halt."""
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def titles(self) -> list[str]:
        return ["", *(COLUMNS[name].title for name in self.columns), ""]

    def cells(self, row: Row) -> list[str]:
        return [row.arm, *(cell(row.estimates[name]) for name in self.columns), row.remark]

    def remarks(self) -> list[str]:
        """What limits the recommended arm, and all else that is to be said."""
        if self.limit is None:
            return list(self.notes)
        relief = f"; more of it by {self.limit.relief}" if self.limit.relief else ""
        return [f"What limits '{self.winner}': {self.limit.resource}: {self.limit.evidence}{relief}.", *self.notes]

    def to_json(self) -> dict[str, Any]:
        limit = None if self.limit is None else {**asdict(self.limit), "relief": self.limit.relief}
        said = {"ask": self.name, "load": self.load, "recommendation": self.winner, "answer": self.text}
        return {**said, "notes": list(self.notes), "limit": limit, "arms": [row.to_json() for row in self.rows]}

    def to_markdown(self) -> str:
        """With the figure that lies beside it."""
        table = [self.titles, ["---"] * len(self.titles), *(self.cells(row) for row in self.rows)]
        parts = [
            f"# {self.asks}",
            self.load,
            f"**{self.text}**",
            "\n".join(f"- {remark}" for remark in self.remarks()),
            "\n".join(f"| {' | '.join(cells)} |" for cells in table),
            "![The numbers of the table](answer.png)",
        ]
        return "\n\n".join(parts) + "\n"
