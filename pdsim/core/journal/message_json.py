"""Messages as JSON, for journals and for the channel between processes of real mode.

A message or token sequence is an object of one key, which names its type. Token ids are hexadecimal digits of 32-bit
integers, because lists of integers take far longer to read and write. Sequences of LONG or more integers, such as page
ids, are written as runs of consecutive integers if a run has about 4 integers or more on average: {"Runs": [95, 88,
400, 7]} is 95 to 182, then 400 to 406. Text of earlier releases, which has plain lists, can also be read.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain, pairwise
from operator import attrgetter, sub
from typing import Any

from pdsim.core import messages
from pdsim.core.sequence import Spans, TokenIds

TYPES: dict[str, Any] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
}
"""Types of messages, steps and results, and of the values in their fields, by name."""
FIELDS: dict[Any, list[str]] = {
    kind: list(kind._fields) if issubclass(kind, tuple) else [field.name for field in fields(kind)]
    for kind in TYPES.values()
}
"""Names of the fields of each type in TYPES."""

LATER = {messages.Arrival: 5, messages.NewRequest: 3, messages.PrefillStep: 2, messages.PeerDown: 1}
"""For each of these types of messages: how many of its last fields older journals lack. Of these fields, default
values at the end of the message are not written."""


def _values_in(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that takes a message of this type and returns its fields' values in order. The function leaves
    out fields with default values at the end, if older journals lack these fields (LATER). A named tuple is returned as
    a plain tuple.
    """
    if issubclass(kind, tuple):
        return tuple
    names = FIELDS[kind]
    if len(names) <= 1:
        return lambda message: tuple([getattr(message, name) for name in names])
    values: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)
    if not (num_later := LATER.get(kind, 0)):
        return values
    defaults = tuple([field.default for field in fields(kind)[-num_later:]])

    def without_defaults(message: Any) -> tuple[Any, ...]:
        found, num_kept = values(message), len(names)
        while num_kept > len(names) - num_later and found[num_kept - 1] == defaults[num_kept - len(names) - 1]:
            num_kept -= 1
        return found[:num_kept]

    return without_defaults


VALUES = {kind: _values_in(kind) for kind in TYPES.values()}

PLAIN = frozenset({int, str, bool, float, type(None)})
_INT = frozenset({int})
LONG = 12
"""Minimum length of an integer sequence that may be written as runs: first integer and length of each run of
consecutive integers. Shorter sequences are written as lists.
"""
_LEAST_MEAN = 4
"""A sequence of integers is written as runs only if its runs have about this length or more on average. Shorter runs
would save little text.
"""
_MOST_IDS = 1 << 24
"""Maximum length of an integer sequence that is read from runs. More integers raise ValueError, so that a damaged
journal cannot fill the memory.
"""


def are_ids(values: Sequence[Any]) -> bool:
    """True if the sequence has at least LONG values and all are integers, such as page ids."""
    return len(values) >= LONG and _INT.issuperset(map(type, values))


def are_one_run(ids: Sequence[int]) -> bool:
    """True if each integer is greater by 1 than the integer before it. Raises IndexError if there is no integer."""
    return ids[-1] - ids[0] == len(ids) - 1 and list(ids) == list(range(ids[0], ids[-1] + 1))


def runs_of(ids: Sequence[int]) -> list[int] | None:
    """Divides ids into runs of consecutive integers. Returns a flat list: first integer and length of each run, in
    turn. None: the runs are too short on average (_LEAST_MEAN).
    """
    if are_one_run(ids):
        return [ids[0], len(ids)]
    steps = list(map(sub, ids[1:], ids))
    if 2 * (len(steps) - steps.count(1)) >= 2 * len(ids) // _LEAST_MEAN:
        return None
    begins = [0, *[i for i, step in enumerate(steps, 1) if step != 1]]
    return [number for begin, end in pairwise([*begins, len(ids)]) for number in (ids[begin], end - begin)]


def _ids_in(runs: Sequence[int]) -> tuple[int, ...]:
    """Returns the integers that runs stand for. runs: first integer and length of each run, in turn. Raises ValueError
    or TypeError if the sequence does not consist of runs, and ValueError if they stand for more than _MOST_IDS
    integers.
    """
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    counts = [count for _, count in pairs]
    if min(counts) < 1 or sum(counts) > _MOST_IDS:
        raise ValueError(f"no runs of integers: {str(runs)[:60]}")
    return tuple(chain.from_iterable([range(first, first + count) for first, count in pairs]))


def to_json(value: Any) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is Spans:
        return {"Spans": [list(span) for span in value.spans]}
    if kind is TokenIds:
        return {"TokenIds": bytes(value).hex()}
    if kind is tuple or kind is list:
        runs = runs_of(value) if are_ids(value) else None
        return _items(value) if runs is None else {"Runs": runs}
    return {kind.__name__: _items(VALUES[kind](value))}


def _items(values: Sequence[Any]) -> list[Any]:
    return list(values) if PLAIN.issuperset(map(type, values)) else [to_json(value) for value in values]


def from_json(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        if PLAIN.issuperset(map(type, value)):
            return tuple(value)
        return tuple([one if type(one) in PLAIN else from_json(one) for one in value])
    if kind is dict:
        ((name, content),) = value.items()
        if name == "Runs":
            return _ids_in(content)
        if name == "Spans":
            return Spans(tuple(span) for span in content)
        if name == "TokenIds":
            return TokenIds(data=bytes.fromhex(content)) if isinstance(content, str) else TokenIds(content)
        return TYPES[name](*from_json(content))
    return value
