"""Records every call into an instance, and writes the calls as text."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

from pdsim.core import messages
from pdsim.core.messages import KvGranted, Message, Result, Step
from pdsim.core.sequence import Spans, TokenIds
from pdsim.core.transfer.transfer_plan import TransferUnit


class Entry(NamedTuple):
    """A recorded call into an instance: its arguments (the last is now_ns) and its result."""

    instance_id: str
    call: str
    args: tuple[Any, ...]
    returned: Any


KILLED = "killed"
"""Call name of an entry for an instance's death at args[0] ns. Later calls are made on a new instance."""


class Recorded:
    """An instance or a router that also records its calls and their results."""

    def __init__(self, inner: Any, record: Callable[[Entry], None]) -> None:
        self.instance_id: str = inner.instance_id
        self.inner = inner
        self.max_steps_in_flight: int = getattr(inner, "max_steps_in_flight", 1)
        self._record = record

    def on_message(self, message: Message, now_ns: int) -> Any:
        return self._note("on_message", (message, now_ns), self.inner.on_message(message, now_ns))

    def next_step(self, now_ns: int) -> Any:
        return self._note("next_step", (now_ns,), self.inner.next_step(now_ns))

    def on_step_done(self, step: Step, result: Result, now_ns: int) -> Any:
        return self._note("on_step_done", (step, result, now_ns), self.inner.on_step_done(step, result, now_ns))

    def levels(self) -> Any:
        return self.inner.levels()

    def waiting_for(self) -> Any:
        return self.inner.waiting_for()

    def _note(self, call: str, args: tuple[Any, ...], returned: Any) -> Any:
        self._record(Entry(self.instance_id, call, args, returned))
        return returned


def digest(entries: Iterable[Entry]) -> str:
    """Digest of a journal. Equal journals have equal digests in every process, on every platform, with any
    PYTHONHASHSEED.
    """
    h = blake2b(digest_size=16)
    for entry in entries:
        h.update(to_line(entry).encode())
    return h.hexdigest()


# The journal as text: one JSON array a line. Messages and sequences are objects of one key, their type's name. Ids
# of tokens are the hexadecimal digits of 32-bit integers: prompts cross several times, and lists take far longer. Runs
# that were recorded with lists are read, too.

_TYPES: dict[str, Any] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
}


_LATER = {messages.Arrival: 2, messages.NewRequest: 1, messages.PrefillStep: 1}
"""Number of last fields that are left out if they have their defaults, because older journals lack them."""


def _values_in(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Function that takes the fields of a message in order. Named tuples are their own fields."""
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
_LONG = 8
"""Minimum length of integer tuples that are written as page ids, which make up most of a journal."""


def to_json(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is Spans:
        return {"Spans": [list(span) for span in value.spans]}
    if kind is TokenIds:
        return {"TokenIds": bytes(value).hex()}
    if kind is tuple or kind is list:
        return _items(value)
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
        if name == "Spans":
            return Spans(tuple(span) for span in content)
        if name == "TokenIds":
            return TokenIds(data=bytes.fromhex(content)) if isinstance(content, str) else TokenIds(content)
        return _TYPES[name](*from_json(content))
    return value


def to_line(entry: Entry) -> str:
    instance_id, call, args, returned = entry
    name = encode_basestring_ascii(instance_id)
    return f'[{name},"{call}",{_sequence_text(args)},{to_text(returned)}]\n'


def to_text(value: Any) -> str:
    """The same text as json.dumps(to_json(value)) without spaces, but several times faster, because a run writes
    millions of page ids.
    """
    return str(_TEXT[type(value)](value))


def _sequence_text(value: Sequence[Any]) -> str:
    if not value:
        return "[]"
    if len(value) >= _LONG and _INT.issuperset(map(type, value)):
        return str(list(value)).replace(" ", "")
    return f"[{','.join([_TEXT[type(v)](v) for v in value])}]"


def _named_text(kind: Any) -> Callable[[Any], str]:
    """Function that writes messages of this kind."""
    hints = get_type_hints(kind)
    others = [(i, _TEXT.get(hint, to_text)) for i, hint in enumerate(hints.values()) if hint is not int]
    name, values = kind.__name__, _VALUES[kind]
    if kind in _LATER:
        return lambda value: f'{{"{name}":{_sequence_text(values(value))}}}'
    template = f'{{"{name}":[{",".join(["%s"] * len(hints))}]}}'
    if not others:
        return lambda value: template % values(value)

    def text(value: Any) -> str:
        items = list(values(value))
        for i, text_of in others:
            items[i] = text_of(items[i])
        return template % tuple(items)

    return text


_SEEN_AGAIN = (messages.NewRequest, KvGranted, messages.PrefillStep, messages.DecodeStep, TransferUnit)
"""Messages that several calls take or return. The most recent ones keep their texts."""
_NUM_REMEMBERED = 256


class _Remembered:
    """Writes immutable objects, and reuses the texts of the most recent ones."""

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


_TEXT: dict[Any, Callable[[Any], str]] = {
    int: str,
    str: encode_basestring_ascii,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
    float: json.dumps,
    tuple: _sequence_text,
    list: _sequence_text,
    Spans: lambda value: f'{{"Spans":{str([list(span) for span in value.spans]).replace(" ", "")}}}',
    TokenIds: lambda value: f'{{"TokenIds":"{bytes(value).hex()}"}}',
}
_TEXT |= {kind: _named_text(kind) for kind in _TYPES.values()}
_TEXT |= {kind: _Remembered(_TEXT[kind]) for kind in _SEEN_AGAIN}


def from_lines(lines: Iterable[str]) -> Iterator[Entry]:
    for line in lines:
        instance_id, call, args, returned = from_json(json.loads(line))
        yield Entry(instance_id, call, args, returned)
