"""The base class of a file's sections, and quantities. In files, a quantity has its unit next to its value (5 ms). In
code, the unit follows from the type of a section's field (Duration: ns) or from a component's field name (_ns).
"""

import ast
import re
from importlib.resources import files
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from pdsim.inputs import shown
from pdsim.system.catalog import hint


class Section(BaseModel):
    """A part of a file. Sections cannot be changed, and unknown fields are errors. Null stands for a field's
    default.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _has_defaults_for_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}

    @model_validator(mode="before")
    @classmethod
    def _has_no_boolean_for_a_number(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(name)
            if field and not any(isinstance(one, Quantity) for one in field.metadata):  # which has words of its own
                require_no_boolean(field.annotation, value, f"{name}: ")
        return data


def require_no_boolean(hint: Any, value: Any, where: str = "") -> None:
    """Raises ValueError if the value has true or false where the type wants a number. Python would take them for 1 and
    0.

    hint: type of the value. where: names the value in the message.
    """
    found = next((one for one in (value if isinstance(value, list) else [value]) if isinstance(one, bool)), None)
    kinds = [] if found is None else _kinds(hint)
    if bool not in kinds and (int in kinds or float in kinds):
        raise ValueError(f"{where}expected a number, found {str(found).lower()}")


def _kinds(hint: Any) -> list[Any]:
    """A type and all types within it. `tuple[int, ...] | None` has tuple, int and None."""
    return [hint, *(kind for inside in get_args(hint) for kind in _kinds(inside))]


def checked_folder_name(name: str) -> str:
    """Returns the name. Raises ValueError if the name is "." or "..", or contains characters that cannot be printed,
    such as control characters. The fields' patterns refuse slashes.
    """
    if name in {".", ".."} or not name.isprintable():
        raise ValueError(f"expected a name that a folder can have, without control characters, found {name!r}")
    return name


FolderName = Annotated[str, Field(pattern=r"^[^/\\]+$"), AfterValidator(checked_folder_name)]
"""Name of a folder inside another folder."""


Seed = Annotated[int, Field(ge=0)]


def meanings(kind: type[Any]) -> dict[str, str]:
    """The docstrings of a class's fields, including those of its bases, by field."""
    found = {}
    for base in reversed(kind.__mro__):
        for field, below in pairwise(_body(base)):
            if isinstance(field, ast.AnnAssign | ast.Assign) and isinstance(below, ast.Expr):
                name = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
                found[ast.unparse(name)] = in_words(ast.literal_eval(below.value))
    return found


def in_words(docstring: str | None) -> str:
    """A docstring as one paragraph, in which null takes the place of None, as in files."""
    return re.sub(r"\bNone\b", "null", " ".join((docstring or "").split()))


def _body(kind: type[Any]) -> list[ast.stmt]:
    """Returns the statements in the body of a class, read from its source file. The source file exists for compiled
    modules, too. Empty: the class is not pdsim's.
    """
    package, *path = kind.__module__.split(".")
    if package != __package__.partition(".")[0]:
        return []
    source = files(package).joinpath(*path[:-1], f"{path[-1]}.py").read_text(encoding="utf-8")
    found = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    return next(found).body


def base_folder(info: ValidationInfo[Any]) -> Path:
    """The folder at which relative paths in a file start."""
    return Path((info.context or {}).get("base", "."))


_NUMBER = re.compile(r"\s*([-+]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*\Z")

_DURATIONS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9}
_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_BANDWIDTHS = {f"{unit}/s": factor for unit, factor in _SIZES.items()} | {
    name: factor / 8
    for prefix, factor in (("M", 1e6), ("G", 1e9), ("T", 1e12))
    for name in (f"{prefix}bps", f"{prefix}b/s", f"{prefix}bit/s")
}
_RATES = {"/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600}


class Dimension(NamedTuple):
    """A kind of quantity, such as time: the suffix of its fields in code, and the units of its values in files."""

    what: str
    """Name of the kind of quantity, such as duration, for messages."""
    suffix: str
    """End of the names of components' fields in code, such as _ns. Files name the field without this end."""
    units: dict[str, float]
    """Factor from each unit in files to the base unit, by the name of the unit."""
    example: str
    """A value as files have it, such as 5 ms, for messages."""
    least: float
    """Smallest accepted value above 0, in base units. Smaller values are mistakes, and dividing by them would
    overflow.
    """
    most: float
    """Largest accepted value, in base units. Larger values are mistakes, and sums of them would overflow 64 bits."""

    def parse(self, value: Any) -> float:
        """Reads a value with its unit and returns it in base units. Raises ValueError, which names the possible
        units.
        """
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"expected a {self.what} such as {self.example!r}, found {shown(value)}")
        match = _NUMBER.match(str(value))
        if match is None:
            raise ValueError(f"expected a {self.what} such as {self.example!r}, found {shown(value)}")
        number, unit = float(match[1].replace("_", "")), match[2]
        if not unit and number:  # nothing needs no unit
            raise ValueError(
                f"bare number {match[1][:40]}: write a {self.what} with its unit, such as {self.example!r}"
            )
        if unit and unit not in self.units:
            known = f"there are {', '.join(self.units)}{hint(unit, self.units)}"
            raise ValueError(f"{unit!r} is no unit of a {self.what}; {known}")
        if not 0 <= number < inf:
            raise ValueError(
                f"a {self.what} cannot be {'infinite' if number > 0 else 'negative'}, found {shown(value)}"
            )
        amount = number * self.units[unit] if unit else 0.0
        if amount and not self.least <= amount <= self.most:
            raise ValueError(
                f"a {self.what} is 0 or from {self.show(self.least)} to {self.show(self.most)}, found {shown(value)}"
            )
        return amount

    def show(self, value: float) -> str:
        """Text of a value in the largest unit that gives a whole number. If none does: the exact value in the base
        unit.
        """
        for unit, factor in sorted(self.units.items(), key=lambda item: -item[1]):
            if value and value % factor == 0:
                return f"{int(value / factor)} {unit}".replace(" /", "/")
        base = min((unit for unit, factor in self.units.items() if factor == 1.0), key=len)
        return f"{value!r} {base}".replace(" /", "/")


DURATION = Dimension("duration", "_ns", _DURATIONS, "5 ms", 1e-9, 3.6e17)
SIZE = Dimension("size", "_bytes", _SIZES, "512 MiB", 1e-9, 1e18)
BANDWIDTH = Dimension("bandwidth", "_bytes_per_s", _BANDWIDTHS, "50 GB/s", 1.0, 1e18)
RATE = Dimension("rate", "_per_s", _RATES, "4/s", 1e-12, 1e15)

DIMENSIONS = (DURATION, BANDWIDTH, SIZE, RATE)
"""All kinds of quantities. A field's kind is the first whose suffix ends the field's name, so _bytes_per_s must stand
before _per_s.
"""


class Quantity:
    """Marks a pydantic field whose value has a unit in files."""

    def __init__(self, dimension: Dimension) -> None:
        self.dimension = dimension

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(value: Any) -> float:
            amount = self.dimension.parse(value)
            return round(amount) if kind is int else amount

        return core_schema.no_info_before_validator_function(
            parse,
            handler(kind),  # with the field's bounds
            serialization=core_schema.plain_serializer_function_ser_schema(self.dimension.show),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        what = f"a {self.dimension.what} with its unit"
        return {"type": "string", "description": what, "examples": [self.dimension.example]}


Duration = Annotated[int, Quantity(DURATION)]
"""A duration in ns."""
FineDuration = Annotated[float, Quantity(DURATION)]
"""A duration in ns with fractions, such as the time of one token."""
Size = Annotated[int, Quantity(SIZE)]
"""A size in bytes."""
Bandwidth = Annotated[float, Quantity(BANDWIDTH)]
"""A bandwidth in bytes per second."""
Rate = Annotated[float, Quantity(RATE)]
"""A rate in events per second."""
