"""Forwards of a server that spans several hosts. Bytes between its hosts cross the same NICs as KV transfers.

A forward alternates between computing and exchanging, in a fixed number of parts. The cost model gives the time of the
exchange on idle links; this module lets the exchange share the bandwidth of links with KV transfers. Law:
tests/laws/test_hosts.py.
"""

from collections.abc import Callable, Mapping, Sequence

from pdsim.cost.host_traffic import HostMoves
from pdsim.scenario.building.wiring import HostNics
from pdsim.sim.bus import Timeline
from pdsim.sim.links.network import Flows
from pdsim.system.transport import Path

PREFILL_PARTS, DECODE_PARTS = 64, 8
"""Number of parts of a forward and of a decode step. Each part computes and exchanges. A KV transfer lasts about
as long as a decode step, and much shorter than a forward, so a forward has more parts.
"""
Move = tuple[float, Path]
"""Number of bytes of an exchange, and the path of links that they cross."""


class HostExchange:
    """One forward of all ranks of a server, in parts. A part begins when all ranks have received the bytes of the part
    before.
    """

    def __init__(
        self,
        timeline: Timeline,
        flows: Flows,
        moves: Sequence[Move],
        computing_ns: int,
        num_parts: int,
        *,
        overlaps: bool,
        on_part: Callable[[int, int], None],
        on_end: Callable[[], None],
    ) -> None:
        """Divides a forward into num_parts equal parts. moves: bytes that the whole forward exchanges, each with the
        path they take. computing_ns: computing time of the whole forward. overlaps: True: each part computes and
        exchanges at the same time. on_part: called after each part with (number of finished parts, num_parts). on_end:
        called after the last part.
        """
        self._timeline = timeline
        self._flows = flows
        self._computing_ns = computing_ns
        self._overlaps = overlaps
        self._on_part = on_part
        self._on_end = on_end
        self._num_parts = num_parts
        self._moves = [(num_bytes / self._num_parts, path) for num_bytes, path in moves]
        self._num_done = self._num_awaited = 0

    def begin_after(self, delay_ns: int) -> None:
        self._timeline.after(delay_ns, self._begin_part)

    def _begin_part(self, _: None = None) -> None:
        now_ns, done = self._computing_ns * self._num_done // self._num_parts, self._num_done + 1
        duration_ns = self._computing_ns * done // self._num_parts - now_ns
        if self._overlaps:
            self._num_awaited = 1
            self._timeline.after(duration_ns, self.arrived)
            self._move()
        else:
            self._timeline.after(duration_ns, self._on_computed)

    def _on_computed(self, _: None) -> None:
        self._move()
        if not self._moves:
            self._end_part()

    def _move(self) -> None:
        self._num_awaited += len(self._moves)
        self._flows.begin_together(self, self._moves)

    def arrived(self, _: None = None) -> None:
        """Handles one of the events for which the present part of the forward waits: bytes have arrived or, if
        computing and exchanging overlap, computing has ended. The last event ends the part.
        """
        self._num_awaited -= 1
        if not self._num_awaited:
            self._end_part()

    def _end_part(self) -> None:
        self._num_done += 1
        self._on_part(self._num_done, self._num_parts)
        if self._num_done < self._num_parts:
            self._begin_part()
        else:
            self._on_end()


class ServerNics:
    """The NICs between the hosts of one server."""

    def __init__(self, timeline: Timeline, flows: Flows, nics: HostNics) -> None:
        self._timeline = timeline
        self._flows = flows
        self._nics = nics

    def computing_ns(
        self, instance_id: str, duration_ns: int, num_tokens: int, mean_tokens: float, *, decodes: bool
    ) -> int:
        """Time in ns that a step computes: its duration on idle links, without the time in which its bytes move between
        hosts. If computing and exchanging overlap, this is the whole duration. num_tokens: tokens of the instance's
        step. mean_tokens: mean number of tokens that the ranks give to experts. decodes: True: a decode step; False: a
        prefill or mixed forward.
        """
        traffic = self._nics.traffic[instance_id]
        if traffic.overlaps:
            return duration_ns
        moves = traffic.decode if decodes else traffic.prefill
        return max(0, round(duration_ns - moves.moving_ns(num_tokens, mean_tokens * traffic.busiest)))

    def exchange(
        self,
        num_tokens: Mapping[str, int],
        mean_tokens: float,
        computing_ns: int,
        *,
        decodes: bool,
        on_part: Callable[[int, int], None],
        on_end: Callable[[], None],
    ) -> HostExchange:
        """Returns the exchange of tokens between the server's hosts during one forward. num_tokens: number of tokens of
        each rank, by instance id. mean_tokens: mean number of tokens that the ranks give to experts. decodes: True:
        all ranks with a step decode only. computing_ns: computing time of the whole forward. on_part: called after each
        part with (number of finished parts, number of parts). on_end: called after the last part.
        """
        found = (self._move(name, num, mean_tokens, decodes=decodes) for name, num in num_tokens.items())
        moves = [move for move in found if move[0]]
        return HostExchange(
            self._timeline,
            self._flows,
            moves,
            computing_ns,
            DECODE_PARTS if decodes else PREFILL_PARTS,
            overlaps=any(self._nics.traffic[name].overlaps for name in num_tokens),
            on_part=on_part,
            on_end=on_end,
        )

    def _move(self, instance_id: str, num_tokens: int, mean_tokens: float, *, decodes: bool) -> Move:
        """Returns the bytes that the busiest GPU of the instance sends or receives during a step, whichever are more,
        as a single flow. Its path has the links of both directions; a link's weight is the share of these bytes that
        pass it. num_tokens: tokens of the instance's step. mean_tokens: mean number of tokens that the ranks give to
        experts. decodes: True: a decode step; False: a prefill or mixed forward.
        """
        traffic = self._nics.traffic[instance_id]
        moves: HostMoves = traffic.decode if decodes else traffic.prefill
        sent, received = moves.out_bytes(num_tokens), moves.in_bytes(num_tokens, mean_tokens * traffic.busiest)
        most = max(sent, received)
        ways = zip((sent, received), self._nics.paths[instance_id], strict=True)
        return most, tuple((link, weight * size / most) for size, path in ways if size for link, weight in path)
