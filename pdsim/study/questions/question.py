"""What a question is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pdsim.study.design import Changes
from pdsim.study.questions.base import Base

if TYPE_CHECKING:
    from pdsim.study.questions.study import Study


class Arm(NamedTuple):
    """One way to do it."""

    label: str
    changes: Changes
    x: float | None = None
    """Where it stands on the figure's axis; None: it is no number."""
    series: str = ""
    """Of arms that are compared among themselves."""


def place_of(arm: Arm) -> float:
    """By which arms are in order; those without a number come first."""
    return arm.x or 0.0


class Verdict(NamedTuple):
    winner: str
    """The label of the arm that the answer is about."""
    advice: str
    """What to do, without the numbers; empty: nothing is recommended."""
    why: str
    """A sentence or two with the numbers, which follow the advice."""
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Question:
    asks: str
    """In the user's words."""
    varies: str
    """What is compared, as docs/ask.md has it."""
    columns: tuple[str, ...]
    """Numbers of table and figure, by their names in COLUMNS."""
    arms: Callable[[Base], list[Arm]]
    """What varies."""
    verdict: Callable[["Study"], Verdict]
    """What to choose, and what to say."""
    then: Callable[["Study"], list[Arm]] = lambda _study: []
    """What to look at next, when the arms have their results."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of flags, where the question is about something that the common defaults do not have."""
    axis: str = ""
    """What x is, with its unit; empty: the figure has dots side by side."""
