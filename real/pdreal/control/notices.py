"""Notices: messages between the processes of a run, besides the core's messages. All fields are plain JSON."""

from typing import Any, NamedTuple


class Hello(NamedTuple):
    """A rank to the launcher: its model is loaded; with its memory."""

    process: str
    memory: dict[str, Any]
    endpoint: str
    """Endpoint at which other processes reach the rank."""


class Peers(NamedTuple):
    """The launcher to a rank: the present instances with their lives, and the memory of all ranks."""

    number: int
    """Number that the rank repeats in its answer."""
    lives: dict[str, int]
    memories: dict[str, list[dict[str, Any]]]
    """A PeerMemory for each rank, by instance."""
    endpoints: dict[str, str]
    """Endpoints of the leaders, by instance."""
    epoch_ns: int | None
    """The epoch, by the monotonic clock of the rank's host. None until all ranks are connected."""


class Connected(NamedTuple):
    """A rank to the launcher: it can reach all instances that these Peers named."""

    process: str
    number: int


class Ping(NamedTuple):
    """The launcher to a rank: answer if you are alive."""


class Pong(NamedTuple):
    """The answer to a Ping. A leader adds its occupancy."""

    process: str
    levels: list[Any]


class Streamed(NamedTuple):
    """A leader to the launcher: one new token for each of some requests."""

    tokens: list[list[Any]]
    """(request_id, token, log probabilities if requested)."""


class Settle(NamedTuple):
    """The launcher to a leader: all requests have ended. The leader answers when it holds nothing of them, or after the
    timeout.
    """

    timeout_ns: int


class Settled(NamedTuple):
    """The answer to Settle: the requests of which something is left. Each is a violation of a law."""

    instance_id: str
    leak: str


class Exit(NamedTuple):
    """The launcher to a rank: the run is over."""


BROKEN = 1
"""The exit code of a rank that could not continue, and told the launcher why."""


class Broken(NamedTuple):
    """A rank to the launcher: it cannot continue, and why."""

    process: str
    reason: str


class Task(NamedTuple):
    """A leader to its followers: a task that all ranks do. The task is the payload (tasks.py)."""

    ticket: int
    """Number of the task. 0: the leader does not wait for an answer."""


class Done(NamedTuple):
    """A follower to its leader: the result of a task."""

    ticket: int
    result: Any
    error: str | None


class HostUp(NamedTuple):
    """An agent to the launcher: it is running."""

    host: str
    endpoint: str
    version: str


class AskTime(NamedTuple):
    """The launcher to an agent: request for the time of its host."""

    number: int


class Time(NamedTuple):
    """The answer to AskTime, by the monotonic clock of the agent's host."""

    host: str
    number: int
    time_ns: int


class SpawnRanks(NamedTuple):
    """The launcher to an agent: start the ranks of an instance. The payload has their specs."""


class KillRanks(NamedTuple):
    """The launcher to an agent: kill one rank of an instance, or all."""

    instance_id: str
    rank: int | None


class Ended(NamedTuple):
    """An agent to the launcher: no process of an instance is left."""

    host: str
    instance_id: str
    exit_code: int


class EndHost(NamedTuple):
    """The launcher to an agent: ranks were told to exit. The agent makes sure that they do, and sends their
    logbooks.
    """


class KeptLog(NamedTuple):
    """An agent to the launcher: the next part of a logbook file, which is the payload."""

    host: str
    file_name: str


class HostDone(NamedTuple):
    """An agent to the launcher: the agent has sent all logbooks."""

    host: str


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Hello, Peers, Connected, Ping, Pong, Streamed, Settle, Settled, Exit, Broken, Task, Done),
        *(HostUp, AskTime, Time, SpawnRanks, KillRanks, Ended, EndHost, KeptLog, HostDone),
    )
}
