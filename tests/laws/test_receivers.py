"""The receiver of a staging ring: what it gives back, when, and whom it tells the watermark."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core import messages as m
from pdsim.core.transfer.receiver import Receiver
from pdsim.core.transfer.staging_ring import StagingRing
from tests.support import examples

ABORT = m.Abort(0, "its prefill was lost")


def receiver(num_cells: int, **changes) -> Receiver:
    """One that lent request 0 so many cells of ten bytes."""
    lender = Receiver("decode-0", ["prefill-0", "prefill-1"], StagingRing(1000), **changes)
    lender.on_message(m.AskStaging(0, "prefill-0", (10,) * num_cells), 0)
    return lender


@given(num_cells=st.integers(1, 6), data=st.data())
@examples(100)
def test_no_span_of_an_aborted_request_comes_back_while_it_is_read(num_cells, data):
    """Whoever is lent it next would write over what a scatter reads."""
    lender = receiver(num_cells)
    num_written = data.draw(st.integers(0, num_cells))
    num_scattered = data.draw(st.integers(0, max(0, min(num_written, num_cells - 1))))
    for cell in range(num_written):
        (scatter,) = lender.on_message(m.CellWritten(0, cell, 10), 0)
        assert (scatter.cell, scatter.staging_offset_bytes) == (cell, 10 * cell)
    for cell in range(num_scattered):
        lender.on_message(m.CellScattered(0, cell), 0)
    said = lender.on_message(ABORT, 0)
    for cell in range(num_scattered, num_written):
        assert said == []
        assert lender.ring.num_live_bytes == 10 * num_cells
        said = lender.on_message(m.CellScattered(0, cell), 0)
    assert lender.ring.num_live_bytes == 0
    assert said[-1] == m.Tell("decode-0", ABORT)


def test_a_sender_that_does_not_know_the_watermark_is_told_once():
    """A new receiver tells each sender with its first spans; an old one tells a new sender."""

    def told(lender, request_id, prefill_id):
        lent = lender.on_message(m.AskStaging(request_id, prefill_id, (10,)), 0)
        return sum(isinstance(command.message, m.StagingWatermark) for command in lent)

    lender = receiver(1, has_restarted=True)
    assert [told(lender, 1, "prefill-0"), told(lender, 2, "prefill-1"), told(lender, 3, "prefill-1")] == [0, 1, 0]
    lender.on_message(m.PeerUp("prefill-1"), 0)
    assert [told(lender, 4, "prefill-0"), told(lender, 5, "prefill-1"), told(lender, 6, "prefill-1")] == [0, 1, 0]
