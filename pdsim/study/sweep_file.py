"""The fields of a sweep file. `pdsim.sweep.schema.json` is made of this."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from pdsim.scenario.fields import Duration, FineDuration, Section
from pdsim.scenario.loading import read_section
from pdsim.scenario.yaml_file import did_you_mean
from pdsim.study.values import Range, Values, parse_values

NUM_RANGES = 3
"""Points that a sweep simulates at their fastest and slowest, too: as many runs as six points more."""

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
    """A key names one field, or several that change together: "prefill.instances, decode.instances"."""
    return [part.strip() for part in key.split(",")]


def _check_fields(fields: dict[str, Values]) -> dict[str, Values]:
    """Several fields that change together have a list of lists."""
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
            raise ValueError("seed: replications are the sweep's own field, as in seeds: [1, 2, 3]")
        if name in seen:
            raise ValueError(f"{name} stands there twice")
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
    """So many points, spread over the fields' values."""

    count: int = Field(ge=1)
    seed: int = 0
    fields_: Fields = Field(alias="fields")


class SloSettings(Section):
    """Limits of a request, and the share of all requests that must meet them."""

    ttft: Duration | None = None
    """Longest time to the first token."""
    tpot: FineDuration | None = None
    """Longest time per output token after the first."""
    e2e: Duration | None = None
    """Longest time to the last token."""
    attainment: float = Field(default=0.99, gt=0, le=1)

    @model_validator(mode="after")
    def _has_a_limit(self) -> "SloSettings":
        if self.ttft is None and self.tpot is None and self.e2e is None:
            raise ValueError("no limit: give it ttft, tpot or e2e, such as ttft: 2 s")
        return self


class SearchSettings(Section):
    """Points that Optuna's TPE chooses, each from the results of those before it."""

    trials: int = Field(ge=1)
    seed: int = 0
    slo: str | None = None
    """Name of the SLO; None: the only one."""
    maximise: Literal["goodput", "rate"] = "goodput"
    """goodput: requests that meet the SLO, per second and GPU. rate: all requests, of points that meet the SLO."""
    fields_: Fields = Field(alias="fields")


class SweepFile(Section):
    """A base scenario and the points around it. Designs stand side by side: their points are joined."""

    name: str = Field(default="", pattern=r"^[^/\\]*$")
    """Name of the table and of the folder under runs/; empty: the file's name."""
    description: str = ""
    scenario: str
    """The base: a scenario file, relative to this one."""
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Each point runs with each of them: its replications. None: with the scenario's own."""
    grid: Annotated[Fields, AfterValidator(_check_grid)] | None = None
    """Every combination."""
    points: Annotated[tuple[dict[str, Any], ...] | None, AfterValidator(_check_points)] = Field(
        default=None, min_length=1
    )
    """Written down one by one."""
    random: Sample | None = None
    """Drawn independently."""
    sobol: Sample | None = None
    """A scrambled Sobol sequence: more even than random. Its count is a power of two."""
    search: SearchSettings | None = None
    slos: dict[str, SloSettings] = Field(default={})

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
        """The name of the SLO that a search looks at."""
        if search.slo is None and len(self.slos) == 1:
            return next(iter(self.slos))
        known = ", ".join(self.slos) or "none; give it some, as in slos: {chat: {ttft: 2 s, tpot: 50 ms}}"
        if search.slo is None:
            raise ValueError(f"search.slo is missing; there are {known}")
        if search.slo not in self.slos:
            raise ValueError(
                f"search.slo: no SLO {search.slo!r}{did_you_mean(search.slo, self.slos)}; there are {known}"
            )
        return search.slo


def load_sweep(path: Path) -> SweepFile:
    """Raises ConfigError with every mistake."""
    file = read_section(path, SweepFile)
    return file if file.name else file.model_copy(update={"name": path.stem})


def sweep_schema() -> dict[str, Any]:
    """The JSON schema of sweep files."""
    schema: dict[str, Any] = SweepFile.model_json_schema()
    return schema
