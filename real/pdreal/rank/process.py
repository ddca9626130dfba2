"""The process of one rank: its model, its cache, its transfers, and a leader or a follower in an event loop."""

import asyncio
import gc
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any

import torch

from pdreal.control import notices
from pdreal.control.channel import LAUNCHER, Channel, Envelope, local_endpoint
from pdreal.rank.group import Follower, RankThreads
from pdreal.rank.kv_transfers import KvDamagedError
from pdreal.rank.leader import Leader
from pdreal.rank.resources import RankResources, build_rank_resources
from pdreal.settings.model import ModelError
from pdreal.settings.rank import RankSpec
from pdreal.transports.protocol import TransferError, UnavailableError
from pdsim.scenario.yaml_file import ConfigError

_SWITCH_S = 1e-4
"""Maximum time in s that a thread keeps Python's lock while others wait. With Python's usual 5 ms a transfer would wait
until the main thread has finished its work for a step."""


def run_rank(spec: RankSpec) -> None:
    """Runs the process of a rank from start to end."""
    os.dup2(2, 1)  # some engines print, and standard output is the run's summary
    torch.set_num_threads(spec.options.threads_of_rank(spec.num_slots))
    os.sched_setaffinity(0, spec.options.cores_of_rank(spec.slot, spec.num_slots))
    sys.setswitchinterval(_SWITCH_S)
    channel = Channel(spec.sockets, spec.process, spec.life, spec.network)
    channel.connect(LAUNCHER, spec.launcher)
    exit_code = 0
    try:
        resources = build_rank_resources(spec)
        asyncio.run(Rank(spec, channel, resources).live())
    except Exception as broken:  # noqa: BLE001  whatever it is, the launcher must hear of it
        exit_code = notices.BROKEN
        channel.send(LAUNCHER, notices.Broken(spec.process, _explain(broken)))
    channel.close()
    sys.stderr.flush()
    os._exit(exit_code)  # whatever a thread still does


class HangError(RuntimeError):
    """Raised if a forward of this rank does not end within the watchdog's limit."""


class Rank:
    """The process of one rank after its model is loaded: connects to its peers, answers the launcher, and runs a leader
    (the scheduler of its instance) or a follower (which carries out the leader's tasks).
    """

    def __init__(self, spec: RankSpec, channel: Channel, resources: RankResources) -> None:
        self._spec = spec
        self._channel = channel
        self._resources = resources
        self._actor: Any = None
        self._peers: dict[str, int] = {}
        """Number of earlier starts of each connected instance, by instance id."""
        self._greetings: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        """Serves until told to exit. Raises the error that makes the rank fail."""
        self._loop = loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = loop.create_future()
        loop.set_exception_handler(lambda _, context: self._fail(context.get("exception") or RuntimeError(context)))
        launcher = parent_process()
        assert launcher is not None
        loop.add_reader(launcher.sentinel, os._exit, 1)  # however it ended: nobody is left to serve
        self._threads = threads = RankThreads(loop, self._resources, round(1e9 * self._spec.options.watchdog_timeout))
        threads.warm_up()
        gc.freeze()  # what is there now stays: it need not be looked through again while steps wait
        self._channel.listen(loop, self._on_envelope)
        for follower in self._spec.followers if self._spec.rank == 0 else ():
            self._channel.connect(follower, self._at_home(follower))
        if self._spec.rank == 0:
            self._actor = Leader(self._spec, self._channel, threads, loop, self._fail, self._resources.end_tokens)
        else:
            self._channel.connect(self._spec.instance_id, self._at_home(self._spec.instance_id))
            self._actor = Follower(self._spec.instance_id, self._channel, threads, self._fail)
        hello = notices.Hello(self._spec.process, self._resources.memory, self._channel.endpoint)
        self._channel.send(LAUNCHER, hello)
        await self._end

    def _at_home(self, process: str) -> str:
        """Returns the endpoint of another rank of the same instance."""
        return local_endpoint(self._spec.sockets, process, self._spec.life)

    def _fail(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def _on_envelope(self, envelope: Envelope, payload: Any) -> None:
        to, message, extra = envelope
        if isinstance(message, notices.Peers):
            self._connect(message)
        elif isinstance(message, notices.Ping):
            if self._threads.hangs:
                self._fail(HangError(f"a forward took more than {self._spec.options.watchdog_timeout:g} s"))
            else:
                self._channel.send(LAUNCHER, notices.Pong(self._spec.process, self._actor.levels()))
        elif isinstance(message, notices.Exit):
            if not self._end.done():
                self._end.set_result(None)
        else:
            self._actor.on_message(to, message, extra if payload is None else payload)

    def _connect(self, peers: notices.Peers) -> None:
        """Connects to instances that are new or were restarted. A leader begins its steps if the notice has the run's
        epoch.
        """
        met: list[str] = []
        for instance_id, life in peers.lives.items():
            if self._peers.get(instance_id) == life or instance_id == self._spec.instance_id:
                continue
            self._peers[instance_id] = life
            if self._spec.rank == 0:
                self._channel.connect(instance_id, peers.endpoints[instance_id])
            for rank, memory in enumerate(peers.memories[instance_id]):
                with self._may_be_gone(instance_id):
                    self._resources.connect(instance_id, rank, memory)
            met.append(instance_id)
        if peers.epoch_ns is not None and isinstance(self._actor, Leader):
            self._actor.begin(peers.epoch_ns)
        greeting = self._loop.create_task(self._greet(met, peers.number))
        greeting.add_done_callback(lambda done: self._fail(error) if (error := done.exception()) else None)
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, instance_ids: list[str], number: int) -> None:
        """Lets each transfer worker of the rank connect to instances (RankThreads.greet), one instance after another,
        then tells the launcher. Other work continues meanwhile. number: number of the Peers notice that named the
        instances.
        """
        for instance_id in instance_ids:
            with self._may_be_gone(instance_id):
                await self._threads.greet(instance_id)
        self._channel.send(LAUNCHER, notices.Connected(self._spec.process, number))

    @contextmanager
    def _may_be_gone(self, instance_id: str) -> Iterator[None]:
        """Context for calls to another instance that may have died. Logs a TransferError, and continues after the
        context.
        """
        try:
            yield
        except TransferError as gone:
            logging.getLogger("pdreal").warning("%s: %s: %s", self._spec.process, instance_id, gone)


def _explain(error: BaseException) -> str:
    """Returns one line for a fault of the machine or the scenario, and the whole traceback for a bug."""
    if isinstance(error, HangError | ModelError | ConfigError | UnavailableError | KvDamagedError | OSError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()
