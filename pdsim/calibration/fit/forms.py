"""How a time depends on what was done: sums of terms with coefficients that cannot be negative.

A monotone table is such a sum too: a first value, and what each step from one knot to the next adds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from pdsim.calibration.fit.rows import Columns, Floats, Rows

Term = Callable[[Columns], Floats]

MOST_KNOTS = 16


@dataclass(frozen=True)
class Form:
    """Σ coefficient · term ns, at least Σ coefficient · least term; with an overlap, a batch of descriptors."""

    name: str
    terms: dict[str, Term]
    shape: tuple[str, ...]
    """Columns whose values make a shape: rows of one shape are held out together."""
    least: dict[str, Term] = field(default_factory=dict)
    """What the host takes while the GPU computes: whichever is slower."""
    overlap: float | None = None
    knots: tuple[float, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.terms, *self.least)

    def design(self, columns: Columns) -> Floats:
        """(rows, parameters): what each coefficient is multiplied with."""
        return np.column_stack([term(columns) for term in (*self.terms.values(), *self.least.values())])

    def times_ns(self, values: Floats, design: Floats) -> Floats:
        if self.overlap is not None:
            batch, posting, moving = (design * values).T
            return np.asarray(batch + (1 - self.overlap) * posting + np.maximum(self.overlap * posting, moving))
        if self.least:
            work, least = self._sides(values, design)
            return np.asarray(np.maximum(work, least))
        return np.asarray(design @ values)

    def slopes(self, values: Floats, design: Floats) -> Floats:
        """(rows, parameters): of the times, by each coefficient."""
        if self.overlap is not None:
            batch, posting, moving = design.T
            waits = self.overlap * posting * values[1] > moving * values[2]
            return np.column_stack([batch, posting * (1 - self.overlap + self.overlap * waits), moving * ~waits])
        if self.least:
            work, least = self._sides(values, design)
            is_work = (work > least)[:, None]
            return design * np.where(np.arange(len(values)) < len(self.terms), is_work, ~is_work)
        return design

    def _sides(self, values: Floats, design: Floats) -> tuple[Floats, Floats]:
        num_terms = len(self.terms)
        return design[:, :num_terms] @ values[:num_terms], design[:, num_terms:] @ values[num_terms:]


def prefill_form(rows: Rows) -> Form:
    """Of affine.py."""
    terms: dict[str, Term] = {"base": _one, "per_token": _column("new_tokens"), "per_pair": _pairs}
    least: dict[str, Term] = {"least": _one}
    if np.ptp(rows.columns["prompts"]):
        terms["per_prompt"] = least["least_per_prompt"] = _column("prompts")
    if np.ptp(_continued(rows.columns)):
        terms["per_context_token"] = _column("context_tokens")
        terms["per_continued_pair"] = lambda columns: _continued(columns) * _pairs(columns)
        least["least_per_continued_prompt"] = lambda columns: _continued(columns) * columns["prompts"]
    return Form("affine", terms, ("new_tokens", "context_tokens", "prompts"), least)


def decode_form(rows: Rows) -> Form:
    terms = {"base": _one, "per_request": _graph, "per_context_token": _column("context_tokens"), **_empty_rows(rows)}
    return Form("affine", terms, ("batch", "context_tokens"))


def prefill_table(rows: Rows) -> Form:
    """Terms of an AffineTable: a step for each knot, instead of base and time per token."""
    lines, knots = prefill_form(rows), _knots(rows.columns["new_tokens"])
    beyond = {name: term for name, term in lines.terms.items() if name not in {"base", "per_token"}}
    terms = {"first": _one, **_steps(_column("new_tokens"), knots), **beyond}
    return replace(lines, name="table", terms=terms, knots=knots)


def decode_table(rows: Rows) -> Form:
    knots = _knots(_graph(rows.columns))
    terms = {"first": _one, **_steps(_graph, knots), "per_context_token": _column("context_tokens")}
    return Form("table", {**terms, **_empty_rows(rows)}, ("batch", "context_tokens"), knots=knots)


def transfer_form(overlap: float) -> Form:
    terms = {"batch": _one, "per_descriptor": _column("num_descriptors"), "per_byte": _column("payload_bytes")}
    return Form("transfer", terms, ("payload_bytes", "num_descriptors"), overlap=overlap)


def staging_form() -> Form:
    return Form("affine", {"base": _one, "per_byte": _column("payload_bytes")}, ("payload_bytes",))


def _one(columns: Columns) -> Floats:
    return np.ones_like(columns["time_ns"])


def _column(name: str) -> Term:
    return lambda columns: columns[name]


def _pairs(columns: Columns) -> Floats:
    """Pairs as attended_pairs counts them, of prompts that are equally long: rows do not say how long each was."""
    new, context = columns["new_tokens"], columns["context_tokens"]
    return np.asarray(new * (context + new / 2) / columns["prompts"])


def _continued(columns: Columns) -> Floats:
    """1 where prompts are behind a context: all of a forward, as rows do not say which."""
    return np.asarray(columns["context_tokens"] > 0, float)


def _knots(values: Floats) -> tuple[float, ...]:
    """Measured values, evenly spread by size; the smallest and the largest among them."""
    known = np.unique(values)
    if len(known) > MOST_KNOTS:
        wanted = np.geomspace(max(known[0], 1), known[-1], MOST_KNOTS)
        known = np.unique([known[np.abs(known - value).argmin()] for value in wanted])
    return tuple(float(value) for value in known)


def _graph(columns: Columns) -> Floats:
    """The batch that a step computes, empty rows of its graph included."""
    return np.maximum(columns["batch"], columns.get("graph", 0))


def _empty_rows(rows: Rows) -> dict[str, Term]:
    """The KV that they would read if they were like the others."""

    def tokens(columns: Columns) -> Floats:
        return np.asarray(columns["context_tokens"] * (_graph(columns) / columns["batch"] - 1))

    return {"per_empty_row_token": tokens} if tokens(rows.columns).any() else {}


def _steps(size: Term, knots: Sequence[float]) -> dict[str, Term]:
    def climbed(columns: Columns, low: float, high: float) -> Floats:
        return np.clip((size(columns) - low) / (high - low), 0, 1)

    return {f"to {high:g}": partial(climbed, low=low, high=high) for low, high in pairwise(knots)}
