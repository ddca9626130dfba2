"""The process that measured transfers are written to: `pdreal host` with another ticket, here or on another host.

Answers go over standard output, a line of JSON each, and its standard input is its life.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pdreal.hosts import Hosts
from pdreal.transports.names import LOOPBACK
from pdreal.transports.protocol import UnavailableError, open_transport

FILL = 7
_HERE = (sys.executable, "-m", "pdreal", "host")


class Target:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        answer = self._hear()
        self.address: str = answer["address"]
        self.begin: int = answer["begin"]
        """Address at which its memory begins."""

    def is_full(self) -> bool:
        """True if every byte was written."""
        assert self._process.stdin is not None
        self._process.stdin.write("all is written\n")
        self._process.stdin.flush()
        return bool(self._hear()["is_full"])

    def _hear(self) -> dict[str, Any]:
        """Raises UnavailableError if it cannot go on."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"wrong": "the target ended"}
        if "wrong" in answer:
            raise UnavailableError(answer["wrong"])
        return answer


@contextmanager
def target_of(transport: str, device: torch.device, num_bytes: int, hosts: Hosts | None) -> Iterator[Target]:
    """hosts: the first that is not here has it; None: this one. Raises UnavailableError."""
    command: Sequence[str] = _HERE
    address = LOOPBACK
    if hosts is not None:
        entry = hosts.others[0][1]
        command, address = shlex.split(entry.start or ""), str(entry.address)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  the user's
    assert process.stdin is not None
    ticket = {"transport": transport, "device": str(device), "num_bytes": num_bytes, "address": address}
    try:
        process.stdin.write(json.dumps({"target": ticket}) + "\n")
        process.stdin.flush()
        yield Target(process)
    finally:
        process.kill()
        process.communicate()


def serve_target(transport: str, device: str, num_bytes: int, address: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some engines print

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        engine = open_transport(transport, torch.device(device), address)
        memory = engine.allocate(num_bytes)
        engine.register([memory])
    except UnavailableError as wrong:
        tell(wrong=str(wrong))
        return
    tell(address=engine.address, begin=memory.data_ptr())
    if sys.stdin.readline():
        tell(is_full=bool((memory == FILL).all()))
        sys.stdin.readline()
    os._exit(0)  # whatever a thread of the engine still does
