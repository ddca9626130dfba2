"""The staging ring as a state machine: a writer that respects the watermark never overwrites what is live."""

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdsim.core.messages import KvGranted
from pdsim.core.transfer.send_planner import RankPairLayout, SendPlanner
from pdsim.core.transfer.staging_ring import Span, StagingPlan, StagingRing, Watermark, may_write
from pdsim.policy.prefill import EveryChunk
from tests.support import examples

SIZE = 24


class Ring(RuleBasedStateMachine):
    """Spans are lent, written when the writer may, and freed in any order; the writer hears of watermarks late."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = StagingRing(SIZE)
        self.known = Watermark()
        self.lent: dict[int, Span] = {}
        self.written: dict[int, Span] = {}
        self.bytes: list[int | None] = [None] * SIZE
        self.count = 0

    @rule(n=st.integers(1, SIZE))
    def lend(self, n: int) -> None:
        self.count += 1
        span = self.ring.assign(self.count, n)
        assert span is not None
        assert 0 <= span.offset < span.end <= SIZE
        assert span.end - span.offset == n
        self.lent[self.count] = span

    @rule(n=st.integers(SIZE + 1, 2 * SIZE))
    def what_is_larger_than_the_ring_is_refused(self, n: int) -> None:
        assert self.ring.assign("never", n) is None

    @rule()
    def the_writer_hears_of_the_watermark(self) -> None:
        assert self.ring.watermark >= self.known
        self.known = self.ring.watermark

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def write(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.lent)))
        span = self.lent[key]
        if may_write(span, self.known):
            place = slice(span.offset, span.end)
            assert all(owner is None for owner in self.bytes[place]), "a live span is overwritten"
            self.bytes[place] = [key] * (span.end - span.offset)
            self.written[key] = self.lent.pop(key)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def free(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.written)))
        span = self.written.pop(key)
        assert self.bytes[span.offset : span.end] == [key] * (span.end - span.offset)
        self.bytes[span.offset : span.end] = [None] * (span.end - span.offset)
        self.ring.free(key)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        live = [*self.lent.values(), *self.written.values()]
        assert self.ring.num_live_bytes == sum(span.end - span.offset for span in live)

    def teardown(self) -> None:
        """Whoever waits for the watermark gets on, in the order of lending, and everything comes back."""
        for _ in range(2 * self.count + 2):
            self.known = self.ring.watermark
            for key in sorted(self.written):
                span = self.written.pop(key)
                self.bytes[span.offset : span.end] = [None] * (span.end - span.offset)
                self.ring.free(key)
            self.known = self.ring.watermark
            for key in sorted(self.lent):
                if may_write(self.lent[key], self.known):
                    self.written[key] = self.lent.pop(key)
                    break
        assert not self.lent
        assert not self.written
        assert self.ring.num_live_bytes == 0


TestRing = Ring.TestCase
TestRing.settings = examples(150, stateful_step_count=50)


@given(num_pages=st.integers(1, 12), cell_pages=st.integers(1, 12), buffer=st.integers(0, 13), ring=st.integers(0, 26))
@example(num_pages=5, cell_pages=4, buffer=4, ring=8)
def test_a_cell_goes_through_the_ring_if_buffer_and_ring_hold_it(num_pages, cell_pages, buffer, ring):
    """Sizes are in pages of one of two writers; the ring holds the cells of both."""
    layout = RankPairLayout(page_size=4, page_bytes=100, num_planes=2, num_writers=2, slices=True)
    staging = StagingPlan(cell_pages=cell_pages, buffer_bytes=100 * buffer, ring_bytes=100 * ring)
    grant = KvGranted(0, 0, tuple(range(num_pages)))
    cursor = SendPlanner("prefill-0", layout, EveryChunk(), staging=staging).cursor(grant)
    cell = min(cell_pages, num_pages)
    assert (cursor is None) == (2 * cell > ring)
    assert cursor is None or cursor.is_staged == (cell <= buffer)
