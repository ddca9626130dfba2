"""Measures CPU seconds and peak memory of a whole command, with start-up, as the operating system counts them."""

import os
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    peak_mib: float
    output: str


def measure(command: list[str], repeats: int = 3) -> Cost:
    """Runs a command `repeats` times. Returns the cost of the run with the least CPU time. If a run fails, prints its
    messages and exits.
    """
    return min((_once(command) for _ in range(repeats)), key=lambda cost: cost.cpu_s)


def _once(command: list[str]) -> Cost:
    read, write = os.pipe()
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    with os.fdopen(read) as out:
        output = out.read()
    error = process.stderr.read() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.stderr:
        process.stderr.close()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with {process.returncode}:\n{error}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output)
