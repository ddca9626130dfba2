"""Reads scenario files and --set changes. A message about a mistake names the file or option and the field, and the
line if the field stands in the file.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema

from pdsim.inputs import shown
from pdsim.metrics.run_folder import CATALOG, SCENARIO
from pdsim.scenario.rules import NOT_MODELLED
from pdsim.scenario.schema import SHORTHANDS, Scenario, by_role
from pdsim.scenario.sections.component import describe_component
from pdsim.scenario.sections.cost import CostChoice
from pdsim.scenario.sections.fields import Section, meanings
from pdsim.scenario.sections.profile import read_profile
from pdsim.scenario.yaml_file import ConfigError, did_you_mean, line_of, parse_yaml, read_yaml
from pdsim.system.catalog import lend, own_entries, write_entries
from pdsim.workload.trace_file import InputWarning

SectionT = TypeVar("SectionT", bound=Section)

Changes = dict[str, Any]
"""New values of scenario fields, by dotted path: {"decode.tp": 2}."""


def load_scenario(path: Path | str, changes: Iterable[str] = ()) -> Scenario:
    """Reads a scenario file and changes it. Each change is a text "dotted.path=value". Raises ConfigError for a wrong
    file, change or field. A file of a run folder may also use the catalog entries in its folder.
    """
    path = Path(path)
    data = _fields_in(path)
    for change in changes:
        apply_change(data, change)
    for differing in lend(path.parent / CATALOG) if path.name == SCENARIO else ():
        warnings.warn(differing, InputWarning, stacklevel=2)
    return parse_scenario(data, base=path.parent, where=str(path), text=path.read_text(encoding="utf-8"))


def write_entries_of(scenario: Scenario, folder: Path) -> None:
    """Copies the user's own entries among `scenario.entries` into the folder, where `load_scenario` finds them."""
    write_entries(own_entries(scenario.entries), folder / CATALOG)


def parse_scenario(data: dict[str, Any], *, base: Path, where: str = "scenario", text: str = "") -> Scenario:
    """Makes a scenario from plain data. Raises ConfigError, which lists every wrong field. Of rules that relate several
    fields (RULES), only the first broken one is reported.

    base: folder at which relative paths start. where: name of the data in messages. text: text of the file that has the
    data, from which messages take line numbers; empty: messages have no line numbers.
    """
    return _validated(Scenario, data, where, text, base)


def read_section(path: Path, kind: type[SectionT]) -> SectionT:
    """Reads a file that has the fields of the class `kind`. Raises ConfigError if the file cannot be read or a
    field is wrong.
    """
    return _validated(kind, _fields_in(path), str(path), path.read_text(encoding="utf-8"))


def load_cost(profile: Path) -> CostChoice:
    """Reads the section `cost` of a profile file. Raises ConfigError if the file is wrong."""
    return _validated(CostChoice, by_role(read_profile(profile)["cost"]), str(profile))


def _fields_in(path: Path) -> dict[str, Any]:
    data = read_yaml(path)
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise ConfigError(f"{path}: expected a mapping of fields, found {found}")
    return data


def _validated(kind: type[SectionT], data: Any, where: str, text: str = "", base: Path = Path()) -> SectionT:
    """Checks plain data against the class `kind`, and returns an object of the class. Raises ConfigError with a line
    for each wrong field, or for the first number beyond MOST. where: name of the data in messages. text: text of the
    file with the data, for line numbers. base: folder at which relative paths start.
    """
    for path, found in _numbers(data):
        if abs(found) > MOST and found not in (inf, -inf):  # the field tells what is not finite
            place = f"{where}: {'.'.join(map(str, path))}"
            raise ConfigError(f"{place}: expected a number from -{MOST:.1e} to {MOST:.1e}, found {shown(found)}")
    try:
        return kind.model_validate(data, context={"base": str(base)})
    except ValidationError as wrong:
        raise ConfigError("\n".join(_explain(error, kind, where, text) for error in wrong.errors())) from None


MOST = 2**63 - 1
"""Largest absolute value of a number in a file. The tables of a run store numbers in 64 bits."""


def _numbers(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int | float]]:
    """Yields the path (keys and indices from the outermost object inwards) and the value of each number in plain data.
    path: beginning of all these paths.
    """
    if isinstance(data, int | float):
        yield path, data
    elif isinstance(data, dict | list | tuple):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _numbers(value, (*path, key))


_MOST_SHOWN = 200
"""If an argument of --set is wrong, the message shows at most this number of its characters."""


def apply_change(data: dict[str, Any], change: str) -> None:
    """Sets the field of plain data that a change names. change: "dotted.path=value", such as "decode.radix_cache=true";
    the value is YAML. Raises ConfigError if the change has another form, if its value is no YAML, or if its path leads
    through a value without fields.
    """
    path, equals, value = change.partition("=")
    flag = f"--set {change if len(change) <= _MOST_SHOWN else f'{change[:_MOST_SHOWN]}...'}"
    if not equals or not path.strip():
        raise ConfigError(f"{flag}: expected path=value, such as decode.radix_cache=true")
    set_field(data, path.strip(), parse_yaml(value, flag), where=flag)


def set_field(data: dict[str, Any], path: str, value: Any, *, where: str) -> None:
    """Sets one field of plain data by its dotted path, such as decode.admission.reserved_tokens. where: names the
    change in messages. Raises ConfigError if the path leads through a value without fields, or through a short form
    that is not known.
    """
    *parents, last = path.split(".")
    at = data
    for key in parents:
        inside = at.get(key)
        if at is data and key in SHORTHANDS:
            try:
                inside = SHORTHANDS[key](inside)
            except ValueError as wrong:
                raise ConfigError(f"{where}: {key}: {wrong}") from None
        if isinstance(inside, str):  # a component that now gets settings
            inside = {"use": inside}
        elif inside is None:
            inside = {}
        elif not isinstance(inside, dict):
            raise ConfigError(f"{where}: {key} is {shown(inside)}, which has no fields")
        at[key] = at = inside
    at[last] = value


def _explain(error: Any, section: type[Section], where: str, text: str) -> str:
    path = [part for part in error["loc"] if not str(part).startswith("function-")]
    line = line_of(text, path) if text else None
    place = f"{where}, line {line}" if line else where
    name = ".".join(map(str, path))
    if error["type"] == "extra_forbidden":
        if name in NOT_MODELLED:
            return f"{place}: {name}: {NOT_MODELLED[name]}"
        known = _fields_at(section, error["loc"][:-1])
        hint = did_you_mean(str(path[-1]), known)
        return f"{place}: unknown field {name!r}{hint}; here are {', '.join(known)}"
    if error["type"] == "missing":
        return f"{place}: {name} is missing"
    if error["type"] == "value_error":
        return f"{place}: {name + ': ' if name else ''}{error['ctx']['error']}"
    return f"{place}: {name}: {error['msg']}, found {shown(error['input'])}"


def _fields_at(section: type[Section], path: tuple[Any, ...]) -> list[str]:
    for key in path:
        if key in section.model_fields:
            hint = section.model_fields[key].annotation
            options = (hint, *get_args(hint))
            section = next(one for one in options if isinstance(one, type) and issubclass(one, Section))
    return [field.alias or name for name, field in section.model_fields.items()]


class SchemaWithMeanings(GenerateJsonSchema):
    """Makes a JSON schema that describes each field by the field's docstring. Editors show the descriptions."""

    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        made = super().model_schema(schema)
        said = meanings(schema["cls"])
        for name, field in schema["cls"].model_fields.items():
            if meaning := said.get(name):
                made["properties"][field.alias or name]["description"] = meaning
        return made

    def encode_default(self, dft: Any) -> Any:
        return describe_component(dft) if is_dataclass(dft) else super().encode_default(dft)


def scenario_schema() -> dict[str, Any]:
    schema: dict[str, Any] = Scenario.model_json_schema(schema_generator=SchemaWithMeanings)
    return schema
