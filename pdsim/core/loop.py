"""The one control loop of an instance, shared by simulator and real harness.

A generator that asks its driver for what only a driver can do: begin a step, wait, say what became of a step.
"""

from collections import deque
from collections.abc import Callable, Generator

from pdsim.core.instance import Instance
from pdsim.core.messages import Command, Message, Pause, Result, Step, Wait

_PAUSE = Pause()


def instance_loop(
    instance: Instance,
    *,
    drain: Callable[[], list[Message]],
    carry_out: Callable[[list[Command]], None],
    now_ns: Callable[[], int],
    pauses: bool = False,
) -> Generator[Step | Wait | Pause, Result | None, None]:
    """Take in messages and choose a step from all that is known, then see the result of the oldest step begun.

    The driver begins each step it is given behind those under way. It answers with the result of the oldest one as soon
    as it is done, if as many are in flight as the instance allows or it wants to wait. It answers None when there is
    room for another step, or when a wait is over: a message came, or it was time.

    An instance with two steps in flight has the second begun before it sees the result of the first, so that its
    executor never idles. The driver goes on only when all that is due at that instant has been delivered.

    With `pauses` the loop also stops after it has handed on what a result led to, for a driver whose host takes time.
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
