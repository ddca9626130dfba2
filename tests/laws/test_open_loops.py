"""An open loop sends each request when the workload says, to the nanosecond, on a timeline that is exact."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.sequence import Spans
from pdsim.sim.bus import Timeline
from pdsim.workload.client import Bursts, ClientDriver, Constant, Gamma, OpenLoop, Poisson, Profile
from pdsim.workload.request_spec import RequestSpec, Streams

rates = st.floats(0.1, 1000)
shares = st.floats(0.01, 0.99)
levels = st.lists(st.just(0.0) | st.floats(0.001, 100), min_size=1, max_size=6).filter(sum).map(tuple)
arrivals = st.one_of(
    st.none(),
    st.builds(Constant, rates),
    st.builds(Poisson, rates),
    st.builds(Gamma, rates, st.floats(0.1, 10)),
    st.builds(lambda rate, share, part: Bursts(rate, part / share, share), rates, shares, st.floats(0, 0.99)),
    st.builds(Profile, levels, st.integers(10**8, 10**11), st.none() | rates, st.booleans()),
)


@given(arrivals, st.lists(st.integers(0, 10**12), min_size=1, max_size=30), st.integers(0, 10**10))
def test_what_is_sent_when_is_what_the_workload_says(arrivals, trace_ns, wait_ns):
    """Also by a driver that starts late: what is due by then is sent at once, and the rest at its time."""
    timeline, sent = Timeline(), []
    specs = [RequestSpec(i, Spans.of(i, 1), Spans.of(i, 1), 1, at_ns) for i, at_ns in enumerate(trace_ns)]
    driver = ClientDriver(
        WithoutPast(timeline),
        OpenLoop(arrivals),
        specs,
        streams=Streams(1),
        send=lambda spec: sent.append((timeline.now_ns, spec.request_id)),
    )
    timeline.after(wait_ns, lambda _: driver.start())
    timeline.run_all()
    if arrivals is None:
        due = sorted((at_ns, i) for i, at_ns in enumerate(trace_ns))
    else:
        due = list(zip(arrivals.times_ns(Streams(1).named("arrivals")), range(len(specs)), strict=False))
    assert sent == [(max(at_ns, wait_ns), i) for at_ns, i in due]


class WithoutPast:
    """As a real event loop has it: what was due earlier happens now."""

    def __init__(self, timeline):
        self._timeline = timeline

    @property
    def now_ns(self):
        return self._timeline.now_ns

    def after(self, delay_ns, callback):
        return self._timeline.after(max(0, delay_ns), callback)
