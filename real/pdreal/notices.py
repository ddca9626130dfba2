"""Notices: what the processes of a run tell each other besides the core's messages. All fields are plain JSON."""

from typing import Any, NamedTuple


class Hello(NamedTuple):
    """A rank to the launcher: its model is loaded, and here is its memory."""

    process: str
    memory: dict[str, Any]


class Peers(NamedTuple):
    """The launcher to a rank: who is there, in which life, and where the memory of every rank lies."""

    number: int
    """Number to answer with."""
    lives: dict[str, int]
    memories: dict[str, list[dict[str, Any]]]
    """A PeerMemory for each rank, by instance."""
    epoch_ns: int | None
    """Begin of time, by the monotonic clock; None as long as not all are connected."""


class Connected(NamedTuple):
    """A rank to the launcher: it can reach all that these Peers named."""

    process: str
    number: int


class Ping(NamedTuple):
    """The launcher to a rank: are you there?"""


class Pong(NamedTuple):
    """The answer; a leader's with how full the instance is, a follower's without."""

    process: str
    levels: list[Any]


class Streamed(NamedTuple):
    """A leader to the launcher: tokens of requests, one each."""

    tokens: list[list[Any]]
    """(request_id, token, log probabilities if it asked for them)"""


class Settle(NamedTuple):
    """The launcher to a leader: all requests have ended. Say when nothing of them is left, or after so long what is."""

    timeout_ns: int


class Settled(NamedTuple):
    """The answer; what is left, if anything is, breaks a law."""

    instance_id: str
    leak: str


class Exit(NamedTuple):
    """The launcher to a rank: the run is over."""


BROKEN = 1
"""The exit code of a rank that could not go on, and said why."""


class Broken(NamedTuple):
    """A rank to the launcher: it cannot go on."""

    process: str
    reason: str


class Task(NamedTuple):
    """A leader to its followers: do this, as I do. What to do is the payload (tasks.py)."""

    ticket: int
    """0: nobody waits for the answer."""


class Done(NamedTuple):
    """A follower to its leader."""

    ticket: int
    result: Any
    error: str | None


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Hello, Peers, Connected, Ping, Pong, Streamed, Settle, Settled, Exit, Broken, Task, Done)
}
