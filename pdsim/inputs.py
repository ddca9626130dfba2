"""Reads text, JSON, YAML and numbers from users and other tools, within limits. Errors name the place of a mistake."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from math import isfinite
from pathlib import Path
from reprlib import Repr
from typing import IO, Any

MOST_BYTES = 1 << 30
"""Maximum size in bytes of a file that is read as a whole."""
MOST_YAML_BYTES = 16 << 20
MOST_YAML_VALUES = 1_000_000
"""Maximum number of values in a YAML file. Values behind an alias count at each use of the alias."""
MOST_TOKENS = 1 << 40
"""Largest accepted number of tokens. Larger numbers are mistakes: no server holds a thousandth of it."""
MOST_CONTEXT_TOKENS = 100_000_000
"""Largest accepted context in tokens: ten times the longest context of a published model."""
MOST_SECONDS = 4e9
"""Largest accepted time in s. Times since 1970 are smaller, and twice this many ns still fit into 64 bits."""

_SHOWN = Repr()
_SHOWN.maxlevel, _SHOWN.maxdict, _SHOWN.maxlist, _SHOWN.maxtuple, _SHOWN.maxset = 4, 8, 8, 8, 8
_SHOWN.maxstring, _SHOWN.maxlong, _SHOWN.maxother = 160, 60, 160


class InputError(ValueError):
    """Raised for input that cannot be used. The message says where the mistake is, what was found, and what is
    possible.
    """


def shown(value: object) -> str:
    """Text of a value for a message. Long or deep values are shortened."""
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"a {type(value).__name__} too long to print"


def shortened(message: str) -> str:
    """The message. If the message has more than 2 * _KEPT_SIDE characters, as when it quotes a damaged file, its middle
    is left out.
    """
    left_out = len(message) - 2 * _KEPT_SIDE
    return message if left_out <= 0 else f"{message[:_KEPT_SIDE]} [{left_out} characters] {message[-_KEPT_SIDE:]}"


_KEPT_SIDE = 900
"""Number of characters that `shortened` keeps at the beginning of a long message, and at its end."""


def read_text(path: Path, what: str = "text", most_bytes: int = MOST_BYTES) -> str:
    """The text of a file, without a BOM. Raises InputError if the path is a folder, a device or a pipe, and if the file
    is no UTF-8 or has more than most_bytes bytes. FileNotFoundError and similar errors of the system pass through.

    what: names the content in messages.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is {'a folder' if path.is_dir() else 'a device or a pipe'}, not a file")
    if (size := path.stat().st_size) > most_bytes:
        raise InputError(f"{path} has {size} bytes; a file of its kind has at most {most_bytes}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise InputError(f"{path}: not {what}: {wrong}") from None


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Context with the lines of a text file, compressed with gzip if the file's name ends with .gz. A BOM is left out.
    Raises InputError if the path is no regular file and, while lines are read within the context, if the content is no
    UTF-8 or no complete gzip. FileNotFoundError and similar errors of the system pass through.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is {'a folder' if path.is_dir() else 'a device or a pipe'}, not a file")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as broken:
        raise InputError(f"{path}: cannot be read as text: {broken}") from None


def read_json(path: Path) -> Any:
    """The JSON value in a file. Raises InputError for other content; FileNotFoundError and similar errors of the system
    pass through.
    """
    return parse_json(read_text(path, "JSON"), str(path))


def parse_json(text: str, where: str, *, has_infinity: bool = False) -> Any:
    """The JSON value of a text. where: name of the text in messages. Raises InputError if the text is not JSON, is
    nested too deep for Python's parser, or has an integer of more than 4300 digits.

    has_infinity: False: Infinity, NaN, and numbers that round to infinity (1e999) are refused, too.
    """
    try:
        return json.loads(text) if has_infinity else _FINITE.decode(text)
    except json.JSONDecodeError as wrong:
        line = f", line {wrong.lineno}" if "\n" in text.rstrip() else ""
        raise InputError(f"{where}{line}: not JSON: {wrong.msg} at column {wrong.colno}") from None
    except RecursionError:
        raise InputError(f"{where}: JSON is nested too deeply: no file that pdsim reads is 100 levels deep") from None
    except ValueError as wrong:  # ours, or Python's of an integer of more than 4300 digits
        said = wrong if isinstance(wrong, _NotFiniteError) else "a number of more than 4300 digits"
        raise InputError(f"{where}: {said}") from None


class _NotFiniteError(ValueError):
    pass


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise _NotFiniteError(f"{text[:20]} is no finite number")
    return value


_FINITE = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def parse_yaml(text: str, where: str) -> Any:
    """The YAML 1.2 value of a text. where: name of the text in messages. Raises InputError if the text is not YAML or
    is nested too deep, if it has more than MOST_YAML_VALUES values when each alias is written out, or if an alias
    contains itself.
    """
    return _parsed_yaml(text, where, one=True)


def parse_yaml_documents(text: str, where: str) -> list[Any]:
    """The YAML 1.2 values of a text that has several documents, as Kubernetes manifests do. where: name of the text in
    messages. Raises InputError in the same cases as parse_yaml.
    """
    documents: list[Any] = _parsed_yaml(text, where, one=False)
    return documents


def _parsed_yaml(text: str, where: str, *, one: bool) -> Any:
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415  a fifth of the start of many commands

    try:
        data = deepcopy(_remembered_yaml(text, one)) if len(text) <= _SHORT else _yaml(text, one)
        _require_size(data, where)
    except MarkedYAMLError as wrong:
        mark = wrong.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{where}{at}: not YAML: {wrong.problem}") from None
    except YAMLError as wrong:  # a character that no YAML has
        raise InputError(f"{where}: not YAML: {wrong}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply: no file that is read here is more than ten deep") from None
    except InputError:
        raise
    except (ValueError, OverflowError, ArithmeticError) as wrong:  # a date of month 13, an integer of 5,000 digits
        raise InputError(f"{where}: not YAML: {str(wrong)[:120]}") from None
    return data


_SHORT = 20_000
"""YAML texts of at most this many characters are cached with their values."""


@lru_cache(maxsize=64)
def _remembered_yaml(text: str, one: bool) -> Any:
    """The YAML value of a text. Values are cached, because plans and sweeps read the same catalog files for each run.
    one: True: the text has a single document.
    """
    return _yaml(text, one)


def _yaml(text: str, one: bool) -> Any:
    from ruamel.yaml import YAML  # noqa: PLC0415

    parser = YAML(typ="safe", pure=True)
    return parser.load(text) if one else list(parser.load_all(text))


def _require_size(data: Any, where: str) -> None:
    """Raises InputError if the data has more than MOST_YAML_VALUES values when each alias is written out, or if an
    alias contains itself. where: name of the data in messages.
    """
    sizes: dict[int, int | None] = {}

    def size(value: Any) -> int:
        if not isinstance(value, dict | list | set | tuple):
            return 1
        if id(value) in sizes:
            if (known := sizes[id(value)]) is None:
                raise InputError(f"{where}: a YAML alias refers to a value that contains the alias")
            return known
        sizes[id(value)] = None
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        sizes[id(value)] = total = 1 + sum(map(size, inside))
        return total

    if (num := size(data)) > MOST_YAML_VALUES:
        raise InputError(
            f"{where}: its aliases stand for {num:.0e} values; at most {MOST_YAML_VALUES:,} are read".replace("e+", "e")
        )


def whole(value: Any) -> int:
    """Reads a whole number, or its text. Raises ValueError for fractions and for true or false."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("no whole number")
    if isinstance(value, str):
        value = int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
    if not isfinite(value) or value != int(value):
        raise ValueError("no whole number")
    return int(value)


def finite(value: Any) -> float:
    """Reads a finite number, or its text. Raises ValueError for others and for true or false."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("no number")
    try:
        found = float(value)
    except OverflowError:
        raise ValueError("no finite number") from None
    if not isfinite(found):
        raise ValueError("no finite number")
    return found
