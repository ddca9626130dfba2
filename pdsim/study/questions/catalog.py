"""All questions by name: each is the QUESTION of its own file."""

from importlib import import_module

from pdsim.scenario.hint import did_you_mean
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.questions.question import Question

NAMES = (
    "pd-ratio",
    "pd-or-not",
    "explain-ttft",
    "page-and-descriptors",
    "staging-ring",
    "transport",
    "decode-cache",
    "routing",
    "admission",
    "overlap",
    "capacity",
)


def question(name: str) -> Question:
    """Raises ConfigError for a name that there is not."""
    if name not in NAMES:
        raise ConfigError(f"no question {name!r}{did_you_mean(name, NAMES)}; there are {', '.join(NAMES)}")
    found: Question = import_module(f"pdsim.study.questions.{name.replace('-', '_')}").QUESTION
    return found
