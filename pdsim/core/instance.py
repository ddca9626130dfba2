"""The contract between an instance (a pure state machine) and whatever drives it."""

from typing import NamedTuple, Protocol

from pdsim.core.messages import Command, Message, Result, Step, Wait


class PolicyError(ValueError):
    """A policy proposed something the instance cannot do."""


class Levels(NamedTuple):
    """How full an instance is and what waits in it."""

    num_used_pages: int
    """Held by requests, alone or through the prefix cache."""
    num_evictable_pages: int
    num_free_pages: int
    num_queued: int
    """Prefill: granted by decode, not begun. Decode: not admitted. Aggregated: not begun."""
    num_transferring: int
    num_ready: int
    """Decode: KV complete, no place in the batch."""
    num_running: int
    """Prefill: begun, not complete. Decode: in the batch. Aggregated: both."""
    num_retracted: int
    blocked_by: str
    """What keeps the head of the queue out: "slots", "pages", or nothing."""


class Instance(Protocol):
    """Driven by three calls; never blocks, never reads a clock, never does I/O.

    The driver passes now_ns, executes the step it is given, and carries out the returned commands.
    """

    @property
    def instance_id(self) -> str: ...

    @property
    def max_steps_in_flight(self) -> int:
        """1, or 2 for an instance that chooses a step before it has seen the result of the last."""
        ...

    def on_message(self, message: Message, now_ns: int) -> list[Command]: ...

    def next_step(self, now_ns: int) -> tuple[Step | Wait, list[Command]]: ...

    def on_step_done(self, step: Step, result: Result, now_ns: int) -> list[Command]: ...

    def levels(self) -> Levels: ...

    def waiting_for(self) -> list[str]:
        """One line for every request that is held up here and what it waits for: the stall report."""
        ...
