"""The contract between an instance, which is a pure state machine, and its driver; and the control loop of both
modes.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdsim.core.memory.kv_cache import NO_LEASE, Lease
from pdsim.core.messages import Command, Message, Pause, Result, Step, Wait
from pdsim.policy.views import TokenSequence


class PolicyError(ValueError):
    """Raised if a policy proposes an action that the instance cannot do."""


@dataclass(slots=True)
class Request:
    """A request in an instance, with its number of computed tokens."""

    request_id: int
    arrival_ns: int
    prompt: TokenSequence
    num_prompt_tokens: int
    priority: int = 0
    lease: Lease = NO_LEASE
    num_cached_tokens: int = 0
    """Number of tokens that the prefix cache had when the request was begun."""
    num_scheduled_tokens: int = 0
    """Number of tokens that were cached or that forwards have taken so far."""
    num_computed_tokens: int = 0
    num_tried_tokens: int = 0
    """Number of tokens to compute when the queue last tried to begin the request; 0: never tried."""
    entry: int = 0
    """Place in the order in which requests last joined the queue of an instance, or on decode became ready to run."""
    num_taken_before: int = 0
    """Number of prompt tokens that the instance's forwards had taken when the request joined the queue."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute or to find in the cache: the prompt, and outputs whose KV was lost."""
        return self.num_prompt_tokens

    @property
    def sequence(self) -> TokenSequence:
        """The tokens to compute, as far as their ids are known."""
        return self.prompt

    @property
    def num_growth_tokens(self) -> int:
        """Number of further tokens that the request may hold until its end."""
        return 1

    @property
    def num_reserved_tokens(self) -> int:
        """Number of tokens that the forward completing this prompt reserves for its growth."""
        return 1

    @property
    def num_asked_tokens(self) -> int:
        """Longest output that the instance sees."""
        return 1

    @property
    def ignores_eos(self) -> bool:
        return False


class Levels(NamedTuple):
    """Occupancy of an instance, and numbers of its waiting requests."""

    num_used_pages: int
    """Pages that requests hold, alone or through the prefix cache."""
    num_evictable_pages: int
    """Cached pages that no request uses."""
    num_free_pages: int
    """Pages that hold no KV."""
    num_queued: int = 0
    """Number of waiting requests. Prefill: granted by decode, not begun. Decode: not admitted. Aggregated: not
    begun."""
    num_transferring: int = 0
    """Number of requests in transfer. Prefill: computed, not sent. Decode: KV on its way."""
    num_ready: int = 0
    """Number of decode requests with complete KV, but without a place in the batch."""
    num_running: int = 0
    """Number of running requests. Prefill: begun, not complete. Decode: in the batch. Aggregated: both kinds."""
    num_retracted: int = 0
    """Requests that lost their pages and wait for new pages."""
    blocked_by: str = ""
    """Resource that the head of the queue lacks: "slots", "pages", or empty."""


LACKS = {
    "": "",
    "slots": ": max_running_requests was reached",
    "pages": ": its KV pool was full",
}
"""Text for each value of Levels.blocked_by. The failure reason of a request that waited too long contains the text."""


class Instance(Protocol):
    """A prefill, decode or aggregated instance: three calls that never block, read no clock and do no I/O. The driver
    passes now_ns, executes the returned step, and carries out the returned commands.
    """

    @property
    def instance_id(self) -> str: ...

    @property
    def max_steps_in_flight(self) -> int:
        """Maximum number of steps under way. Above 1, the instance chooses a step before it has seen the last
        result.
        """

    def on_message(self, message: Message, now_ns: int) -> list[Command]: ...

    def next_step(self, now_ns: int) -> tuple[Step | Wait, list[Command]]: ...

    def on_step_done(self, step: Step, result: Result, now_ns: int) -> list[Command]: ...

    def levels(self) -> Levels: ...

    def waiting_for(self) -> list[str]:
        """Lines of the stall report: each waiting request, and the resource or message that it waits for."""


_PAUSE = Pause()


def instance_loop(
    instance: Instance,
    *,
    drain: Callable[[], list[Message]],
    carry_out: Callable[[list[Command]], None],
    now_ns: Callable[[], int],
    pauses: bool = False,
) -> Generator[Step | Wait | Pause, Result | None, None]:
    """The control loop of an instance: takes messages, chooses a step by the present state, then sees the result of the
    oldest step under way.

    The driver begins each step behind the steps under way, and then answers. If as many steps are under way as the
    instance allows, or the instance wants to wait, the answer is the result of the oldest step, as soon as it is done.
    The answer is None if another step may be begun, or if a wait is over because a message came or the time was
    reached.

    An instance with several steps under way has the next step begun before it sees the result of the first, so that its
    executor never idles. The driver continues only when all messages due at that instant have been delivered. With
    `pauses` the loop also stops after it has handed on the consequences of a result, for a driver whose host takes
    time.
    """
    begun: deque[Step] = deque()
    while True:
        now = now_ns()
        for message in drain():
            if commands := instance.on_message(message, now):
                carry_out(commands)
        step, commands = instance.next_step(now)
        if commands:
            carry_out(commands)
        result = yield step
        if not isinstance(step, Wait):
            begun.append(step)
        if result is not None and (commands := instance.on_step_done(begun.popleft(), result, now_ns())):
            carry_out(commands)
            if pauses:
                yield _PAUSE
