"""Words of command lines, quoted so that a shell or Kubernetes hands them to a program unchanged."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdsim.scenario.yaml_file import ConfigError

Flags = list[tuple[str, Any]]


class Expanded(str):
    """A word of a command in which a shell or Kubernetes replaces variables. Only pdsim's own words are Expanded:
    variables in a user's text must not be replaced.
    """

    __slots__ = ()


def command_words(program: Sequence[str], flags: Iterable[tuple[str, Any]]) -> list[str]:
    """The arguments of a command line. program: first arguments, such as the executable. flags: pairs of an option
    without its dashes, and its value. A list gives an argument for each of its items. An option with value True has no
    value on the command line; an option with None or False is left out.

    A single text that begins with a dash is joined to its option by an equals sign, so that the text is not read as
    another option. Raises ConfigError for an argument that has a NUL or is not UTF-8.
    """
    found = list(program)
    for name, value in flags:
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words = [one if isinstance(one, str) else str(one) for one in values]
        if len(words) == 1 and isinstance(values[0], str) and words[0].startswith("-"):
            found.append(f"--{name}={words[0]}")
        else:
            found += [f"--{name}", *words]
    for word in found:
        _require_bytes(word)
    return found


def shell_line(words: Sequence[str], variables: Mapping[str, object]) -> str:
    """Returns a command as one line for a shell, with environment variables in front. words: program and arguments.
    variables: values of the environment variables, by name.
    """
    return " ".join([*(f"{name}={_quoted(value)}" for name, value in variables.items()), *map(_quoted, words)])


def container_words(words: Sequence[str]) -> list[str]:
    """Returns a command as a list for a container's manifest. Words that are not Expanded are escaped, because
    Kubernetes replaces $(NAME) and reads $$ as $.
    """
    return [container_word(word) for word in words]


def container_word(word: str) -> str:
    return str(word) if isinstance(word, Expanded) else word.replace("$", "$$")


def comment(text: str) -> str:
    """The text as lines of a comment, in shell scripts and in YAML."""
    return "".join(f"# {line}\n" for line in re.split(r"[\r\n\v\f\x85\u2028\u2029]+", text))


def _quoted(word: object) -> str:
    return f'"{word}"' if isinstance(word, Expanded) and "$" in word else shlex.quote(str(word))


def _require_bytes(word: str) -> None:
    """Raises ConfigError if a word is not UTF-8, or has a NUL, which would end it."""
    if "\0" in word or any("\ud800" <= char <= "\udfff" for char in word):
        raise ConfigError(f"{word!r}: no command line holds this word; leave out NUL and bytes that are not UTF-8")
