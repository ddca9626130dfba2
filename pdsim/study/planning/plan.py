"""A plan: the cluster, what cheaper ones lack, and how firm it stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdsim.metrics.summary_rows import counted, markdown_table, markdown_text, significant
from pdsim.sim.sensitivity import Limit
from pdsim.study.outcome import SATURATED, Outcome
from pdsim.study.planning.space import CandidateCluster
from pdsim.study.planning.trials import LoneRequest
from pdsim.study.slo import Slo


class Row(NamedTuple):
    candidate: CandidateCluster
    outcome: Outcome
    limit: Limit | None = None
    """Limit of one that misses the SLO, in the term that it misses most."""

    def to_json(self) -> dict[str, Any]:
        one = self.candidate
        head = {"cluster": one.label, "gpus": one.num_gpus, "price_per_h": one.price_per_h, "kw": one.kw}
        found = {**head, "changes": one.changes, **self.outcome.to_json()}
        return found if self.limit is None else {**found, "limit": self.limit._asdict()}


REMARKS = {"nearest": "misses it", "plan": "the plan", "as_cheap": "as cheap", "safe": "safe", "faster": "faster"}
"""Remarks on each kind of row, in the order in which they are listed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    about: str
    """The model, its GPUs and their prices, and the load."""
    slo: Slo
    num_candidates: int
    num_tried: int
    max_gpus: int
    chosen: Row | None
    """None: nothing meets it."""
    others: tuple[Row, ...]
    """Rows as cheap, and within the SLO, too."""
    nearest: tuple[Row, ...]
    """Rows as cheap or cheaper, and outside the SLO: the nearest to it first."""
    faster: tuple[Row, ...] = ()
    """Dearer, each with more to spare than all that are cheaper."""
    load_factor: float | None = None
    """Times the load that it still takes; None: the load cannot be scaled."""
    breaks: str = ""
    """The part that breaks first beyond that; empty: nothing that was tried."""
    lost: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcome of the cluster with one instance less, by role."""
    ends: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcomes on the fastest and the slowest server that it may be, where no server was measured."""

    safe: Row | None = None
    """The cheapest that meets it on the slowest server, too, where the plan does not at both ends."""
    measure: str = ""
    """Times to measure, where an end misses the SLO."""
    loads: Mapping[float, Row | None] = field(default_factory=dict)
    """The cheapest at so many times the load; None: nothing meets it."""
    own: Row | None = None
    """The cluster of the scenario that the plan began with."""
    checked: Outcome | None = None
    """Outcome on the trace that it was not made from."""
    lone: LoneRequest | None = None
    """A request that misses it alone, where nothing meets it because requests do so on every server."""

    @property
    def text(self) -> str:
        if self.chosen is None:
            nearest = f" The nearest is {self.nearest[0].candidate.label}." if self.nearest else ""
            why = "" if self.lone is None else ": requests miss it even one at a time"
            return f"Nothing of up to {self.max_gpus} GPUs meets it{why}.{nearest}"
        one = self.chosen.candidate
        power = "" if one.kw is None else f", {one.kw:.1f} kW"
        return f"Take {one.label}: {counted(one.num_gpus, 'GPU')}, {one.price_per_h:g} an hour{power}"

    @property
    def notes(self) -> list[str]:
        """Sentences on how firm it stands."""
        found = [] if self.lone is None else [f"{self.lone}."]
        found += [self.safety] if self.safety else []
        if self.chosen is not None:
            found += self._attained(self.chosen.outcome)
        found += [
            f"{row.candidate.label}: {row.outcome.lack}; {row.limit}." for row in self.nearest if row.limit is not None
        ]
        if self.own is not None and self.chosen is not None:
            saved = 1 - self.chosen.candidate.price_per_h / self.own.candidate.price_per_h
            less = f"{saved:.0%} less" if saved > 0 else "no less"
            own = f"The scenario's own {self.own.candidate.priced}: {self._tails(self.own.outcome)}"
            found.append(f"{own}. The plan costs {less}.")
        if self.checked is not None:
            found.append(f"On the trace that it was not made from: {self._tails(self.checked)}.")
        if self.load_factor is not None:
            breaks = f"; {self.breaks}" if self.breaks else ", the most that was tried"
            takes = "no more than this load" if self.load_factor == 1 else f"{self.load_factor:g} times this load"
            found.append(f"It takes {takes}{breaks}.")
        for factor, row in self.loads.items():
            cheapest = f"nothing of up to {self.max_gpus} GPUs meets it" if row is None else row.candidate.priced
            found.append(f"At {factor:g} times this load: {cheapest}.")
        for role, outcome in self.lost.items():
            found.append(f"With one {role} instance lost: {self._tails(outcome)}.")
        for end, outcome in self.ends.items():
            found.append(f"On the {end} server that this may be: {self._tails(outcome)}.")
        return [*found, self.measure] if self.measure else found

    @property
    def safety(self) -> str:
        """A sentence on the cluster that meets the SLO on the slowest server, too; empty if servers were measured."""
        if not self.ends:
            return ""
        slow = "on the slowest server that this may be"
        if all(outcome.meets for outcome in self.ends.values()):
            return f"Safe: it meets the SLO {slow}, too."
        if self.safe is None:
            return f"Not safe: nothing of up to {self.max_gpus} GPUs meets the SLO {slow}."
        return f"Safe is {self.safe.candidate.priced}: it meets the SLO {slow}, too."

    @staticmethod
    def _attained(outcome: Outcome) -> list[str]:
        """Shares of requests within all limits, together and by class."""
        if outcome.attained is None:
            return []
        of_classes = ", ".join(f"{name or 'no class'} {one.share:.2%}" for name, one in outcome.classes.items())
        classes = f" ({of_classes})" if of_classes else ""
        share, rate = f"{outcome.attained.share:.2%}", significant(outcome.attained.goodput_per_s)
        return [f"{share} of the requests{classes} are within all limits: a goodput of {rate} requests/s."]

    @staticmethod
    def _tails(outcome: Outcome) -> str:
        if outcome.judgement is None:
            return outcome.reason
        tails = ", ".join(f"{one.name} {one.text}" for one in outcome.judgement.readings.values())
        if outcome.reason == SATURATED:
            return f"{tails}; it {SATURATED}"
        return f"{tails}, {'within' if outcome.meets else 'outside'} the SLO"

    @property
    def kinds(self) -> dict[str, tuple[Row, ...]]:
        """Rows by their kind, a key of REMARKS and of plan.json."""
        chosen = () if self.chosen is None else (self.chosen,)
        listed = {row.candidate for row in (*chosen, *self.others)}
        safe = () if self.safe is None or self.safe.candidate in listed else (self.safe,)
        faster = tuple(row for row in self.faster if self.safe is None or row.candidate != self.safe.candidate)
        return {"nearest": self.nearest, "plan": chosen, "as_cheap": self.others, "safe": safe, "faster": faster}

    @property
    def rows(self) -> list[Row]:
        """Rows by kind: the plan after those that miss the SLO."""
        return [row for kind in REMARKS for row in self.kinds[kind]]

    @property
    def titles(self) -> list[str]:
        terms = [f"{term}, {'%' if term.is_share else 'ms'}" for term in self.slo.terms]
        return ["cluster", "GPUs", "an hour", *terms, "within all", ""]

    def cells(self, row: Row) -> list[str]:
        one, outcome = row.candidate, row.outcome
        readings = {} if outcome.judgement is None else outcome.judgement.readings
        shown = [readings[term].number if term in readings else "" for term in self.slo.terms]
        attained = "" if outcome.attained is None else f"{outcome.attained.share:.1%}"
        return [one.label, str(one.num_gpus), f"{one.price_per_h:g}", *shown, attained, self._remark(row)]

    def _remark(self, row: Row) -> str:
        return next(REMARKS[kind] for kind, rows in self.kinds.items() if row in rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "slo": str(self.slo),
            "terms": [str(term) for term in self.slo.terms],
            "text": self.text,
            "notes": self.notes,
            "safety": self.safety,
            "candidates": self.num_candidates,
            "tried": self.num_tried,
            "plan": None if self.chosen is None else self.chosen.to_json(),
            "as_cheap": [row.to_json() for row in self.others],
            "nearest": [row.to_json() for row in self.nearest],
            "faster": [row.to_json() for row in self.kinds["faster"]],
            "load_factor": self.load_factor,
            "breaks": self.breaks,
            "loads": {f"{factor:g}": None if row is None else row.to_json() for factor, row in self.loads.items()},
            "lost": {role: outcome.to_json() for role, outcome in self.lost.items()},
            "ends": {end: outcome.to_json() for end, outcome in self.ends.items()},
            "measure": self.measure,
            "safe": None if self.safe is None else self.safe.to_json(),
            "own": None if self.own is None else self.own.to_json(),
            "checked": None if self.checked is None else self.checked.to_json(),
            "lone": None if self.lone is None else self.lone.to_json(),
        }

    def to_markdown(self) -> str:
        notes = [f"- {markdown_text(note)}" for note in self.notes]
        table = markdown_table(self.titles, map(self.cells, self.rows))
        text, about = markdown_text(self.text), markdown_text(f"{self.about}; SLO: {self.slo}")
        return "\n".join([f"**{text}**", "", about, "", *notes, "", table, ""])
