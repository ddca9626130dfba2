"""Parts of the readers of options: functions that split commands into options, convert the values of options, and make
readers. A reader stores the value of one option in a Read. flags.py and trtllm_flags.py have tables with the readers of
each server program's options.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.inputs import InputError, finite, parse_json, whole

Value = str | bool | list[str]


def parsed(words: Sequence[str]) -> tuple[list[str], dict[str, Value]]:
    """Splits the words of a command. Returns the words that belong to no option, and the value of each option by the
    option's name. The value is True for an option without a value, and a list for an option with several values.
    `--tp-size 4` and `--tp_size=4` are the same option.
    """
    alone: list[str] = []
    flags: dict[str, Value] = {}
    name = None
    for word in words:
        if (word.startswith("--") and len(word) > 2) or word in _SHORT:  # noqa: PLR2004
            name, equals, value = _SHORT.get(word, word)[2:].partition("=")
            name = name.replace("_", "-")
            flags[name] = value if equals else True
            name = None if equals else name
        elif name is None:
            alone.append(word)
        else:
            before = flags[name]
            flags[name] = (
                word if before is True else [*before, word] if isinstance(before, list) else [str(before), word]
            )
    return alone, flags


_SHORT = {
    "-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-pp": "--pipeline-parallel-size",
    "-O": "--compilation-config", "-n": "--nnodes", "-r": "--node-rank", "-ep": "--enable-expert-parallel",
    "-asc": "--api-server-count", "-dpl": "--data-parallel-size-local", "-dph": "--data-parallel-hybrid-lb",
}  # fmt: skip


@dataclass
class Read:
    """Scenario fields that the options of one server set. understood: texts on the options that were read. aside: texts
    on the options that were ignored. assumed: texts on assumptions.
    """

    server: dict[str, Any] = field(default_factory=dict)
    """Fields of the section of the server's role, by name."""
    common: dict[str, Any] = field(default_factory=dict)
    """Fields outside the section of the server's role, by path."""
    understood: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    """Options whose value is a variable that the file does not set."""


Reader = Callable[[Read, Value], None]


def difference(read: Read, first: Read) -> str:
    """Says how the options of a server differ from those of the first server of its role. pdsim gives all servers of a
    role the options of the first one. The text names the server's own options, which are ignored, and the options that
    it gets from the first server. Empty: no difference. read: options of the server. first: options of the first
    server.
    """
    own = {text.split()[0] for text in read.understood}
    lost = [text for text in read.understood if text not in first.understood]
    gained = [text for text in first.understood if text.split()[0] not in own]
    changes = ((lost, "ignored"), (gained, "added"))
    return ", and ".join(f"{', '.join(options)} {change}" for options, change in changes if options)


def differences(read: Read, other: Read) -> list[tuple[str, str]]:
    """Lists the options that two servers do not have with the same value: (option and value of the server, those of the
    other server). A server that lacks the option has "no --OPTION". read, other: options of the two servers.
    """
    own, others = ({text.split()[0]: text for text in one.understood} for one in (read, other))
    differing = (name for name in {**own, **others} if own.get(name) != others.get(name))
    return [(own.get(name, f"no {name}"), others.get(name, f"no {name}")) for name in differing]


def text_of(value: Value) -> str:
    """The value of an option as a text. Raises ValueError if the option has no value, or several."""
    if not isinstance(value, str):
        raise ValueError("one value")
    return value


def json_of(value: Value) -> Any:
    """Parses the value as JSON. Raises ValueError if the value is not a single text, or if the text is not JSON."""
    try:
        return parse_json(text_of(value), "")
    except InputError:
        raise ValueError("JSON") from None


def object_of(value: Value) -> dict[str, Any]:
    """Parses the value as a JSON object. Raises ValueError if the value is not a single text with a JSON object."""
    found = json_of(value)
    if not isinstance(found, dict):
        raise ValueError("a JSON object")
    return found


def count_of(value: Value) -> int:
    """Reads the value as a whole number. Raises ValueError if the value is not a single text with a whole number."""
    try:
        return whole(text_of(value))
    except ValueError:
        raise ValueError("a whole number") from None


def positive_of(value: Value) -> int:
    """Reads the value as a whole number. Raises ValueError if the value is not a single text with a whole number above
    0.
    """
    found = count_of(value)
    if found < 1:
        raise ValueError("a whole number above 0")
    return found


def of_server(name: str, convert: Callable[[Value], Any] = count_of) -> Reader:
    """Makes a reader that stores an option's value in the field `name` of the server's role. convert: makes the field's
    value from the option's.
    """
    return lambda read, value: read.server.__setitem__(name, convert(value))


def of_common(name: str, convert: Callable[[Value], Any] = count_of) -> Reader:
    """Makes a reader that stores an option's value in the scenario's field with the path `name`. convert: makes the
    field's value from the option's.
    """
    return lambda read, value: read.common.__setitem__(name, convert(value))


def number_of(value: Value) -> float:
    """Reads the value as a number. Raises ValueError if the value is not a single text with a finite number."""
    try:
        return finite(text_of(value))
    except ValueError:
        raise ValueError("a number") from None


def share_of(value: Value) -> float:
    """Reads the value as a share. Raises ValueError if the value is not a single text with a number above 0 and at most
    1.
    """
    found = number_of(value)
    if not 0 < found <= 1:
        raise ValueError("a number above 0 and at most 1")
    return found


def is_flag(found: bool) -> Callable[[Value], bool]:
    """Makes a converter for options without a value, or with true or false. found: the result for an option without a
    value or with true.
    """

    def convert(value: Value) -> bool:
        return found if value is True or text_of(value).lower() in ("true", "1") else not found

    return convert


def one_of(known: Mapping[str, Any]) -> Callable[[Value], Any]:
    """Makes a converter that returns known[value]. The converter raises ValueError, which lists the known values, if
    the option's value is another text. It also raises ValueError if the option has no value, or several.
    """

    def convert(value: Value) -> Any:
        if text_of(value) not in known:
            raise ValueError(", ".join(known))
        return known[text_of(value)]

    return convert


def nothing(read: Read, value: Value) -> None:
    """Reads an option that changes neither bytes nor times."""
    del read, value


def inverse(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns pdsim's names by an engine's names. table: the engine's names by pdsim's names; names for which the
    engine has none (None) are left out.
    """
    return {theirs: ours for ours, theirs in table.items() if theirs is not None}


STATE_DTYPES = {"float32": "fp32", "auto": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Types of the states of linear-attention layers, by the engines' names."""


def note_dtype(read: Read, value: Value) -> None:
    """Reads --dtype, the data type in which a server computes. Sets no field, because pdsim computes in two bytes or
    less, and adds a note if the type has more bytes.
    """
    if value not in ("auto", "half", "float16", "bfloat16"):
        read.aside.append(f"--dtype {value}: pdsim computes in two bytes or less")


def sizes_of(value: Value) -> list[int]:
    """The values as whole numbers. Raises ValueError if one of them is no whole number."""
    words = value if isinstance(value, list) else text_of(value).replace(",", " ").split()
    return [count_of(word) for word in words]
