"""The transfer workers of one prefill instance: several queues. Each queue sends one transfer unit at a time.

Each state of a unit begins with an event:

queued     a TransferUnit came                                     it joins the queue of its destination
ready      its layers are computed                                 and its span of the ring, if any, is free to write
sending    -> StartTransfer                                        one per queue
sent       UnitSent came -> KvSent here, KvArrived or CellWritten there
failed     TransferFailed came -> Abort here and there             other units of the request are dropped
lost       TransferLost came -> Abort here, KvLost there           as failed, but bytes may still be under way
stopped    StopSending came -> KvSent here, Abort there            after the unit under way has ended

"Here" is the prefill instance, "there" the decode instance or its receiver. Messages reach the workers at once; they do
not wait for the instance's loop. A unit that is not ready lets later units of other requests pass. SGLang puts a chunk
that is not ready back at the tail of its queue, and tries again within 1 ms.
"""

from collections.abc import Sequence
from dataclasses import field

from pdsim.core import messages as m
from pdsim.core.deadlines import LateRequests
from pdsim.core.messages import TransferUnit, receiver_of, sender_of
from pdsim.core.transfer.staging_ring import Span, Watermark, may_write
from pdsim.dataclass import dataclass

_LOST = "lost"


@dataclass(slots=True)
class _Queue:
    units: list[TransferUnit] = field(default_factory=list)
    sending: TransferUnit | None = None

    def drop(self, request_id: int) -> None:
        self.units = [unit for unit in self.units if unit.request_id != request_id]


_EMPTY = Watermark()
"""Watermark for decode instances that have not yet reported how far their staging ring is free."""


class Sender:
    def __init__(
        self, prefill_id: str, decode_ids: Sequence[str], *, num_queues: int, by_request: bool = False, staged: bool
    ) -> None:
        """num_queues: number of queues, each with one worker. by_request: True: all units of a request use the same
        queue. False: all units for a decode instance use the same queue. staged: True: units may need spans of a
        staging ring.
        """
        self.instance_id = sender_of(prefill_id)
        self._prefill_id = prefill_id
        self._staged = staged
        self._by_request = by_request
        self._queues = [_Queue() for _ in range(num_queues)]
        self._decode_ids = decode_ids
        self._shards: dict[str, int] = {}
        """Index of the queue of each decode instance; not used with by_request. The table is made when the sender gets
        its first unit, because tables of all pairs of instances would be large."""
        self._computed = (0, 0)
        """Id of the step whose layers are being computed, and number of its layer groups that are computed."""
        self._spans: dict[tuple[int, int], Span] = {}
        self._watermarks: dict[str, Watermark] = {}
        self._stopped = LateRequests()
        """Requests that the sender no longer sends. The sender drops later TransferUnits and StagingLent of these
        requests. Reason _LOST: bytes of the request may still arrive."""
        self._stopping: dict[int, m.StopSending] = {}
        """Stopped requests of which one unit is still being sent, with the message that stopped them."""

    @property
    def held(self) -> list[int]:
        """Ids of requests that have units in this sender's queues or under way, spans of a staging ring to which no
        transfer has begun, or a StopSending that the sender must answer. An id may occur more than once.
        """
        sending = [queue.sending for queue in self._queues if queue.sending is not None]
        units = [*sending, *(unit for queue in self._queues for unit in queue.units)]
        return [*(unit.request_id for unit in units), *(request_id for request_id, _ in self._spans), *self._stopping]

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        self._stopped.now_ns = now_ns
        if self._stopped.kept:
            self._stopped.forget()
        if isinstance(message, TransferUnit):
            if message.request_id in self._stopped.kept:
                return []
            queue = self._queue(message)
            queue.units.append(message)
            return self._start_next(queue)
        if isinstance(message, m.UnitSent):
            return self._on_sent(message.unit)
        if isinstance(message, m.StopSending):
            return self._stop(message)
        if isinstance(message, m.TransferLost):
            self._stopped.kept.pop(message.unit.request_id, None)
            self._stopped.add(message.unit.request_id, _LOST)
        if isinstance(message, m.TransferFailed | m.TransferLost):
            return self._on_failed(message.unit, message.reason)
        if isinstance(message, m.LayersComputed):
            self._computed = (message.step_id, message.num_groups)
        elif isinstance(message, m.StagingLent):
            if message.request_id not in self._stopped.kept:
                for cell, span in enumerate(message.spans):
                    self._spans[message.request_id, cell] = span
        elif isinstance(message, m.StagingWatermark):
            self._watermarks[message.decode_id] = message.watermark
        else:
            raise TypeError(f"{self.instance_id}: a sender does not take {message}")
        return [command for queue in self._queues for command in self._start_next(queue)]

    def worker(self, unit: TransferUnit) -> int:
        num_queues = len(self._queues)
        if self._by_request:
            return unit.request_id % num_queues
        if not self._shards:
            self._shards = {decode_id: i % num_queues for i, decode_id in enumerate(self._decode_ids)}
        return self._shards[unit.target]

    def _queue(self, unit: TransferUnit) -> _Queue:
        return self._queues[self.worker(unit)]

    def _start_next(self, queue: _Queue) -> list[m.Command]:
        if queue.sending is not None:
            return []
        held_up: set[int] = set()
        for i, unit in enumerate(queue.units):
            if unit.request_id not in held_up and self._is_ready(unit):
                del queue.units[i]
                queue.sending = unit
                span = None if unit.cell is None else self._spans.pop((unit.request_id, unit.cell))
                return [m.StartTransfer(unit, None if span is None else span.offset)]
            held_up.add(unit.request_id)
        return []

    def _is_ready(self, unit: TransferUnit) -> bool:
        if unit.after_layers is not None:
            return unit.after_layers < self._computed
        if unit.cell is not None:
            span = self._spans.get((unit.request_id, unit.cell))
            return span is not None and may_write(span, self._watermarks.get(unit.target, _EMPTY))
        return True

    def _on_sent(self, unit: TransferUnit) -> list[m.Command]:
        queue = self._queue(unit)
        queue.sending = None
        if unit.request_id in self._stopping:
            return self._start_next(queue) + self._answer(unit.request_id)
        commands: list[m.Command] = []
        if unit.cell is not None:
            written = m.CellWritten(unit.request_id, unit.cell, unit.num_bytes)
            commands.append(m.Send(receiver_of(unit.target), written))
        if unit.is_last:
            commands.append(m.Send(self._arrives_at(unit.target), m.KvArrived(unit.request_id, unit.first_token_ends)))
        commands += self._start_next(queue)
        if unit.is_last:
            commands.append(m.Tell(self._prefill_id, m.KvSent(unit.request_id)))
        return commands

    def _arrives_at(self, decode_id: str) -> str:
        return receiver_of(decode_id) if self._staged else decode_id

    # Stopping. The units of one request go through one queue: at most one of them is under way.

    def _stop(self, stop: m.StopSending) -> list[m.Command]:
        self._forget(stop.request_id)
        self._stopping.setdefault(stop.request_id, stop)
        under_way = [queue.sending.request_id for queue in self._queues if queue.sending is not None]
        return [] if stop.request_id in under_way else self._answer(stop.request_id)

    def _on_failed(self, unit: TransferUnit, reason: str) -> list[m.Command]:
        request_id, queue = unit.request_id, self._queue(unit)
        queue.sending = None
        if request_id in self._stopping:
            return self._start_next(queue) + self._answer(request_id)
        self._forget(request_id)
        commands = [self._say(unit.target, request_id, reason), *self._start_next(queue)]
        return [*commands, m.Tell(self._prefill_id, m.Abort(request_id, reason, retryable=True))]

    def _say(self, decode_id: str, request_id: int, reason: str) -> m.Command:
        """Returns a message that tells a decode instance that the sender sends no more KV of this request. KvLost:
        bytes may still arrive. Abort: no bytes arrive any more, so the pages may be used again. reason: text that the
        message gives as its reason.
        """
        is_lost = request_id in self._stopped.kept and self._stopped.why(request_id) == _LOST
        word = m.KvLost(request_id, reason) if is_lost else m.Abort(request_id, reason, retryable=True)
        return m.Send(self._arrives_at(decode_id), word)

    def _forget(self, request_id: int) -> None:
        self._stopped.add(request_id)
        for queue in self._queues:
            queue.drop(request_id)
        for key in [key for key in self._spans if key[0] == request_id]:
            del self._spans[key]

    def _answer(self, request_id: int) -> list[m.Command]:
        """Commands that answer the request's StopSending. Empty: no StopSending has arrived, or prefill does not know
        the request. To be called only while no unit of the request is under way.
        """
        stop = self._stopping.pop(request_id, None)
        if stop is None or not stop.decode_id:
            return []
        word = self._say(stop.decode_id, request_id, "no transfer of the request is under way")
        return [word, m.Tell(self._prefill_id, m.KvSent(request_id))]
