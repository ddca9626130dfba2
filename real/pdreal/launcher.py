"""A running cluster, as whoever sends requests sees it: start, submit, abort, load, stop.

The launcher holds the router and the health monitor of the core, carries out what they command, and passes on what
instances stream. It decides nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from pdreal.bootstrap import Bootstrap, LaunchError
from pdreal.channel import LAUNCHER, Channel, Envelope, process_of
from pdreal.clock import Timeline
from pdreal.fleet import Fleet
from pdreal.logbook import Logbook
from pdreal.notices import BROKEN, Broken, Connected, Exit, Hello, Ping, Pong, Settle, Settled, Streamed
from pdreal.options import Options
from pdreal.requests import Request, Sampling
from pdreal.scratch_folder import ScratchFolder
from pdsim.core import messages as m
from pdsim.core.instance import Levels
from pdsim.core.invariants import InvariantError, check_all_idle
from pdsim.core.journal import KILLED, Entry
from pdsim.core.messages import receiver_of, sender_of
from pdsim.core.router import num_retries, request_of
from pdsim.core.sequence import TokenIds
from pdsim.scenario.build import build_monitor, build_router
from pdsim.scenario.schema import Scenario

_LOG = logging.getLogger("pdreal")
_SETTLE_NS = 10_000_000_000
_SETTLE_S = 15.0
"""Limit for an answer: who is later hangs."""
_PING_S = 1.0
"""Interval at which levels are asked for, where there is no health section."""
_LAST_WORDS_S = 0.2
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_STEADY_S = 60.0
"""Life after which an instance starts again as quickly as after its first death."""


class Unwatched:
    """Stand-in for a health monitor in a scenario without health: nobody is told of lost instances."""

    def on_message(self, message: m.Heartbeat, now_ns: int) -> list[m.Send]:
        return []


class Launcher:
    def __init__(
        self,
        scenario: Scenario,
        options: Options,
        *,
        folder: Path | None = None,
        on_end: Callable[[Request], None] | None = None,
    ) -> None:
        """scenario: resolved. folder: where logbooks are kept; None keeps none. on_end: called as a request ends."""
        self._scenario = scenario
        self._options = options
        self._folder = folder
        self._logbook = Logbook(None, LAUNCHER, 0)
        self._on_end = on_end or (lambda _: None)
        self._requests: dict[int, Request] = {}
        self._num_requests = 0
        self._up: dict[str, float] = {}
        """Instances that are connected with all others, and since when by the monotonic clock, in seconds."""
        self._levels: dict[str, Levels] = {}
        self._silent: set[str] = set()
        """Processes that have not answered the last ping."""
        self._settled: dict[str, asyncio.Future[str]] = {}
        self._deaths: dict[str, str] = {}
        """Why an instance said it could not go on."""
        self._restart_s: dict[str, float | None] = {}
        """Delays until what was killed on purpose starts again, or None for never."""
        self._backoff_s: dict[str, float] = {}
        """The last of an instance."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.failure: str | None = None
        """Why the cluster cannot go on, if it cannot: an instance was lost and nobody watches over them."""

    # What a caller does.

    async def start(self) -> None:
        """Returns when every instance is ready, and time begins. Raises LaunchError."""
        loop = asyncio.get_running_loop()
        self._timeline = Timeline(monotonic_ns(), loop)
        if self._folder is not None:
            loop.set_exception_handler(self._on_error)  # of a run; a server's loop has callbacks of others, too
            self._logbook = Logbook(self._folder, LAUNCHER, 0)
        self._plain_router = build_router(self._scenario)
        self._router: Any = self._logbook.recorded(self._plain_router)
        health = self._scenario.health
        self._monitor: Any = Unwatched()
        if health is not None:
            self._monitor = self._logbook.recorded(build_monitor(self._scenario, health))
        self._scratch = ScratchFolder()
        self._channel = Channel(self._scratch.path, LAUNCHER)
        self._channel.listen(loop, self._on_envelope)
        self._fleet = Fleet(
            self._scenario,
            self._options,
            sockets=self._scratch.path,
            logs=self._folder,
            loop=loop,
            on_death=self._on_exit,
        )
        self._bootstrap = Bootstrap(self._channel, self._fleet)
        try:
            await self._bootstrap.bring_up(self._fleet.instance_ids)
            self._timeline = Timeline(await self._bootstrap.begin(), loop)
        except BaseException:  # also where it is cancelled
            await self.stop()
            raise
        self._mark_up(self._fleet.instance_ids)
        self._spawn_task(self._ask_for_signs_of_life())

    @property
    def timeline(self) -> Timeline:
        return self._timeline

    @property
    def instance_ids(self) -> list[str]:
        return self._fleet.instance_ids

    def submit(self, prompt_ids: list[int] | TokenIds, sampling: Sampling, *, request_id: int | None = None) -> Request:
        """Send a request; iterate over it for its tokens. Without an id of the caller's it gets the next one."""
        if request_id is None:
            request_id = self._num_requests
        self._num_requests = max(self._num_requests, request_id + 1)
        prompt = prompt_ids if isinstance(prompt_ids, TokenIds) else TokenIds(prompt_ids)
        request = self._requests[request_id] = Request(request_id, prompt, sampling)
        expected = sampling.max_tokens if sampling.stop_after_tokens is None else sampling.stop_after_tokens
        self._note("on_arrival", request_id, len(prompt), expected)
        if self.failure is not None:
            failed = m.Failed(request_id, self.failure)
            asyncio.get_running_loop().call_soon(self._end, failed)  # a closed loop sends the next one as this one ends
        else:
            self._tell_router(m.Arrival(request_id, prompt, sampling.max_tokens))
        return request

    def abort(self, request_id: int, reason: str = "aborted by the client") -> None:
        """Give a request up; nothing happens if it has ended."""
        if request_id not in self._requests:
            return
        self._tell_router(m.Cancel(request_id, reason))
        if request_id in self._requests:
            self._end(m.Failed(request_id, reason))

    def flush_cache(self) -> None:
        """Have every instance forget what is cached and nobody uses."""
        self._tell_router(m.FlushCache())

    def load(self) -> dict[str, Levels]:
        """Levels of each instance as last asked, at most about a second ago; not of those that are down."""
        return dict(self._levels)

    def memory(self, instance_id: str) -> list[dict[str, Any]]:
        """Memory that the ranks of an instance have published."""
        return self._bootstrap.memories[instance_id]

    @property
    def num_live_requests(self) -> int:
        return len(self._requests)

    @property
    def missing_roles(self) -> list[str]:
        """Roles of which no instance is up."""
        roles = self._fleet.roles
        return sorted({*roles.values()} - {roles[i] for i in self._up})

    async def stop(self) -> list[str]:
        """End what is left, and every process, in bounded time: who hangs is killed.

        What did not come back of pages, locks and bytes: should be nothing.
        """
        self._stopping = True
        for request_id in list(self._requests):
            self.abort(request_id, "the server stops")
        leaks = await self._settle()
        for task in self._tasks:
            task.cancel()
        for instance_id in self._fleet.instance_ids:
            for process in self._fleet.processes(instance_id):
                self._channel.send(process, Exit())
        for instance_id in self._fleet.instance_ids:
            if instance_id not in self._up:
                self._fleet.kill(instance_id)  # it may be on its way up, and hear nothing yet
        self._fleet.end()
        self._channel.close()
        self._logbook.close()
        self._scratch.cleanup()
        return leaks

    def kill(self, instance_id: str, *, rank: int | None = None, restart_after_s: float | None = None) -> None:
        """SIGKILL, for tests of what follows. It stays down if no time is given, and the cluster is watched."""
        self._restart_s[instance_id] = restart_after_s
        self._fleet.kill(instance_id, rank)

    # Messages.

    def _on_envelope(self, envelope: Envelope, _: Any) -> None:
        message = envelope.message
        match message:
            case Streamed():
                for attempt, token in message.tokens:
                    self._stream(attempt, token)
            case m.FirstToken():
                self._on_first_token(message, *envelope.extra)
            case m.Finished() | m.Failed():
                self._on_outcome(message)
            case m.PrefillDone():
                self._tell_router(message)
            case Hello() | Connected():
                self._bootstrap.on_notice(message)
            case Pong():
                self._silent.discard(message.process)
                if message.process in self._up and message.levels:  # not of one that has died since
                    self._levels[message.process] = Levels(*message.levels)
            case Settled():
                if waiting := self._settled.pop(message.instance_id, None):
                    waiting.set_result(message.leak)
            case Broken():
                self._deaths[process_of(message.process).partition(".rank")[0]] = message.reason
                _LOG.error("%s: %s", message.process, message.reason)
            case _:
                raise TypeError(f"the launcher does not take {message}")
        self._logbook.flush()

    def _send(self, command: m.Send) -> None:
        """Send to those who are up; what is sent to the dead is lost."""
        to, message = command
        if process_of(to) in self._up:
            extra = None
            if isinstance(message, m.NewRequest):
                extra = self._requests[request_of(message.request_id)].sampling
            self._channel.send(to, message, extra)

    def _tell_router(self, message: m.Message) -> None:
        """Instances get what they are sent; clients hear of attempts what concerns them."""
        for command in self._router.on_message(message, self._timeline.now_ns):
            match command:
                case m.Send(to, m.NewRequest() as new):
                    if to == new.decode_id:
                        self._on_attempt(new)
                    self._send(command)
                case m.Send():
                    self._send(command)
                case m.WakeAt():
                    self._timeline.at(command.time_ns, lambda _: self._tell_router(m.Woken()))
                case m.Failed():
                    self._end(command)
                case m.PrefillDone():
                    pass  # nobody's answer is held back for it
                case _:
                    raise TypeError(f"a router does not command {command}")

    # Requests.

    def _on_attempt(self, new: m.NewRequest) -> None:
        if num_retries(new.request_id):
            self._note("on_retry", new.request_id)
        self._note("on_routed", new.request_id, new.prefill_id, new.decode_id)

    def _on_first_token(self, message: m.FirstToken, token: int | None, num_cached_tokens: int) -> None:
        """An aggregated instance has streamed it with the others."""
        if (request := self._under_way(message.request_id)) is None:
            return
        request.num_cached_tokens = num_cached_tokens
        if token is not None:
            self._stream(message.request_id, token)
        self._note("on_first_token", request.request_id)

    def _stream(self, attempt: int, token: int) -> None:
        """A request that has a token is not tried again."""
        if (request := self._under_way(attempt)) is None:
            return
        if self._plain_router.retries and not request.tokens:
            self._tell_router(m.FirstToken(attempt))
        request.put(token)

    def _under_way(self, attempt: int) -> Request | None:
        """The request of an attempt, unless the router has given the attempt up: its tokens may still be on the way."""
        request_id = self._plain_router.client_of(attempt)
        return None if request_id is None else self._requests.get(request_id)

    def _on_outcome(self, outcome: m.Finished | m.Failed) -> None:
        request_id = self._plain_router.client_of(outcome.request_id)
        self._tell_router(outcome)
        if request_id is not None and isinstance(outcome, m.Finished):
            self._end(m.Finished(request_id))

    def _end(self, outcome: m.Finished | m.Failed) -> None:
        request = self._requests.pop(outcome.request_id, None)
        if request is None:
            return  # the caller gave it up
        self._note("on_output", outcome.request_id, len(request.tokens))
        self._note("on_end", outcome)
        request.end(outcome.reason if isinstance(outcome, m.Failed) else "")
        self._on_end(request)

    # Life and death.

    async def _ask_for_signs_of_life(self) -> None:
        health = self._scenario.health
        interval_s = _PING_S if health is None else health.heartbeat_interval / 1e9
        number = 0
        while True:
            await asyncio.sleep(interval_s)
            number += 1
            for instance_id in self._fleet.instance_ids:
                processes = self._fleet.processes(instance_id)
                answered = instance_id in self._up and self._silent.isdisjoint(processes)
                self._silent.update(processes)
                for process in processes if instance_id in self._up else ():
                    self._channel.send(process, Ping(number))
                self._on_heartbeat(m.Heartbeat(instance_id, self._fleet.lives[instance_id] if answered else None))

    def _on_heartbeat(self, heartbeat: m.Heartbeat) -> None:
        """One that is given up while it is up hangs."""
        commands = self._monitor.on_message(heartbeat, self._timeline.now_ns)
        if heartbeat.life is None and commands and heartbeat.instance_id in self._up:
            self._deaths[heartbeat.instance_id] = reason = "it did not answer, and was killed"
            _LOG.error("%s: %s", heartbeat.instance_id, reason)
            self._fleet.kill(heartbeat.instance_id)
        for command in commands:
            if command.to == self._router.instance_id:
                self._tell_router(command.message)
            else:
                self._send(command)

    def _on_exit(self, instance_id: str, exit_code: int | None) -> None:
        """One that ended itself said why, which may come a moment after its end."""
        if exit_code == BROKEN and instance_id not in self._deaths:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._on_death, instance_id, exit_code)
        else:
            self._on_death(instance_id, exit_code)

    def _on_death(self, instance_id: str, exit_code: int | None) -> None:
        up_s = monotonic() - self._up.pop(instance_id, monotonic())
        self._levels.pop(instance_id, None)
        reason = self._deaths.pop(instance_id, f"exit code {exit_code}")
        self._channel.disconnect(instance_id)
        self._bootstrap.on_death(instance_id, reason)
        if waiting := self._settled.pop(instance_id, None):
            waiting.set_result(f"{instance_id} is dead: {reason}")
        if self._folder is not None:
            self._note_death(self._folder, instance_id)
        if self._stopping:
            return
        if self._scenario.health is None:
            self._give_up(f"{instance_id} was lost: {reason}")
            return
        backoff_s = self._backoff_s[instance_id] = next_backoff_s(self._backoff_s.get(instance_id), up_s)
        delay_s = self._restart_s.pop(instance_id, backoff_s)
        if delay_s is not None:
            self._timeline.after(round(delay_s * 1e9), lambda _: self._restart(instance_id))

    def _note_death(self, folder: Path, instance_id: str) -> None:
        """Note a death at the begin of the next life's journal: what died may have left half a line in its own."""
        logbook = Logbook(folder, instance_id, self._fleet.lives[instance_id] + 1)
        names = [instance_id]
        if self._fleet.roles[instance_id] == "prefill":
            names.append(sender_of(instance_id))
        elif self._scenario.network.staging is not None:
            names.append(receiver_of(instance_id))
        for name in names:
            logbook.entry(Entry(name, KILLED, (self._timeline.now_ns,), None))
        logbook.close()

    def _give_up(self, reason: str) -> None:
        """Nobody watches over the instances: without one of them nothing goes on."""
        self.failure = self.failure or reason
        for request_id in list(self._requests):
            self._end(m.Failed(request_id, reason))

    def _on_error(self, _: object, context: dict[str, Any]) -> None:
        """A callback failed, on a full disk for example: without this the run would wait for ever."""
        error, where = context.get("exception"), ""
        if isinstance(error, OSError):
            where = f"; it writes to {self._folder}"
        else:
            _LOG.error("%s", context["message"], exc_info=error)
        with suppress(OSError):
            self._logbook.close()
        self._give_up(f"the launcher failed: {error or context['message']}{where}")

    def _restart(self, instance_id: str) -> None:
        if not self._stopping:
            self._spawn_task(self._bring_back(instance_id))

    async def _bring_back(self, instance_id: str) -> None:
        with suppress(LaunchError):  # on_death has been called for it, too
            await self._bootstrap.bring_up([instance_id])
            self._mark_up([instance_id])

    def _mark_up(self, instance_ids: list[str]) -> None:
        """Mark those that were started and are still there."""
        for instance_id in filter(self._fleet.is_alive, instance_ids):
            self._up[instance_id] = monotonic()
            self._silent.difference_update(self._fleet.processes(instance_id))

    async def _settle(self) -> list[str]:
        """Wait until nothing is left of any request, in instances and here. Who does not answer is killed."""
        loop = asyncio.get_running_loop()
        self._settled = {i: loop.create_future() for i in self._up}
        answers = dict(self._settled)
        for instance_id in answers:
            self._channel.send(instance_id, Settle(_SETTLE_NS))
        if answers:
            await asyncio.wait(answers.values(), timeout=_SETTLE_S)
        leaks = [answer.result() for answer in answers.values() if answer.done() and answer.result()]
        for instance_id in (i for i, answer in answers.items() if not answer.done()):
            leaks.append(f"{instance_id} did not answer, and was killed")
            self._fleet.kill(instance_id)
        try:
            if self.failure is None:
                check_all_idle([self._plain_router])
        except InvariantError as broken:
            leaks.append(str(broken))
        return leaks

    def _note(self, method: str, *args: Any) -> None:
        self._logbook.row(method, self._timeline.now_ns, *args)

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(None, {"message": "a task of the launcher failed", "exception": error})


def next_backoff_s(last_s: float | None, up_s: float) -> float:
    """Wait before the next start of an instance that died. last_s: the wait before; up_s: the life since."""
    return _FIRST_BACKOFF_S if last_s is None or up_s >= _STEADY_S else min(2 * last_s, _MAX_BACKOFF_S)
