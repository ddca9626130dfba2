"""Command-line options that replace the model and the load of a scenario."""

import json
from collections.abc import Sequence
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.inputs import MOST_CONTEXT_TOKENS, shown
from pdsim.scenario.yaml_file import ConfigError

_SPREAD = 0.5
"""Standard deviation as a share of the mean, if the user gives only the mean of lengths."""
_LONGEST = 4
"""Longest length as a multiple of the mean, if the user gives only the mean of lengths."""
_NUM_REQUESTS = 1000
"""Number of requests of a load with --rate and without --requests. With this number, ten requests lie above the p99."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Model and load that replace those of the scenario."""

    model: str | None = None
    """Model, by its name in pdsim catalog."""
    rate: str | None = None
    """Requests per second, such as 4/s: Poisson arrivals."""
    concurrency: int | None = None
    """Number of requests in flight (closed loop), instead of a rate. The first requests, as many as this number, warm
    up and do not count. If this number is 1, or more than half of all requests, all requests count.
    """
    requests: int | None = None
    """Number of requests [1,000 with --rate, if neither a scenario file nor a trace gives the number]."""
    isl: int | None = None
    """Mean prompt length in tokens. Lengths are lognormal with a standard deviation of half the mean."""
    osl: int | None = None
    """Mean output length in tokens. Lengths are lognormal with a standard deviation of half the mean."""

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate and --concurrency exclude each other: give one")

    @property
    def lengths(self) -> dict[str, Any]:
        """The fields of a generated workload that these options set: number and lengths of its requests."""
        num_requests = _NUM_REQUESTS if self.requests is None and self.rate is not None else self.requests
        given = {"num_requests": num_requests, "input_tokens": spread(self.isl), "output_tokens": spread(self.osl)}
        return {field: value for field, value in given.items() if value is not None}

    @property
    def client(self) -> dict[str, Any] | None:
        if self.rate is not None:
            return {"use": "open_loop", "arrivals": {"use": "poisson", "rate": self.rate}}
        if self.concurrency is None:
            return None
        return {"use": "closed_loop", "concurrency": self.concurrency}

    def changes(self, *, has_own_load: bool) -> tuple[str, ...]:
        """These options as changes of the scenario, in the notation of --set. has_own_load: True: a file or a trace
        sets the number of requests, so this number changes only if --requests is given.
        """
        lengths = self.lengths
        if has_own_load and self.requests is None:
            lengths.pop("num_requests", None)
        fields = {"model": self.model, "client": self.client}
        fields |= {f"workload.{name}": value for name, value in lengths.items()}
        return tuple(f"{path}={json.dumps(value)}" for path, value in fields.items() if value is not None)


def spread(mean: int | None) -> dict[str, Any] | None:
    """Returns settings of lognormal lengths with this mean in tokens, a standard deviation of half the mean, and a
    maximum of four times the mean. None: no mean is given. Raises ConfigError if the mean is out of range.
    """
    if mean is None:
        return None
    if not 1 <= mean <= MOST_CONTEXT_TOKENS:
        raise ConfigError(f"--isl and --osl: from 1 to {MOST_CONTEXT_TOKENS:,} tokens, found {shown(mean)}")
    return {"use": "lognormal", "mean": mean, "stddev": _SPREAD * mean, "most": _LONGEST * mean}


def require_load(load: LoadOptions, changes: Sequence[str]) -> None:
    """Raises ConfigError if the user gave no load: `load` lacks lengths or a client, and no change of --set (`changes`)
    sets a field of workload or client.
    """
    is_set = any(change.startswith(("workload", "client")) for change in changes)
    has_lengths = load.isl is not None and load.osl is not None
    if is_set or (has_lengths and load.client is not None):
        return
    raise ConfigError(
        "the load is missing. Give the mean lengths in tokens and the rate (--isl 6000 --osl 250 --rate 3.5/s) or the "
        "requests in flight (--concurrency 64 instead of --rate), or --trace FILE, or a scenario file"
    )
