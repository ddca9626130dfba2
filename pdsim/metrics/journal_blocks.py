"""Writes and reads the calls of a journal in blocks. A block is a line of JSON with columns, in which each message
stands once; lines of single calls take longer to write and to read.

A block has two keys. `objects` has the messages, steps and results of its calls, each once, in groups of one kind: the
kind's name, and a column for each field. Objects are numbered from 0 in the order of groups and rows. If a kind has no
fields, all its objects are equal and share one number. If the values of a field are all objects, these come in an
earlier group, and the column is {"numbers": ...} instead of values. `calls` has the calls in order, with a column for
each of:

instance_id, call, now_ns   name of the instance, name of its method, and time of the call
num_args, num_returned      how many objects the call got, and how many it returned; a chosen step is the first of them
objects                     numbers of all objects that calls got, then of all that they returned
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from operator import attrgetter
from typing import Any

from pydantic_core import from_json as decoded
from pydantic_core import to_json as encoded

from pdsim.core.journal.calls import KILLED, Entry
from pdsim.core.journal.message_json import FIELDS, LONG, PLAIN, TYPES, are_one_run, from_json, to_json
from pdsim.core.sequence import Spans, TokenIds

_KINDS = frozenset(TYPES.values())
_GETTERS: dict[Any, dict[str, Callable[[Any], Any]]] = {
    kind: {name: attrgetter(name) for name in names} for kind, names in FIELDS.items()
}
_SEQUENCES = frozenset({Spans, TokenIds})


def _sequence_json(value: Any) -> Any:
    return {"Spans": value.spans} if type(value) is Spans else to_json(value)


class _Objects:
    """The messages, steps and results in a block of the journal. Each is stored once and has a number, and calls of the
    block refer to the number. Objects are told apart by Python's id(), which stays valid because the block's calls keep
    the objects alive.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[str, dict[str, Any]]] = []
        self._numbers: dict[int, int] = {}
        self._num = 0
        self._pages: dict[int, tuple[Any, Any]] = {}
        """Long tuples of integers with their JSON, by id. A grant and the transfer of its pages have the same tuple."""

    def numbers(self, values: Sequence[Any]) -> list[int]:
        """Returns the number of each of the objects `values` in the block. Objects without a number get the next ones;
        the objects in their fields get theirs first.
        """
        ids = list(map(id, values))
        by_kind: dict[Any, list[Any]] = defaultdict(list)
        for value in dict(zip(ids, values, strict=True)).values():
            by_kind[type(value)].append(value)
        for kind, found in by_kind.items():
            if new := [value for value in found if id(value) not in self._numbers]:
                self._add(kind, new)
        return list(map(self._numbers.__getitem__, ids))

    def _add(self, kind: Any, new: Sequence[Any]) -> None:
        columns = {name: self._column(list(map(get, new))) for name, get in _GETTERS[kind].items()}
        self.groups.append((kind.__name__, columns))
        if columns:
            self._numbers.update(zip(map(id, new), count(self._num)))
            self._num += len(new)
        else:  # all are equal
            self._numbers.update(dict.fromkeys(map(id, new), self._num))
            self._num += 1

    def _column(self, values: list[Any]) -> Any:
        """Returns the values of one field of several objects of one class as JSON. All items of a tuple have the same
        type.
        """
        types = set(map(type, values))
        if types <= PLAIN:
            return values
        if types <= _SEQUENCES:
            return list(map(_sequence_json, values))
        if types <= _KINDS:
            return {"numbers": self.numbers(values)}
        if types == {tuple}:
            types = {type(items[0]) for items in values if items}
            if types == {int}:
                return list(map(self._ids, values))
            if types <= PLAIN:
                return list(map(list, values))  # lists are written in half the time
            if types <= _KINDS:
                numbers = iter(self.numbers(list(chain.from_iterable(values))))
                return {"numbers": [list(islice(numbers, len(items))) for items in values]}
        return list(map(to_json, values))

    def _ids(self, ids: tuple[int, ...]) -> Any:
        """A tuple of integers as JSON: a list, or {"Runs": [first, length]} for LONG or more consecutive integers, such
        as page ids. A tuple of several runs becomes a list, because the search for runs takes too long.
        """
        if len(ids) < LONG:
            return list(ids)
        if (known := self._pages.get(id(ids))) is None:
            made: Any = {"Runs": [ids[0], len(ids)]} if are_one_run(ids) else list(ids)
            known = self._pages[id(ids)] = ids, made
        return known[1]


def to_block(entries: Sequence[Entry]) -> bytes:
    """Returns the calls of a journal as one block of bytes: one line of JSON, with a line feed at its end, that has the
    calls and, once each, the objects in their arguments and results. There must be at least one call.
    """
    instance_ids, calls, args, returned = zip(*entries, strict=True)
    given = [values[:-1] for values in args]
    results = [
        (result[0], *result[1]) if call == "next_step" else result or ()
        for call, result in zip(calls, returned, strict=True)
    ]
    objects = _Objects()
    columns = {
        "instance_id": instance_ids,
        "call": calls,
        "now_ns": [values[-1] for values in args],
        "num_args": list(map(len, given)),
        "num_returned": list(map(len, results)),
        "objects": objects.numbers(list(chain(chain.from_iterable(given), chain.from_iterable(results)))),
    }
    return encoded({"objects": objects.groups, "calls": columns}) + b"\n"


def entries_in(block: str | bytes) -> Iterator[Entry]:
    """Yields the journal entries of one block (a line that to_block made). Raises ValueError, LookupError or TypeError
    if the block is damaged.
    """
    found = decoded(block)
    objects: list[Any] = []
    for name, columns in found["objects"]:
        objects += _made(TYPES[name], {field: _values(column, objects) for field, column in columns.items()})
    calls = found["calls"]
    known = list(map(objects.__getitem__, calls["objects"]))
    num_args = sum(calls["num_args"])
    if len(known) != num_args + sum(calls["num_returned"]):
        raise ValueError(f"calls have another number of objects than {len(known)}")
    given, results = iter(known[:num_args]), iter(known[num_args:])
    rows = zip(*[calls[name] for name in _CALL], strict=True)
    for instance_id, call, now_ns, num_given, num_returned in rows:
        args = (*islice(given, num_given), now_ns)
        result: Any = tuple(islice(results, num_returned))
        if call == "next_step":
            result = result[0], result[1:]
        yield Entry(instance_id, call, args, None if call == KILLED else result)


_CALL = ("instance_id", "call", "now_ns", "num_args", "num_returned")


def _made(kind: Any, columns: dict[str, Sequence[Any]]) -> Iterable[Any]:
    if not columns:
        return [kind()]
    rows = zip(*columns.values(), strict=True)
    if list(columns) == FIELDS[kind]:
        return [kind(*row) for row in rows]
    return [kind(**dict(zip(columns, row, strict=True))) for row in rows]  # of another release


def _values(column: Any, objects: Sequence[Any]) -> Sequence[Any]:
    if not isinstance(column, dict):
        values: Sequence[Any] = from_json(column)
        return values
    return [
        objects[number] if isinstance(number, int) else tuple([objects[one] for one in number])
        for number in column["numbers"]
    ]
