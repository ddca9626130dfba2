"""The instances of a run as the launcher sees them: which are up, which do not answer, why one died, and when it
restarts.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from signal import Signals
from time import monotonic
from typing import Any

from pdreal.control.channel import Channel, Network, process_of
from pdreal.control.clock import Timeline
from pdreal.control.logbook import Logbook
from pdreal.control.notices import BROKEN, Broken, Connected, Exit, Hello, Ping, Pong, Settle, Settled
from pdreal.hosts.bootstrap import Bootstrap
from pdreal.hosts.fleet import Fleet
from pdreal.settings.host import LaunchError
from pdreal.settings.options import Options
from pdsim.core import messages as m
from pdsim.core.instance import Levels
from pdsim.core.journal.calls import KILLED, Entry
from pdsim.core.messages import receiver_of, sender_of
from pdsim.scenario.building.machines import build_monitor
from pdsim.scenario.schema import Scenario

_LOG = logging.getLogger("pdreal")
_SETTLE_NS = 10_000_000_000
_SETTLE_S = 15.0
"""Maximum time in s for an instance's answer to the message Settle, which says that all requests have ended. An
instance that takes longer counts as hung.
"""
_PING_S = 1.0
"""Interval in s at which the launcher asks instances for their numbers of requests and pages (levels), if the scenario
has no health section."""
_LAST_WORDS_S = 0.2
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_STEADY_S = 60.0
"""An instance that has run for this time in s gets the shortest restart delay after its next death."""


class NoMonitor:
    """Takes the place of the health monitor in a scenario without a health section. Lost instances are not reported to
    others.
    """

    def on_message(self, message: m.Heartbeat, now_ns: int) -> list[m.Send]:
        return []


class Instances:
    def __init__(
        self,
        scenario: Scenario,
        options: Options,
        channel: Channel,
        timeline: Timeline,
        logbook: Logbook,
        *,
        network: Network | None,
        sockets: Path,
        folder: Path | None,
        carry_out: Callable[[Sequence[Any]], None],
        on_lost: Callable[[str], None],
        spawn_task: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """scenario: resolved. options: options of pdreal. channel: connects the launcher with all ranks. timeline: the
        run's clock. logbook: records the calls into the health monitor. network: settings for runs on several hosts.
        sockets: folder for Unix sockets. folder: for logbooks; None: none are kept.

        carry_out: called with the health monitor's commands. on_lost: called with a reason if an instance is lost and
        the scenario has no health section. spawn_task: runs a coroutine in the background.
        """
        self._scenario = scenario
        self._channel = channel
        self._timeline = timeline
        self._folder = folder
        self._carry_out = carry_out
        self._on_lost = on_lost
        self._spawn_task = spawn_task
        where: dict[str, Any] = {"sockets": sockets, "logs": folder, "loop": timeline.loop}
        self.fleet = Fleet(scenario, options, channel, network, **where, on_death=self._on_exit)
        self.bootstrap = Bootstrap(channel, self.fleet)
        monitor = build_monitor(scenario)
        self._monitor: Any = NoMonitor() if monitor is None else logbook.recorded(monitor)
        self._up: dict[str, float] = {}
        """Instances that are connected with all others, with the monotonic time in s of the connection."""
        self.levels: dict[str, Levels] = {}
        """Latest known levels of each running instance. The launcher asks for them at every heartbeat_interval of the
        health section, or every _PING_S s if there is no health section."""
        self._given_up: set[str] = set()
        """Instances that were killed, or silent for too long, and whose end is not reported yet."""
        self._silent: set[str] = set()
        """Processes that have not answered the last ping."""
        self._settled: dict[str, asyncio.Future[str]] = {}
        self._deaths: dict[str, str] = {}
        """Reasons that instances gave for not being able to continue."""
        self._restart_s: dict[str, float | None] = {}
        """Delays in s until killed instances restart. None: never."""
        self._backoff_s: dict[str, float] = {}
        """Last restart delay of each instance, in s."""
        self._stopping = False

    async def start(self) -> None:
        """Starts all instances, then the run's clock. Raises LaunchError if an instance does not start."""
        await self.fleet.start()
        await self.bootstrap.bring_up(self.fleet.instance_ids)
        self._timeline.epoch_ns = await self.bootstrap.begin()
        self._mark_up(self.fleet.instance_ids)
        self._spawn_task(self._ask_for_signs_of_life())

    def is_up(self, instance_id: str) -> bool:
        return instance_id in self._up

    @property
    def missing_roles(self) -> list[str]:
        """Roles without a running instance."""
        roles = self.fleet.roles
        return sorted({*roles.values()} - {roles[i] for i in self._up})

    def kill(self, instance_id: str, rank: int | None, restart_after_s: float | None) -> None:
        """Kills an instance, or one of its ranks and thereby the instance. Has no effect if the instance has ended
        already, or when all instances stop. rank: None: all ranks. restart_after_s: delay in s until the instance
        restarts; None: never.
        """
        if self._stopping or not self.fleet.is_alive(instance_id):
            return
        self._given_up.add(instance_id)
        self._restart_s[instance_id] = restart_after_s
        self.fleet.kill(instance_id, rank)

    def on_notice(self, notice: Hello | Connected | Pong | Settled | Broken) -> None:
        match notice:
            case Hello() | Connected():
                self.bootstrap.on_notice(notice)
            case Pong():
                self._silent.discard(notice.process)
                if notice.process in self._up and notice.levels:  # not of one that has died since
                    self.levels[notice.process] = Levels(*notice.levels)
            case Settled():
                if waiting := self._settled.pop(notice.instance_id, None):
                    waiting.set_result(notice.leak)
            case Broken():
                self._deaths[process_of(notice.process).partition(".rank")[0]] = notice.reason
                _LOG.error("%s: %s", notice.process, notice.reason)

    async def _ask_for_signs_of_life(self) -> None:
        health = self._scenario.health
        interval_s = _PING_S if health is None else health.heartbeat_interval / 1e9
        while True:
            await asyncio.sleep(interval_s)
            for instance_id in self.fleet.instance_ids:
                processes = self.fleet.processes(instance_id)
                is_up = instance_id in self._up and instance_id not in self._given_up
                answered = is_up and self._silent.isdisjoint(processes)
                self._silent.update(processes)
                for process in processes if instance_id in self._up else ():
                    self._channel.send(process, Ping())
                self._on_heartbeat(m.Heartbeat(instance_id, self.fleet.lives[instance_id] if answered else None))

    def _on_heartbeat(self, heartbeat: m.Heartbeat) -> None:
        """Passes a heartbeat to the health monitor. If the monitor gives up an instance whose processes still run, this
        method kills the processes.
        """
        commands = self._monitor.on_message(heartbeat, self._timeline.now_ns)
        if heartbeat.life is None and commands and heartbeat.instance_id in self._up:
            self._deaths[heartbeat.instance_id] = reason = "it did not answer, and was killed"
            _LOG.error("%s: %s", heartbeat.instance_id, reason)
            self._given_up.add(heartbeat.instance_id)
            self._channel.disconnect(heartbeat.instance_id)
            self.fleet.kill(heartbeat.instance_id)
        self._carry_out(commands)

    # Deaths and restarts.

    def _on_exit(self, instance_id: str, exit_code: int | str) -> None:
        """Handles the end of an instance. Exit code BROKEN means that a rank sends a Broken notice with the reason. If
        this notice has not arrived yet, the end is handled _LAST_WORDS_S s later. exit_code: exit code of the process
        that ended first, or the reason why the instance was lost.
        """
        if exit_code == BROKEN and instance_id not in self._deaths:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._on_death, instance_id, exit_code)
        else:
            self._on_death(instance_id, exit_code)

    def _on_death(self, instance_id: str, exit_code: int | str) -> None:
        self._given_up.discard(instance_id)
        up_since_s = self._up.pop(instance_id, None)
        up_s = 0.0 if up_since_s is None else monotonic() - up_since_s
        self.levels.pop(instance_id, None)
        age = "before it was up" if up_since_s is None else f"{up_s:.0f} s after it was up"
        reason = self._reason_of(instance_id, exit_code, age)
        self._channel.disconnect(instance_id)
        self.bootstrap.on_death(instance_id, reason)
        if waiting := self._settled.pop(instance_id, None):
            waiting.set_result(f"{instance_id} is dead: {reason}")
        if self._folder is not None:
            self._note_death(self._folder, instance_id)
        if self._stopping:
            return
        if self._scenario.health is None:
            self._on_lost(f"{instance_id} was lost: {reason}")
            return
        backoff_s = self._backoff_s[instance_id] = next_backoff_s(self._backoff_s.get(instance_id), up_s)
        delay_s = self._restart_s.pop(instance_id, backoff_s)
        if delay_s is not None:
            self._timeline.after(round(delay_s * 1e9), lambda _: self._restart(instance_id))

    def _reason_of(self, instance_id: str, exit_code: int | str, age: str) -> str:
        """Returns the reason why an instance died. Logs the reason, unless it was logged before (`_deaths`), the run
        stops, or the launcher was told to kill the instance. exit_code: exit code of the process that ended first, or
        the reason as text. age: text on the time of the death, such as "9 s after it was up".
        """
        if known := self._deaths.pop(instance_id, ""):
            return known
        reason = exit_code if isinstance(exit_code, str) else ended_by(exit_code)
        if not self._stopping and instance_id not in self._restart_s:
            _LOG.error("%s: %s, %s", instance_id, reason, age)
        return reason

    def _note_death(self, folder: Path, instance_id: str) -> None:
        """Writes the death of an instance into the journal of the instance's next start. The journal of the dead
        processes cannot take the entry, because its last line may be incomplete. folder: folder of the journals.
        """
        logbook = Logbook(folder, instance_id, self.fleet.lives[instance_id] + 1)
        names = [instance_id]
        if self.fleet.roles[instance_id] == "prefill":
            names.append(sender_of(instance_id))
        elif self.fleet.roles[instance_id] == "decode" and self._scenario.network.staging is not None:
            names.append(receiver_of(instance_id))
        for name in names:
            logbook.entry(Entry(name, KILLED, (self._timeline.now_ns,), None))
        logbook.close()

    def _restart(self, instance_id: str) -> None:
        if not self._stopping:
            self._spawn_task(self._bring_back(instance_id))

    async def _bring_back(self, instance_id: str) -> None:
        await self.fleet.prepare(instance_id)
        if self._stopping:
            return
        with suppress(LaunchError):  # on_death has been called for it, too
            await self.bootstrap.bring_up([instance_id])
            self._mark_up([instance_id])

    def _mark_up(self, instance_ids: list[str]) -> None:
        """Marks started instances as up, except those that have died since their start."""
        for instance_id in filter(self.fleet.is_alive, instance_ids):
            self._up[instance_id] = monotonic()
            self._silent.difference_update(self.fleet.processes(instance_id))

    # The end.

    async def settle(self) -> list[str]:
        """Asks running instances to answer when requests hold none of their memory, locks or transfers any more, and
        waits for the answers. Returns a text for each instance in which requests still hold some after a time limit,
        that died meanwhile, or that did not answer and was killed. Instances that the launcher has already given up are
        not asked.
        """
        self._stopping = True
        loop = asyncio.get_running_loop()
        self._settled = {i: loop.create_future() for i in self._up if i not in self._given_up}
        answers = dict(self._settled)
        for instance_id in answers:
            self._channel.send(instance_id, Settle(_SETTLE_NS))
        if answers:
            await asyncio.wait(answers.values(), timeout=_SETTLE_S)
        leaks = [answer.result() for answer in answers.values() if answer.done() and answer.result()]
        for instance_id in (i for i, answer in answers.items() if not answer.done()):
            leaks.append(f"{instance_id} did not answer, and was killed")
            self.fleet.kill(instance_id)
        return leaks

    async def end(self) -> list[str]:
        """Ends every process, in bounded time. Returns problems on other hosts."""
        for instance_id in self.fleet.instance_ids:
            for process in self.fleet.processes(instance_id):
                self._channel.send(process, Exit())
        for instance_id in self.fleet.instance_ids:
            if instance_id not in self._up:
                self.fleet.kill(instance_id)  # it may be on its way up, and hear nothing yet
        return await self.fleet.end()


def ended_by(exit_code: int) -> str:
    """The signal or the exit code with which a process ended, as text."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def next_backoff_s(last_s: float | None, up_s: float) -> float:
    """Returns the delay in s before the next start of a dead instance. last_s: the delay before its last start; None:
    this is its first death. up_s: time in s for which the instance has run since that start.
    """
    return _FIRST_BACKOFF_S if last_s is None or up_s >= _STEADY_S else min(2 * last_s, _MAX_BACKOFF_S)
