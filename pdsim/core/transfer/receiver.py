"""The receiver of staged KV of one decode instance. It lends parts of a ring of memory to prefill instances, and lets
arriving KV be scattered into pages.

Each state of a cell begins with a message:

lent        AskStaging came -> StagingLent              a span for every cell of the request
written     CellWritten came -> Scatter                 the KV is in the ring
scattered   CellScattered came                          the KV is in its pages; the decode instance gets a message
free        FreeCells came -> StagingWatermark          the instance's loop sends FreeCells at most once per step
given up    Abort came -> spans free, Abort passed on   when no scatter of the request is under way
lost        KvLost came -> KvLost passed on             the instance decides when to give the spans up

PeerDown of a prefill instance counts as Abort of each request that the instance was sending; if the instance has
restarted, after a timeout. The last unit's KvArrived goes on to the instance when every cell of the request is
scattered. Messages reach the receiver at once; it does not wait for the decode instance's loop.
"""

from collections.abc import Sequence
from dataclasses import replace

from pdsim.core import messages as m
from pdsim.core.deadlines import Deadlines, LateRequests
from pdsim.core.messages import receiver_of, sender_of
from pdsim.core.transfer.staging_ring import StagingRing
from pdsim.dataclass import dataclass


@dataclass(slots=True)
class _Incoming:
    prefill_id: str
    num_cells: int
    num_written: int = 0
    num_scattered: int = 0
    arrived: m.KvArrived | None = None
    aborted: m.Abort | None = None


class Receiver:
    def __init__(
        self,
        decode_id: str,
        prefill_ids: Sequence[str],
        ring: StagingRing,
        *,
        release_timeout_ns: int | None = None,
        has_restarted: bool = False,
    ) -> None:
        """prefill_ids: instances that may send to this one. ring: the staging ring. release_timeout_ns: time in ns for
        which parts of the ring stay reserved for a prefill instance that died and has restarted; None: no limit.
        has_restarted: True: this receiver takes the place of one that died.
        """
        self.instance_id = receiver_of(decode_id)
        self.ring = ring
        self._decode_id = decode_id
        self._prefill_ids = prefill_ids
        self._incoming: dict[int, _Incoming] = {}
        self._aborted = LateRequests()
        """Aborted requests, and requests whose KV was lost. The receiver ignores AskStaging of these requests."""
        self._orphans = Deadlines(self.instance_id, release_timeout_ns)
        self._strangers: set[str] = set(prefill_ids) if has_restarted else set()
        """Prefill instances whose sender may not know the present watermark: this receiver has restarted, or the
        instance has come up or failed since its last AskStaging."""

    @property
    def held(self) -> list[int]:
        """Ids of requests that got spans of the staging ring, and whose KV is not yet completely in its pages."""
        return list(self._incoming)

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        self._aborted.now_ns = now_ns
        if self._aborted.kept:
            self._aborted.forget()
        if isinstance(message, m.AskStaging):
            return self._lend(message)
        if isinstance(message, m.CellWritten):
            return self._on_written(message)
        if isinstance(message, m.CellScattered):
            return self._on_scattered(message)
        if isinstance(message, m.KvArrived):
            return self._on_arrived(message)
        if isinstance(message, m.FreeCells):
            return self._free(message)
        if isinstance(message, m.Abort):
            return self._on_abort(message)
        if isinstance(message, m.KvLost):
            self._aborted.add(message.request_id)
            return [m.Tell(self._decode_id, message)]
        if isinstance(message, m.PeerUp):
            self._strangers.add(message.instance_id)
            return []
        if isinstance(message, m.PeerDown):
            return self._on_prefill_down(message, now_ns)
        if isinstance(message, m.Woken):
            return self._expire(now_ns)
        raise TypeError(f"{self.instance_id}: a receiver does not take {message}")

    def _lend(self, ask: m.AskStaging) -> list[m.Command]:
        if ask.request_id in self._aborted.kept:
            return []
        spans = []
        for cell, num_bytes in enumerate(ask.cell_bytes):
            span = self.ring.assign((ask.request_id, cell), num_bytes)
            assert span is not None, f"cells of {num_bytes} bytes for a ring of {self.ring.num_bytes}"
            spans.append(span)
        self._incoming[ask.request_id] = _Incoming(ask.prefill_id, len(spans))
        sender_id = sender_of(ask.prefill_id)
        lent: list[m.Command] = [m.Send(sender_id, m.StagingLent(ask.request_id, tuple(spans)))]
        if ask.prefill_id in self._strangers:
            self._strangers.remove(ask.prefill_id)
            lent.insert(0, m.Send(sender_id, m.StagingWatermark(self._decode_id, self.ring.watermark)))
        return lent

    def _on_written(self, message: m.CellWritten) -> list[m.Command]:
        incoming = self._incoming.get(message.request_id)
        if incoming is None or incoming.aborted:
            return []
        incoming.num_written += 1
        span = self.ring.span((message.request_id, message.cell))
        return [m.Scatter(self._decode_id, message.request_id, message.cell, message.num_bytes, span.offset)]

    def _on_scattered(self, message: m.CellScattered) -> list[m.Command]:
        incoming = self._incoming.get(message.request_id)
        if incoming is None:
            return []
        incoming.num_scattered += 1
        if incoming.aborted is not None:
            return self._give_back(incoming.aborted, incoming)
        return [m.Tell(self._decode_id, replace(message, completes=self._complete(message.request_id, incoming)))]

    def _on_arrived(self, message: m.KvArrived) -> list[m.Command]:
        incoming = self._incoming.get(message.request_id)
        if incoming is None:
            return [m.Tell(self._decode_id, message)]
        incoming.arrived = message
        arrived = self._complete(message.request_id, incoming)
        return [] if arrived is None else [m.Tell(self._decode_id, arrived)]

    def _on_abort(self, message: m.Abort) -> list[m.Command]:
        self._aborted.add(message.request_id)
        incoming = self._incoming.get(message.request_id)
        if incoming is None:
            return [m.Tell(self._decode_id, message)]
        incoming.aborted = message
        return self._give_back(message, incoming)

    def _give_back(self, abort: m.Abort, incoming: _Incoming) -> list[m.Command]:
        """If no scatter of an aborted request is under way, frees the request's memory in the staging ring and tells
        the decode instance. Otherwise does nothing.
        """
        if incoming.num_scattered < incoming.num_written:
            return []
        del self._incoming[abort.request_id]
        cells = tuple(m.CellScattered(abort.request_id, cell) for cell in range(incoming.num_cells))
        return [*self._free(m.FreeCells(cells)), m.Tell(self._decode_id, abort)]

    def _on_prefill_down(self, down: m.PeerDown, now_ns: int) -> list[m.Command]:
        """Gives up all requests whose KV a failed prefill instance was sending. If the instance has restarted already,
        begins a timeout for each of these requests instead. The receiver gives requests up, and not the decode
        instance, because the decode instance may itself have restarted, and then knows only some of the transfers.
        """
        self._strangers.add(down.instance_id)
        commands: list[m.Command] = []
        for request_id in [i for i, incoming in self._incoming.items() if incoming.prefill_id == down.instance_id]:
            if down.has_restarted:
                commands += self._orphans.add(request_id, now_ns)
            else:
                commands += self._on_abort(m.Abort(request_id, f"{down.instance_id} was lost", retryable=True))
        return commands

    def _expire(self, now_ns: int) -> list[m.Command]:
        commands: list[m.Command] = []
        for request_id in self._orphans.expired(now_ns, commands, self._incoming.__contains__):
            commands += self._on_abort(m.Abort(request_id, "nobody writes any more", retryable=True))
        return commands

    def _complete(self, request_id: int, incoming: _Incoming) -> m.KvArrived | None:
        if incoming.arrived is None or incoming.num_scattered < incoming.num_cells:
            return None
        del self._incoming[request_id]
        return incoming.arrived

    def _free(self, message: m.FreeCells) -> list[m.Command]:
        before = self.ring.watermark
        for cell in message.cells:
            key = cell.request_id, cell.cell
            if key in self.ring:  # it came back already if the request was given up
                self.ring.free(key)
        if self.ring.watermark == before:
            return []
        watermark = m.StagingWatermark(self._decode_id, self.ring.watermark)
        return [m.Send(sender_of(prefill_id), watermark) for prefill_id in self._prefill_ids]
