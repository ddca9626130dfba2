"""Writes that the target carries out: the sender asks, the target copies and answers.

Each sending thread has a connection: a Unix socket without a file (abstract name; Linux only). A connection begins
with a JSON line that describes the sender's memory. A request is the number of ranges and three arrays of int64:
addresses in the sender, addresses in the target, lengths. The answer is the length of a text and the text: empty, or
what went wrong. A peer that dies closes its connections.
"""

import json
import os
import socket
import struct
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from pdreal.transports.protocol import Addresses, TransferError

TIMEOUT_S = 30.0
"""Maximum wait for an answer in s."""

_COUNT = struct.Struct("=q")


class Sender(Protocol):
    """The sending process, as the receiver sees it: its memory, from which the receiver copies."""

    def copy(self, sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
        """Copies ranges, and returns when all bytes are in place. sources: addresses in the sender. targets: addresses
        in this receiver. lengths: sizes in bytes, one per range. Raises TransferError if a range cannot be copied.
        """
        ...

    def close(self) -> None: ...


class PullServer:
    """Accepts connections of senders, and copies the KV that each sender offers out of the sender's memory. Each
    connection has a thread.
    """

    def __init__(self, open_sender: Callable[[Any], Sender]) -> None:
        """open_sender: called once per connection, with the sender's description of its memory, in the thread that will
        copy.
        """
        self._open_sender = open_sender
        self._socket = socket.socket(socket.AF_UNIX)
        self.name = f"pdreal-{os.getpid()}-{uuid.uuid4().hex}"
        self._socket.bind(f"\0{self.name}")
        self._socket.listen()
        threading.Thread(target=self._accept, name="pull accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), name="pull", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, _EndedError), connection, connection.makefile("rb") as stream:
            description = json.loads(stream.readline() or "null")
            try:
                sender = self._open_sender(description)
            except TransferError as wrong:
                sender = _NoSender(str(wrong))
            try:
                while True:
                    (count,) = _COUNT.unpack(_read(stream, _COUNT.size))
                    ranges = np.frombuffer(_read(stream, 3 * 8 * count), np.int64).reshape(3, count)
                    answer = _problem_of(sender, *ranges).encode()
                    connection.sendall(_COUNT.pack(len(answer)) + answer)
            finally:
                sender.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class PullClient:
    """The sender's side of a transfer that the receiver carries out: asks one receiver (PullServer) to copy ranges of
    memory. Each thread has its own connection, which its first write opens.
    """

    def __init__(self, name: str, description: Any) -> None:
        """name: name of the receiver's socket (PullServer.name). description: describes this sender's memory, as plain
        JSON.
        """
        self._name = name
        self._description = description
        self._threads = threading.local()
        self._connections: set[socket.socket] = set()

    def write(self, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        """Asks the receiver to copy ranges, and returns when it has copied them. local: addresses in this sender.
        remote: addresses in the receiver. lengths: sizes in bytes, one per range. Raises TransferError if the receiver
        could not copy them, is gone, or does not answer within TIMEOUT_S.
        """
        request = np.stack([local, remote, lengths]).astype(np.int64)
        try:
            connection = self._connection()
            connection.sendall(_COUNT.pack(len(lengths)) + request.tobytes())
            (length,) = _COUNT.unpack(_receive(connection, _COUNT.size))
            problem = _receive(connection, length).decode()
        except OSError as wrong:
            self._drop_connection()
            raise TransferError(f"no answer from the peer: {wrong}") from None
        if problem:
            raise TransferError(problem)

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._threads, "connection", None)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX)
            self._threads.connection = connection
            self._connections.add(connection)
            connection.settimeout(TIMEOUT_S)
            connection.connect(f"\0{self._name}")
            connection.sendall(json.dumps(self._description).encode() + b"\n")
        return connection

    def _drop_connection(self) -> None:
        """Closes this thread's connection, if there is one."""
        connection: socket.socket | None = getattr(self._threads, "connection", None)
        if connection is not None:
            self._threads.connection = None
            self._connections.discard(connection)
            connection.close()

    def close(self) -> None:
        """Closes all connections. Writes that still run fail."""
        for connection in list(self._connections):
            connection.close()


class _NoSender:
    """Takes the place of a sender whose memory could not be opened. Each copy raises TransferError with the problem."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def copy(self, sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
        raise TransferError(self._problem)

    def close(self) -> None:
        """Does nothing, because nothing is open."""


class _EndedError(Exception):
    """Raised if the sender closed its connection."""


def _problem_of(sender: Sender, sources: Addresses, targets: Addresses, lengths: Addresses) -> str:
    try:
        sender.copy(sources, targets, lengths)
    except TransferError as wrong:
        return str(wrong)
    return ""


def _read(stream: Any, num_bytes: int) -> bytes:
    got: bytes = stream.read(num_bytes)
    if len(got) < num_bytes:
        raise _EndedError
    return got


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = connection.recv(num_bytes)
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
