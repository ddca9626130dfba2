"""Reads files of measured times, one per row: CSV, plain or gzip, or Parquet. docs/calibration.md lists the columns of
each kind of row.

Rows without a column `kind` come from `pdkernels.bench` and have a column `kernel`, or are older rows of transfers and
have a column `transport`.
"""

import csv
import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdsim.dataclass import dataclass
from pdsim.inputs import open_text
from pdsim.scenario.yaml_file import ConfigError, did_you_mean

Floats = NDArray[np.float64]
Columns = dict[str, Floats]


class Kind(NamedTuple):
    """A kind of row: the columns that it has besides `time_us`, on which its times depend."""

    needed: tuple[str, ...] = ()
    """Columns that every row of the kind must have."""
    optional: Mapping[str, float] = {}
    """Columns that may be missing, each with the value that then applies."""
    divided_by: str = ""
    """Column whose values divide the rows; each value has a fit of its own. Empty: all rows have one fit."""
    role: Literal["prefill", "decode", ""] = ""
    """Role of the instances on whose number of ranks the times depend. Empty: the times do not depend on a number of
    ranks.
    """


_TRANSFER = Kind(("payload_bytes", "num_descriptors"), divided_by="transport")
KINDS: dict[str, Kind] = {
    "prefill": Kind(("new_tokens", "context_tokens"), {"prompts": 1.0, "end_s": 0.0}, role="prefill"),
    "decode": Kind(("batch", "context_tokens"), {"graph": 0.0, "verified": 1.0}, role="decode"),
    "gather": Kind(("payload_bytes",), {"submit_us": 0.0}),
    "scatter": Kind(("payload_bytes",), {"submit_us": 0.0}),
    "transfer": _TRANSFER,
    "host": Kind((), {"new_tokens": 0.0}, divided_by="what"),
    "storage": Kind(("payload_bytes", "num_descriptors"), divided_by="what"),
    "clock": Kind(("new_tokens", "busy_us"), role="prefill"),
    "loop": Kind(("batch", "context_tokens"), {"graph": 0.0, "verified": 1.0, "rest_us": nan}, role="decode"),
    "sending": _TRANSFER._replace(role="decode"),
    "handover": _TRANSFER._replace(role="decode"),
    "ttft": Kind(("new_tokens", "context_tokens"), role="prefill"),
    "stall": Kind(("new_tokens",), role="prefill"),
    "burst": Kind(("new_tokens", "prompts"), role="prefill"),
    "round_trip": Kind(role="prefill"),
}
_HOST_ROLES: dict[str, Literal["prefill", "decode"]] = {
    "grant": "prefill",
    "result": "prefill",
    "admit": "decode",
    "answer": "decode",
}
"""Rows of kind `host` by name: the role whose loop does this work. The loop informs all ranks of its instance, so the
time depends on their number.
"""
OF_PAIRS = ("host", "sending", "handover")
"""Kinds of rows that a prefill and a decode instance measure together. If no such row was measured with the number of
ranks that is asked for, rows of instances with one rank stand in.
"""
_MOST = 1e18
"""Largest value that a row may have in any column. Sums of squares of larger numbers are not finite."""
FORWARDS = ("prefill", "decode")
"""Kinds of rows that are averaged to one row per shape if they were measured in rounds. Rows that a server measured are
not averaged.
"""
STAGING = ("gather", "scatter")
OBSERVED = ("ttft", "stall", "burst", "round_trip")
"""Kinds of rows that a client of a server measures."""
DEVICE = ("device", "machine")
UNKNOWN = "unknown"
"""Stands for the device of a server that does not name its device."""
REQUIRED_PROVENANCE = ("command", "date")
PROVENANCE = (
    *DEVICE,
    "driver",
    "engine",
    "software",
    "versions",
    "torch",
    "torch_version",
    "triton",
    "python",
    "model",
    "dtype",
    "page_size",
    "tp",
    "ep",
    "moe_a2a_backend",
    "url",
)
OUR_KERNELS = "fused"
"""Variant in rows of `pdkernels.bench` for the kernels that real mode runs. Other variants are for comparison."""
FOUND_IDLE = "found_idle"
"""Column with 1 for each forward of a log that found its GPU idle, and 0 for each that was launched while the GPU still
ran the forward before.
"""
PREFILL_GRAPHS = "prefill_graphs"
"""Name of the column with the sizes, in tokens, of the CUDA graphs in which an engine runs prefill forwards. The sizes
ascend, separated by spaces.
"""
A_COPY = "copy"
"""Name, in place of a transport's, in rows of plain copies. They measure a link without a transfer engine."""


class Ranks(NamedTuple):
    """Number of ranks of an instance (tp). ep: number of ranks over which whole experts are spread: all ranks, or 1 if
    each rank has a part of every expert. a2a: library that sends tokens to whole experts.
    """

    tp: int = 1
    ep: int = 1
    a2a: str = "none"

    def __str__(self) -> str:
        sizes = f"tp {self.tp}" if self.ep == 1 else f"tp {self.tp} and ep {self.ep}"
        return sizes if self.a2a == "none" else f"{sizes} with {self.a2a}"


ONE_RANK = Ranks()


def flags_of(pair: tuple[Ranks, Ranks]) -> list[str]:
    """Options of `pdsim calibrate` that select the rows of these ranks of prefill and decode."""
    given = [(role, ranks._asdict()) for role, ranks in zip(("prefill", "decode"), pair, strict=True)]
    usual = ONE_RANK._asdict()
    return [
        word
        for name in usual
        for role, values in given
        if values[name] != usual[name]
        for word in (f"--{role}-{name}", str(values[name]))
    ]


@dataclass(frozen=True)
class Rows:
    """All rows of one kind, one name, and one number of ranks. name: value of the column that divides this kind of rows
    (Kind.divided_by), such as the transport of transfers. Empty: the kind is not divided.
    """

    kind: str
    """Name of the kind, such as prefill, decode, transfer or host."""
    name: str
    columns: Columns
    """The rows' values, by column. The column `time_ns` has their times in ns."""
    ranks: Ranks = ONE_RANK
    """Number of ranks of the instance that was measured."""

    @property
    def role(self) -> str:
        """Role (prefill or decode) of the instances on whose number of ranks the times depend. Empty: the times depend
        on no number of ranks.
        """
        return _HOST_ROLES.get(self.name, "") if self.kind == "host" else KINDS[self.kind].role

    def __len__(self) -> int:
        return len(self.columns["time_ns"])

    def where(self, chosen: NDArray[Any]) -> "Rows":
        return replace(self, columns={name: column[chosen] for name, column in self.columns.items()})


def is_log(rows: Rows) -> bool:
    """True if the rows are a server's log: every forward has the time at which it ended."""
    return bool(rows.columns.get("end_s", np.zeros(1)).all())


@dataclass(frozen=True)
class Measurements:
    rows: tuple[Rows, ...]
    """The rows of all files, divided by kind, name and number of ranks."""
    provenance: tuple[dict[str, str], ...]
    """For each file: where its rows come from. If rows of a file differ, their different values are joined with
    commas.
    """
    notes: tuple[str, ...] = ()
    """Says which rows were left out, and why."""
    forwards: Mapping[str, list[str]] = field(default_factory=dict)
    """The different values that rows of prefill and decode have in some columns (such as device, model and graph
    sizes), by column. Rows of other kinds do not count, because they may come from a host without the GPU.
    """

    def of(self, kind: str) -> tuple[Rows, ...]:
        return tuple(rows for rows in self.rows if rows.kind == kind)

    def of_ranks(self, prefill: Ranks, decode: Ranks) -> "Measurements":
        """Returns only the measurements with the given parallel sizes. Of kinds that do not depend on ranks, the rows
        of one rank are kept. For a kind in OF_PAIRS without rows of these sizes, the rows of one rank are kept instead.
        Notes name the kinds without any such row, and other rows that no choice of sizes would keep. prefill, decode:
        the wanted parallel sizes of prefill and of decode instances.

        Raises ConfigError if there are rows of prefill or decode forwards, but none with the wanted sizes.
        """
        asked = {"prefill": prefill, "decode": decode, "": ONE_RANK}
        for phase in FORWARDS:
            found = sorted(rows.ranks for rows in self.of(phase))
            if found and asked[phase] not in found:
                there = ", ".join(map(str, found))
                flags = f"--{phase}-tp, --{phase}-ep, --{phase}-a2a"
                raise ConfigError(f"no rows of {phase} with {asked[phase]}; the rows have {there}: {flags}")
        there_are = {(rows.kind, rows.name, rows.ranks) for rows in self.rows}

        def ranks_of(rows: Rows) -> Ranks:
            wanted = asked[rows.role]
            is_there = rows.kind not in OF_PAIRS or (rows.kind, rows.name, wanted) in there_are
            return wanted if is_there else ONE_RANK

        chosen = tuple(rows for rows in self.rows if rows.ranks == ranks_of(rows))
        notes = (*_lost(self.rows, chosen, asked), *_of_more_ranks(self.rows, chosen))
        return replace(self, rows=chosen, notes=notes)

    @property
    def devices(self) -> str:
        return ", ".join(dict.fromkeys(file["device"] for file in self.provenance))


def _lost(there: Sequence[Rows], chosen: Sequence[Rows], asked: Mapping[str, Ranks]) -> Iterator[str]:
    """A note for each kind of rows, or for some values of its column `name`, of which no row was chosen. there: all
    rows. asked: the wanted parallel sizes, by role.
    """
    kept = {(rows.kind, rows.name) for rows in chosen}
    lost: dict[tuple[str, Ranks], set[str]] = {}
    for rows in there:
        if (rows.kind, rows.name) not in kept:
            lost.setdefault((rows.kind, asked[rows.role]), set()).add(rows.name)
    for (kind, ranks), names in sorted(lost.items()):
        named = f" ({', '.join(sorted(names))})" if KINDS[kind].divided_by else ""
        yield f"{kind}{named} is left out: no rows with {ranks}"


def _of_more_ranks(there: Sequence[Rows], chosen: Sequence[Rows]) -> Iterator[str]:
    """A note for each kind of rows that one rank measures, if some of its rows are left out because they have several
    ranks. there: all rows.
    """
    kept = {(rows.kind, rows.name) for rows in chosen}
    for rows in there:
        is_of_one = not KINDS[rows.kind].role and rows.kind not in OF_PAIRS
        if is_of_one and (rows.kind, rows.name) in kept and rows.ranks != ONE_RANK:
            of_name = f" ({rows.name})" if rows.name else ""
            yield f"{rows.kind}{of_name}: rows with {rows.ranks} are left out, those with {ONE_RANK} are used"


def read_rows(paths: Sequence[Path]) -> Measurements:
    """Reads files of measured times. Raises ConfigError, which names the file, line and column of a mistake.

    `pdreal measure` measures each shape of a forward in several rounds. The rounds of a shape (rows of prefill and
    decode with `repeats`) become one row with the mean time, in which slow rounds count as they would in a run.
    """
    found: dict[tuple[str, str, Ranks], list[dict[str, float]]] = {}
    rounds: dict[tuple[str, str, Ranks], list[dict[str, float]]] = {}
    provenance = []
    forwards: list[Mapping[str, str]] = []
    for path in paths:
        lines = _lines(path)
        provenance.append(_provenance(path, lines))
        for number, line in enumerate(lines, start=2):
            where = f"{path}, line {number}"
            kind = _kind(line, where)
            if kind is not None:
                name = KINDS[kind].divided_by
                key = kind, line.get(name, "") if name else "", _ranks(line, where)
                single = found.setdefault(key, [])
                is_round = kind in FORWARDS and line.get("repeats")
                (rounds.setdefault(key, []) if is_round else single).append(_values(kind, line, where))
                if kind in FORWARDS:
                    forwards.append(line)
    for key, in_rounds in rounds.items():
        found[key] += _shapes(in_rounds)
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: no row to fit; kinds are {', '.join(KINDS)}")
    if len(graphs := _distinct(forwards, [PREFILL_GRAPHS])) > 1:
        raise ConfigError(f"{', '.join(map(str, paths))}: {PREFILL_GRAPHS} of rows differ: {' and '.join(graphs)}")
    counts = sorted({row["verified"] for (kind, *_), values in found.items() if kind == "decode" for row in values})
    if len(counts) > 1:
        texts = " and ".join(f"{count:g}" for count in counts)
        raise ConfigError(f"{', '.join(map(str, paths))}: decode rows verify {texts} tokens; fit rows of one number")
    rows = [Rows(kind, name, _columns(values), ranks) for (kind, name, ranks), values in found.items()]
    kept = {"device": DEVICE, **{name: (name,) for name in ("model", "dtype", "ep", "verified", PREFILL_GRAPHS)}}
    setups = {name: _distinct(forwards, columns) for name, columns in kept.items()}
    return Measurements(tuple(rows), tuple(provenance), forwards=setups)


def _distinct(lines: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(value for line in lines for column in columns if (value := line.get(column))))


def _columns(rows: Sequence[Mapping[str, float]]) -> Columns:
    return {column: np.array([row[column] for row in rows]) for column in rows[0]}


def _shapes(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Replaces rows of the same shape by one row with their mean time. Rows have the same shape if all columns except
    the time are equal.
    """
    times_ns: dict[tuple[tuple[str, float], ...], list[float]] = {}
    for row in rows:
        shape = tuple((name, value) for name, value in row.items() if name != "time_ns")
        times_ns.setdefault(shape, []).append(row["time_ns"])
    return [{**dict(shape), "time_ns": fmean(rounds_ns)} for shape, rounds_ns in times_ns.items()]


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise ConfigError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: rows are a file")
    try:
        return _parquet_lines(path) if path.suffix == ".parquet" else _csv_lines(path)
    except (ValueError, OSError, EOFError, csv.Error) as broken:
        raise ConfigError(f"{path} cannot be read as rows: {broken}") from None


def _parquet_lines(path: Path) -> list[dict[str, str]]:
    from pyarrow import parquet  # noqa: PLC0415  slow to import

    table = parquet.read_table(path).to_pylist()
    return [{name: "" if value is None else str(value) for name, value in line.items()} for line in table]


def _csv_lines(path: Path) -> list[dict[str, str]]:
    with open_text(path) as file:
        return list(csv.DictReader(file))


def _provenance(path: Path, lines: Sequence[Mapping[str, str]]) -> dict[str, str]:
    if not lines:
        raise ConfigError(f"{path} has no rows")
    device = next((name for name in DEVICE if lines[0].get(name)), None)
    missing = [name for name in REQUIRED_PROVENANCE if not lines[0].get(name)]
    if device is None or missing:
        lacking = [*([] if device else [DEVICE[0]]), *missing]
        raise ConfigError(
            f"{path} does not say where its rows come from: no {', '.join(lacking)}; it has {', '.join(lines[0])}"
        )

    def distinct(column: str) -> str:
        return ", ".join(_distinct(lines, [column]))

    known = {name: distinct(name) for name in PROVENANCE if name not in DEVICE}
    stated = {"device": distinct(device), **known, **{name: distinct(name) for name in REQUIRED_PROVENANCE}}
    return {"rows": path.name, **{name: value for name, value in stated.items() if value}}


def _kind(line: Mapping[str, str], where: str) -> str | None:
    """The kind of a row, from the row's values by column. where: names the row in messages of errors. None: the row is
    not used, because it times a plain copy or another kernel for comparison, or because a kernel has no time. Raises
    ConfigError if the kind is unknown.
    """
    if "kind" in line:
        kind = line["kind"]
        if kind not in KINDS:
            raise ConfigError(f"{where}: no kind {kind!r}{did_you_mean(kind, KINDS)}; {', '.join(KINDS)}")
    elif "kernel" in line:
        is_ours = line["kernel"] in STAGING and line.get("variant") == OUR_KERNELS and line.get("time_us")
        return line["kernel"] if is_ours else None
    elif "transport" in line:
        kind = "transfer"
    else:
        raise ConfigError(f"{where}: no column kind, kernel or transport; there are {', '.join(line)}")
    return None if kind == "transfer" and line.get("transport") == A_COPY else kind


def _values(kind: str, line: Mapping[str, str], where: str) -> dict[str, float]:
    columns = KINDS[kind]
    if columns.divided_by and not line.get(columns.divided_by):
        raise ConfigError(f"{where}: {kind} needs {columns.divided_by}")
    values = {name: _number(line, name, where) for name in (*columns.needed, "time_us")}
    for name, empty in columns.optional.items():
        values[name] = _number(line, name, where) if line.get(name) else empty
    if kind in {"sending", "handover"}:  # each rank sends its part
        num_ranks = _ranks(line, where).tp
        values |= {name: values[name] / num_ranks for name in columns.needed}
    if kind == "prefill":
        values["graph"] = _graph(line, where, values["new_tokens"])
    if "kind" in line and kind in STAGING:  # timed from the call on the host, which pdkernels.bench leaves out
        values["submit_us"] = 0.0
    values["time_ns"] = 1e3 * values.pop("time_us")
    if values["time_ns"] <= 0:
        raise ConfigError(f"{where}: time_us: expected a time above 0, found {line['time_us']!r}")
    return values


def graph_sizes(text: str) -> list[int]:
    """Reads the sizes of CUDA graphs from a row's text. Raises ValueError if the text has anything else."""
    sizes = [int(size) for size in text.split()]
    if sizes != sorted({size for size in sizes if size > 0}):
        raise ValueError
    return sizes


def _graph(line: Mapping[str, str], where: str, num_tokens: float) -> float:
    """Number of tokens of the smallest CUDA graph that holds a forward of num_tokens. line: the row's values by column.
    where: names the row in messages of errors. 0: the forward ran without a graph.
    """
    words = line.get(PREFILL_GRAPHS) or ""
    try:
        sizes = graph_sizes(words)
    except ValueError:
        raise ConfigError(f"{where}: {PREFILL_GRAPHS}: expected rising numbers of tokens, found {words!r}") from None
    return next((float(size) for size in sizes if size >= num_tokens), 0.0)


def _ranks(line: Mapping[str, str], where: str) -> Ranks:
    sizes = {}
    for column in ("tp", "ep"):
        text = line.get(column) or "1"
        if not text.isdecimal() or not int(text):
            raise ConfigError(f"{where}: {column}: expected a number of ranks, found {text!r}")
        sizes[column] = int(text)
    return Ranks(sizes["tp"], sizes["ep"], line.get("moe_a2a_backend") or "none")


def _number(line: Mapping[str, str], name: str, where: str) -> float:
    least = 1 if name == "prompts" else 0
    try:
        value = float(line.get(name) or "")
    except ValueError:
        raise ConfigError(f"{where}: {name}: expected a number, found {line.get(name)!r}") from None
    if not least <= value <= _MOST:
        raise ConfigError(f"{where}: {name}: expected a number from {least} to {_MOST:g}, found {line.get(name)!r}")
    return value


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], provenance: Mapping[str, str]) -> None:
    """Writes rows so that `read_rows` can read them: as CSV, with gzip if the name ends in .gz. provenance: columns to
    add to every row, which say where the rows come from.
    """
    complete: Iterator[dict[str, Any]] = ({**row, **provenance} for row in rows)
    first = next(complete)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, first)
        writer.writeheader()
        writer.writerow(first)
        writer.writerows(complete)
