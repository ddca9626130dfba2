"""A plan: the cluster, what cheaper ones lack, and how firm it stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdsim.sim.sensitivity import Limit
from pdsim.study.planning.outcome import Outcome
from pdsim.study.planning.slo import Slo
from pdsim.study.planning.space import Candidate


class Row(NamedTuple):
    candidate: Candidate
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        one = self.candidate
        head = {"cluster": one.label, "gpus": one.num_gpus, "price_per_h": one.price_per_h, "changes": one.changes}
        return {**head, **self.outcome.to_json()}


@dataclass(frozen=True, kw_only=True)
class Plan:
    slo: Slo
    num_candidates: int
    num_tried: int
    max_gpus: int
    chosen: Row | None
    """None: nothing meets it."""
    others: tuple[Row, ...]
    """As cheap, and within the SLO, too."""
    nearest: tuple[Row, ...]
    """As cheap or cheaper, and outside the SLO: the nearest to it first."""
    limit: Limit | None
    """Of the nearest, in the term that it misses most."""
    load_factor: float | None = None
    """Times the load that it still takes; None: the load cannot be scaled."""
    breaks: str = ""
    """What breaks first beyond that; empty: nothing that was tried."""
    lost: Mapping[str, Outcome] = field(default_factory=dict)
    """Of the cluster with one instance less, by role."""
    ends: Mapping[str, Outcome] = field(default_factory=dict)
    """On the fastest and the slowest server that it may be, where no server was measured."""

    certain: Row | None = None
    """The cheapest that meets it on the slowest server, too, where the plan does not."""

    @property
    def text(self) -> str:
        if self.chosen is None:
            nearest = f" The nearest is {self.nearest[0].candidate.label}." if self.nearest else ""
            return f"Nothing of up to {self.max_gpus} GPUs meets it.{nearest}"
        one = self.chosen.candidate
        return f"Take {one.label}: {one.num_gpus} GPUs, {one.price_per_h:g} an hour"

    @property
    def notes(self) -> list[str]:
        """How firm it stands, a sentence each."""
        found = []
        if self.nearest and self.limit is not None:
            found.append(f"{self.nearest[0].candidate.label} misses it: {self.limit}.")
        if self.load_factor is not None:
            breaks = f"; {self.breaks}" if self.breaks else ", the most that was tried"
            found.append(f"It takes {self.load_factor:g} times this load{breaks}.")
        for role, outcome in self.lost.items():
            found.append(f"With one {role} instance lost: {self._tails(outcome)}.")
        for end, outcome in self.ends.items():
            found.append(f"On the {end} server that this may be: {self._tails(outcome)}.")
        if any(not outcome.meets for outcome in self.ends.values()):
            one = None if self.certain is None else self.certain.candidate
            sure = "none" if one is None else f"{one.label}, {one.num_gpus} GPUs, {one.price_per_h:g} an hour,"
            found.append(f"On the slowest, {sure} meets it. Rows of your server (pdsim observe) say more.")
        return found

    def _tails(self, outcome: Outcome) -> str:
        if not outcome.tails_ms:
            return outcome.reason
        tails = ", ".join(f"{name} {ms:,.0f} ms" for name, ms in outcome.tails_ms.items())
        return f"{tails}, within the SLO" if outcome.meets else f"{tails}: {outcome.reason}"

    @property
    def rows(self) -> list[Row]:
        """The plan first."""
        return [*([self.chosen] if self.chosen else []), *self.others, *self.nearest]

    @property
    def titles(self) -> list[str]:
        return ["cluster", "GPUs", "an hour", *(f"{term}, ms" for term in self.slo.terms), ""]

    def cells(self, row: Row) -> list[str]:
        one, outcome = row
        tails = [outcome.tails_ms.get(str(term)) for term in self.slo.terms]
        shown = ["" if ms is None else f"{ms:,.0f}" for ms in tails]
        remark = "the plan" if row == self.chosen else "as cheap" if outcome.meets else "misses it"
        return [one.label, str(one.num_gpus), f"{one.price_per_h:g}", *shown, remark]

    def to_json(self) -> dict[str, Any]:
        return {
            "slo": str(self.slo),
            "candidates": self.num_candidates,
            "tried": self.num_tried,
            "plan": None if self.chosen is None else self.chosen.to_json(),
            "as_cheap": [row.to_json() for row in self.others],
            "nearest": [row.to_json() for row in self.nearest],
            "limit": None if self.limit is None else self.limit._asdict(),
            "load_factor": self.load_factor,
            "breaks": self.breaks,
            "lost": {role: outcome.to_json() for role, outcome in self.lost.items()},
            "certain": None if self.certain is None else self.certain.to_json(),
            "ends": {end: outcome.to_json() for end, outcome in self.ends.items()},
        }

    def to_markdown(self) -> str:
        table = [self.titles, ["---"] * len(self.titles), *map(self.cells, self.rows)]
        lines = [f"| {' | '.join(cells)} |" for cells in table]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"**{self.text}**", "", f"SLO: {self.slo}", "", *notes, "", *lines, ""])
