"""The folder of an observation: rows as they are measured, what the server says of itself, and the load."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
            told = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
            writer.writerow({**told, **provenance})
            file.flush()

        yield add


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_load(path: Path) -> list[dict[str, Any]]:
    """Arms of a load; path is the observation's folder or the file. Raises ConfigError."""
    path = path / LOAD if path.is_dir() else path
    try:
        arms: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["arms"]
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: pdsim observe writes it when its load has ended") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no load of pdsim observe") from None
    if not arms:
        raise ConfigError(f"{path}: the observation ended before its load")
    return arms


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
        **statistics("e2e_latency", Samples(latency_ms)),
    }
