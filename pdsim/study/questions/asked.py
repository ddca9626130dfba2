"""What a question is asked about: the cluster, its load and the SLO, as flags give them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from pdsim.scenario.hint import did_you_mean
from pdsim.scenario.yaml_file import ConfigError


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Of what is None the default is taken: the question's, or that of DEFAULTS; with a scenario, what that says."""

    scenario: Path | None = None
    """A scenario file, instead of what describes cluster and lengths."""
    model: str | None = None
    """In the catalog [llama-3.1-8b]."""
    gpu: str | None = None
    """In the catalog [h200]."""
    gpus: int | None = None
    """All together [4]."""
    tp: int | None = None
    """GPUs of one server [as few as leave 40 % of their memory to KV]."""
    profile: Path | None = None
    """Step times that were fitted to measurements [the roofline's]."""
    trace: Path | None = None
    """In any format that a scenario reads, known by its first line."""
    input_tokens: str | None = None
    """N: within 20 % of it; N-M: from N to M; evenly spread [4096]."""
    output_tokens: str | None = None
    """The same [256]."""
    prefixes: int | None = None
    """Each prompt begins with one of so many prefixes [20]."""
    prefix_tokens: int | None = None
    """Of each prefix, before the input tokens [0: prompts share nothing]."""
    rate: float | None = None
    """Requests a second, in Poisson arrivals [a trace's own times]."""
    concurrency: int | None = None
    """Requests in flight, instead of a rate [64]."""
    requests: int | None = None
    """How many [400; of a trace all, up to 5,000]."""
    ttft_ms: float = 2000.0
    """SLO: time to the first token."""
    tpot_ms: float = 50.0
    """SLO: time per output token after the first."""
    attainment: float = 0.9
    """SLO: share of the requests that must meet both."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "prefixes", "concurrency", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag(name)} {value}: at least 1")
        for name in ("rate", "ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"{flag(name)} {value:g}: a number above 0")
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"--attainment {self.attainment:g}: a share, above 0 and at most 1")
        self._refuse("rate", ("concurrency",))
        self._refuse("scenario", ("model", "gpu", "gpus", "tp", "profile", *_LENGTHS))
        self._refuse("trace", _LENGTHS)

    def _refuse(self, name: str, others: tuple[str, ...]) -> None:
        beside = [other for other in others if getattr(self, other) is not None]
        if getattr(self, name) is not None and beside:
            hint = "; change the scenario with --set" if name == "scenario" else ""
            raise ConfigError(f"{flag(name)} stands beside {flag(beside[0])}: give one of the two{hint}")

    def given(self) -> dict[str, Any]:
        """What is not its default."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


_LENGTHS = ("input_tokens", "output_tokens", "prefixes", "prefix_tokens")

DEFAULTS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h200",
    "gpus": 4,
    "input_tokens": "4096",
    "output_tokens": "256",
    "prefixes": 20,
    "prefix_tokens": 0,
    "requests": 400,
    "concurrency": 64,
}

NUM_SEEDS = 3
"""Runs of each way of doing it."""


def asked_of(given: Mapping[str, Any]) -> Asked:
    """As Python has it: files may be strings, tokens numbers. Raises ConfigError for what there is not."""
    known = [field.name for field in fields(Asked)]
    for name in given:
        if name not in known:
            raise ConfigError(f"ask has no {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    read = {name: value for name, value in given.items() if value is not None}
    read |= {name: Path(read[name]) for name in ("scenario", "profile", "trace") if name in read}
    read |= {name: str(read[name]) for name in ("input_tokens", "output_tokens") if name in read}
    return Asked(**read)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
