"""The one control loop of an instance, shared by simulator and real harness.

A generator that asks its driver for what only a driver can do: settle, wait, execute a step.
"""

from collections.abc import Callable, Generator

from pdsim.core.instance import Instance
from pdsim.core.messages import Command, Message, Settle, Step, StepResult, Wait


def instance_loop(
    instance: Instance,
    *,
    drain: Callable[[], list[Message]],
    carry_out: Callable[[list[Command]], None],
    now_ns: Callable[[], int],
) -> Generator[Step | Wait | Settle, StepResult | None, None]:
    """Messages are delivered between steps, all that are due before the next step is chosen."""
    settle = Settle()
    while True:
        yield settle
        for message in drain():
            if commands := instance.on_message(message, now_ns()):
                carry_out(commands)
        step, commands = instance.next_step(now_ns())
        if commands:
            carry_out(commands)
        result = yield step
        if not isinstance(step, Wait):
            assert result is not None, f"the driver sent no result for {step}"
            if commands := instance.on_step_done(step, result, now_ns()):
                carry_out(commands)
