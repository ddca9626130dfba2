"""How long two journals decide the same: until requests come in another order, as times differ."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from pdsim.core.journal import KILLED, Entry
from pdsim.core.messages import DecodeStep


class Prefix(NamedTuple):
    """Of the decisions of one instance."""

    num_equal: int
    """Before the first that differs."""
    num_decisions: int
    """Measured."""


def equal_prefixes(measured: Iterable[Entry], simulated: Iterable[Entry]) -> dict[str, Prefix]:
    """By instance, of the real run."""
    ours, theirs = _decisions(measured), _decisions(simulated)
    return {name: Prefix(_common(found, theirs.get(name, [])), len(found)) for name, found in ours.items()}


def _common(one: list[Any], other: list[Any]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _decisions(entries: Iterable[Entry]) -> dict[str, list[Any]]:
    """What each instance said, without times. A decode step that only goes on with its batch is none: how many of them
    there are between two others is a matter of time.
    """
    by_instance: dict[str, list[Any]] = {}
    for entry in entries:
        known = by_instance.setdefault(entry.instance_id, [])
        if entry.call == KILLED:
            known.append(KILLED)
        elif (said := _said(entry.returned)) is not None:
            known.append(said)
    return by_instance


def _said(returned: Any) -> Any:
    match returned:
        case (DecodeStep() as step, commands):
            return (tuple(step.joined), _timeless(commands)) if step.joined or commands else None
        case (None, commands) | commands:
            return _timeless(commands) or None


_NO_DECISION = {"step_id", "prompt"}
"""Steps are numbered as they come, and a real prompt has tokens where a simulated one has spans."""


def _timeless(value: Any) -> Any:
    fields = getattr(value, "_fields", None)
    if fields is not None:
        kept = [name for name in fields if not name.endswith("_ns") and name not in _NO_DECISION]
        return (type(value).__name__, *(_timeless(getattr(value, name)) for name in kept))
    if isinstance(value, list | tuple):
        return tuple(_timeless(one) for one in value)
    return value
