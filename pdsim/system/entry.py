"""Catalog entries: dataclasses from the plain data of a file, every mistake with its field."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from math import inf
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Entry = TypeVar("Entry")


class EntryError(ValueError):
    """A field that is wrong."""


def hint(word: Any, among: Iterable[str]) -> str:
    close = get_close_matches(str(word), list(among), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def build(kind: type[Entry], data: Any, path: str = "", **given: Any) -> Entry:
    """An entry from the mapping of its fields, and from those given. path: of the mapping in its file, with a dot.

    Raises EntryError. A number that must be there is above 0; one with a default may be 0.
    """
    if not isinstance(data, Mapping):
        raise EntryError(f"{path.rstrip('.') or 'the file'}: expected a mapping of fields, found {data!r}")
    known = {field.name: field for field in fields(kind) if field.name not in given}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            raise EntryError(f"unknown field {f'{path}{name}'!r}; here are {', '.join(known)}{hint(name, known)}")
    types, values = get_type_hints(kind), dict(given)
    for name, field in known.items():
        is_needed = field.default is MISSING
        if name in data:
            values[name] = _value(types[name], data[name], f"{path}{name}")
            if is_needed and values[name] == 0:
                raise EntryError(f"{path}{name}: expected a number above 0, found {data[name]!r}")
        elif is_needed:
            raise EntryError(f"{path}{name} is missing")
    return kind(**values)


def _value(kind: Any, value: Any, path: str) -> Any:
    """The value, if it is of this kind; a mapping becomes the dataclass that it describes."""
    options = [option for option in get_args(kind) if option is not NoneType]
    if NoneType in get_args(kind):
        return None if value is None else _value(options[0], value, path)
    if get_origin(kind) is Literal:
        return _one_of(options, value, path)
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise EntryError(f"{path}: expected a mapping, found {value!r}")
        return {_value(options[0], key, path): _value(options[1], one, f"{path}.{key}") for key, one in value.items()}
    if is_dataclass(kind):
        return build(kind, value, f"{path}.")  # type: ignore[arg-type]
    if options:  # dataclasses, told apart by their field `kind`
        kinds, chosen = {option.KIND: option for option in options}, dict(value) if isinstance(value, Mapping) else {}
        return build(kinds[_one_of(kinds, chosen.pop("kind", None), f"{path}.kind")], chosen, f"{path}.")
    return _scalar(kind, value, path)


def _one_of(among: Iterable[str], value: Any, path: str) -> Any:
    if value not in list(among):  # it may be unhashable
        raise EntryError(f"{path}: expected one of {', '.join(among)}, found {value!r}{hint(value, among)}")
    return value


def _scalar(kind: type, value: Any, path: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf
    if kind is float and is_number:
        return value
    if kind is int and is_number and int(value) == value:
        return int(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    what = {float: "a number from 0 on", int: "a whole number from 0 on", str: "a text", bool: "true or false"}[kind]
    raise EntryError(f"{path}: expected {what}, found {value!r}")
