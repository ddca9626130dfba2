"""Sends and receives KV of an instance, as its leader sees the transfers: transfer units, staged cells, and the check
of KV.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pdreal.control.clock import Timeline
from pdreal.control.logbook import InstanceLog
from pdreal.control.tasks import DigestArrived, DigestSent, ScatterCell, Seed, SendUnit, StateMove, Windows
from pdreal.rank.executor import Executor, NewToken
from pdreal.rank.group import RankGroup
from pdreal.rank.step_loop import inner
from pdreal.settings.rank import RankSpec
from pdsim.core import messages as m
from pdsim.core.messages import TransferUnit, receiver_of, sender_of
from pdsim.scenario.building import wiring

_UNEQUAL = -1
"""Takes the place of the fingerprint of a KV head of which ranks have different copies. Such a head counts as damaged,
even if the ranks of the other side have different copies, too."""


class KvDamagedError(Exception):
    """Error with which an instance fails if KV that arrived differs from the KV that was sent."""


class KvTransfers:
    """Carries out the commands of an instance's sender or receiver. Keeps data of requests whose KV is being
    transferred.
    """

    def __init__(
        self,
        spec: RankSpec,
        agents: Iterable[Any],
        group: RankGroup,
        executor: Executor,
        timeline: Timeline,
        log: InstanceLog,
        carry_out: Callable[[Sequence[m.Command]], None],
    ) -> None:
        """spec: the instance's role, scenario and options. agents: the state machine that sends or receives KV for the
        instance; empty if there is none. group: the instance's ranks. executor: knows the pages of requests. log: takes
        the entries of the instance. carry_out: carries out the commands of the state machine.
        """
        self._instance_id = spec.instance_id
        self._agents = {agent.instance_id: agent for agent in agents}
        self._group = group
        self._executor = executor
        self._timeline = timeline
        self._log = log
        self._carry_out = carry_out
        scenario = spec.scenario
        if spec.role == "prefill":
            self._wire = wiring.wire_of(scenario)
        plan = wiring.staging_plan(scenario)
        self._cell_pages = 0 if plan is None else plan.cell_pages
        self._check = KvCheck(group) if spec.options.check_kv and spec.role != "aggregated" else None
        self._grants: dict[int, m.KvGranted] = {}
        """Grant of each request, from KvGranted until this instance forgets the request."""
        self._target_slots: dict[int, int] = {}
        """Slot on decode for the linear-attention state of each request in _grants. 0: none."""
        self._sent_pages: dict[int, list[int]] = {}
        """For models with sliding windows: ids of those pages of each prompt whose transfer has begun."""
        self._first_tokens: dict[int, NewToken] = {}
        """First token of each computed prompt, until it is sent to decode with the prompt's last KV."""

    def tell(self, agent_id: str, message: Any) -> None:
        """Gives the sender or receiver a message, and carries out its commands at once. agent_id: name of the sender or
        receiver.
        """
        self._carry_out(self._agents[agent_id].on_message(message, self._timeline.now_ns))

    def grant(self, granted: m.KvGranted, state_slot: int) -> None:
        """Keeps the pages that a request was granted, and decode's slot for its linear-attention state (0: none).
        Decode calls this when it grants them, prefill when KvGranted arrives.
        """
        self._grants[granted.request_id] = granted
        self._target_slots[granted.request_id] = state_slot

    def forget(self, request_id: int) -> None:
        self._grants.pop(request_id, None)
        self._target_slots.pop(request_id, None)
        self._sent_pages.pop(request_id, None)
        self._first_tokens.pop(request_id, None)
        if self._check is not None:
            self._check.forget(request_id)

    def _num_sent_tokens(self, request_id: int) -> int:
        """Returns the number of prompt tokens that decode did not have in its prefix cache."""
        return self._executor.num_prompt_tokens(request_id) - self._grants[request_id].num_cached_tokens

    # Prefill.

    def on_layers(self, step_id: int, num_groups: int) -> None:
        self.tell(sender_of(self._instance_id), m.LayersComputed(step_id, num_groups))

    def keep_first_tokens(self, new_tokens: Sequence[NewToken]) -> None:
        self._first_tokens.update((new.request_id, new) for new in new_tokens)

    def send(self, command: m.StartTransfer) -> None:
        unit, offset = command.unit, command.staging_offset_bytes
        worker = inner(self._agents[sender_of(self._instance_id)]).worker(unit)
        start_ns = self._timeline.now_ns
        task = SendUnit(worker, unit, offset, self._windows(unit), self._state(unit))
        self._group.begin(task, partial(self._on_sent, unit, worker, start_ns))

    def _state(self, unit: TransferUnit) -> StateMove | None:
        if not unit.is_last or not self._wire.state_bytes:
            return None
        return StateMove(self._executor.state_slot(unit.request_id), self._target_slots[unit.request_id])

    def _windows(self, unit: TransferUnit) -> Windows | None:
        """Returns the pages whose KV of sliding-window layers the unit sends: the prompt's last pages, on prefill and
        on decode. None: the unit is not the request's last, or no layer has a window. Units of a request are sent in
        order, so with the last unit all pages of the request are known.
        """
        if not self._wire.num_window_planes:
            return None
        request_id = unit.request_id
        pages = self._sent_pages.setdefault(request_id, [])
        pages += unit.source_pages
        if not unit.is_last:
            return None
        grant = self._grants[request_id]
        num_pages = self._wire.num_window_pages(
            range(grant.num_cached_tokens, self._executor.num_prompt_tokens(request_id))
        )
        return Windows(pages[-num_pages:], grant.pages[-num_pages:]) if num_pages else None

    def _on_sent(self, unit: TransferUnit, worker: int, start_ns: int, _: list[Any], error: str | None) -> None:
        if error is not None:
            reason = f"transfer from {unit.source} to {unit.target}: {error}"
            self.tell(sender_of(unit.source), m.TransferLost(unit, reason))
            return
        self._log.transfer(unit, self._wire, worker, start_ns)
        tell_sender = partial(self.tell, sender_of(unit.source), m.UnitSent(unit))
        if self._check is None:
            tell_sender()
        else:
            slot = self._executor.state_slot(unit.request_id) if unit.is_last else 0
            self._check.on_sent(unit, worker, self._num_sent_tokens(unit.request_id), slot, tell_sender)

    def arrival_facts(self, arrived: m.KvArrived) -> dict[str, Any]:
        """Returns data that is sent to decode with the last KV of a request: `token` (the first token), `logprobs` of
        this token, `num_cached_tokens`, `seed` (start of drafting), and `digests` (fingerprints) if KV is checked.
        """
        request_id = arrived.request_id
        first = self._first_tokens.pop(request_id)
        facts: dict[str, Any] = {
            "token": first.token,
            "logprobs": first.logprobs,
            "num_cached_tokens": self._executor.num_cached_tokens(request_id),
            "seed": self._executor.seed(request_id),
        }
        if self._check is not None:
            facts["digests"] = self._check.sent(request_id)
        return facts

    # Decode.

    def on_arrived(self, request_id: int, facts: dict[str, Any]) -> None:
        """Keeps the data that arrived with a request's last KV, such as its first token. facts: the data, with the keys
        that prefill's `arrival_facts` writes.
        """
        seed = None if facts["seed"] is None else Seed(*facts["seed"])
        first = facts["token"], facts["num_cached_tokens"], facts["logprobs"]
        self._executor.add_first_token(request_id, *first, seed)
        if self._check is not None:
            self._check.expect(request_id, facts["digests"])

    def when_checked(self, message: m.Message, then: Callable[[], None]) -> None:
        """Calls `then` when the KV of a message has been compared with the KV that was sent, or at once if the message
        completes no request or KV is not checked. If the KV differs, the instance fails, and `then` is not called.
        """
        arrived = message.completes if isinstance(message, m.CellScattered) else message
        if self._check is not None and isinstance(arrived, m.KvArrived):
            grant = self._grants[arrived.request_id]
            slot = self._target_slots[grant.request_id]
            self._check.compare(grant, self._num_sent_tokens(grant.request_id), slot, then)
        else:
            then()

    def scatter(self, command: m.Scatter) -> None:
        pages = self._grants[command.request_id].pages
        first = command.cell * self._cell_pages
        task = ScatterCell(command, pages[first : first + self._cell_pages])
        cell = m.CellScattered(command.request_id, command.cell)
        what = f"scatter of request {command.request_id}"
        self._group.begin_or_fail(task, what, lambda _: self.tell(receiver_of(command.decode_id), cell))


class KvCheck:
    """Checks by fingerprints that the KV of every request arrives unchanged: the KV that prefill sent must equal the KV
    in decode's pages.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._pages: dict[int, list[int]] = {}
        """On prefill: ids of the pages that were sent so far, of each request whose last unit has not been sent."""
        self._digests: dict[int, dict[str, int]] = {}
        """Fingerprints of each request, by KV head or state. Prefill keeps them until it sends them to decode, decode
        until it compares them."""

    def on_sent(
        self, unit: TransferUnit, worker: int, num_tokens: int, state_slot: int, then: Callable[[], None]
    ) -> None:
        """Collects the pages of a sent unit. After a request's last unit, computes fingerprints of the KV that the
        request sent, and calls `then` when they are computed. After any other unit, calls `then` at once. worker: the
        transfer worker that sent the unit. num_tokens: number of prompt tokens that the request sends. state_slot: slot
        of the request's linear-attention state; 0: none.
        """
        request_id = unit.request_id
        pages = self._pages.setdefault(request_id, [])
        if unit.after_layers is None or unit.after_layers[1] == 0:
            pages += unit.source_pages
        if not unit.is_last:
            then()
            return
        del self._pages[request_id]

        def on_done(results: list[Any]) -> None:
            self._digests[request_id] = _joined(results)
            then()

        task = DigestSent(worker, pages, num_tokens, state_slot)
        self._group.begin_or_fail(task, f"fingerprints of request {request_id}", on_done)

    def forget(self, request_id: int) -> None:
        self._pages.pop(request_id, None)
        self._digests.pop(request_id, None)

    def sent(self, request_id: int) -> dict[str, int]:
        return self._digests.pop(request_id)

    def expect(self, request_id: int, digests: dict[str, int]) -> None:
        self._digests[request_id] = digests

    def compare(self, grant: m.KvGranted, num_tokens: int, state_slot: int, then: Callable[[], None]) -> None:
        """Calls `then` if the KV in the granted pages equals the KV that was sent. Otherwise the instance fails with
        KvDamagedError. num_tokens: number of tokens that were sent. state_slot: decode's slot of the linear-attention
        state; 0: none.
        """
        expected = self._digests.pop(grant.request_id)

        def on_done(results: list[Any]) -> None:
            if (found := _joined(results)) == expected and _UNEQUAL not in found.values():
                then()
                return
            wrong = (head for head, value in expected.items() if value == _UNEQUAL or value != found.get(head))
            damaged = ", ".join(wrong)
            what = f"KV heads {damaged} of {num_tokens} tokens arrived with other values than were sent"
            self._group.fail(KvDamagedError(f"KV of request {grant.request_id} is damaged: {what}"))

        task = DigestArrived(grant.pages, num_tokens, state_slot)
        self._group.begin_or_fail(task, f"fingerprints of request {grant.request_id}", on_done)


def _joined(by_rank: Iterable[dict[str, int]]) -> dict[str, int]:
    """Returns the fingerprints of all ranks, by KV head or state. If ranks with copies of a head disagree, the head's
    fingerprint is _UNEQUAL.
    """
    heads: dict[str, int] = {}
    for digests in by_rank:
        for head, value in digests.items():
            heads[head] = value if heads.get(head, value) == value else _UNEQUAL
    return heads
