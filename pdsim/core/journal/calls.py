"""Records calls into the state machines of a run: instances, senders, receivers, the router and others."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pdsim.core.messages import EncodeStep, Message, Result, Step


class Entry(NamedTuple):
    """A recorded call of a state machine: the machine's id, the name of the method, the arguments (the last is now_ns)
    and the result. With the name KILLED: no call, but the machine's death.
    """

    instance_id: str
    call: str
    args: tuple[Any, ...]
    returned: Any


_new_entry = tuple.__new__
"""Makes an Entry in half the time of its constructor."""

KILLED = "killed"
"""Name of the journal entry that records the death of an instance, a sender or a receiver at args[0] ns. Later entries
with the same id are calls of the state machine that took its place after a restart."""


class Recorded:
    """Wraps a state machine, such as an instance or the router, and gives `record` an Entry for each call of
    on_message, next_step and on_step_done.
    """

    def __init__(self, inner: Any, record: Callable[[Entry], None]) -> None:
        self.instance_id: str = inner.instance_id
        self.inner = inner
        self.max_steps_in_flight: int = getattr(inner, "max_steps_in_flight", 1)
        self._record = record

    def on_message(self, message: Message, now_ns: int) -> Any:
        return self._note("on_message", (message, now_ns), self.inner.on_message(message, now_ns))

    def next_step(self, now_ns: int) -> Any:
        return self._note("next_step", (now_ns,), self.inner.next_step(now_ns))

    def on_step_done(self, step: Step | EncodeStep, result: Result, now_ns: int) -> Any:
        return self._note("on_step_done", (step, result, now_ns), self.inner.on_step_done(step, result, now_ns))

    def levels(self) -> Any:
        return self.inner.levels()

    def waiting_for(self) -> Any:
        return self.inner.waiting_for()

    def _note(self, call: str, args: tuple[Any, ...], returned: Any) -> Any:
        self._record(_new_entry(Entry, (self.instance_id, call, args, returned)))
        return returned
