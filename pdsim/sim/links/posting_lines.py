"""Waiting lines of transfers, for engines that post the descriptors of one transfer after another. Tests:
tests/laws/test_serial_lines.py.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.sim.bus import Timeline
from pdsim.system.transport import Transport


@dataclass(slots=True, eq=False)
class _Posting:
    source: str
    transfer: Any
    unposted_ns: int
    """Time in ns that one thread alone needs to post the remaining descriptors."""
    takes_turns: bool
    """True: posting this transfer takes longer than one turn (turn_ns of the transport, if not 0). The transfer's
    worker then takes turns with the other posting workers of its rank.
    """
    posted_ns: int = 0
    """Time in ns that posting has taken so far."""


class PostingLines:
    """Lines in which transfers wait to post their descriptors, one for each sending instance. The first transfer of a
    line posts. A transfer with descriptors left after its turn (takes_turns) goes to the end of the line; one that has
    posted all stays first until it leaves.
    """

    def __init__(
        self,
        timeline: Timeline,
        transport: Transport,
        on_posted: Callable[[Any, int], None],
        on_posting: Callable[[str, float], None] | None,
    ) -> None:
        """on_posted: function that is called when all descriptors of a transfer are posted, with the transfer and the
        time in ns that posting took. Also called when the turn of a transfer ends that has left its line.

        on_posting: function that gets the id of an instance, and the speed of its loop while threads post, as a share
        of the normal speed; None: no loop is told.
        """
        self._timeline = timeline
        self._transport = transport
        self._on_posted = on_posted
        self._on_posting = on_posting
        self._lines: dict[str, deque[_Posting]] = {}

    def join(self, source: str, transfer: Any, posting_ns: int) -> None:
        """Puts a transfer at the end of the line of the sending instance `source`. posting_ns: time in ns that one
        thread alone needs to post the transfer's descriptors.
        """
        posting = _Posting(source, transfer, posting_ns, 0 < self._transport.turn_ns < posting_ns)
        line = self._lines.setdefault(source, deque())
        line.append(posting)
        if posting.takes_turns:
            self._tell_loop(source)
        if len(line) == 1:
            self._post(posting)

    def leave(self, source: str, transfer: Any) -> None:
        """Removes a transfer from the line of the sending instance `source`. If the transfer was the first of the line,
        the next transfer begins to post. No effect if the transfer is not in the line.
        """
        line = self._lines.get(source)
        posting = next((one for one in line or () if one.transfer is transfer), None)
        if not line or posting is None:
            return
        was_first = line[0] is posting
        line.remove(posting)
        if posting.takes_turns:
            self._tell_loop(source)
        if was_first and line:
            self._post(line[0])

    def drop(self, source: str) -> None:
        """Drops the waiting line of a prefill instance that died, so that none of its transfers posts further
        descriptors. source: id of the instance.
        """
        self._lines.pop(source, None)

    def _post(self, posting: _Posting) -> None:
        """Posts descriptors of a transfer: all that are left or, if the workers of its rank alternate (takes_turns), as
        many as one turn allows.
        """
        duration_ns = part_ns = posting.unposted_ns
        if posting.takes_turns:
            whole_ns, num_posting = self._transport.turn_alone_ns, self._num_in_turns(posting.source)
            part_ns = min(part_ns, whole_ns)
            duration_ns = round(part_ns * self._transport.turn_beside_ns(num_posting) / whole_ns)
        posting.unposted_ns -= part_ns
        posting.posted_ns += duration_ns
        self._timeline.after(duration_ns, self._end_turn, posting)

    def _end_turn(self, posting: _Posting) -> None:
        line = self._lines.get(posting.source)
        if posting.unposted_ns and line and line[0] is posting:
            line.rotate(-1)
            self._post(line[0])
        else:
            self._on_posted(posting.transfer, posting.posted_ns)

    def _num_in_turns(self, source: str) -> int:
        return sum(posting.takes_turns for posting in self._lines.get(source, ()))

    def _tell_loop(self, source: str) -> None:
        if self._on_posting is not None:
            self._on_posting(source, self._transport.loop_pace(self._num_in_turns(source)))
