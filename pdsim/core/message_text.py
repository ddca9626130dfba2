"""Writes and reads messages as JSON and as text, for journals and for the channel between processes of real mode.

A message or sequence is an object of one key, which names its type. Token ids are hexadecimal digits of 32-bit
integers, because lists of integers take far longer to read and write. Long sequences of integers, such as page ids, are
runs if runs are shorter: {"Runs": [95, 88, 400, 7]} is 95 to 182, then 400 to 406. Text of earlier releases, which has
plain lists, can also be read.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain, pairwise
from json.encoder import encode_basestring_ascii
from operator import attrgetter, sub
from typing import Any, get_origin, get_type_hints

from pdsim.core import messages
from pdsim.core.messages import KvGranted
from pdsim.core.sequence import Spans, TokenIds
from pdsim.core.transfer.transfer_plan import TransferUnit

_TYPES: dict[str, Any] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
}


_LATER = {messages.Arrival: 5, messages.NewRequest: 2, messages.PrefillStep: 1, messages.PeerDown: 1}
"""Number of last fields of a message that may be missing. A field with its default value is not written, because older
journals lack the field."""


def _values_in(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that returns a message's fields in order. A named tuple already is such a sequence."""
    if issubclass(kind, tuple):
        return tuple
    names = [field.name for field in fields(kind)]
    if len(names) <= 1:
        return lambda message: tuple([getattr(message, name) for name in names])
    values: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)
    if not (num_later := _LATER.get(kind, 0)):
        return values
    defaults = tuple([field.default for field in fields(kind)[-num_later:]])

    def without_defaults(message: Any) -> tuple[Any, ...]:
        found, num_kept = values(message), len(names)
        while num_kept > len(names) - num_later and found[num_kept - 1] == defaults[num_kept - len(names) - 1]:
            num_kept -= 1
        return found[:num_kept]

    return without_defaults


_VALUES = {kind: _values_in(kind) for kind in _TYPES.values()}

_PLAIN = frozenset({int, str, bool, float, type(None)})
_INT = frozenset({int})
_LONG = 12
"""Minimum length of sequences that are written as runs."""
_LEAST_MEAN = 4
"""Minimum mean length of runs. Shorter runs would have longer text than their integers."""
_MOST_IDS = 1 << 24
"""Maximum length of a sequence that is read from runs. The limit keeps a damaged journal from filling the memory."""


def _are_ids(values: Sequence[Any]) -> bool:
    """True for long sequences of integers, such as page ids."""
    return len(values) >= _LONG and _INT.issuperset(map(type, values))


def _runs_of(ids: Sequence[int]) -> list[int] | None:
    """Returns the first integer and the length of each run of consecutive integers. None: the text of runs would not be
    shorter.
    """
    if ids[-1] - ids[0] == len(ids) - 1 and list(ids) == list(range(ids[0], ids[-1] + 1)):
        return [ids[0], len(ids)]
    steps = list(map(sub, ids[1:], ids))
    if 2 * (len(steps) - steps.count(1)) >= 2 * len(ids) // _LEAST_MEAN:
        return None
    begins = [0, *[i for i, step in enumerate(steps, 1) if step != 1]]
    return [number for begin, end in pairwise([*begins, len(ids)]) for number in (ids[begin], end - begin)]


def _ids_in(runs: Sequence[int]) -> tuple[int, ...]:
    """Returns the integers that runs stand for. Raises ValueError or TypeError if the sequence does not consist of
    runs.
    """
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    counts = [count for _, count in pairs]
    if min(counts) < 1 or sum(counts) > _MOST_IDS:
        raise ValueError(f"no runs of integers: {str(runs)[:60]}")
    return tuple(chain.from_iterable([range(first, first + count) for first, count in pairs]))


def to_json(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is Spans:
        return {"Spans": [list(span) for span in value.spans]}
    if kind is TokenIds:
        return {"TokenIds": bytes(value).hex()}
    if kind is tuple or kind is list:
        runs = _runs_of(value) if _are_ids(value) else None
        return _items(value) if runs is None else {"Runs": runs}
    return {kind.__name__: _items(_VALUES[kind](value))}


def _items(values: Sequence[Any]) -> list[Any]:
    return list(values) if _PLAIN.issuperset(map(type, values)) else [to_json(value) for value in values]


def from_json(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        if _PLAIN.issuperset(map(type, value)):
            return tuple(value)
        return tuple([one if type(one) in _PLAIN else from_json(one) for one in value])
    if kind is dict:
        ((name, content),) = value.items()
        if name == "Runs":
            return _ids_in(content)
        if name == "Spans":
            return Spans(tuple(span) for span in content)
        if name == "TokenIds":
            return TokenIds(data=bytes.fromhex(content)) if isinstance(content, str) else TokenIds(content)
        return _TYPES[name](*from_json(content))
    return value


def to_text(value: Any) -> str:
    """Returns the same text as json.dumps(to_json(value)) without spaces, but several times faster."""
    return _TEXT[type(value)](value)


def sequence_text(values: Sequence[Any]) -> str:
    if len(values) < _LONG:
        return f"[{','.join([_TEXT[type(value)](value) for value in values])}]" if values else "[]"
    return _long_tuple_text(values) if type(values) is tuple else _long_text(values)


def _long_text(values: Sequence[Any]) -> str:
    runs = _runs_of(values) if _are_ids(values) else None
    if runs is None:
        return f"[{','.join([_TEXT[type(value)](value) for value in values])}]"
    return f'{{"Runs":{_integers_text(runs)}}}'


def _integers_text(values: list[Any]) -> str:
    """Returns the text of a list of integers, or of a list of lists of integers."""
    return str(values).replace(" ", "")


def _named_text(kind: Any) -> Callable[[Any], str]:
    """Returns a function that writes messages of one kind. Its source code is generated from the field names, as
    dataclasses do, because a loop over the fields takes three times as long.
    """
    name, hints = kind.__name__, get_type_hints(kind)
    if kind in _LATER:
        values = _VALUES[kind]
        return lambda value: f'{{"{name}":{sequence_text(values(value))}}}'
    writers = {f"text_of_{field}": _TEXT.get(get_origin(hint) or hint, to_text) for field, hint in hints.items()}
    items = [
        f"{{message.{field}}}" if hint is int else f"{{text_of_{field}(message.{field})}}"
        for field, hint in hints.items()
    ]
    source = f"""lambda message: f'{{{{"{name}":[{",".join(items)}]}}}}'"""
    made: Callable[[Any], str] = eval(source, writers)  # noqa: S307  the source is of names in messages
    return made


_SEEN_AGAIN = (messages.NewRequest, KvGranted, messages.PrefillStep, messages.DecodeStep, TransferUnit)
"""Kinds of messages that appear in several calls. The texts of the most recent messages are kept."""
_NUM_REMEMBERED = 256


class _Remembered:
    """Writes immutable objects as text, and reuses the texts of the most recent objects."""

    def __init__(self, text: Callable[[Any], str]) -> None:
        self._text = text
        self._texts: dict[int, tuple[Any, str]] = {}

    def __call__(self, value: Any) -> str:
        found = self._texts.get(id(value))
        if found is None:
            if len(self._texts) == _NUM_REMEMBERED:
                self._texts.clear()
            found = self._texts[id(value)] = value, self._text(value)
        return found[1]


_long_tuple_text = _Remembered(_long_text)
_TEXT: dict[Any, Callable[[Any], str]] = {
    int: str,
    str: encode_basestring_ascii,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
    float: json.dumps,
    tuple: sequence_text,
    list: sequence_text,
    Spans: lambda value: f'{{"Spans":{_integers_text([list(span) for span in value.spans])}}}',
    TokenIds: lambda value: f'{{"TokenIds":"{bytes(value).hex()}"}}',
}
_TEXT |= {kind: _named_text(kind) for kind in _TYPES.values()}
_TEXT |= {kind: _Remembered(_TEXT[kind]) for kind in _SEEN_AGAIN}
