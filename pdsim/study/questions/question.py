"""A question: a sweep over a scenario, and a verdict. Each is the QUESTION of its own file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from pdsim.scenario.loading import Changes
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.study.questions.base import Base

if TYPE_CHECKING:
    from pdsim.study.questions.study import Study


class Arm(NamedTuple):
    """A way to do it."""

    label: str
    changes: Changes
    x: float | None = None
    """Place on the figure's axis; None: it is no number."""
    series: str = ""
    """Name of arms that are compared among themselves."""
    axis: str = ""
    """Meaning of x, where it is not what the question says."""


def place_of(arm: Arm) -> float:
    """Key that orders arms; those without a number come first."""
    return arm.x or 0.0


class Verdict(NamedTuple):
    winner: str
    """The label of the arm that the answer is about."""
    advice: str
    """Advice without the numbers; empty: nothing is recommended."""
    why: str
    """A sentence or two with the numbers, which follow the advice."""
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Question:
    asks: str
    """The question in the user's words."""
    columns: tuple[str, ...]
    """Numbers of table and figure, by their names in COLUMNS."""
    arms: Callable[[Base], list[Arm]]
    """Arms to compare."""
    verdict: Callable[["Study"], Verdict]
    """Chooses an arm, and says why."""
    then: Callable[["Study"], list[Arm]] = lambda _study: []
    """Arms to look at next, when the first have their results."""
    starter: Changes = field(default_factory=dict)
    """Changes of the starter scenario, where the question is about something that it does not have."""
    axis: str = ""
    """Meaning of x, with its unit; empty: the figure has dots side by side."""


NAMES = (
    "pd-ratio",
    "pd-or-not",
    "explain-ttft",
    "page-and-descriptors",
    "staging-ring",
    "transport",
    "decode-cache",
    "host-cache",
    "storage",
    "routing",
    "admission",
    "overlap",
    "prefill-split",
    "capacity",
    "priorities",
    "local-prefill",
    "elastic",
)


def question(name: str) -> Question:
    """Raises ConfigError for a name that there is not."""
    if name not in NAMES:
        raise ConfigError(f"no question {name!r}{did_you_mean(name, NAMES)}; there are {', '.join(NAMES)}")
    found: Question = import_module(f"pdsim.study.questions.{name.replace('-', '_')}").QUESTION
    return found
