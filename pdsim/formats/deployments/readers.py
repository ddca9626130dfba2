"""Readers of single flags: what the tables of flags are made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdsim.inputs import finite, whole

Value = str | bool | list[str]


def parsed(words: Sequence[str]) -> tuple[list[str], dict[str, Value]]:
    """Words without a flag, and flags with their values. `--tp-size 4` and `--tp_size=4` are the same flag."""
    alone: list[str] = []
    flags: dict[str, Value] = {}
    name = None
    for word in words:
        if (word.startswith("--") and len(word) > 2) or word in _SHORT:  # noqa: PLR2004
            name, equals, value = _SHORT.get(word, word[2:]).partition("=")
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
    """Fields that the flags of one server set."""

    server: dict[str, Any] = field(default_factory=dict)
    """Fields of the server's role."""
    common: dict[str, Any] = field(default_factory=dict)
    """Fields of the scenario, by path."""
    understood: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    """Flags whose values are variables that the file does not set."""


Reader = Callable[[Read, Value], None]


def text_of(value: Value) -> str:
    """One value."""
    if not isinstance(value, str):
        raise ValueError("one value")
    return value


def count_of(value: Value) -> int:
    """One whole number."""
    try:
        return whole(text_of(value))
    except ValueError:
        raise ValueError("a whole number") from None


def of_server(name: str, convert: Callable[[Value], Any] = count_of) -> Reader:
    """Returns a reader that stores a flag's value in the server's field `name`. convert: from text to the value."""
    return lambda read, value: read.server.__setitem__(name, convert(value))


def of_common(name: str, convert: Callable[[Value], Any] = count_of) -> Reader:
    """Returns a reader that stores a flag's value in the scenario's field `name`."""
    return lambda read, value: read.common.__setitem__(name, convert(value))


def number_of(value: Value) -> float:
    """One number."""
    try:
        return finite(text_of(value))
    except ValueError:
        raise ValueError("a number") from None


def is_flag(found: bool) -> Callable[[Value], bool]:
    """Reader of a flag without a value, or with true or false."""

    def convert(value: Value) -> bool:
        return found if value is True or text_of(value).lower() in ("true", "1") else not found

    return convert


def one_of(known: Mapping[str, Any]) -> Callable[[Value], Any]:
    """Reader of one of the known values."""

    def convert(value: Value) -> Any:
        if text_of(value) not in known:
            raise ValueError(", ".join(known))
        return known[text_of(value)]

    return convert


def nothing(read: Read, value: Value) -> None:
    """Reader of a flag that changes neither bytes nor times."""
    del read, value


def inverse(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table from theirs to ours."""
    return {theirs: ours for ours, theirs in table.items() if theirs is not None}


STATE_DTYPES = {"float32": "fp32", "auto": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Types of linear-attention states, by the engines' names."""


def dtype_of(read: Read, value: Value) -> None:
    """Reads the type that a server computes in."""
    if value not in ("auto", "half", "float16", "bfloat16"):
        read.aside.append(f"--dtype {value}: pdsim computes in two bytes or less")


def sizes_of(value: Value) -> list[int]:
    """Several whole numbers."""
    words = value if isinstance(value, list) else text_of(value).replace(",", " ").split()
    return [count_of(word) for word in words]
