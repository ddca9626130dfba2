"""The fields of a sweep file, and the points that the file describes. The schema `pdsim.sweep.schema.json` is made from
this module.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from pdsim.dataclass import dataclass
from pdsim.scenario.loading import Changes, read_section
from pdsim.scenario.sections.fields import DIMENSIONS, Dimension, Section, Seed, checked_folder_name
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.study.verdict.slo import Slo
from pdsim.workload.request_spec import Streams

NUM_RANGES = 3
"""Default number of best points of each SLO that a sweep also simulates with the fastest and with the slowest step
times. Each of these points takes two more runs per seed.
"""
_KEYS = ("from", "to", "count", "step", "scale")
_SCALES = ("linear", "log")
_EXAMPLE = "[1, 2, 4] or {from: 64 MiB, to: 4 GiB, count: 7, scale: log}"


@dataclass(frozen=True)
class Range:
    """Numbers from `first` to `last`, both included, in the base unit of `dimension`: ns, bytes, bytes/s or 1/s. A grid
    takes `count` numbers from first to last, or goes in steps of `step` from first up to at most last. is_whole: only
    whole numbers. is_log: numbers lie evenly on a logarithmic scale.
    """

    first: float
    last: float
    dimension: Dimension | None
    """Quantity that the range's numbers measure, such as time. None: the numbers have no unit."""
    is_whole: bool
    is_log: bool
    count: int | None
    """Number of values in a grid; fewer if rounding makes values equal. None: the values follow from `step`. A range
    with neither cannot be used in a grid.
    """
    step: float | None
    """Difference of two neighbouring values in a grid, in the unit of `first`. None: `count` decides, if given."""

    def at(self, share: float) -> Any:
        """The value at a share of the range, 0 (first) to 1 (last): a number, or a text with number and unit."""
        if self.is_log:
            amount = self.first * (self.last / self.first) ** share
            return self._shown(round(amount) if self.is_whole else amount)
        if self.is_whole:  # every whole number takes an equal part of the way
            return self._shown(min(self.last, self.first + math.floor((self.last - self.first + 1) * share)))
        return self._shown(self.first + (self.last - self.first) * share)

    @property
    def num_values(self) -> int:
        """Number of values that the range has in a grid, or an upper bound of this number. Raises ValueError if the
        range has neither count nor step.
        """
        if self.step is not None:
            return math.floor((self.last - self.first) / self.step * (1 + 1e-12)) + 1
        if self.count is not None:
            return self.count
        raise ValueError("a range in a grid needs count, or step")

    def values(self) -> list[Any]:
        """The values that the range has in a grid. Raises ValueError if the range has neither count nor step."""
        if self.step is not None:
            return [self._shown(self.first + i * self.step) for i in range(self.num_values)]
        made = [self.at(i / (self.num_values - 1)) for i in range(self.num_values)]
        return list(dict.fromkeys(made))  # few whole numbers lie between near ends

    def _shown(self, amount: float) -> Any:
        if self.dimension is not None:
            return self.dimension.show(amount)
        return int(amount) if self.is_whole else amount


Values = Sequence[Any] | Range


def parse_values(given: Any) -> Values:
    """Reads the values of a field: a list or a range. Raises ValueError, whose message says what is possible."""
    if isinstance(given, Mapping):
        return _range(given)
    if not isinstance(given, list | tuple):
        raise ValueError(f"expected values such as {_EXAMPLE}, found {given!r}")
    if not given:
        raise ValueError(f"an empty list: give values, such as {_EXAMPLE}, or leave the field out")
    return list(given)


def pick(values: Values, share: float) -> Any:
    """The element of a list, or the value of a range, at a share from 0 to below 1."""
    return values.at(share) if isinstance(values, Range) else values[int(share * len(values))]


def _range(given: Mapping[str, Any]) -> Range:
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"a range has no {key!r}{did_you_mean(str(key), _KEYS)}; it has {', '.join(_KEYS)}")
    for key in ("from", "to"):
        if key not in given:
            raise ValueError(f"a range needs {key}, as in {_EXAMPLE}")
    if "count" in given and "step" in given:
        raise ValueError("a range has count or step, not both")
    if (scale := given.get("scale", "linear")) not in _SCALES:
        raise ValueError(f"scale is linear or log, found {scale!r}")
    (first, dimension), (last, other) = _amount(given["from"]), _amount(given["to"])
    if dimension is not other:
        raise ValueError(f"from {given['from']!r} to {given['to']!r}: the two are of different kinds")
    if first >= last:
        raise ValueError(f"from {given['from']!r} to {given['to']!r}: the first must be less than the second")
    if scale == "log" and first <= 0:
        raise ValueError(f"from {given['from']!r}: a log range begins above 0")
    step = _step(given.get("step"), dimension, scale)
    ends = [first, last] if step is None else [first, last, step]
    whole = all(float(end).is_integer() for end in ends) if dimension else all(isinstance(end, int) for end in ends)
    count = _count(given.get("count"))
    if whole and dimension is None and scale == "linear" and count is None:
        step = step or 1
    return Range(first, last, dimension, whole, scale == "log", count, step)


def _step(given: Any, dimension: Dimension | None, scale: str) -> float | None:
    if given is None:
        return None
    step, other = _amount(given)
    if other is not dimension or step <= 0 or scale == "log":
        raise ValueError(
            f"step {given!r}: expected a value above 0 in the unit of its range; only linear ranges have a step"
        )
    return step


def _count(given: Any) -> int | None:
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 2):  # noqa: PLR2004
        raise ValueError(f"count {given!r}: expected a whole number from 2 on")
    return given


def _amount(given: Any) -> tuple[float, Dimension | None]:
    """Reads a number with or without a unit. Returns the number in ns, bytes, bytes/s or 1/s, and its kind of quantity;
    None: a plain number. Raises ValueError if `given` is no number or has an unknown unit.
    """
    if isinstance(given, int | float) and not isinstance(given, bool):
        return given, None
    unit = str(given).lstrip("+-0123456789._ eE") if isinstance(given, str) else ""
    dimension = next((one for one in DIMENSIONS if unit and unit in one.units), None)
    if dimension is None:
        raise ValueError(f"expected a number, or a quantity such as '64 MiB', found {given!r}")
    return dimension.parse(given), dimension


_VALUES_SCHEMA = {
    "anyOf": [
        {"type": "array", "minItems": 1},
        {
            "type": "object",
            "properties": {
                "from": {"type": ["number", "string"]},
                "to": {"type": ["number", "string"]},
                "count": {"type": "integer", "minimum": 2},
                "step": {"type": ["number", "string"]},
                "scale": {"enum": ["linear", "log"]},
            },
            "required": ["from", "to"],
            "additionalProperties": False,
        },
    ]
}

FieldValues = Annotated[Values, PlainValidator(parse_values), WithJsonSchema(_VALUES_SCHEMA)]


def fields_of(key: str) -> list[str]:
    """Paths of the fields in one key of a sweep file. A key such as "prefill.instances, decode.instances" changes
    several fields together.
    """
    return [part.strip() for part in key.split(",")]


def _check_fields(fields: dict[str, Values]) -> dict[str, Values]:
    """Checks the fields of a sweep's design and returns them unchanged. Raises ValueError if there are no fields, a
    field is `seed` or is given twice, or a key names several fields that change together and one of its values is no
    list with one value per field.
    """
    if not fields:
        raise ValueError("no fields: give it some, such as {page_size: [1, 16, 64]}, or leave it out")
    seen: set[str] = set()
    for key, values in fields.items():
        names = fields_of(key)
        _check_names(names, seen)
        if len(names) == 1:
            continue
        if isinstance(values, Range):
            raise ValueError(f"{key}: fields that change together have a list, not a range")
        for value in values:
            if not isinstance(value, list) or len(value) != len(names):
                raise ValueError(f"{key}: expected a list of {len(names)} values for each point, found {value!r}")
    return fields


def _check_names(names: list[str], seen: set[str]) -> None:
    for name in names:
        if name == "seed":
            raise ValueError("seed: give the sweep's field seeds instead, as in seeds: [1, 2, 3]")
        if name in seen:
            raise ValueError(f"{name} is given twice")
        seen.add(name)


def _check_grid(fields: dict[str, Values]) -> dict[str, Values]:
    for key, values in fields.items():
        if isinstance(values, Range):
            try:
                _ = values.num_values
            except ValueError as wrong:
                raise ValueError(f"{key}: {wrong}") from None
    return fields


def _check_points(points: tuple[dict[str, Any], ...] | None) -> tuple[dict[str, Any], ...] | None:
    for point in points or ():
        _check_names(list(point), set())
    return points


Fields = Annotated[dict[str, FieldValues], AfterValidator(_check_fields)]


class Sample(Section):
    """`count` points whose values are drawn from the fields' lists and ranges."""

    count: int = Field(ge=1)
    """Number of points."""
    seed: Seed = 0
    """Seed of the random numbers from which the points are drawn."""
    fields_: Fields = Field(alias="fields")
    """Lists or ranges of values, by the path of the scenario field."""


def _slo(value: Any) -> Slo:
    """Reads an SLO from text. Raises ValueError if the value is no text, or no SLO."""
    if isinstance(value, Slo):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected text, such as 'ttft < 2 s and tpot < 50 ms for 95 %', found {value!r}")
    return Slo.of_text(value)


SloText = Annotated[
    Slo,
    PlainValidator(_slo, json_schema_input_type=str),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string"}),
]
"""An SLO, written as for the option --slo."""


class SearchSettings(Section):
    """A search: Optuna's TPE chooses points by the results of earlier points."""

    trials: int = Field(ge=1)
    """Number of points that the search evaluates."""
    seed: Seed = Field(default=0, lt=1 << 32)
    """Seed of the random numbers with which TPE chooses points."""
    slo: str | None = None
    """Name of the SLO that the search uses. None: the only SLO of the file."""
    maximise: Literal["goodput", "rate"] = "goodput"
    """goodput: the search maximises requests within the SLO, per second and GPU. rate: it maximises all requests per
    second and GPU, of points that meet the SLO.
    """
    fields_: Fields = Field(alias="fields")
    """Lists or ranges of values to choose from, by the path of the scenario field."""


class SweepFile(Section):
    """A scenario, and the points to simulate. Each point changes some of the scenario's fields. The sweep has all
    points that the fields grid, points, random, sobol and search describe.
    """

    name: Annotated[str, Field(pattern=r"^[^/\\]*$"), AfterValidator(checked_folder_name)] = ""
    """Name of the sweep, of its table and of its folder under runs/. Empty: the name of the file."""
    description: str = ""
    """Text for readers of the file, without an effect."""
    scenario: str
    """Path of the scenario file that the points change, relative to the folder of the sweep file."""
    seeds: tuple[Seed, ...] | None = Field(default=None, min_length=1)
    """Seeds of random numbers. Each point is run once with each seed. None: once, with the scenario's own seed."""
    grid: Annotated[Fields, AfterValidator(_check_grid)] | None = None
    """Values of fields. Every combination of the values is a point."""
    points: Annotated[tuple[dict[str, Any], ...] | None, AfterValidator(_check_points)] = Field(
        default=None, min_length=1
    )
    """A list of points, each with the values of its fields."""
    random: Sample | None = None
    """Points whose values are drawn independently of one another."""
    sobol: Sample | None = None
    """Points of a scrambled Sobol sequence, which covers the fields' ranges more evenly than random points. The number
    of points must be a power of two.
    """
    search: SearchSettings | None = None
    """A search that chooses further points by the results of earlier ones."""
    slos: dict[str, SloText] = Field(default={})
    """SLOs that judge each point, by name, such as {chat: "ttft p99 < 2 s"}."""

    @model_validator(mode="after")
    def _is_consistent(self) -> "SweepFile":
        if all(part is None for part in (self.grid, self.points, self.random, self.sobol, self.search)):
            raise ValueError("nothing to sweep: give it grid, points, random, sobol or search")
        if self.sobol is not None and self.sobol.count & (self.sobol.count - 1):
            below = 1 << (self.sobol.count.bit_length() - 1)
            raise ValueError(f"sobol.count: {self.sobol.count} is no power of two; near are {below} and {2 * below}")
        if self.search is not None:
            self.searched_slo(self.search)
        return self

    def searched_slo(self, search: SearchSettings) -> str:
        """Name of the SLO that a search uses: the one that the search names, or the file's only SLO. Raises ValueError
        if the search names none and the file has not exactly one, or if the file lacks the named SLO.
        """
        if search.slo is None and len(self.slos) == 1:
            return next(iter(self.slos))
        known = ", ".join(self.slos) or "none; give it some, as in slos: {chat: ttft p99 < 2 s}"
        if search.slo is None:
            raise ValueError(f"search.slo is missing; there are {known}")
        if search.slo not in self.slos:
            raise ValueError(
                f"search.slo: no SLO {search.slo!r}{did_you_mean(search.slo, self.slos)}; there are {known}"
            )
        return search.slo


def load_sweep(path: Path) -> SweepFile:
    """Reads a sweep file. Raises ConfigError, which lists every mistake in the file."""
    file = read_section(path, SweepFile)
    return file if file.name else file.model_copy(update={"name": path.stem})


def sweep_schema() -> dict[str, Any]:
    """The JSON schema of sweep files."""
    schema: dict[str, Any] = SweepFile.model_json_schema()
    return schema


def designed_points(file: SweepFile) -> list[Changes]:
    """Points of all designs except the search, in the order grid, points, random, sobol. Raises ConfigError if a design
    needs a package that is missing.
    """
    made: list[Changes] = [*_grid(file.grid or {}), *map(dict, file.points or ())]
    if file.random is not None:
        made += _random(file.random)
    if file.sobol is not None:
        made += _sobol(file.sobol)
    return made


def num_points(file: SweepFile) -> int:
    """Number of points of all designs, including the search. If a grid has ranges, the number is an upper bound,
    because rounding may make values of a range equal.
    """
    grid = [v.num_values if isinstance(v, Range) else len(v) for v in (file.grid or {}).values()]
    samples = [sample.count for sample in (file.random, file.sobol) if sample is not None]
    searched = 0 if file.search is None else file.search.trials
    return (prod(grid) if grid else 0) + len(file.points or ()) + sum(samples) + searched


def assigned(values: Mapping[str, Any]) -> Changes:
    """Returns the value of each scenario field. values: the value of each key of a sweep file. If a key names several
    fields, its value is a list with one value per field.
    """
    changes: Changes = {}
    for key, value in values.items():
        names = fields_of(key)
        changes |= {names[0]: value} if len(names) == 1 else dict(zip(names, value, strict=True))
    return changes


def _grid(fields: Mapping[str, Values]) -> Iterator[Changes]:
    if fields:
        lists = [values.values() if isinstance(values, Range) else values for values in fields.values()]
        for combination in product(*lists):
            yield assigned(dict(zip(fields, combination, strict=True)))


def _random(sample: Sample) -> Iterable[Changes]:
    """Yields random points. Each field has a stream of random numbers of its own, so that adding a field does not
    change the values of other fields.
    """
    streams = {key: Streams(sample.seed).named(key) for key in sample.fields_}
    for _ in range(sample.count):
        yield assigned({key: pick(values, streams[key].random()) for key, values in sample.fields_.items()})


def _sobol(sample: Sample) -> Iterable[Changes]:
    try:
        from scipy.stats import qmc  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError("sobol needs SciPy, which is not installed: pip install 'pdsim[sweep]'") from None
    sequence = qmc.Sobol(len(sample.fields_), seed=sample.seed)
    for shares in sequence.random_base2(sample.count.bit_length() - 1):
        yield assigned(
            {key: pick(values, share) for (key, values), share in zip(sample.fields_.items(), shares, strict=True)}
        )
