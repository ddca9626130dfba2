"""The contract between an instance, which is a pure state machine, and its driver. Also the control loop that
simulation and real mode share.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

from pdsim.core.encode.media_item import MediaItem
from pdsim.core.memory.kv_cache import NO_LEASE, Lease
from pdsim.core.messages import Command, Message, Pause, Result, Step, Wait
from pdsim.dataclass import dataclass
from pdsim.policy.views import TokenSequence


class PolicyError(ValueError):
    """Raised if a policy proposes an action that the instance cannot execute."""


@dataclass(slots=True)
class Request:
    """A request in an instance, with the numbers of its cached, scheduled and computed tokens."""

    request_id: int
    arrival_ns: int
    prompt: TokenSequence
    num_prompt_tokens: int
    """Length of the prompt in tokens."""
    priority: int = 0
    """Decode's queue takes requests of a higher priority first. Other queues do so if their policy reads priorities."""
    lease: Lease = NO_LEASE
    """Pages that the request holds."""
    num_cached_tokens: int = 0
    """Number of the request's tokens that the prefix cache had when a forward first took the request."""
    num_scheduled_tokens: int = 0
    """Number of the request's tokens that were cached or that forwards have been given to compute so far, forwards
    under way included.
    """
    num_computed_tokens: int = 0
    """Number of the request's tokens that have KV: tokens that were cached, and tokens of forwards that have ended."""
    num_tried_tokens: int = 0
    """Number of uncached tokens when the queue last tried to begin the request; 0: the queue has not tried."""
    entry: int = 0
    """Sequence number that the request got when it last joined the instance's queue or, on decode, became ready to run.
    """
    num_taken_before: int = 0
    """Total number of prompt tokens that the instance had taken into forwards when the request joined the queue."""
    media: tuple[MediaItem, ...] = ()
    """Images and audio clips of the prompt that the instance must encode or read, in the prompt's order."""
    encode_ids: tuple[str, ...] = ()
    """Encode instance from which each item of `media` is read. Empty: the instance encodes the items itself."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that need KV before the request can decode: the prompt, and outputs whose KV was lost."""
        return self.num_prompt_tokens

    @property
    def sequence(self) -> TokenSequence:
        """Tokens that the cache must hold or a forward must compute. Output tokens whose ids the instance does not know
        are left out, or placeholders stand for them (RunningRequest.unseen).
        """
        return self.prompt

    @property
    def num_growth_tokens(self) -> int:
        """Maximum number of further output tokens that the scheduler expects of the request. On prefill: 1."""
        return 1

    @property
    def num_reserved_tokens(self) -> int:
        """Number of tokens that a forward reserves for the request's outputs when it completes the prompt."""
        return 1

    @property
    def num_asked_tokens(self) -> int:
        """Maximum number of output tokens that prefill policies see. On prefill and vLLM's aggregated instances: 1."""
        return 1

    @property
    def ignores_eos(self) -> bool:
        return False


class Levels(NamedTuple):
    """Numbers of an instance's pages and requests, by state."""

    num_used_pages: int
    """Number of pages that requests hold, including cached pages that they share."""
    num_evictable_pages: int
    """Number of cached pages that no request uses."""
    num_free_pages: int
    """Number of pages that hold no KV."""
    num_queued: int = 0
    """Number of waiting requests. Prefill: decode has granted pages, and no forward has begun the prompt. Decode: the
    request has no pages. Aggregated: no forward has begun the prompt, or the request is retracted."""
    num_transferring: int = 0
    """Number of requests in transfer. Prefill: computed, but not sent completely. Decode: pages are granted, but KV has
    not arrived completely."""
    num_ready: int = 0
    """Number of decode requests whose KV is complete, and that wait for room in the batch."""
    num_running: int = 0
    """Number of running requests. Prefill: partly computed prompts. Decode: requests in the batch. Aggregated: both
    kinds."""
    num_retracted: int = 0
    """Number of requests that lost their pages and wait for new pages."""
    blocked_by: str = ""
    """Resource that the first queued request lacks: "slots" or "pages". Empty: the request lacks nothing."""


LACKS = {
    "": "",
    "slots": ": max_running_requests was reached",
    "pages": ": its KV pool was full",
}
"""End of the failure message of a request that waited too long, by Levels.blocked_by."""


class Clock(Protocol):
    @property
    def now_ns(self) -> int: ...


class Instance(Protocol):
    """A prefill, decode or aggregated instance. The driver calls on_message, next_step and on_step_done, which never
    block, read no clock and do no I/O. The driver passes now_ns, executes the returned step, and carries out the
    returned commands.
    """

    @property
    def instance_id(self) -> str: ...

    @property
    def max_steps_in_flight(self) -> int:
        """Maximum number of steps under way. Above 1, the instance chooses a step before it has the result of the
        previous step.
        """

    def on_message(self, message: Message, now_ns: int) -> list[Command]: ...

    def next_step(self, now_ns: int) -> tuple[Step | Wait, list[Command]]: ...

    def on_step_done(self, step: Step, result: Result, now_ns: int) -> list[Command]: ...

    def levels(self) -> Levels: ...

    def waiting_for(self) -> list[str]:
        """Lines for the report of a stalled run: each waiting request, and the resource or message that it waits
        for.
        """


_PAUSE = Pause()


def instance_loop(
    instance: Instance,
    *,
    drain: Callable[[], list[Message]],
    carry_out: Callable[[list[Command]], None],
    clock: Clock,
    pauses: bool = False,
) -> Generator[Step | Wait | Pause, Result | None, None]:
    """The control loop of an instance: takes messages, yields the next step, and handles the result of the oldest step
    under way. drain: removes and returns the messages that have arrived. carry_out: executes commands. clock: tells the
    time.

    The driver starts each yielded step behind the steps under way. It answers None if the instance allows a further
    step under way. Otherwise, or if the loop yields a Wait while steps are under way, it answers with the result of the
    oldest step, when this step is done. If no step is under way, it answers a Wait with None, when a message comes or
    the Wait's time is reached.

    If several steps may be under way, the next step starts before the result of the first is handled, so that the
    executor never idles. The driver continues only when all messages due at that instant are delivered. pauses: True:
    the loop also yields a Pause after the commands that follow a result, for a driver that models host time.
    """
    begun: deque[Step] = deque()
    on_message, next_step, on_step_done = instance.on_message, instance.next_step, instance.on_step_done
    while True:
        now_ns = clock.now_ns
        for message in drain():
            if commands := on_message(message, now_ns):
                carry_out(commands)
        step, commands = next_step(now_ns)
        if commands:
            carry_out(commands)
        result = yield step
        if not isinstance(step, Wait):
            begun.append(step)
        if result is not None and (commands := on_step_done(begun.popleft(), result, clock.now_ns)):
            carry_out(commands)
            if pauses:
                yield _PAUSE
