"""YAML 1.2 files: reads and writes them, and finds the line of a field."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pdsim.files import write_whole
from pdsim.inputs import MOST_YAML_BYTES, InputError, read_text
from pdsim.inputs import parse_yaml as parse_input


class ConfigError(InputError):
    """A wrong file or flag. The message names the place, the value, and the possible values."""


def read_yaml(path: Path) -> Any:
    if path.is_dir() or not path.exists():
        kind = "is a folder, not a file" if path.is_dir() else "does not exist"
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(f"{path} {kind}" + (f"; {path.parent}/ has {', '.join(near)}" if near else ""))
    try:
        text = read_text(path, "YAML", MOST_YAML_BYTES)
    except OSError as wrong:
        raise ConfigError(f"{path}: cannot be read: {wrong.strerror}") from None
    except InputError as wrong:
        raise ConfigError(str(wrong)) from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Reads YAML. Raises ConfigError with the line of a mistake."""
    try:
        return parse_input(text, where)
    except InputError as wrong:
        raise ConfigError(str(wrong)) from None


def write_yaml(data: Any, path: Path) -> None:
    """Writes a YAML file. If OSError is raised, an earlier file stays."""
    write_whole(path, to_yaml(data))


def _represent_text(representer: Any, text: str) -> Any:
    """Represents a text. Unicode line breaks are escaped, because a YAML reader takes them for spaces outside double
    quotes.
    """
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def to_yaml(data: Any) -> str:
    yaml = YAML()
    yaml.representer.add_representer(str, _represent_text)
    yaml.default_flow_style = False
    yaml.width = 120
    out = StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line of the field at this path, or of the innermost enclosing field that the file contains."""
    node = YAML(typ="safe", pure=True).compose(text)
    line = None
    for key in path:
        found = None
        if node is not None and node.id == "mapping":
            found = next(((k, v) for k, v in node.value if k.value == str(key)), None)
        elif node is not None and node.id == "sequence" and isinstance(key, int) and key < len(node.value):
            found = (node.value[key], node.value[key])
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def did_you_mean(word: object, among: Iterable[str]) -> str:
    """A suggestion such as " (did you mean 'fcfs'?)", or an empty text. word: a text, number, date or null from
    a file.
    """
    close = get_close_matches(str(word), list(among), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
