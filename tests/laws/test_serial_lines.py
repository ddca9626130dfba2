"""Engines that post and move one transfer after another, whatever dies or times out meanwhile; beside a naive twin."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pdsim.core.messages import StartTransfer, TransferUnit
from pdsim.core.transfer.send_planner import RankPairLayout
from pdsim.scenario.building.wiring import Interconnect
from pdsim.sim.bus import Timeline
from pdsim.sim.links.network import Network
from pdsim.system.transport import Topology, Transport
from tests.support import examples
from tests.twins.serial_line import Death, NaiveTransfer, ends

SOURCES, TARGETS = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
SECOND = 10**9
times_ns = st.floats(0, 300).map(lambda seconds: int(seconds * SECOND))
transfers = st.builds(
    NaiveTransfer,
    st.sampled_from(SOURCES),
    st.sampled_from(TARGETS),
    times_ns,
    posting_ns=st.floats(0.1, 100).map(lambda seconds: int(seconds * SECOND)),
    moving_ns=st.integers(1, 100).map(lambda seconds: seconds * SECOND),
)
deaths = st.builds(
    lambda who, died_ns, lasts_ns: Death(who, died_ns, died_ns + lasts_ns),
    st.sampled_from(SOURCES + TARGETS),
    times_ns,
    st.floats(1, 100).map(lambda seconds: int(seconds * SECOND)),
)
BEFORE, AFTER, LONG = (
    NaiveTransfer("prefill-0", "decode-0", start_s * SECOND, posting_ns=posting_s * SECOND, moving_ns=9 * SECOND)
    for start_s, posting_s in ((1, 9), (30, 9), (1, 50))
)
TWO_DEATHS = [Death("decode-0", 5 * SECOND, 20 * SECOND), Death("prefill-1", 10 * SECOND, 30 * SECOND)]


class Line:
    """A byte takes a second, a descriptor a nanosecond. Each prefill instance has a link of its own."""

    def __init__(self, turn_ns: int, timeout_ns: int) -> None:
        self.timeline = Timeline()
        self.told: list[tuple[int, int, bool]] = []
        wire = RankPairLayout(page_size=1, page_bytes=1, num_planes=1)
        engine = Transport(name="test", link="nic", descriptor_ns=1, serial=True, turn_ns=turn_ns, sources={})
        topology = Topology(
            capacity=dict.fromkeys(SOURCES, 1.0),
            ways_out={source: ((source, 1.0),) for source in SOURCES},
            ways_in=dict.fromkeys(TARGETS, ()),
        )
        self.network = Network(
            self.timeline,
            Interconnect(wire=wire, transport=engine, topology=topology, staging=None, layer_groups=0),
            on_done=lambda transfer: self._tell(transfer, arrives=True),
            on_failed=lambda transfer: self._tell(transfer, arrives=False),
            timeout_ns=timeout_ns,
        )

    def _tell(self, transfer, *, arrives: bool) -> None:
        self.told.append((transfer.unit.request_id, self.timeline.now_ns, arrives))

    def run(self, transfers: list[NaiveTransfer], deaths: list[Death]) -> list[tuple[int, int, bool]]:
        for i, t in enumerate(transfers):
            unit = TransferUnit(i, t.source, t.target, (), (), t.moving_ns // SECOND, t.posting_ns, 0, is_last=True)
            self.timeline.after(t.start_ns, self.network.start, StartTransfer(unit, None))
        for death in deaths:
            self.timeline.after(death.died_ns, self.network.kill, death.instance)
            self.timeline.after(death.back_ns, self.network.revive, death.instance)
        self.timeline.run_all()
        return sorted(self.told)


@given(
    st.lists(transfers, min_size=1, max_size=8),
    st.lists(deaths, max_size=2, unique_by=lambda death: death.instance),
    st.sampled_from([7 * SECOND, 1000 * SECOND]),
    st.floats(10, 500).map(lambda seconds: int(seconds * SECOND)),
)
@example([BEFORE, AFTER], [Death("prefill-0", 5 * SECOND, 20 * SECOND)], 1000 * SECOND, 100 * SECOND)  # a line anew
@example([LONG], TWO_DEATHS, 1000 * SECOND, 100 * SECOND)  # who is stuck stays so, whoever dies next
@examples(300)
def test_a_line_goes_on_behind_what_has_died_or_timed_out(transfers, deaths, turn_ns, timeout_ns):
    assume(not any(d.instance == t.source and d.died_ns <= t.start_ns <= d.back_ns for t in transfers for d in deaths))
    instants = [time_ns for t in transfers for time_ns in (t.start_ns, t.start_ns + timeout_ns)]
    instants += [time_ns for death in deaths for time_ns in (death.died_ns, death.back_ns)]
    expected = ends(transfers, deaths, turn_ns=turn_ns, timeout_ns=timeout_ns)
    arrivals = {end_ns for end_ns, arrives in expected.values() if arrives}
    assume(len(set(instants)) == len(instants))  # the order within an instant is nobody's law
    assume(arrivals.isdisjoint(instants))
    told = Line(turn_ns, timeout_ns).run(transfers, deaths)
    in_order = [(i, *expected[t]) for i, t in enumerate(transfers) if t in expected]
    assert [(i, arrives) for i, _, arrives in told] == [(i, arrives) for i, _, arrives in in_order]
    ends_ns = [end_ns for _, end_ns, _ in in_order]
    assert [end_ns for _, end_ns, _ in told] == pytest.approx(ends_ns, abs=9, rel=0)
