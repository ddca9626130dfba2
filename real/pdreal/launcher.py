"""A running cluster as the sender of requests sees it: start, submit, abort, load, stop.

The launcher runs the core's router, carries out the router's commands, and passes on the tokens that instances stream.
All decisions are the router's.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any

from pdreal.control.channel import LAUNCHER, Channel, Envelope, Network, process_of
from pdreal.control.clock import Timeline
from pdreal.control.logbook import Logbook
from pdreal.control.notices import Broken, Connected, Hello, Pong, Settled, Streamed
from pdreal.control.requests import Drafted, Logprobs, Request, RestartError, Sampling
from pdreal.hosts.instances import Instances
from pdreal.hosts.remote_host import HostNotice
from pdreal.hosts.scratch_folder import ScratchFolder
from pdreal.settings.options import Options
from pdsim.core import messages as m
from pdsim.core.instance import Levels
from pdsim.core.invariants import InvariantError, check_all_idle
from pdsim.core.routing.router import num_retries, request_of
from pdsim.core.sequence import TokenIds
from pdsim.scenario.building.machines import build_router
from pdsim.scenario.schema import Scenario

_LOG = logging.getLogger("pdreal")
_LOOK_S = 0.02
"""Interval in s at which Launcher.restart first checks whether the instance has no requests left, and then whether the
restarted instance is ready.
"""


async def _until(holds: Callable[[], bool], limit_s: float | None) -> None:
    """Waits until a condition holds. Raises TimeoutError after limit_s seconds; None: never."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110  it is rare, and the router tells nobody
            await asyncio.sleep(_LOOK_S)


class Launcher:
    def __init__(
        self,
        scenario: Scenario,
        options: Options,
        *,
        folder: Path | None = None,
        on_end: Callable[[Request], None] | None = None,
    ) -> None:
        """scenario: resolved. folder: where logbooks are written; None: nowhere. on_end: called when a request ends."""
        self._scenario = scenario
        self._options = options
        self._folder = folder
        self._logbook = Logbook(None, LAUNCHER, 0)
        self._on_end = on_end or (lambda _: None)
        self._requests: dict[int, Request] = {}
        self._num_requests = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: str | None = None
        """Reason why the cluster cannot continue: the launcher failed, or an instance was lost and the scenario has no
        health section. None: the cluster can continue."""
        self.failed = asyncio.Event()
        """Set when `failure` is no longer None."""

    # What a caller does.

    async def start(self) -> None:
        """Starts every instance, then the run's clock. Raises LaunchError if an instance does not start."""
        loop = asyncio.get_running_loop()
        self.timeline = Timeline(monotonic_ns(), loop)
        if self._folder is not None:
            loop.set_exception_handler(self._on_error)  # of a run; a server's loop has callbacks of others, too
            self._logbook = Logbook(self._folder, LAUNCHER, 0)
        self._plain_router = build_router(self._scenario)
        self._router: Any = self._logbook.recorded(self._plain_router)
        self._scratch = ScratchFolder()
        hosts = self._options.hosts
        network = None if hosts is None else Network.dealt(hosts.home_address)
        self._channel = Channel(self._scratch.path, LAUNCHER, network=network)
        self._channel.listen(loop, self._on_envelope)
        self._instances = Instances(
            self._scenario,
            self._options,
            self._channel,
            self.timeline,
            self._logbook,
            network=network,
            sockets=self._scratch.path,
            folder=self._folder,
            carry_out=self._carry_out,
            on_lost=self._give_up,
            spawn_task=self._spawn_task,
        )
        try:
            await self._instances.start()
        except BaseException:  # also where it is cancelled
            await self.stop()
            raise

    @property
    def instance_ids(self) -> list[str]:
        return self._instances.fleet.instance_ids

    def submit(
        self,
        prompt_ids: list[int] | TokenIds,
        sampling: Sampling,
        *,
        request_id: int | None = None,
        priority: int = 0,
    ) -> Request:
        """Sends a request. Iterating over the returned Request yields its tokens. prompt_ids: token ids of the prompt.
        sampling: how tokens are drawn, and when the output ends. request_id: None takes the next free id. priority: for
        scheduling policies (QueuedRequest.priority).
        """
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
            self._tell_router(m.Arrival(request_id, prompt, sampling.max_tokens, priority, sampling.has_fixed_length))
        return request

    def abort(self, request_id: int, reason: str = "aborted by the client") -> None:
        """Aborts a request. Has no effect if the request has ended. reason: text for the client."""
        if request_id not in self._requests:
            return
        self._tell_router(m.Cancel(request_id, reason))
        if request_id in self._requests:
            self._end(m.Failed(request_id, reason))

    def flush_cache(self) -> None:
        """Tells every instance to drop cached KV that no request uses."""
        self._tell_router(m.FlushCache())

    def load(self) -> dict[str, Levels]:
        """Returns the numbers of requests and of pages by state (Levels) of each running instance, by the instance's
        name. The launcher asks for new numbers at every heartbeat_interval of the health section, or every second if
        the scenario has no health section.
        """
        return dict(self._instances.levels)

    @property
    def hosts(self) -> dict[str, dict[str, float]]:
        """Offset, error and drift of each other host's clock in ms, by host (RemoteHost.described). Recorded times of
        the run are already corrected by the offsets.
        """
        return {name: host.described() for name, host in self._instances.fleet.remote.items()}

    @property
    def num_live_requests(self) -> int:
        return len(self._requests)

    @property
    def missing_roles(self) -> list[str]:
        """Roles without a running instance."""
        return self._instances.missing_roles

    async def stop(self) -> list[str]:
        """Ends remaining requests and every process, in bounded time; hung processes are killed. Returns descriptions
        of problems: pages, locks and bytes that were not released, instances that died or did not answer meanwhile, and
        logbooks of other hosts that were not received. The list should be empty.
        """
        for request_id in list(self._requests):
            self.abort(request_id, "the server stops")
        leaks = await self._instances.settle()
        try:
            if self.failure is None:
                check_all_idle([self._plain_router])
        except InvariantError as broken:
            leaks.append(str(broken))
        for task in self._tasks:
            task.cancel()
        leaks += await self._instances.end()
        self._channel.close()
        self._logbook.close()
        self._scratch.cleanup()
        return leaks

    def kill(self, instance_id: str, *, rank: int | None = None, restart_after_s: float | None = None) -> None:
        """Kills an instance, or one rank and thereby the instance, with SIGKILL. If the scenario has a health section,
        the instance starts again restart_after_s s after its end; None: never. Without a health section, all requests
        fail, and the cluster cannot continue.
        """
        self._instances.kill(instance_id, rank, restart_after_s)

    async def restart(self, instance_id: str, patience_s: float) -> None:
        """Restarts an instance without failing a request: sends no new requests to the instance, waits until it has
        none, kills it, and starts it again. Returns when the instance takes requests again. patience_s: maximum time in
        s until the instance has no requests.

        Raises RestartError, and lets the instance continue as before, in four cases: its requests take longer than
        patience_s; the scenario has no health section, so instances that end are not started again; the instance is
        down or takes no new requests; no other instance of the role takes requests.
        """
        instances = self._plain_router.roles[self._instances.fleet.roles[instance_id]]
        if self._scenario.health is None:
            raise RestartError("the scenario has no health section, so instances that end are not started again")
        if len(instances.offered) < 2 or instance_id not in [load.instance_id for load in instances.offered]:  # noqa: PLR2004
            raise RestartError(f"{instance_id} is down, drains, or alone takes requests in its role")
        self._tell_router(m.Drain(instance_id))
        (load,) = (load for load in instances.loads if load.instance_id == instance_id)
        try:
            await _until(lambda: not load.num_requests, patience_s)
        except BaseException as late:
            self._tell_router(m.PeerUp(instance_id))
            if isinstance(late, TimeoutError):
                raise RestartError(f"{instance_id} has {load.num_requests} requests after {patience_s:g} s") from None
            raise
        self.kill(instance_id, restart_after_s=0.0)
        await _until(lambda: load in instances.offered, None)

    # Messages.

    def _on_envelope(self, envelope: Envelope, payload: Any) -> None:
        message = envelope.message
        match message:
            case Streamed():
                for new in message.tokens:
                    self._stream(*new)
            case m.FirstToken():
                self._on_first_token(message, *envelope.extra)
            case m.Finished() | m.Failed():
                self._on_outcome(message, envelope.extra)
            case m.PrefillDone():
                self._tell_router(message)
            case _ if isinstance(message, HostNotice):
                self._instances.fleet.on_notice(message, payload)
            case Hello() | Connected() | Pong() | Settled() | Broken():
                self._instances.on_notice(message)
            case _:
                raise TypeError(f"the launcher does not take {message}")
        self._logbook.flush()

    def _send(self, command: m.Send) -> None:
        """Sends messages to instances that are up. Messages to other instances are lost."""
        message = command.message
        if self._instances.is_up(process_of(command.to)):
            extra = None
            if isinstance(message, m.NewRequest):
                extra = self._requests[request_of(message.request_id)].sampling
            self._channel.send(command.to, message, extra)

    def _carry_out(self, commands: Sequence[m.Send]) -> None:
        """Delivers the messages of the health monitor."""
        for command in commands:
            if command.to == self._router.instance_id:
                self._tell_router(command.message)
            else:
                self._send(command)

    def _tell_router(self, message: m.Message) -> None:
        """Gives the router a message and carries out the router's commands: sends messages, sets alarms, and ends
        failed requests.
        """
        for command in self._router.on_message(message, self.timeline.now_ns):
            match command:
                case m.Send(to, m.NewRequest() as new):
                    if to == new.decode_id:
                        self._on_attempt(new)
                    self._send(command)
                case m.Send():
                    self._send(command)
                case m.WakeAt():
                    self.timeline.at(command.time_ns, lambda _: self._tell_router(m.Woken()))
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

    def _on_first_token(
        self, message: m.FirstToken, token: int | None, num_cached_tokens: int, logprobs: Logprobs | None
    ) -> None:
        """Handles the message that a request has its first token. token: the token; None: the instance is aggregated,
        and sends the first token in a Streamed notice, like every other token. num_cached_tokens: number of prompt
        tokens found in the prefix cache. logprobs: log probabilities of the token; None: not asked for.
        """
        if (request := self._under_way(message.request_id)) is None:
            return
        request.num_cached_tokens = num_cached_tokens
        if token is not None:
            self._stream(message.request_id, token, logprobs)
        self._note("on_first_token", request.request_id)

    def _stream(self, attempt: int, token: int, logprobs: Logprobs | None = None) -> None:
        """Passes a token to its request. Before the request's first token, tells the router if the router needs to know
        of first tokens (hears_first_tokens). A request that has a token is never retried. attempt: id of one attempt to
        serve the request; each retry is another attempt.
        """
        if (request := self._under_way(attempt)) is None:
            return
        if self._plain_router.hears_first_tokens and not request.tokens:
            self._tell_router(m.FirstToken(attempt))
        request.put(token, logprobs)

    def _under_way(self, attempt: int) -> Request | None:
        """Returns the request that an attempt serves. attempt: id of one attempt to serve a request; each retry is
        another attempt. None: the request has ended, or the router has given up the attempt, whose tokens may still
        arrive.
        """
        request_id = self._plain_router.client_of(attempt)
        return None if request_id is None else self._requests.get(request_id)

    def _on_outcome(self, outcome: m.Finished | m.Failed, drafted: Sequence[int]) -> None:
        request_id = self._plain_router.client_of(outcome.request_id)
        self._tell_router(outcome)
        if request_id is not None and isinstance(outcome, m.Finished):
            if (request := self._requests.get(request_id)) is not None:
                request.drafted = Drafted(*drafted)
            self._end(m.Finished(request_id))

    def _end(self, outcome: m.Finished | m.Failed) -> None:
        request = self._requests.pop(outcome.request_id, None)
        if request is None:
            return  # the caller gave it up
        self._note("on_output", outcome.request_id, len(request.tokens))
        self._note("on_end", outcome)
        request.end(outcome.reason if isinstance(outcome, m.Failed) else "")
        self._on_end(request)

    # Failures.

    def _give_up(self, reason: str) -> None:
        """Fails all requests, because the cluster cannot continue (`failure`)."""
        self.failure = self.failure or reason
        self.failed.set()
        for request_id in list(self._requests):
            self._end(m.Failed(request_id, reason))

    def _on_error(self, _: object, context: dict[str, Any]) -> None:
        """Handles an exception in a callback or a task of the launcher, such as a full disk: closes the logbook, and
        fails all requests. Without this handler the run would never end. context: asyncio's description of the
        exception.
        """
        error, where = context.get("exception"), ""
        if isinstance(error, OSError):
            where = f"; it writes to {self._folder}"
        else:
            _LOG.error("%s", context["message"], exc_info=error)
        with suppress(OSError):
            self._logbook.close()
        self._give_up(f"the launcher failed: {error or context['message']}{where}")

    def _note(self, method: str, *args: Any) -> None:
        self._logbook.row(method, self.timeline.now_ns, *args)

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(None, {"message": "a task of the launcher failed", "exception": error})
