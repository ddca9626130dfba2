"""Notices: what the processes of a run tell each other besides the core's messages. All fields are plain JSON."""

from typing import Any, NamedTuple


class Hello(NamedTuple):
    """A rank to the launcher: its model is loaded, and here is its memory."""

    process: str
    memory: dict[str, Any]
    endpoint: str
    """Endpoint at which others reach it."""


class Peers(NamedTuple):
    """The launcher to a rank: who is there, in which life, and where the memory of every rank lies."""

    number: int
    """Number to answer with."""
    lives: dict[str, int]
    memories: dict[str, list[dict[str, Any]]]
    """A PeerMemory for each rank, by instance."""
    endpoints: dict[str, str]
    """Endpoints of the leaders, by instance."""
    epoch_ns: int | None
    """Begin of time, by the monotonic clock of the rank's host; None as long as not all are connected."""


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


class HostUp(NamedTuple):
    """An agent to the launcher: it is there."""

    host: str
    endpoint: str
    version: str


class AskTime(NamedTuple):
    """The launcher to an agent."""

    number: int


class Time(NamedTuple):
    """The answer, by the monotonic clock of the agent's host."""

    host: str
    number: int
    time_ns: int


class SpawnRanks(NamedTuple):
    """The launcher to an agent: start the ranks of an instance. Their specs are the payload."""


class KillRanks(NamedTuple):
    """The launcher to an agent: kill one rank of an instance, or all."""

    instance_id: str
    rank: int | None


class Ended(NamedTuple):
    """An agent to the launcher: nothing is left of an instance."""

    host: str
    instance_id: str
    exit_code: int


class EndHost(NamedTuple):
    """The launcher to an agent: ranks were told to exit. See to it, and hand over their logbooks."""


class KeptLog(NamedTuple):
    """An agent to the launcher: the next part of a file of logbooks, which is the payload."""

    host: str
    file_name: str


class HostDone(NamedTuple):
    """An agent to the launcher: that was all."""

    host: str


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Hello, Peers, Connected, Ping, Pong, Streamed, Settle, Settled, Exit, Broken, Task, Done),
        *(HostUp, AskTime, Time, SpawnRanks, KillRanks, Ended, EndHost, KeptLog, HostDone),
    )
}
