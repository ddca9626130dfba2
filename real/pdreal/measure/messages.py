"""What a message takes from process to process."""

import asyncio
from pathlib import Path
from time import perf_counter_ns

from pdreal.channel import Channel
from pdreal.measure.rows import Row, row_of
from pdreal.scratch_folder import ScratchFolder
from pdsim.core.messages import Heartbeat

_ROUND_TRIPS = 500


def message_row() -> Row:
    """One way."""
    with ScratchFolder() as folder:
        return row_of("host", asyncio.run(_messages_us(folder)), what="message")


async def _messages_us(folder: Path) -> list[float]:
    """Sorted halves of round trips between two channels of one process."""
    loop = asyncio.get_running_loop()
    near, far = Channel(folder, "near"), Channel(folder, "far")
    near.connect("far")
    far.connect("near")
    answered = asyncio.Event()
    far.listen(loop, lambda envelope, _: far.send("near", envelope.message))
    near.listen(loop, lambda *_: answered.set())
    times_us = []
    for _ in range(_ROUND_TRIPS):
        answered.clear()
        begin_ns = perf_counter_ns()
        near.send("far", Heartbeat("prefill-0", life=0))
        await answered.wait()
        times_us.append((perf_counter_ns() - begin_ns) / 2e3)
    for channel in (near, far):
        loop.remove_reader(channel.descriptor)
        channel.close()
    return sorted(times_us)
