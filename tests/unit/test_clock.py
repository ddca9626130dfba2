"""Decode steps, many at once and one by one, end at the same nanosecond."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import DecodeStep
from pdsim.cost.model import DecodeLine
from pdsim.sim.instances.executor import DecodeClock

lines = st.builds(DecodeLine, st.integers(1 << 20, 1 << 45), st.integers(0, 1 << 30), st.integers(0, 1 << 30))
batches = st.tuples(st.integers(1, 200), st.integers(1, 100_000), st.integers(0, 50_000))


def step(batch, after=0):
    num_requests, context, repeated = batch
    context += num_requests * after
    return DecodeStep(0, (), (), num_requests, context + repeated, context, 1)


@given(lines, st.lists(st.tuples(batches, st.integers(1, 30)), min_size=1, max_size=5))
def test_many_steps_take_what_single_steps_take(line, runs):
    many, single = DecodeClock(), DecodeClock()
    for batch, num_steps in runs:
        many.begin(line, step(batch))
        ends = [many.duration_ns(n) for n in range(1, num_steps + 1)]
        one_by_one, now = [], 0
        for i in range(num_steps):
            single.begin(line, step(batch, i))
            now += single.duration_ns(1)
            single.finish(1)
            one_by_one.append(now)
        many.finish(num_steps)
        assert ends == one_by_one


@given(lines, batches, st.integers(0, 10**9), st.integers(0, 3))
def test_steps_until_is_the_first_step_that_ends_late_enough(line, batch, elapsed_ns, warm_up):
    clock = DecodeClock()
    for _ in range(warm_up):
        clock.begin(line, step(batch))
        clock.finish(1)
    clock.begin(line, step(batch))
    elapsed_ns = min(elapsed_ns, 10_000 * clock.duration_ns(1))
    n = clock.steps_until(elapsed_ns)
    assert n >= 1
    assert clock.duration_ns(n) >= elapsed_ns
    assert n == 1 or clock.duration_ns(n - 1) < elapsed_ns
