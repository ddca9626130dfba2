"""The control channel: a ZeroMQ socket for what comes in, and one to each peer. Messages between two keep their order.

Each life of a process has an endpoint of its own, so that messages to a dead process never reach its successor: a Unix
socket, and on several hosts a TCP port beside it, which accepts only holders of the run's keys (CURVE).
"""

import json
import pickle
from asyncio import AbstractEventLoop
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pdreal.control.notices import KINDS
from pdsim.core.journal import from_json, to_text


class Envelope(NamedTuple):
    to: str
    """Receiver of the message: a state machine of the core, or a process."""
    message: Any
    extra: Any = None
    """Plain JSON: with NewRequest the sampling, with FirstToken and KvArrived the token and the cached tokens."""


def encode(envelope: Envelope) -> bytes:
    to, message, extra = envelope
    name = type(message).__name__
    content = json.dumps({name: message}) if name in KINDS else to_text(message)
    return f"[{json.dumps(to)},{content},{json.dumps(extra)}]".encode()


def decode(data: bytes) -> Envelope:
    to, content, extra = json.loads(data)
    ((name, fields),) = content.items()
    return Envelope(to, KINDS[name](*fields) if name in KINDS else from_json(content), extra)


LAUNCHER = "launcher"
_LINGER_MS = 1000
"""Limit for the last messages to leave."""


def process_of(machine: str) -> str:
    """The process of a state machine: an instance's agents live with its leader, the router with the launcher."""
    if machine in {"router", "health", LAUNCHER}:
        return LAUNCHER
    return machine.removesuffix(".sender").removesuffix(".receiver")


class Network(NamedTuple):
    """Place of a process in a run on several hosts."""

    address: str
    """Endpoint on which it listens."""
    public_key: str
    secret_key: str
    """A key pair of the run, which the launcher deals: whoever holds it is one of us."""

    @classmethod
    def dealt(cls, address: str) -> "Network":
        """A network with new keys, whose launcher has this address."""
        public_key, secret_key = zmq.curve_keypair()
        return cls(address, public_key.decode(), secret_key.decode())

    def protect(self, socket: "zmq.Socket[bytes]") -> None:
        """The socket proves that it holds the keys, and reads and writes for those that do."""
        socket.curve_publickey, socket.curve_secretkey = self.public_key.encode(), self.secret_key.encode()

    def callback(self, _: str, key: bytes) -> bool:
        """Called by the authenticator with the key of whoever connects."""
        return key == self.public_key.encode()


def local_endpoint(folder: Path, process: str, life: int = 0) -> str:
    """The unix socket of a process, for others on its host."""
    return f"ipc://{folder}/{process}.{life}"


class Channel:
    """Never blocks: what a peer does not take yet waits in its socket."""

    def __init__(self, folder: Path, process: str, life: int = 0, network: Network | None = None) -> None:
        """network: where the run has several hosts."""
        self._context = zmq.Context()
        self._network = network
        self._guard: Any = None
        self._incoming = self._context.socket(zmq.PULL)
        self._incoming.setsockopt(zmq.RCVHWM, 0)
        self.endpoint = local_endpoint(folder, process, life)
        """Endpoint at which others reach it."""
        if network is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback(credentials_provider=network)
            network.protect(self._incoming)
            self._incoming.curve_server = True
        self._incoming.bind(self.endpoint)
        if network is not None:
            self.endpoint = f"tcp://{network.address}:{self._incoming.bind_to_random_port(f'tcp://{network.address}')}"
        self._outgoing: dict[str, zmq.Socket[bytes]] = {}

    def connect(self, process: str, endpoint: str) -> None:
        """Connect to a life of a process. What waits for an earlier life is dropped."""
        self.disconnect(process)
        socket = self._context.socket(zmq.PUSH)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RECONNECT_IVL, 10), (zmq.RECONNECT_IVL_MAX, 1000)):
            socket.setsockopt(option, value)
        if self._network is not None:
            self._network.protect(socket)
            socket.curve_serverkey = self._network.public_key.encode()
        socket.connect(endpoint)
        self._outgoing[process] = socket

    def disconnect(self, process: str) -> None:
        if old := self._outgoing.pop(process, None):
            old.close(linger=0)

    def send(self, to: str, message: Any, extra: Any = None, *, payload: Any = None) -> None:
        """Send a message, to nobody if its process is not connected. payload: any object, within one instance or
        with an agent.
        """
        if socket := self._outgoing.get(process_of(to)):
            frames = [encode(Envelope(to, message, extra))]
            if payload is not None:
                frames.append(pickle.dumps(payload))
            socket.send_multipart(frames, zmq.NOBLOCK)

    def listen(self, loop: AbstractEventLoop, on_message: Callable[[Envelope, Any], None]) -> None:
        """Call back with each message and its payload."""

        def drain() -> None:
            """Read until nothing is left: the descriptor tells of news only once."""
            while not self._incoming.closed:
                try:
                    frames = self._incoming.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                payload = pickle.loads(frames[1]) if len(frames) > 1 else None  # noqa: S301  from our own processes
                on_message(decode(frames[0]), payload)

        loop.add_reader(self.descriptor, drain)
        loop.call_soon(drain)

    @property
    def descriptor(self) -> int:
        """Readable when there may be news."""
        return int(self._incoming.getsockopt(zmq.FD))

    def close(self) -> None:
        for socket in self._outgoing.values():
            socket.close(linger=_LINGER_MS)
        self._incoming.close(linger=0)
        if self._guard is not None:
            self._guard.stop()
        self._context.term()
