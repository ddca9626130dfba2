"""Checks the values that the user chose on the page."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.scenario.sections.servers import Split
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.servers import Server
from pdsim.study.verdict.slo import Slo

MOST_INSTANCES = 16
_MOST_REQUESTS = 10**9


@dataclass(frozen=True)
class Part:
    """The part of the load that the page simulates."""

    trace: str
    """Path of a trace. Empty: the requests are the scenario's own."""
    first: int
    """Number of the first request to simulate, from 1. Has no effect if requests are generated."""
    count: int
    """Number of requests to simulate. If a trace has fewer from `first` on: all of these."""

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> "Part":
        """Reads from the page's controls which requests the page simulates: a trace, the number of the first request,
        and how many. chosen: the value of each control, by control. Raises ConfigError if the trace is no path, or a
        number is not whole or not from 1 to _MOST_REQUESTS.
        """
        trace = chosen.get("trace", "")
        if not isinstance(trace, str) or len(trace) > 4096 or "\0" in trace:  # noqa: PLR2004
            raise ConfigError("trace: expected the path of a file")
        path = str(Path(trace).expanduser().absolute()) if trace else ""
        return cls(path, _whole(chosen, "first"), _whole(chosen, "count"))


@dataclass(frozen=True)
class Choice:
    """A cluster with its SLO and its prices, as the user chose on the page. A field that is None keeps the scenario's
    value.
    """

    model: str | None
    """Name of the model in the catalog. None: the scenario's model."""
    weight_dtype: str | None
    kv_dtype: str | None
    servers: tuple[Server, ...]
    """GPU and parallel sizes of the prefill and of the decode servers, or of the aggregated servers."""
    counts: tuple[int, ...]
    """Number of servers of each role, in the order of `servers`."""
    radix: bool
    """True: decode keeps a radix cache. Has no effect with aggregated servers."""
    router: str | None
    """Name of the routing policy."""
    load: Any
    """Value of the field that sets the load, such as a rate in requests per second."""
    slo: Slo
    prices: Mapping[str, float]
    """Price of one hour of each GPU, by the GPU's name."""

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> "Choice":
        """Reads the fields from the values of the page's controls. chosen: the value of each control, by control.
        Raises ConfigError if the servers, their numbers, the SLO or the prices are wrong. Other values are not checked.
        """
        servers, counts = _servers(chosen)
        slo = chosen.get("slo")
        if not isinstance(slo, str):
            raise ConfigError("SLO: expected limits, such as ttft p99 < 2 s, tpot p99 < 50 ms")
        return cls(
            chosen.get("model"),
            chosen.get("weight_dtype"),
            chosen.get("kv_dtype"),
            servers,
            counts,
            bool(chosen.get("radix")),
            chosen.get("router"),
            chosen.get("load"),
            Slo.parse(slo, "SLO"),
            _prices(chosen.get("prices", {})),
        )


def _whole(chosen: Mapping[str, Any], name: str) -> int:
    value = chosen.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_REQUESTS:
        raise ConfigError(f"{name}: expected a whole number from 1 on")
    return value


def _prices(chosen: Any) -> dict[str, float]:
    if not isinstance(chosen, Mapping):
        raise ConfigError("prices: expected an object with a number for each GPU")
    for gpu, price in chosen.items():
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not is_number or not isfinite(price) or price < 0:
            raise ConfigError(f"price of {gpu}: expected a number from 0 on")
    return dict(chosen)


def _servers(chosen: Mapping[str, Any]) -> tuple[tuple[Server, ...], tuple[int, ...]]:
    """Reads two tuples from the values of the page's controls: GPU and parallel sizes of the servers of each role, and
    the number of servers of each role. Raises ConfigError if a value is missing or wrong.
    """
    roles = ("aggregated",) if chosen.get("kind") == "aggregated" else ("prefill", "decode")
    try:
        servers = tuple(Server(chosen[role]["gpu"], Split(chosen[role]["tp"])) for role in roles)
        counts = tuple(int(chosen[role]["instances"]) for role in roles)
    except (KeyError, TypeError, ValueError) as wrong:
        raise ConfigError(f"no cluster: {wrong!r}") from None
    if not 1 <= min(counts) <= max(counts) <= MOST_INSTANCES:
        raise ConfigError(f"{counts} instances: expected 1 to {MOST_INSTANCES}")
    return servers, counts
