"""Plans the transfer units that send a prompt's KV: whole pages, slices of pages, staged cells, or groups of layers."""

from pdsim.core.instance import PolicyError
from pdsim.core.messages import AskStaging, Command, KvGranted, PrefillChunk, Send, receiver_of
from pdsim.core.prefill.bootstrap_queue import PrefillRequest
from pdsim.core.transfer.transfer_plan import Piece, RankPairLayout, SendCursor, TransferSize, TransferUnit
from pdsim.dataclass import dataclass
from pdsim.policy.protocols import TransferPolicy


@dataclass(frozen=True, kw_only=True)
class StagingPlan:
    """Sizes of staging memory (SGLang 0.5.23, staging_handler.py)."""

    cell_pages: int
    """Maximum pages of a staging cell: the number of pages that one forward can compute."""
    buffer_bytes: int | None
    """Size in bytes of a prefill worker's staging buffer. A request whose cells are larger is sent as slices of pages.
    None: every cell fits."""
    ring_bytes: int
    """Size in bytes of a decode rank's ring. A request whose cells are larger fails."""


class SendPlanner:
    """Plans the transfer units of one prefill instance."""

    def __init__(
        self,
        prefill_id: str,
        layout: RankPairLayout,
        policy: TransferPolicy,
        *,
        staging: StagingPlan | None = None,
        layer_groups: int = 0,
    ) -> None:
        """layer_groups: number of groups of layers. The KV of a group is sent while the forward computes later groups.
        0: KV is sent after the forward.
        """
        self._prefill_id = prefill_id
        self._layout = layout
        self._policy = policy
        self._staging = staging
        self._layer_groups = layer_groups
        self.sends_layers = layer_groups > 0

    def cursor(self, grant: KvGranted) -> SendCursor | None:
        """Returns a cursor over the granted pages. None: the KV cannot be sent, because a staged cell is larger than
        the whole ring.
        """
        cell_pages = None
        if self._staging is not None and self._layout.slices:
            cell_pages = self._staging.cell_pages
            cell_bytes = min(cell_pages, len(grant.pages)) * self._layout.page_bytes
            if self.ring_bytes(len(grant.pages)) > self._staging.ring_bytes:
                return None
            if self._staging.buffer_bytes is not None and cell_bytes > self._staging.buffer_bytes:
                cell_pages = None
        layout = self._layout
        return SendCursor(grant.num_cached_tokens, grant.pages, layout.page_size, cell_pages, layout.num_shares)

    def ring_bytes(self, num_pages: int) -> int:
        """Size in bytes of the largest staging cell for num_pages pages, in one decode rank's ring. 0: KV is not
        staged.
        """
        if self._staging is None or not self._layout.slices:
            return 0
        return min(self._staging.cell_pages, num_pages) * self._layout.page_bytes * self._layout.num_writers

    def with_cached(self, request: PrefillRequest, now_ns: int) -> list[Command]:
        """Returns units that send a prompt's cached prefix when its first chunk begins."""
        if request.num_cached_tokens <= request.cursor.num_sent_tokens:
            return []
        num_loading_tokens = request.lease.num_loaded * self._layout.page_size
        return self._units(request, self._send_until(request) - num_loading_tokens, now_ns)

    def with_chunk(self, request: PrefillRequest, chunk: PrefillChunk, step_id: int, now_ns: int) -> list[Command]:
        """Returns units that send a chunk's KV while the chunk is computed. Empty without layer groups."""
        return self._layers(request, chunk, step_id, now_ns) if self._layer_groups else []

    def ask_staging(self, request: PrefillRequest) -> list[Command]:
        """Returns a message that asks for the request's staging cells in the ring. Empty if the request is not
        staged.
        """
        if not request.cursor.is_staged:
            return []
        page_bytes = self._layout.page_bytes * self._layout.num_writers
        cells = tuple(pages * page_bytes for pages in request.cursor.cell_sizes())
        ask = AskStaging(request.request_id, self._prefill_id, cells)
        return [Send(receiver_of(request.decode_id), ask)] if cells else []

    def _send_until(self, request: PrefillRequest) -> int:
        end = self._policy.send_until(request)
        if end > max(request.num_computed_tokens, request.cursor.num_sent_tokens):
            raise PolicyError(f"{self._policy}: send_until returned {end}, more tokens than are computed of {request}")
        return end

    def after_chunk(self, request: PrefillRequest, is_last: bool, first_token_ends: bool, now_ns: int) -> list[Command]:
        """Returns units that send KV after a computed chunk. With layer groups, only the first token remains to be
        sent.
        """
        end = request.num_prompt_tokens if is_last else self._send_until(request)
        return self._units(request, end, now_ns, is_last=is_last, first_token_ends=first_token_ends)

    def _units(
        self, request: PrefillRequest, end: int, now_ns: int, *, is_last: bool = False, first_token_ends: bool = False
    ) -> list[Command]:
        pieces = request.cursor.advance(end, request.lease.table, is_last=is_last)
        if request.cursor.is_staged:
            return self._cells(request, pieces, is_last, first_token_ends, now_ns)
        units: list[Command] = []
        for piece in pieces:
            ends = is_last and piece is pieces[-1]
            sent = _sent(request) if ends and not self._layer_groups else None
            size = self._layout.size(piece.source, piece.target, sent)
            units.append(self._unit(request, piece, size, now_ns, ends, ends and first_token_ends))
        return units

    def _cells(
        self, request: PrefillRequest, pieces: list[Piece], is_last: bool, first_token_ends: bool, now_ns: int
    ) -> list[Command]:
        """Returns one unit with one descriptor for each staged cell. Linear-attention state is not staged: the unit of
        the first token carries it.
        """
        whole = [piece for piece in pieces if piece.source]
        units: list[Command] = [
            self._unit(
                request, piece, TransferSize(len(piece.source) * self._layout.page_bytes, 1), now_ns, cell=piece.cell
            )
            for piece in whole
        ]
        if is_last:
            rest = Piece((), (), 0)
            state = self._layout.size((), (), _sent(request))
            units.append(self._unit(request, rest, state, now_ns, is_last, first_token_ends))
        return units

    def _layers(self, request: PrefillRequest, chunk: PrefillChunk, step_id: int, now_ns: int) -> list[Command]:
        """Returns one unit for each layer group of a chunk. A unit may be sent when its group is computed."""
        units: list[Command] = []
        end = chunk.num_context_tokens + chunk.num_tokens
        for piece in request.cursor.advance(end, request.lease.table, is_last=chunk.is_last):
            size = self._layout.size(piece.source, piece.target, _sent(request) if chunk.is_last else None)
            for group in range(self._layer_groups):
                part = self._layout.part(size, group, self._layer_groups)
                units.append(self._unit(request, piece, part, now_ns, after_layers=(step_id, group)))
        return units

    def _unit(
        self,
        request: PrefillRequest,
        piece: Piece,
        size: TransferSize,
        now_ns: int,
        is_last: bool = False,
        first_token_ends: bool = False,
        cell: int | None = None,
        after_layers: tuple[int, int] | None = None,
    ) -> TransferUnit:
        ids, pages = (request.request_id, self._prefill_id, request.decode_id), (piece.source, piece.target)
        return TransferUnit(*ids, *pages, *size, now_ns, is_last, first_token_ends, cell, after_layers)


def _sent(request: PrefillRequest) -> range:
    """Range of the prompt's tokens that decode had not cached."""
    return range(request.cursor.start_tokens, request.num_prompt_tokens)
