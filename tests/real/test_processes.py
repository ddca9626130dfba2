"""Rank processes: the event loop goes on while what they are forked from starts again; a death has its signal."""

import asyncio
import os
import signal
from multiprocessing import forkserver
from time import monotonic

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.hosts.instances import ended_by
from pdreal.hosts.processes import Processes


def test_the_loop_goes_on_while_a_killed_forkserver_starts_again():
    async def longest_gap_s():
        processes = Processes(asyncio.get_running_loop(), lambda *exited: None)
        await processes.prepare()
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        await asyncio.sleep(0.5)  # instances come back after a pause, too
        preparing = asyncio.ensure_future(processes.prepare())
        begin_s = last_s = monotonic()
        longest_s = 0.0
        while not preparing.done():
            await asyncio.sleep(0.01)
            longest_s, last_s = max(longest_s, monotonic() - last_s), monotonic()
        preparing.result()
        return longest_s, monotonic() - begin_s

    longest_s, taken_s = asyncio.run(longest_gap_s())
    assert longest_s < taken_s / 2


@pytest.mark.parametrize(
    ("code", "text"), [(-9, "killed by SIGKILL"), (-200, "killed by signal 200"), (3, "exit code 3")]
)
def test_an_end_is_told_by_its_signal_or_code(code, text):
    assert ended_by(code) == text
