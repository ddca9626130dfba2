"""The staging side of one decode instance: lends its ring to prefill, and has what arrives scattered into pages.

lent        AskStaging came -> StagingLent              a span for every cell of the request
written     CellWritten came -> Scatter                 the KV is in the ring
scattered   CellScattered came                          the KV is in its pages; the decode instance is told
free        FreeCells came -> StagingWatermark          once per decode step, as the instance's loop gets to it

The last unit's KvArrived goes on to the instance when every cell of the request is scattered. Messages reach the
receiver at once, beside the instance's loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdsim.core.messages import (
    AskStaging,
    CellScattered,
    CellWritten,
    Command,
    FreeCells,
    KvArrived,
    Message,
    Scatter,
    Send,
    StagingLent,
    StagingWatermark,
    Tell,
)
from pdsim.core.names import receiver_of, sender_of
from pdsim.core.staging_ring import StagingRing


@dataclass(slots=True)
class _Incoming:
    num_cells: int
    num_scattered: int = 0
    arrived: KvArrived | None = None


class Receiver:
    def __init__(self, decode_id: str, prefill_ids: Sequence[str], ring: StagingRing) -> None:
        self.instance_id = receiver_of(decode_id)
        self.ring = ring
        self._decode_id = decode_id
        self._prefill_ids = prefill_ids
        self._incoming: dict[int, _Incoming] = {}

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        if isinstance(message, AskStaging):
            return self._lend(message)
        if isinstance(message, CellWritten):
            return [Scatter(self._decode_id, message.request_id, message.cell, message.num_bytes)]
        if isinstance(message, CellScattered):
            return self._on_scattered(message)
        if isinstance(message, KvArrived):
            return self._on_arrived(message)
        if isinstance(message, FreeCells):
            return self._free(message)
        raise TypeError(f"{self.instance_id}: a receiver does not take {message}")

    def _lend(self, ask: AskStaging) -> list[Command]:
        spans = []
        for cell, num_bytes in enumerate(ask.cell_bytes):
            span = self.ring.assign((ask.request_id, cell), num_bytes)
            assert span is not None, f"cells of {num_bytes} bytes for a ring of {self.ring.num_bytes}"
            spans.append(span)
        self._incoming[ask.request_id] = _Incoming(len(spans))
        return [Send(sender_of(ask.prefill_id), StagingLent(ask.request_id, tuple(spans)))]

    def _on_scattered(self, message: CellScattered) -> list[Command]:
        incoming = self._incoming[message.request_id]
        incoming.num_scattered += 1
        return [Tell(self._decode_id, message._replace(completes=self._complete(message.request_id, incoming)))]

    def _on_arrived(self, message: KvArrived) -> list[Command]:
        incoming = self._incoming.get(message.request_id)
        if incoming is None:
            return [Tell(self._decode_id, message)]
        incoming.arrived = message
        arrived = self._complete(message.request_id, incoming)
        return [] if arrived is None else [Tell(self._decode_id, arrived)]

    def _complete(self, request_id: int, incoming: _Incoming) -> KvArrived | None:
        if incoming.arrived is None or incoming.num_scattered < incoming.num_cells:
            return None
        del self._incoming[request_id]
        return incoming.arrived

    def _free(self, message: FreeCells) -> list[Command]:
        before = self.ring.watermark
        for cell in message.cells:
            self.ring.free((cell.request_id, cell.cell))
        if self.ring.watermark == before:
            return []
        watermark = StagingWatermark(self._decode_id, self.ring.watermark)
        return [Send(sender_of(prefill_id), watermark) for prefill_id in self._prefill_ids]
