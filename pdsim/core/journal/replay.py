"""Replays a recording on new instances.

The replay of a real run must give the same decisions, which proves that simulator and real mode run the same policy
code.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pdsim.core.journal.calls import KILLED, Entry
from pdsim.core.journal.message_json import to_json


class ReplayError(AssertionError):
    """Raised if a replayed call returns another result than the recorded call or raises an error, and if a recording
    cannot be replayed, because it has an unknown instance or an instance that died and cannot be restarted.
    """


def replay(
    entries: Iterable[Entry], instances: Mapping[str, Any], restarted: Callable[[str], Any] | None = None
) -> int:
    """Makes the recorded calls on new instances, and returns the number of calls. Raises ReplayError at the first call
    that returns another result than the recorded one, raises an error, or belongs to an unknown instance.

    instances: new instances by id. restarted: function that gets the id of an instance that died in the recorded run,
    and makes an instance in its place; None: raises ReplayError if an instance died in the recorded run.
    """
    machines, count = dict(instances), 0
    for entry in entries:
        if entry.instance_id not in machines:
            raise ReplayError(
                f"entry {count} is a call of {entry.instance_id}, which is unknown; there are {', '.join(machines)}"
            )
        if entry.call == KILLED:
            if restarted is None:
                raise ReplayError(f"entry {count}: {entry.instance_id} was killed, and the journal has no restart")
            machines[entry.instance_id] = restarted(entry.instance_id)
            continue
        where = f"entry {count}, {entry.instance_id}.{entry.call} at {entry.args[-1]} ns"
        try:
            got = getattr(machines[entry.instance_id], entry.call)(*entry.args)
        except Exception as wrong:
            raise ReplayError(f"{where}: raises {type(wrong).__name__}: {wrong}") from wrong
        if not _are_same(got, entry.returned):
            raise ReplayError(f"{where}: recorded {to_json(entry.returned)}, replayed {to_json(got)}")
        count += 1
    return count


def _are_same(got: Any, recorded: Any) -> bool:
    """True if both results are equal as objects or as JSON. Compares JSON, which is slower, only if the objects
    differ. Lists and tuples count as equal.
    """
    return bool(_as_read(got) == recorded or to_json(got) == to_json(recorded))


def _as_read(returned: Any) -> Any:
    """Returns a call's result with tuples in place of its lists and of lists directly in a tuple, because a journal
    that is read from a file has tuples only.
    """
    if type(returned) is list:
        return tuple(returned)
    if type(returned) is tuple:
        return tuple([tuple(one) if type(one) is list else one for one in returned])
    return returned
