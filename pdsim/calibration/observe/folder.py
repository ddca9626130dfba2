"""The folder of an observation: rows as they are measured, what the server says of itself, and the load."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from pdsim.metrics.distribution import Samples
from pdsim.metrics.summary import statistics
from pdsim.scenario.yaml_file import ConfigError

ROWS, SERVER, LOAD = "rows.csv", "server.json", "load.json"
_SIZES = ("kind", "new_tokens", "context_tokens", "prompts", "batch", "time_us")


class AddRow(Protocol):
    def __call__(self, row: Mapping[str, Any], /) -> None: ...


@contextmanager
def row_writer(folder: Path, provenance: Mapping[str, str]) -> Iterator[AddRow]:
    """Writes each row at once, so that an interrupted observation keeps what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ROWS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*_SIZES, *provenance))
        writer.writeheader()

        def add(row: Mapping[str, Any], /) -> None:
            rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
            writer.writerow({**rounded, **provenance})
            file.flush()

        yield add


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_load(path: Path) -> list[dict[str, Any]]:
    """Arms of a load; path is the observation's folder or the file. Raises ConfigError."""
    path = path / LOAD if path.is_dir() else path
    try:
        arms: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["arms"]
        _check(arms)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: pdsim observe writes it when its load has ended") from None
    except KeyError as lacking:
        raise ConfigError(f"{path} is no load of pdsim observe: it lacks {lacking}") from None
    except (ValueError, TypeError, AttributeError, OSError) as wrong:
        raise ConfigError(f"{path} is no load of pdsim observe: {wrong}") from None
    if not arms:
        raise ConfigError(f"{path}: the observation ended before its load")
    return arms


def _check(arms: Any) -> None:
    """Raises KeyError or ValueError: where, what was found, and what is possible."""
    for i, arm in enumerate(arms):
        arm["name"]
        _at_least(f"arms[{i}].concurrency", arm["concurrency"], 1)
        _at_least(f"arms[{i}].requests: number", len(arm["requests"]), 1)
        for j, one in enumerate(arm["requests"]):
            where = f"arms[{i}].requests[{j}]"
            for name in ("prompt_tokens", "output_tokens"):
                _at_least(f"{where}.{name}", one[name], 1)
            times = [one["sent_s"], *one["event_s"]]
            if len(times) == 1 or not all(isinstance(at, int | float) for at in times) or times != sorted(times):
                raise ValueError(f"{where}.event_s: expected times in s from sent_s on, found {one['event_s']!r}")


def _at_least(where: str, found: Any, least: int) -> None:
    if not isinstance(found, int) or found < least:
        raise ValueError(f"{where}: expected a whole number of at least {least}, found {found!r}")


def summary_of(requests: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The fields of a run's summary that a client can measure."""
    requests = list(requests)
    ttft_ms = [1e3 * (one["event_s"][0] - one["sent_s"]) for one in requests]
    latency_ms = [1e3 * (one["event_s"][-1] - one["sent_s"]) for one in requests]
    tpot_ms = [
        1e3 * (one["event_s"][-1] - one["event_s"][0]) / (one["output_tokens"] - 1)
        for one in requests
        if one["output_tokens"] > 1
    ]
    seconds = max(one["event_s"][-1] for one in requests) - min(one["sent_s"] for one in requests)
    return {
        "request_throughput": len(requests) / seconds,
        "output_throughput": sum(one["output_tokens"] for one in requests) / seconds,
        **statistics("ttft", Samples(ttft_ms)),
        **statistics("tpot", Samples(tpot_ms)),
        **statistics("itl", Samples(_itl_ms(requests))),
        **statistics("e2e_latency", Samples(latency_ms)),
    }


def _itl_ms(requests: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    """Gaps between events, each shared by the tokens of an event."""
    for one in requests:
        tokens_per_event = max(1.0, one["output_tokens"] / len(one["event_s"]))
        yield from (1e3 * (end - begin) / tokens_per_event for begin, end in pairwise(one["event_s"]))
