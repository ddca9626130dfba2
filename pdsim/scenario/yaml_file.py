"""Reads and writes YAML 1.2 files, and finds the line of a field."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pdsim.files import write_whole
from pdsim.inputs import MOST_YAML_BYTES, InputError, read_text
from pdsim.inputs import parse_yaml as parse_input
from pdsim.system.catalog import CatalogError


class ConfigError(InputError):
    """Raised for a wrong file or option. The message says where the mistake is, what was found, and what is
    possible.
    """


@contextmanager
def named(*files: Path | str) -> Iterator[None]:
    """Context in which messages of ConfigError and CatalogError name the files whose content is wrong. Names are put in
    front of a message that has none of them.
    """
    try:
        yield
    except (ConfigError, CatalogError) as wrong:
        if any(str(file) in str(wrong) for file in files):
            raise
        raise ConfigError(f"{', '.join(map(str, files))}: {wrong}") from None


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
    """Reads YAML text. Raises ConfigError with the line of a mistake. where: names the text in messages."""
    try:
        return parse_input(text, where)
    except InputError as wrong:
        raise ConfigError(str(wrong)) from None


def write_yaml(data: Any, path: Path) -> None:
    """Writes a YAML file. If this raises OSError, a file that was there before stays as it was."""
    write_whole(path, to_yaml(data))


def _represent_text(representer: Any, text: str) -> Any:
    """Writes a text. Unicode line breaks are escaped, because YAML readers take them for spaces outside double
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
    """Number of the line, from 1, of the field at this path. If the field is missing: of the innermost section around
    it. None: no such section. text: the file's text.
    """
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
    """A suggestion such as " (did you mean 'fcfs'?)". Empty: no similar word.

    word: what the user wrote, also a number, date or null. among: possible words.
    """
    close = get_close_matches(str(word), list(among), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
