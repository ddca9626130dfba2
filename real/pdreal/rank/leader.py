"""Rank 0 of an instance, its leader: gives messages to the instance and its sender or receiver, and carries out their
commands.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

from pdreal.control import notices
from pdreal.control.channel import LAUNCHER, Channel
from pdreal.control.clock import Timeline
from pdreal.control.logbook import InstanceLog, Logbook
from pdreal.control.requests import Sampling
from pdreal.memory.state_slots import StateSlots
from pdreal.rank.executor import Executor, NewToken
from pdreal.rank.group import RankGroup, RankThreads
from pdreal.rank.host_copies import HostCopies
from pdreal.rank.kv_transfers import KvTransfers
from pdreal.rank.speculation import Speculation
from pdreal.rank.step_loop import StepLoop, inner
from pdreal.settings.rank import RankSpec
from pdsim.core import messages as m
from pdsim.core.invariants import InvariantError, check_all_idle
from pdsim.core.messages import TransferUnit, receiver_of, sender_of
from pdsim.core.sequence import TokenIds
from pdsim.scenario.building.machines import build_machine

_SETTLE_AGAIN_S = 0.02


class Outbox:
    """Messages that a leader sends. The logbook is written before the messages are sent, so the log has the calls and
    events that led to a message even if this process is killed. Sending waits for the next pass of the event loop, so
    that a step that is ready begins first.
    """

    def __init__(self, channel: Channel, log: InstanceLog, loop: AbstractEventLoop) -> None:
        self._channel = channel
        self._log = log
        self._loop = loop
        self._messages: list[tuple[str, Any, Any]] = []
        self._is_due = False

    def send(self, to: str, message: Any, extra: Any = None) -> None:
        self._messages.append((to, message, extra))
        self.flush_soon()

    def flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        messages, self._messages = self._messages, []
        self._log.flush()
        for message in messages:
            self._channel.send(*message)


class Leader:
    def __init__(
        self,
        spec: RankSpec,
        channel: Channel,
        threads: RankThreads,
        loop: AbstractEventLoop,
        fail: Callable[[BaseException], None],
        end_tokens: Sequence[int],
    ) -> None:
        """fail: called with the error if the instance cannot continue. end_tokens: ids of the tokens that end a
        sequence.
        """
        self._spec = spec
        self._timeline = timeline = Timeline(monotonic_ns(), loop)
        self._has_begun = False
        logbook = Logbook(spec.logs, spec.process, spec.life)
        self._log = log = InstanceLog(spec.instance_id, logbook, timeline)
        self._instance, *agents = (logbook.recorded(machine) for machine in state_machines(spec))
        self._machines = [inner(machine) for machine in (self._instance, *agents)]
        self._executor = executor = Executor(
            self._machines[0],
            spec.scenario.page_size,
            end_tokens,
            Speculation.of(spec.scenario),
            StateSlots.of(self._machines[0], spec.scenario, spec.role),
        )
        self._group = group = RankGroup(channel, threads, spec.followers, fail)
        self._outbox = outbox = Outbox(channel, log, loop)
        self._transfers = transfers = KvTransfers(spec, agents, group, executor, timeline, log, self._carry_out)
        has_layer_groups = spec.role == "prefill" and spec.scenario.pair.prefill.layer_groups > 0
        self._steps = StepLoop(
            self._instance,
            executor,
            group,
            timeline,
            log,
            carry_out=self._carry_out,
            on_tokens=transfers.keep_first_tokens if spec.role == "prefill" else self._stream,
            on_layers=transfers.on_layers if has_layer_groups else None,
            forget=self._forget,
            flush_soon=outbox.flush_soon,
        )
        self._copies = HostCopies(spec, group, executor, timeline, log, self._carry_out, self._steps.post)
        self._commands: dict[type, Callable[[Any], None]] = {
            m.Send: self._send,
            m.Tell: lambda command: self._tell(command.to, command.message),
            m.WakeAt: self._wake_at,
            m.FirstToken: self._on_first_token,
            m.Retracted: lambda retracted: log.note("on_retracted", retracted.request_id),
            m.AskOutput: self._put_out,
            m.SaveKv: self._copies.save,
            m.LoadKv: self._copies.load,
            m.WriteBackup: self._copies.write_back,
            m.LoadBack: self._copies.load_back,
            m.StoreKv: self._copies.on_storage,
            m.PrefetchKv: self._copies.on_storage,
            m.StopPrefetch: self._copies.on_storage,
            m.PrefillDone: self._on_outcome,
            m.Finished: self._on_outcome,
            m.Failed: self._on_outcome,
            TransferUnit: self._send_unit,
            m.StartTransfer: transfers.send,
            m.Scatter: transfers.scatter,
        }

    def begin(self, epoch_ns: int) -> None:
        """Starts the loop. Time counts from the epoch that all processes share. No effect when called again."""
        if not self._has_begun:
            self._has_begun = True
            self._timeline.epoch_ns = epoch_ns
            self._steps.go_on()

    def levels(self) -> list[Any]:
        return list(self._instance.levels())

    def on_message(self, to: str, message: Any, extra: Any) -> None:
        match message:
            case notices.Done():
                self._group.on_done(message)
                return
            case notices.Settle():
                self._settle(self._timeline.now_ns + message.timeout_ns)
                return
            case m.NewRequest(request_id, _, prompt):
                assert isinstance(prompt, TokenIds)
                self._executor.add(request_id, prompt, Sampling(*extra))
            case m.KvGranted():
                self._transfers.grant(message, extra or 0)
            case m.KvArrived():
                self._transfers.on_arrived(message.request_id, extra)
        self._tell(to, message)

    def _tell(self, to: str, message: m.Message) -> None:
        """Gives a message to a sender or receiver, which answers at once, or to the instance, which answers between
        steps.
        """
        if to == self._spec.instance_id:
            self._transfers.when_checked(message, partial(self._steps.post, message))
        else:
            self._transfers.tell(to, message)

    def _stream(self, new_tokens: Sequence[NewToken]) -> None:
        self._outbox.send(LAUNCHER, notices.Streamed([list(new) for new in new_tokens]))

    def _settle(self, until_ns: int) -> None:
        """Sends Settled to the launcher as soon as no step runs and requests hold nothing in the instance, its sender
        or its receiver (check_all_idle), or else at the time until_ns. Settled then has a description of what requests
        still hold. Returns at once; an event-loop timer looks again every _SETTLE_AGAIN_S s.
        """
        try:
            check_all_idle(self._machines)
            leak = "requests are under way" if self._steps.num_in_flight else ""
        except InvariantError as broken:
            leak = str(broken)
        if leak and self._timeline.now_ns < until_ns:
            self._timeline.loop.call_later(_SETTLE_AGAIN_S, self._settle, until_ns)
        else:
            self._outbox.send(LAUNCHER, notices.Settled(self._spec.instance_id, leak))

    # Commands.

    def _carry_out(self, commands: Sequence[m.Command]) -> None:
        for command in commands:
            self._commands[type(command)](command)

    def _send(self, command: m.Send) -> None:
        if self._copies.hold_back(command):
            return
        message = command.message
        extra: Any = None
        if isinstance(message, m.KvArrived):
            extra = self._transfers.arrival_facts(message)
        elif isinstance(message, m.KvGranted):
            extra = self._executor.state_slot(message.request_id)
            self._transfers.grant(message, extra)
            self._log.note("on_admitted", message.request_id, message.num_cached_tokens)
        self._outbox.send(command.to, message, extra)

    def _send_unit(self, unit: TransferUnit) -> None:
        if not self._copies.hold_back(unit):
            self._transfers.tell(sender_of(unit.source), unit)

    def _wake_at(self, command: m.WakeAt) -> None:
        self._timeline.at(command.time_ns, lambda _: self._tell(command.who, m.Woken()))

    def _put_out(self, asked: m.AskOutput) -> None:
        output = TokenIds(self._executor.output(asked.request_id)[: asked.num_tokens])
        self._steps.post(m.PutOut(asked.request_id, output))

    def _on_first_token(self, command: m.FirstToken) -> None:
        request_id = command.request_id
        token = None if self._spec.role == "aggregated" else self._executor.last_token(request_id)
        self._log.note("on_streamed", request_id)
        told = [token, self._executor.num_cached_tokens(request_id), self._executor.first_logprobs(request_id)]
        self._outbox.send("router", command, told)

    def _on_outcome(self, outcome: m.Outcome) -> None:
        drafted = self._executor.drafted(outcome.request_id)
        self._forget(outcome.request_id)
        self._outbox.send("router", outcome, drafted)

    def _forget(self, request_id: int) -> None:
        self._transfers.forget(request_id)
        self._copies.forget(request_id)


def state_machines(spec: RankSpec) -> list[Any]:
    """Returns new state machines of an instance: the instance itself, then the sender of a prefill instance, or the
    receiver of a decode instance if KV is staged. If spec.life is above 0, the instance was restarted. A receiver then
    knows that senders have an outdated view of its memory.
    """
    names = [spec.instance_id]
    if spec.role == "prefill":
        names.append(sender_of(spec.instance_id))
    elif spec.role == "decode" and spec.scenario.network.staging is not None:
        names.append(receiver_of(spec.instance_id))
    return [build_machine(spec.scenario, name, has_restarted=spec.life > 0) for name in names]
