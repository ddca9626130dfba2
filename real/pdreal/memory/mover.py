"""Movers: the mover of a prefill rank sends KV, and the mover of a decode rank receives KV."""

import queue
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdreal.control.tasks import StateMove, Windows
from pdreal.memory.geometry import (
    CacheGeometry,
    Exchange,
    Integers,
    Move,
    Planes,
    RankPair,
    heads_of_rank,
    move_of,
    move_of_windows,
    planes_of,
    planes_of_group,
)
from pdreal.memory.page_copies import Push, push_of, staging_of
from pdreal.memory.paged_kv import SCRATCH_PAGE, Digests, digest
from pdreal.memory.states import digest_of_state
from pdreal.settings.model import from_catalog
from pdreal.transports.protocol import MappingTransport, TransferError, Transport
from pdreal.transports.streams import wait_for_engines
from pdsim.core.messages import Scatter, TransferUnit
from pdsim.scenario.building import wiring
from pdsim.scenario.building.sizing import layout_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import DecodeSettings, PrefillSettings
from pdsim.system.memory import Layout
from pdsim.system.model import DTYPE_BYTES, STATE_DTYPE_BYTES

_GREETING_BYTES = 16


class PeerMemory(NamedTuple):
    """Addresses at which a decode rank receives KV. All fields are plain JSON."""

    address: str
    """Address of the rank's transfer engine."""
    planes: Sequence[int]
    """Address of the first byte of each plane (K, V or latents of one layer)."""
    ring: int | None
    """Address of the first byte of the rank's staging ring. None: the rank has no staging ring."""
    greetings: Sequence[int]
    """Address of some unused bytes in each memory region. A sender writes there to connect."""
    states: Sequence[int] = ()
    """Address of the first byte of each plane of linear-attention states."""


class _Mover:
    """Base of the movers of prefill and of decode. Has the planes of one rank, and the transfer engine. A plane is K, V
    or latents of one layer, or one of the two tensors of states of a linear-attention layer.
    """

    def __init__(
        self,
        exchange: Exchange,
        geometry: CacheGeometry,
        tp: int,
        rank: int,
        planes: Sequence[torch.Tensor],
        transport: Transport,
        states: Sequence[torch.Tensor],
    ) -> None:
        """exchange: layouts of both instances. geometry: layout of this rank's cache. tp: number of ranks of this
        rank's instance. planes, states: planes of the KV cache and of linear-attention states, [slots, ...] each, in
        memory that the transport's `allocate` made.
        """
        self._exchange = exchange
        self._planes = planes
        self._states = states
        self._transport = transport
        self._begins = _begins(planes, geometry)
        self._rank = rank
        self._page_size = geometry.page_size
        self._heads = heads_of_rank(exchange.num_kv_heads, tp, rank)

    def digest(self, pages: Sequence[int], tokens: range, state_slot: int = 0) -> Digests:
        """Returns fingerprints: one for each KV head of this rank, of the KV of these tokens (in sliding-window layers,
        of the last ones), and one of this rank's part of the state if state_slot is not 0. Prefill and decode return
        the same fingerprints for the same KV. pages: pages of a request. tokens: indices of tokens; token 0 is the
        first token of the first page.
        """
        of_state = digest_of_state(self._states, state_slot, self._rank)
        windows = _windows(self._exchange)
        return {**digest(self._planes, self._heads, pages, tokens, self._page_size, windows), **of_state}

    def close(self) -> None:
        self._transport.close()


class PrefillMover(_Mover):
    """Sends KV from the planes (K, V or latents of one layer) of one prefill rank. Several threads may send at a time;
    with staging, no more threads than staging buffers.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        planes: Sequence[torch.Tensor],
        transport: Transport,
        *,
        buffer_bytes: int = 0,
        num_buffers: int = 0,
        pushes: bool = False,
        states: Sequence[torch.Tensor] = (),
    ) -> None:
        """exchange: layouts of the prefill and the decode instance. rank: index of this prefill rank. planes, states:
        planes of the KV cache and of linear-attention states. transport: transfer engine. buffer_bytes: size of the
        largest staged cell that is sent to one decode rank; 0: KV is not staged. num_buffers: number of staging
        buffers. pushes: True: kernels (torch on a CPU) write into the pages of decode ranks.
        """
        super().__init__(exchange, exchange.prefill, exchange.prefill_tp, rank, planes, transport, states)
        if pushes:
            assert isinstance(transport, MappingTransport)
        self._mapping = transport if isinstance(transport, MappingTransport) and pushes else None
        self._pushes: dict[tuple[RankPair, str, Planes], Push] = {}
        self._pairs = [pair for pair in exchange.pairs if pair.prefill_rank == rank]
        self._peers: dict[tuple[str, int], PeerMemory] = {}
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        buffers = [transport.allocate(buffer_bytes) for _ in range(num_buffers)] if buffer_bytes else []
        for buffer in buffers:
            self._buffers.put(buffer)
        self._staging = staging_of(_whole_planes(planes, exchange), self._page_size) if buffers else None
        transport.register([*planes, *buffers, *states])

    def connect(self, decode_id: str, rank: int, peer: PeerMemory) -> None:
        """Connects to a decode rank, if this prefill rank sends KV to the rank. If the decode rank was restarted, its
        addresses replace those of its earlier process. Raises TransferError if the decode rank is gone. decode_id: name
        of the decode instance. rank: index of its rank. peer: addresses of its memory.
        """
        self.disconnect(decode_id, rank)
        if rank in [pair.decode_rank for pair in self._pairs]:
            self._transport.connect(peer.address)
            self._peers[decode_id, rank] = peer

    def disconnect(self, decode_id: str, rank: int) -> None:
        if (decode_id, rank) in self._peers:
            address = self._peers.pop((decode_id, rank)).address
            self._transport.disconnect(address)
            self._pushes = {key: push for key, push in self._pushes.items() if key[1] != address}

    def warm_up(self) -> None:
        """With staging, compiles the gather kernel, so that the first transfer does not wait. This takes a second."""
        _enter(self._planes)
        if self._staging is not None:
            buffer = self._buffers.get()
            for pair in self._pairs:
                self._staging.gather([SCRATCH_PAGE], pair.source_heads, buffer[: self._exchange.wire.page_bytes])
            self._buffers.put(buffer)

    def greet(self, decode_id: str) -> None:
        """Writes a few bytes to all memory regions of an instance. Each thread that will write there calls this,
        because engines connect to a peer and map its memory at the first write. Raises TransferError if a write fails.
        """
        _enter(self._planes)
        for pair in self._pairs if self._mapping is not None else ():
            if (peer := self._peers.get((decode_id, pair.decode_rank))) is not None:
                groups = range(self._exchange.layer_groups)
                of_groups = [planes_of_group(group, self._exchange) for group in groups]
                for planes in (tuple(range(len(self._planes))), self._exchange.window_planes, *of_groups):
                    self._push(peer, pair, planes, (SCRATCH_PAGE,), (SCRATCH_PAGE,))
        for (instance_id, _), peer in list(self._peers.items()):
            if instance_id == decode_id:
                ranges = np.broadcast_to(self._begins[0], len(peer.greetings)), np.array(peer.greetings, np.int64)
                self._transport.write(peer.address, *ranges, np.full(len(peer.greetings), _GREETING_BYTES))

    def send(
        self,
        unit: TransferUnit,
        staging_offset_bytes: int | None = None,
        windows: Windows | None = None,
        state: StateMove | None = None,
    ) -> None:
        """Writes a unit to all decode ranks that get KV from this rank, one after another. Returns when the bytes have
        arrived.

        staging_offset_bytes: where the unit's cells begin in the staging ring of decode ranks; None: the unit is sent
        without staging. windows: KV of sliding-window layers that is sent with the unit. state: slots of the
        linear-attention state that is sent with the unit.

        The GPU must have finished computing the KV. Raises TransferError if a decode rank is not connected, or a write
        fails.
        """
        _enter(self._planes)
        for pair in self._pairs if unit.source_pages or windows is not None or state is not None else ():
            peer = self._peers.get((unit.target, pair.decode_rank))
            if peer is None:
                raise TransferError(f"{unit.target} is not connected")
            if windows is not None:
                self._send_windows(peer, pair, windows)
            if state is not None:
                self._send_state(peer, state)
            if not unit.source_pages:
                continue
            if self._mapping is not None:
                self._push(peer, pair, planes_of(unit, self._exchange), unit.source_pages, unit.target_pages)
            elif staging_offset_bytes is None:
                self._write(peer, move_of(unit, pair, self._exchange))
            else:
                self._write_cell(peer, unit, pair, staging_offset_bytes)

    def _send_windows(self, peer: PeerMemory, pair: RankPair, windows: Windows) -> None:
        if self._mapping is not None:
            self._push(peer, pair, self._exchange.window_planes, *windows)
        else:
            self._write(peer, move_of_windows(windows, pair, self._exchange))

    def _send_state(self, peer: PeerMemory, state: StateMove) -> None:
        lengths = np.array(self._exchange.state_bytes, np.int64)
        local = np.array([plane.data_ptr() for plane in self._states], np.int64)
        remote = np.array(peer.states, np.int64)
        self._transport.write(peer.address, local + state.source * lengths, remote + state.target * lengths, lengths)

    def _push(
        self, peer: PeerMemory, pair: RankPair, planes: Planes, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        assert self._mapping is not None
        if not planes:
            return
        target = self._exchange.decode
        begins = np.array([peer.planes[plane] for plane in planes], np.int64)
        lengths = np.full(len(begins), (max(target_pages) + 1) * target.page_bytes)
        with self._mapping.mapped(peer.address) as regions:
            addresses = regions.translate(begins, lengths)
            key = pair, peer.address, planes
            push = self._pushes.get(key)
            if push is None or not np.array_equal(push.addresses, addresses):  # mapped anew
                push = self._pushes[key] = push_of([self._planes[plane] for plane in planes], addresses, pair, target)
            push(source_pages, target_pages)

    def _write(self, peer: PeerMemory, move: Move) -> None:
        planes = list(move.planes)
        local = self._begins[planes, None] + move.local_offsets
        remote = np.array(peer.planes, np.int64)[planes, None] + move.remote_offsets
        lengths = np.tile(move.lengths, len(local))
        self._transport.write(peer.address, local.reshape(-1), remote.reshape(-1), lengths)

    def _write_cell(self, peer: PeerMemory, unit: TransferUnit, pair: RankPair, staging_offset_bytes: int) -> None:
        assert self._staging is not None
        assert peer.ring is not None
        buffer = self._buffers.get()
        try:
            cell = buffer[: unit.num_bytes]
            self._staging.gather(unit.source_pages, pair.source_heads, cell)
            target = peer.ring + staging_offset_bytes + pair.writer * unit.num_bytes
            self._transport.write(peer.address, *(np.array([n]) for n in (cell.data_ptr(), target, cell.nbytes)))
        finally:
            self._buffers.put(buffer)


class DecodeMover(_Mover):
    """Receives KV into the planes (K, V or latents of one layer) of one decode rank."""

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        planes: Sequence[torch.Tensor],
        transport: Transport,
        *,
        ring_bytes: int = 0,
        states: Sequence[torch.Tensor] = (),
    ) -> None:
        """planes, states: planes of the KV cache and of linear-attention states. ring_bytes: size of the staging ring;
        0: there is none.
        """
        super().__init__(exchange, exchange.decode, exchange.decode_tp, rank, planes, transport, states)
        self._writers = [pair.target_heads for pair in exchange.pairs if pair.decode_rank == rank]
        self._ring = transport.allocate(ring_bytes + _GREETING_BYTES) if ring_bytes else None
        self._staging = staging_of(_whole_planes(planes, exchange), self._page_size) if ring_bytes else None
        transport.register([*planes, *([] if self._ring is None else [self._ring]), *states])

    def describe(self) -> PeerMemory:
        ring = None if self._ring is None else self._ring.data_ptr()
        planes = self._begins.tolist()
        greetings = planes if self._ring is None else [*planes, self._ring[-_GREETING_BYTES:].data_ptr()]
        states = [plane.data_ptr() for plane in self._states]
        return PeerMemory(self._transport.address, planes, ring, [*greetings, *states], states)

    def warm_up(self) -> None:
        """With staging, compiles the scatter kernel, so that the first transfer does not wait. This takes a second."""
        _enter(self._planes)
        if self._staging is not None and self._ring is not None:
            cells = self._ring[: len(self._writers) * self._exchange.wire.page_bytes]
            self._staging.scatter([SCRATCH_PAGE], self._writers, cells)

    def scatter(self, command: Scatter, pages: Sequence[int]) -> None:
        """Copies the staged cells of all prefill ranks from the ring into pages. Returns when the copy is done."""
        assert self._ring is not None
        assert self._staging is not None
        _enter(self._planes)
        wait_for_engines(self._ring.device)
        begin = command.staging_offset_bytes
        cells = self._ring[begin : begin + command.num_bytes * len(self._writers)]
        self._staging.scatter(pages, self._writers, cells)

    def digest(self, pages: Sequence[int], tokens: range, state_slot: int = 0) -> Digests:
        wait_for_engines(self._planes[0].device)
        return super().digest(pages, tokens, state_slot)


def _whole_planes(planes: Sequence[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
    """Returns the planes (K, V or latents of one layer) of layers without a sliding window. All pages of these planes
    are sent.
    """
    return [plane for number, plane in enumerate(planes) if number not in exchange.window_planes]


def _windows(exchange: Exchange) -> dict[int, int]:
    return dict.fromkeys(exchange.window_planes, exchange.wire.window_tokens)


def _begins(planes: Sequence[torch.Tensor], geometry: CacheGeometry) -> Integers:
    """Returns the address of each plane (K, V or latents of one layer). Raises ValueError if a plane is not contiguous,
    has tokens of another size than `geometry`, or has fewer pages.
    """
    for plane in planes:
        token_bytes, num_pages = plane[0].nbytes, len(plane) // geometry.page_size
        if not plane.is_contiguous() or token_bytes != geometry.token_bytes or num_pages < geometry.num_pages:
            raise ValueError(
                f"a plane has {num_pages} pages with tokens of {token_bytes} bytes, the scenario {geometry.num_pages} "
                f"with {geometry.token_bytes}"
            )
    return np.array([plane.data_ptr() for plane in planes], np.int64)


def _enter(planes: Sequence[torch.Tensor]) -> None:
    """Makes the GPU with the planes the current GPU of this thread, because engines open memory on the current GPU."""
    if planes[0].device.type == "cuda":
        torch.cuda.set_device(planes[0].device)


def exchange_of(scenario: Scenario) -> Exchange:
    """Returns the layouts between which KV moves. scenario: resolved."""
    prefill, decode = layout_of(scenario, "prefill"), layout_of(scenario, "decode")
    wire, config, state = wiring.wire_of(scenario), from_catalog(scenario.model), prefill.model.state
    of_layer = () if state is None else (state.conv_bytes, state.ssm_elements * STATE_DTYPE_BYTES[scenario.state_dtype])
    return Exchange(
        wire=wire,
        state_bytes=[num_bytes // prefill.tp for num_bytes in of_layer] * config.num_state_layers,
        window_layers=config.llama.window_layers if wire.num_window_planes else (),
        num_kv_heads=config.num_kv_heads,
        prefill_tp=prefill.tp,
        decode_tp=decode.tp,
        prefill=cache_geometry(scenario, scenario.pair.prefill, prefill),
        decode=cache_geometry(scenario, scenario.pair.decode, decode),
        layer_groups=scenario.pair.prefill.layer_groups,
    )


def cache_geometry(scenario: Scenario, settings: PrefillSettings | DecodeSettings, layout: Layout) -> CacheGeometry:
    """Returns the shape of the KV cache that each rank of a role has. scenario: resolved."""
    model = from_catalog(scenario.model)
    assert settings.pool_tokens is not None, "the scenario is not resolved"
    return CacheGeometry(
        num_pages=settings.pool_tokens // scenario.page_size,
        page_size=scenario.page_size,
        num_layers=model.num_kv_layers + layout.num_draft_layers,
        num_kv_heads=len(heads_of_rank(model.num_kv_heads, layout.tp, 0)),
        head_dim=model.head_dim,
        itemsize=int(DTYPE_BYTES[layout.kv_dtype]),
        planes_per_layer=model.planes_per_layer,
    )


def prefill_mover(
    scenario: Scenario,
    rank: int,
    planes: Sequence[torch.Tensor],
    transport: Transport,
    states: Sequence[torch.Tensor] = (),
) -> PrefillMover:
    exchange = exchange_of(scenario)
    return PrefillMover(
        exchange,
        rank,
        planes,
        transport,
        buffer_bytes=_largest_cell_bytes(scenario, exchange),
        num_buffers=wiring.transport(scenario).num_queues,
        pushes=wiring.transport(scenario).pushes,
        states=states,
    )


def decode_mover(
    scenario: Scenario,
    rank: int,
    planes: Sequence[torch.Tensor],
    transport: Transport,
    states: Sequence[torch.Tensor] = (),
) -> DecodeMover:
    exchange, staging = exchange_of(scenario), scenario.network.staging
    is_staged = staging is not None and exchange.wire.slices
    ring_bytes = staging.ring if staging and is_staged else 0
    return DecodeMover(exchange, rank, planes, transport, ring_bytes=ring_bytes, states=states)


def _largest_cell_bytes(scenario: Scenario, exchange: Exchange) -> int:
    """Returns the size in bytes of the largest staging cell: the KV of a part of a prompt, which a prefill rank gathers
    in a buffer and sends to a decode rank's staging ring. 0: KV is not staged.

    A cell has at most the pages that one forward computes. A staged cell fits into the prefill rank's buffer, and into
    the decode rank's ring divided by the number of prefill ranks that write to this ring. A request with cells above
    the buffer's size is sent without staging; a request with cells above the ring's size fails. exchange: the layouts
    of both instances.
    """
    plan = wiring.staging_plan(scenario)
    if plan is None or not exchange.wire.slices:
        return 0
    pages = min(plan.cell_pages, exchange.prefill.num_pages)
    cell_bytes = min(pages * exchange.wire.page_bytes, plan.ring_bytes // exchange.wire.num_writers)
    return cell_bytes if plan.buffer_bytes is None else min(cell_bytes, plan.buffer_bytes)
