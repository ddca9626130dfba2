"""The control channel: each process has one ZeroMQ socket for incoming messages, and one socket to each peer. Messages
between two processes stay in order.

Each start of a process has its own endpoint, so messages to a dead process never reach its successor. The endpoint is a
Unix socket. Runs on several hosts also have a TCP port, which accepts only holders of the run's keys (CURVE).
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
from pdsim.core.journal.message_json import from_json
from pdsim.core.journal.message_text import to_text


class Envelope(NamedTuple):
    to: str
    """Name of the receiver: a state machine of the core, or a process."""
    message: Any
    """The message: one of the core (core/messages.py), or a notice between processes of real mode."""
    extra: Any = None
    """Data for which the core's message has no field, as plain JSON. For NewRequest: the sampling. For FirstToken and
    KvArrived: the token, its log probabilities and the number of cached tokens. For KvArrived also: the start of
    drafting (tasks.Seed), and fingerprints if KV is checked. For KvGranted: the slot of the linear-attention state on
    decode. For Finished, Failed and PrefillDone: the fields of Drafted. None: no such data."""


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
"""Maximum time in ms that closing a channel waits until its last messages are sent."""


def process_of(machine: str) -> str:
    """Returns the name of the process in which a state machine runs. The sender and the receiver of an instance run in
    its leader; the router runs in the launcher. machine: name of the state machine, such as router, prefill-0 or
    prefill-0.sender.
    """
    if machine in {"router", "health", LAUNCHER}:
        return LAUNCHER
    return machine.removesuffix(".sender").removesuffix(".receiver")


class Network(NamedTuple):
    """Network settings of a process in a run on several hosts: its address and the run's keys."""

    address: str
    """IP address of this process's host, at which the process listens for other hosts."""
    public_key: str
    """Public key of the run. A process admits only peers that present this key."""
    secret_key: str
    """Secret key of the run. Together with `public_key` the secret key is the run's key pair. The launcher makes the
    pair, and only processes of the run hold the pair."""

    @classmethod
    def dealt(cls, address: str) -> "Network":
        """Returns network settings with a new pair of keys, which encrypts the control channel (CURVE). address: IP
        address of the launcher's host.
        """
        public_key, secret_key = zmq.curve_keypair()
        return cls(address, public_key.decode(), secret_key.decode())

    def protect(self, socket: "zmq.Socket[bytes]") -> None:
        """Makes a socket prove that it has the run's keys, and accept only peers that have them."""
        socket.curve_publickey, socket.curve_secretkey = self.public_key.encode(), self.secret_key.encode()

    def callback(self, _: str, key: bytes) -> bool:
        """Returns True if `key`, which a connecting peer presents, is the run's public key. ZeroMQ's authenticator
        calls this method; the first argument, an authentication domain, is not used.
        """
        return key == self.public_key.encode()


def local_endpoint(folder: Path, process: str, life: int = 0) -> str:
    """Returns the address of the Unix socket on which a process listens for other processes of its host. folder: where
    the socket lies. life: number of earlier starts of the process.
    """
    return f"ipc://{folder}/{process}.{life}"


class Channel:
    """Sends and receives messages without blocking. A message that a peer does not accept yet waits in the peer's
    socket.
    """

    def __init__(self, folder: Path, process: str, life: int = 0, network: Network | None = None) -> None:
        """folder: folder of the process's Unix socket. process: name of this process. life: number of its earlier
        starts. network: settings for runs on several hosts. None: the run is on one host.
        """
        self._context = zmq.Context()
        self._network = network
        self._guard: Any = None
        self._incoming = self._context.socket(zmq.PULL)
        self._incoming.setsockopt(zmq.RCVHWM, 0)
        self.endpoint = local_endpoint(folder, process, life)
        """Endpoint at which other processes reach this one."""
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
        """Connects to a process that was started or restarted, and listens at `endpoint`. If the process was restarted,
        messages that still wait for the earlier one are dropped.
        """
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
        """Sends a message. The message is dropped if the receiving process is not connected. to: name of the receiving
        state machine or process. extra: data for which the message has no field (Envelope.extra). payload: any object
        that pickle can send; only between processes of one instance, or between the launcher and a host's agent.
        """
        if socket := self._outgoing.get(process_of(to)):
            frames = [encode(Envelope(to, message, extra))]
            if payload is not None:
                frames.append(pickle.dumps(payload))
            socket.send_multipart(frames, zmq.NOBLOCK)

    def listen(self, loop: AbstractEventLoop, on_message: Callable[[Envelope, Any], None]) -> None:
        """Calls on_message with each message and its payload (None: the message has none) from now on."""

        def drain() -> None:
            """Reads until no message is left, because the socket's file descriptor signals new messages only once."""
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
        """File descriptor that is readable when messages may have arrived."""
        return int(self._incoming.getsockopt(zmq.FD))

    def close(self) -> None:
        for socket in self._outgoing.values():
            socket.close(linger=_LINGER_MS)
        self._incoming.close(linger=0)
        if self._guard is not None:
            self._guard.stop()
        self._context.term()
