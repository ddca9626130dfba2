"""Notices: messages between the processes of a run that control the processes; the core's messages are in
pdsim.core.messages. All fields are plain JSON.
"""

from typing import Any, NamedTuple


class Hello(NamedTuple):
    """A rank tells the launcher that its model is loaded. memory: addresses at which the rank receives KV (fields of
    PeerMemory); empty if the rank receives no KV.
    """

    process: str
    """Name of the rank's process."""
    memory: dict[str, Any]
    endpoint: str
    """Endpoint at which other processes reach the rank."""


class Peers(NamedTuple):
    """The launcher tells a rank which instances run now, how often each was started, and where the memory of all ranks
    is.
    """

    number: int
    """Number of this notice. The rank repeats the number in its answer."""
    lives: dict[str, int]
    """For each running instance: how often it had been started before its present start. The keys are instance ids."""
    memories: dict[str, list[dict[str, Any]]]
    """For each instance, the fields of a PeerMemory for each of its ranks, in the order of ranks. A rank that receives
    no KV has no fields."""
    endpoints: dict[str, str]
    """Address on which each instance's leader receives messages of other instances, by instance id."""
    epoch_ns: int | None
    """Start of the run (time 0 of all records) in ns, by the monotonic clock of the rank's host. None until all ranks
    are connected.
    """


class Connected(NamedTuple):
    """A rank tells the launcher that it has connected to all instances of a Peers notice that are not gone."""

    process: str
    """Name of the rank's process."""
    number: int
    """Number of the Peers notice to which this is the answer."""


class Ping(NamedTuple):
    """The launcher asks a rank whether it is alive."""


class Pong(NamedTuple):
    """The answer to a Ping. levels: from a leader, the values of its instance's Levels (numbers of requests and pages);
    from other ranks an empty list.
    """

    process: str
    """Name of the rank's process."""
    levels: list[Any]


class Streamed(NamedTuple):
    """A leader sends the launcher the new tokens of one step. A request has several if the step accepted drafts."""

    tokens: list[list[Any]]
    """One entry per new token: [request id, token id, log probabilities (null if the request does not ask for them)].
    """


class Settle(NamedTuple):
    """The launcher tells a leader that all requests have ended. The leader answers as soon as its instance holds no
    memory, locks or transfers for requests, but not later than the timeout.
    """

    timeout_ns: int
    """Maximum time in ns until the leader answers."""


class Settled(NamedTuple):
    """A leader's answer to the launcher's notice that all requests have ended (Settle). leak: names what the instance
    still holds for requests, such as pages or locks, which is an error. Empty: the instance holds nothing.
    """

    instance_id: str
    leak: str


class Exit(NamedTuple):
    """The launcher tells a rank that the run is over."""


BROKEN = 1
"""The exit code of a rank that could not continue, and told the launcher why."""


class Broken(NamedTuple):
    """A rank tells the launcher that it cannot continue, and why."""

    process: str
    """Name of the rank's process."""
    reason: str
    """Text that says why the rank cannot continue."""


class Task(NamedTuple):
    """A leader gives its followers a task that all ranks do. The task is the message's payload (tasks.py)."""

    ticket: int
    """Number of the task. 0: the leader does not wait for an answer."""


class Done(NamedTuple):
    """A follower tells its leader that a task has ended. error: why the task failed; None: the task has not failed, and
    `result` is its result.
    """

    ticket: int
    """Number of the task (Task.ticket)."""
    result: Any
    error: str | None


class HostUp(NamedTuple):
    """A host's agent tells the launcher that it is running. version: version of the agent's pdsim."""

    host: str
    endpoint: str
    """Endpoint at which the agent receives messages."""
    version: str


class AskTime(NamedTuple):
    """The launcher asks an agent for the time of its host."""

    number: int
    """Number of the question, which the answer repeats."""


class Time(NamedTuple):
    """An agent answers AskTime with the monotonic clock of its host."""

    host: str
    number: int
    """Number of the AskTime to which this is the answer."""
    time_ns: int


class SpawnRanks(NamedTuple):
    """The launcher tells an agent to start the ranks of an instance. The channel sends the ranks' settings (a list of
    RankSpec) as the payload of this notice.
    """


class KillRanks(NamedTuple):
    """The launcher tells an agent to kill one rank of an instance, or all of them."""

    instance_id: str
    rank: int | None
    """Index of the rank. None: all ranks."""


class Ended(NamedTuple):
    """An agent tells the launcher that no process of an instance is left. exit_code: exit code of the process that
    ended first, or -9 if the instance was killed before its processes were started.
    """

    host: str
    instance_id: str
    exit_code: int


class EndHost(NamedTuple):
    """The launcher tells an agent that ranks were told to exit. The agent makes sure that they do, and sends their
    logbooks.
    """


class KeptLog(NamedTuple):
    """An agent sends the launcher the next bytes of a logbook file, as the payload."""

    host: str
    file_name: str
    """Name of the log file, without its folder."""


class HostDone(NamedTuple):
    """An agent tells the launcher that all ranks on its host have ended, and that it has sent their logbooks."""

    host: str


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Hello, Peers, Connected, Ping, Pong, Streamed, Settle, Settled, Exit, Broken, Task, Done),
        *(HostUp, AskTime, Time, SpawnRanks, KillRanks, Ended, EndHost, KeptLog, HostDone),
    )
}
