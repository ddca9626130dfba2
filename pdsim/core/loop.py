"""The one control loop of an instance, shared by simulator and real harness.

A generator that asks its driver for what only a driver can do: settle, begin a step, collect its result, wait.
"""

from collections import deque
from collections.abc import Callable, Generator

from pdsim.core.instance import Instance
from pdsim.core.messages import Collect, Command, Effect, Message, Settle, Step, StepResult, Wait

_SETTLE = Settle()
_COLLECT = Collect()


def instance_loop(
    instance: Instance,
    *,
    drain: Callable[[], list[Message]],
    carry_out: Callable[[list[Command]], None],
    now_ns: Callable[[], int],
) -> Generator[Effect, StepResult | None, None]:
    """Choose a step from all that is known, begin it, and take in the result of the oldest one.

    An instance that overlaps has a second step begun before it looks at the result of the first, so that its executor
    never idles; it sees every result one step late. Messages are taken in before each choice, and at no other time.
    """
    begun: deque[Step] = deque()
    while True:
        yield _SETTLE
        now = now_ns()
        for message in drain():
            if commands := instance.on_message(message, now):
                carry_out(commands)
        step, commands = instance.next_step(now)
        if commands:
            carry_out(commands)
        if not isinstance(step, Wait):
            yield step
            begun.append(step)
            if len(begun) < instance.max_steps_in_flight:
                continue
        elif not begun:
            yield step
            continue
        result = yield _COLLECT
        assert result is not None, f"the driver sent no result for {begun[0]}"
        if commands := instance.on_step_done(begun.popleft(), result, now_ns()):
            carry_out(commands)
