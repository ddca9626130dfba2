"""Rank 0 of an instance: drives the instance's loop and its sender or receiver, and carries out what they command."""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

from pdreal import notices
from pdreal.channel import LAUNCHER, Channel
from pdreal.clock import Timeline
from pdreal.executor import Executor
from pdreal.fleet import RankSpec
from pdreal.kv_check import KvCheck
from pdreal.logbook import Logbook
from pdreal.rank_group import RankGroup, RankThreads
from pdreal.requests import Sampling
from pdreal.tasks import Compute, ScatterCell, SendUnit
from pdsim.core import messages as m
from pdsim.core.instance import Levels, instance_loop
from pdsim.core.invariants import InvariantError, check_all_idle
from pdsim.core.journal import Recorded
from pdsim.core.messages import receiver_of, sender_of
from pdsim.core.sender import Sender
from pdsim.core.sequence import TokenIds
from pdsim.core.transfer_plan import TransferUnit
from pdsim.metrics.recorder import transfer_record
from pdsim.metrics.records import StepRecord
from pdsim.scenario import wiring
from pdsim.scenario.build import build_machine
from pdsim.scenario.sizing import layout_of

_SETTLE_AGAIN_S = 0.02
_FEW_REQUESTS = 256


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
        self._spec = spec
        self._channel = channel
        self._events = loop
        self._fail = fail
        self._timeline = Timeline(monotonic_ns(), loop)
        self._has_begun = False
        self._logbook = None if spec.logs is None else Logbook(spec.logs, spec.process, spec.life)
        self._instance, self._agents = self._state_machines()
        self._machines = [self._inner(machine) for machine in (self._instance, *self._agents.values())]
        self._executor = Executor(self._inner(self._instance), end_tokens)
        self._group = RankGroup(channel, threads, spec.followers)
        self._inbox: list[m.Message] = []
        self._loop = instance_loop(
            self._instance, drain=self._drain, carry_out=self._carry_out, now_ns=lambda: self._timeline.now_ns
        )
        self._look_around_at = _FEW_REQUESTS
        """With so many requests in the executor some may be left over."""
        self._num_in_flight = 0
        self._waits = False
        self._timer: TimerHandle | None = None
        self._last_levels: Levels | None = None
        self._settle_until_ns: int | None = None
        is_pair = spec.role != "aggregated"
        self._wire = wiring.wire_of(spec.scenario, *self._layouts()) if is_pair else None
        self._layer_groups = spec.scenario.pair.prefill.layer_groups if spec.role == "prefill" else 0
        staging = spec.scenario.network.staging if is_pair else None
        self._cell_pages = 0 if staging is None else wiring.staging_plan(spec.scenario, staging).cell_pages
        self._check = KvCheck(self._group) if spec.options.check_kv and is_pair else None
        self._first_tokens: dict[int, int] = {}
        """Of prompts that are computed and not sent."""
        self._granted: dict[int, m.KvGranted] = {}
        """Of requests whose KV is on its way."""
        self._num_saves = 0
        """Retracted requests whose KV is not copied yet."""
        self._held_back: list[m.Command] = []
        """Sends that wait for that."""
        self._commands: dict[type, Callable[[Any], None]] = {
            m.Send: self._send,
            m.Tell: lambda command: self._tell(command.to, command.message),
            m.WakeAt: self._wake_at,
            m.FirstToken: self._on_first_token,
            m.Retracted: self._on_retracted,
            m.SaveKv: self._save,
            m.LoadKv: self._load,
            m.PrefillDone: self._on_outcome,
            m.Finished: self._on_outcome,
            m.Failed: self._on_outcome,
            TransferUnit: lambda unit: self._tell(sender_of(unit.source), unit),
            m.StartTransfer: self._start_transfer,
            m.Scatter: self._scatter,
        }

    def begin(self, epoch_ns: int) -> None:
        """Start the loop, with time as everybody counts it. Does nothing when called again."""
        if not self._has_begun:
            self._has_begun = True
            self._timeline = Timeline(epoch_ns, self._events)
            self._events.call_soon(self._advance, None)

    def levels(self) -> list[Any]:
        return list(self._instance.levels())

    # What comes in.

    def on_message(self, to: str, message: Any, extra: Any) -> None:
        match message:
            case notices.Done():
                self._group.on_done(message)
            case notices.Settle():
                self._settle_until_ns = self._timeline.now_ns + message.timeout_ns
                self._settle()
            case m.NewRequest():
                assert isinstance(message.prompt, TokenIds)
                self._executor.add(message.request_id, message.prompt, Sampling(*extra))
                self._tell(to, message)
            case m.KvGranted():
                self._granted[message.request_id] = message
                self._tell(to, message)
            case m.KvArrived():
                self._on_arrived(to, message, extra)
            case _:
                self._tell(to, message)

    def _on_arrived(self, to: str, message: m.KvArrived, extra: Any) -> None:
        self._executor.add_first_token(message.request_id, extra["token"], extra["num_cached_tokens"])
        if self._check is not None:
            self._check.expect(message.request_id, extra["digests"])
        self._tell(to, message)

    def _tell(self, to: str, message: m.Message) -> None:
        """Senders and receivers answer at once; the instance when it looks."""
        if to != self._spec.instance_id:
            self._carry_out(self._agents[to].on_message(message, self._timeline.now_ns))
            return
        arrived = message.completes if isinstance(message, m.CellScattered) else message
        if self._check is not None and isinstance(arrived, m.KvArrived):
            grant = self._granted[arrived.request_id]
            self._check.compare(
                grant, self._num_sent_tokens(grant.request_id), partial(self._post, message), self._fail
            )
        else:
            self._post(message)

    def _post(self, message: m.Message) -> None:
        self._inbox.append(message)
        if self._waits:
            self._go_on()

    # The loop.

    def _go_on(self, _: None = None) -> None:
        """Behind what else has come."""
        self._waits = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._events.call_soon(self._advance, None)

    def _drain(self) -> list[m.Message]:
        inbox, self._inbox = self._inbox, []
        return inbox

    def _advance(self, answer: m.StepResult | None) -> None:
        """Begin what the loop asks for until it must wait, for a step or for a message."""
        while True:
            asked = self._loop.send(answer)
            if self._executor.num_requests > self._look_around_at:
                self._forget_others()
            self._note_levels()
            if isinstance(asked, m.Wait):
                if not self._num_in_flight:
                    self._begin_wait(asked)
                break
            assert not isinstance(asked, m.Pause)
            self._begin(asked)
            self._num_in_flight += 1
            if self._num_in_flight == self._instance.max_steps_in_flight:
                break
            answer = None
        self._flush()

    def _forget_others(self) -> None:
        """Requests that ended without an outcome here: cancelled before they were begun, say. All messages are seen."""
        present = set(self._machines[0].requests())
        for request_id in self._executor.others_than(present):
            self._forget(request_id)
        self._look_around_at = 2 * self._executor.num_requests + _FEW_REQUESTS

    def _begin_wait(self, wait: m.Wait) -> None:
        self._waits = True
        if self._inbox:
            self._go_on()
        elif wait.until_ns is not None:
            self._timer = self._timeline.at(wait.until_ns, self._go_on)

    def _begin(self, step: m.Step) -> None:
        batch = self._executor.begin(step)
        on_layers = partial(self._on_layers, step.step_id) if self._layer_groups else None
        self._group.compute(Compute(batch, step.step_id), partial(self._on_computed, step), on_layers)

    def _on_layers(self, step_id: int, num_layers: int) -> None:
        """Called by the thread that computes, as so many layers are done."""
        self._events.call_soon_threadsafe(self._tell_layers, step_id, num_layers)

    def _tell_layers(self, step_id: int, num_groups: int) -> None:
        self._tell(sender_of(self._spec.instance_id), m.LayersComputed(step_id, num_groups))

    def _on_computed(self, step: m.Step, computed: Any, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
            return
        outcome = self._executor.finish(step, computed.tokens)
        self._note_step(step, computed)
        if self._spec.role == "prefill":
            self._first_tokens.update(outcome.new_tokens)
        elif outcome.new_tokens:
            self._send_out(LAUNCHER, notices.Streamed([list(new) for new in outcome.new_tokens]))
        self._num_in_flight -= 1
        self._advance(outcome.result)

    # Commands.

    def _carry_out(self, commands: Sequence[m.Command]) -> None:
        for command in commands:
            self._commands[type(command)](command)

    def _send(self, command: m.Send) -> None:
        if self._num_saves:
            self._held_back.append(command)
            return
        to, message = command
        extra: dict[str, Any] | None = None
        if isinstance(message, m.KvArrived):
            extra = {
                "token": self._first_tokens.pop(message.request_id),
                "num_cached_tokens": self._executor.num_cached_tokens(message.request_id),
            }
            if self._check is not None:
                extra["digests"] = self._check.sent(message.request_id)
        elif isinstance(message, m.KvGranted):
            self._granted[message.request_id] = message
            self._note("on_admitted", message.request_id, message.num_cached_tokens)
        self._send_out(to, message, extra)

    def _send_out(self, to: str, message: Any, extra: Any = None) -> None:
        """What others hear of is on file before, though this process be killed at once."""
        self._flush()
        self._channel.send(to, message, extra)

    def _wake_at(self, command: m.WakeAt) -> None:
        self._timeline.at(command.time_ns, lambda _: self._tell(command.who, m.Woken()))

    def _on_first_token(self, command: m.FirstToken) -> None:
        request_id = command.request_id
        token = None if self._spec.role == "aggregated" else self._executor.last_token(request_id)
        self._note("on_streamed", request_id)
        self._send_out("router", command, [token, self._executor.num_cached_tokens(request_id)])

    def _on_retracted(self, command: m.Retracted) -> None:
        self._note("on_retracted", command.request_id)

    def _save(self, command: m.SaveKv) -> None:
        """Nobody may hear of pages that were given back before their KV is copied."""
        self._num_saves += 1
        self._group.begin(Compute(self._executor.save(command)), self._on_saved)

    def _on_saved(self, _: list[Any], error: str | None) -> None:
        if error is not None:
            self._fail(RuntimeError(f"saving KV to host memory: {error}"))
            return
        self._num_saves -= 1
        held, self._held_back = self._held_back, []
        self._carry_out(held)

    def _load(self, command: m.LoadKv) -> None:
        self._group.compute(Compute(self._executor.load(command)), self._on_copied)

    def _on_copied(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)

    def _on_outcome(self, outcome: m.Outcome) -> None:
        self._forget(outcome.request_id)
        self._send_out("router", outcome)

    def _forget(self, request_id: int) -> None:
        self._granted.pop(request_id, None)
        self._first_tokens.pop(request_id, None)
        if (work := self._executor.forget(request_id)) is not None:
            self._group.compute(Compute(work), self._on_copied)

    # Transfers.

    def _start_transfer(self, command: m.StartTransfer) -> None:
        unit, offset = command
        worker = self._sender.worker(unit)
        start_ns = self._timeline.now_ns
        self._group.begin(SendUnit(worker, unit, offset), partial(self._on_sent, unit, worker, start_ns))

    def _on_sent(self, unit: TransferUnit, worker: int, start_ns: int, _: list[Any], error: str | None) -> None:
        sender_id = sender_of(unit.source)
        if error is not None:
            self._tell(sender_id, m.TransferLost(unit, f"transfer from {unit.source} to {unit.target}: {error}"))
            return
        if self._logbook is not None and self._wire is not None:
            now_ns = self._timeline.now_ns
            self._logbook.row("on_transfer", now_ns, transfer_record(unit, self._wire, worker, start_ns, now_ns))
        if self._check is None:
            self._tell(sender_id, m.UnitSent(unit))
        else:
            num_tokens = self._num_sent_tokens(unit.request_id)
            self._check.on_sent(unit, worker, num_tokens, lambda: self._tell(sender_id, m.UnitSent(unit)), self._fail)

    def _num_sent_tokens(self, request_id: int) -> int:
        """Of the prompt: all that decode had not cached."""
        return self._executor.num_prompt_tokens(request_id) - self._granted[request_id].num_cached_tokens

    @property
    def _sender(self) -> Sender:
        sender: Sender = self._inner(self._agents[sender_of(self._spec.instance_id)])
        return sender

    def _scatter(self, command: m.Scatter) -> None:
        pages = self._granted[command.request_id].pages
        first = command.cell * self._cell_pages
        task = ScatterCell(command, pages[first : first + self._cell_pages])
        self._group.begin(task, partial(self._on_scattered, command))

    def _on_scattered(self, command: m.Scatter, _: list[Any], error: str | None) -> None:
        if error is not None:
            self._fail(RuntimeError(f"scatter of request {command.request_id}: {error}"))
            return
        self._tell(receiver_of(command.decode_id), m.CellScattered(command.request_id, command.cell))

    # The end.

    def _settle(self) -> None:
        """Answer when nothing is left of any request."""
        assert self._settle_until_ns is not None
        try:
            check_all_idle(self._machines)
            leak = "requests are under way" if self._num_in_flight else ""
        except InvariantError as broken:
            leak = str(broken)
        if leak and self._timeline.now_ns < self._settle_until_ns:
            self._events.call_later(_SETTLE_AGAIN_S, self._settle)
            return
        self._send_out(LAUNCHER, notices.Settled(self._spec.instance_id, leak))

    # What is observed.

    def _flush(self) -> None:
        if self._logbook is not None:
            self._logbook.flush()

    def _note(self, method: str, *args: Any) -> None:
        if self._logbook is not None:
            self._logbook.row(method, self._timeline.now_ns, *args)

    def _note_levels(self) -> None:
        if self._logbook is not None and (levels := self._instance.levels()) != self._last_levels:
            self._last_levels = levels
            self._note("on_levels", self._spec.instance_id, levels)

    def _note_step(self, step: m.Step, computed: Any) -> None:
        if self._logbook is None:
            return
        if isinstance(step, m.PrefillStep):
            num_requests = len(step.chunks)
            num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
            num_context_tokens = sum(chunk.num_context_tokens for chunk in step.chunks)
        else:
            num_requests = num_tokens = step.num_requests
            num_context_tokens = step.num_context_tokens
        duration_ns = computed.end_ns - computed.start_ns
        row = StepRecord(
            self._spec.instance_id,
            "prefill" if isinstance(step, m.PrefillStep) else "decode",
            computed.start_ns - self._timeline.epoch_ns,
            duration_ns,
            duration_ns,
            1,
            num_requests,
            num_tokens,
            num_context_tokens,
            0.0,
        )
        self._note("on_step", step, row)

    # State machines.

    def _state_machines(self) -> tuple[Any, dict[str, Any]]:
        """The instance and its sender or receiver: fresh, or as they are after a restart."""
        spec = self._spec
        present = [spec.instance_id]
        if spec.role == "prefill":
            present.append(sender_of(spec.instance_id))
        elif spec.role == "decode" and spec.scenario.network.staging is not None:
            present.append(receiver_of(spec.instance_id))
        build = partial(build_machine, spec.scenario, has_restarted=spec.life > 0)
        instance, *agents = (self._recorded(build(name)) for name in present)
        return instance, {agent.instance_id: agent for agent in agents}

    def _recorded(self, machine: Any) -> Any:
        return machine if self._logbook is None else Recorded(machine, self._logbook.entry)

    @staticmethod
    def _inner(machine: Any) -> Any:
        return getattr(machine, "inner", machine)

    def _layouts(self) -> tuple[Any, Any]:
        return layout_of(self._spec.scenario, "prefill"), layout_of(self._spec.scenario, "decode")
