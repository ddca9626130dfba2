"""Observes a server: sends probes until their share of the time or of the requests is used up, then a load with the
rest. The load can be simulated afterwards.
"""

import csv
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from pdsim.calibration.fit.rows import UNKNOWN
from pdsim.calibration.observe.probes import (
    LOAD_SHARE,
    LONGEST_OUTPUT,
    ObservationBudget,
    Probe,
    loads,
    observe,
    play,
    round_trips,
)
from pdsim.calibration.observe.server_client import ServerClient, ServerError
from pdsim.dataclass import dataclass
from pdsim.files import require_empty_or_own, write_whole
from pdsim.inputs import read_json, shown
from pdsim.metrics.distribution import Samples
from pdsim.metrics.summary import statistics
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import names

ROWS, SERVER, LOAD = "rows.csv", "server.json", "load.json"
_SIZES = ("kind", "new_tokens", "context_tokens", "prompts", "batch", "time_us")
_MOST_BUSY = 3
"""Maximum number of refusals by a busy server. At a further one, the observation ends."""
_SETTLE_S, _MOST_SETTLE_S = 0.05, 1.0
"""Minimum wait for a server to notice ended streams, and maximum wait while its metrics still count them, in s."""


@dataclass
class Session:
    """Sends probes one after another, and keeps the measured rows, notes and loads."""

    server: ServerClient
    """The server that is observed."""
    budget: ObservationBudget
    """Limits of time, requests and concurrency."""
    folder: Path
    """Folder for the rows, the description of the server, and the load."""
    _: KW_ONLY
    command: str
    """The command that the user gave, for the provenance of the rows."""
    gpu: str | None
    """Name of the GPU in the catalog, if the user gave it. None: not given."""
    tp: int | None
    """Number of GPUs of the server, if the user gave it. None: as the server reports."""
    about: dict[str, Any] = field(default_factory=dict)
    """The server's description of itself, by field (ServerClient.describe). Empty until the observation begins."""
    num_rows: Counter[str] = field(default_factory=Counter)
    """Number of measured rows, by their kind."""
    loads: list[dict[str, Any]] = field(default_factory=list)
    """Results of the load tests, one per test, as `play` returns them."""
    notes: list[str] = field(default_factory=list)
    """Sentences on parts that were left out, and on disturbances."""
    interrupted: bool = False
    """True: the user interrupted the observation."""

    def __post_init__(self) -> None:
        self._begin_s = time.monotonic()
        self._refused: Counter[str] = Counter()
        self._too_long = float("inf")
        self._others = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin_s

    def run(self, probes: Sequence[Probe], advance: Callable[[int], None]) -> None:
        """Observes the server. advance: called before each probe, with the number of requests of all earlier probes and
        of this one. Raises ConfigError if the server does not answer, or streams nothing.
        """
        try:
            self._begin()
        except ServerError as wrong:
            raise ConfigError(str(wrong)) from None
        try:
            with row_writer(self.folder, self._provenance()) as add:

                def keep(row: dict[str, Any]) -> None:
                    add(row)
                    self.num_rows[row["kind"]] += 1

                self._probe(probes, keep, advance)
            self._load()
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("interrupted; what was measured is kept")
        except ServerError as wrong:
            self.notes.append(f"ended early: {wrong}")

    def to_json(self) -> dict[str, Any]:
        loads = {load["name"]: summary_of(load["requests"]) for load in self.loads}
        return {"folder": str(self.folder), **self.about, "rows": self.num_rows, "loads": loads, "notes": self.notes}

    def _begin(self) -> None:
        self.about = self.server.describe()
        self.server.learn_sizes()
        if left_out := self.server.require_streams():
            self.notes.append(f"requests leave out {', '.join(left_out)}, which the server refuses")
        self._others = self.server.num_running()
        if self._others:
            self.notes.append(f"{self._others:g} requests of other clients run, which prolong the times")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / SERVER, self.about)
        (self.folder / LOAD).unlink(missing_ok=True)  # of an earlier observation

    def _provenance(self) -> dict[str, str]:
        served = self.about["model"].rsplit("/", 1)[-1].lower()
        return {
            "device": self.gpu or UNKNOWN,
            "model": served if served in names("models") else self.about["model"],
            "tp": str(self.tp or self.about["tp"]),
            "engine": f"{self.about['server']} {self.about['version']}".strip(),
            "url": self.about["url"],
            "command": self.command,
            "date": datetime.now(UTC).date().isoformat(),
        }

    def _probe(self, probes: Sequence[Probe], keep: Callable[[Any], None], advance: Callable[[int], None]) -> None:
        end_s = 60 * self.budget.num_minutes * (1 - LOAD_SHARE)
        for row in round_trips(self.server):
            keep(row)
        num_sent = num_busy = 0
        for probe in probes:
            if self.seconds > end_s:
                self.notes.append(f"time is up after {num_sent} of {sum(one.num_requests for one in probes)} requests")
                return
            num_sent += probe.num_requests
            advance(num_sent)
            if probe.prompt_tokens >= self._too_long or self._refused[probe.kind] > 1:
                continue
            try:
                for row in observe(self.server, probe):
                    keep(row)
            except ServerError as wrong:
                if wrong.is_busy:
                    num_busy += 1
                    if num_busy > _MOST_BUSY:
                        raise
                    time.sleep(wrong.retry_after_s)
                elif wrong.is_refusal:
                    self._refuse(probe, wrong)
                else:
                    raise
            if probe.output_tokens == LONGEST_OUTPUT:
                self._settle()

    def _settle(self) -> None:
        """Waits until the server's metrics no longer count streams of the previous probe, but hardly longer than
        _MOST_SETTLE_S. The next probe then runs without these streams, and the number of requests in flight stays
        within its maximum.
        """
        end_s = time.monotonic() + _MOST_SETTLE_S
        time.sleep(_SETTLE_S)
        while self.server.num_running() > self._others and time.monotonic() < end_s:
            time.sleep(_SETTLE_S)

    def _refuse(self, probe: Probe, wrong: ServerError) -> None:
        if probe.kind == "ttft":
            self._too_long = min(self._too_long, probe.prompt_tokens)
        else:
            self._refused[probe.kind] += 1
        self.notes.append(f"{probe.kind} of {probe.prompt_tokens} tokens: {wrong}")

    def _load(self) -> None:
        content = {"about": self.about["url"], "command": self.command, "arms": self.loads}
        for load in loads(self.budget):
            end_s = self._begin_s + 60 * self.budget.num_minutes
            lengths = tuple(pair for pair in load.lengths if pair[0] < self._too_long)
            if time.monotonic() > end_s or not lengths:
                why = "no prompt is short enough for" if not lengths else "time is up before"
                self.notes.append(f"{why} load {load.name}")
                return
            played = play(self.server, replace(load, lengths=lengths), end_s)
            if not (num_done := len(played["requests"])):
                self.notes.append(f"time is up before load {load.name}")
                return
            self.loads.append(played)
            if num_done < len(lengths):
                self.notes.append(f"time is up after {num_done} of {len(lengths)} requests of load {load.name}")
            write_json(self.folder / LOAD, content)


class AddRow(Protocol):
    def __call__(self, row: Mapping[str, Any], /) -> None: ...


@contextmanager
def row_writer(folder: Path, provenance: Mapping[str, str]) -> Iterator[AddRow]:
    """Context manager that yields a function. The function appends one measured row to the file of rows and writes it
    at once, so an interrupted observation keeps its rows. provenance: columns that say where rows come from; all rows
    have the same values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ROWS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*_SIZES, *provenance))
        writer.writeheader()

        def add(row: Mapping[str, Any], /) -> None:
            rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
            writer.writerow({**rounded, **provenance})
            file.flush()

        yield add


def require_observation(folder: Path) -> None:
    """Raises ForeignFileError if the folder has files of something else than an observation."""
    require_empty_or_own(folder, f"observation ({SERVER})", is_own=(folder / SERVER).is_file())


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_load(path: Path) -> list[dict[str, Any]]:
    """Reads the runs of the load that `pdsim observe` sent, from the folder of an observation or its load file. Returns
    the entries of `arms`, one per run. Raises ConfigError if the file is missing or wrong, or has no runs.
    """
    path = path / LOAD if path.is_dir() else path
    try:
        arms: list[dict[str, Any]] = read_json(path)["arms"]
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
    """Raises KeyError with the name of the field if a run of a load file lacks a field, and ValueError if a field is
    wrong: the message gives the field, its value, and the possible values. Other structures may raise TypeError. arms:
    the runs of the loads, as JSON.
    """
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
    if type(found) is not int or found < least:
        raise ValueError(f"{where}: expected a whole number of at least {least}, found {shown(found)}")


def summary_of(requests: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Those fields of a run's summary that a client can measure. requests: tokens and times of each request, as `play`
    returns them.
    """
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
    """Yields the gaps between tokens in ms. If streamed events have several tokens, each time between two events is
    divided by the request's mean number of tokens per event. requests: events and tokens of each request, as `play`
    returns them.
    """
    for one in requests:
        tokens_per_event = max(1.0, one["output_tokens"] / len(one["event_s"]))
        yield from (1e3 * (end - begin) / tokens_per_event for begin, end in pairwise(one["event_s"]))
