"""Laws and closed forms of the planners of Dynamo and llm-d."""

from math import ceil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.policy.planners import SpareSaturation, ThroughputPlanner
from pdsim.policy.protocols import Servers

SECOND = 1_000_000_000
ONE_EACH = Servers(1, 1)
COUNTS = st.integers(0, 20_000)


def planner(**changes):
    given_ns = {"prefill_token_ns": 100_000, "decode_base_ns": 20_000_000, "decode_kv_token_ns": 60}
    return ThroughputPlanner(**{**given_ns, "max_kv_tokens": 200_000, **changes})


def view(arrived=100, prompt=1000, output=200, servers=ONE_EACH, most=64, finished=None):
    prefill, decode = (SimpleNamespace(num_servers=count) for count in servers)
    finished = arrived if finished is None else finished
    return SimpleNamespace(
        interval_ns=10 * SECOND, max_servers=most, prefill=prefill, decode=decode, num_arrived=arrived,
        num_arrived_tokens=arrived * prompt, num_finished=finished, num_output_tokens=finished * output,
    )  # fmt: skip


@given(
    loads=st.lists(st.tuples(COUNTS, st.integers(1, 50_000), st.integers(1, 5_000), COUNTS), min_size=1, max_size=5),
    most=st.integers(2, 20),
    max_change=st.integers(1, 8),
)
def test_wanted_servers_are_between_one_of_each_and_the_most(loads, most, max_change):
    one, now = planner(max_change=max_change), Servers(1, most - 1)
    for arrived, prompt, output, finished in loads:
        wanted = one.servers(view(arrived, prompt, output, now, most, finished))
        assert min(wanted) >= 1
        assert sum(wanted) <= most
        assert all(want <= have + max_change for want, have in zip(wanted, now, strict=True))
        now = wanted


@given(arrived=st.integers(1, 20_000), prompt=st.integers(1, 20_000), output=st.integers(1, 2_000))
def test_a_constant_load_settles(arrived, prompt, output):
    one, now, seen = planner(max_change=8), Servers(1, 1), []
    for _ in range(12):
        now = one.servers(view(arrived, prompt, output, now))
        seen.append(now)
    assert len({*seen[8:]}) == 1


@given(arrived=COUNTS, prompt=st.integers(1, 20_000), servers=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_kept_servers_are_all_used(arrived, prompt, servers):
    wanted = planner(keep_servers=True).servers(view(arrived, prompt, servers=Servers(*servers)))
    assert sum(wanted) == sum(servers)
    assert min(wanted) >= 1


@given(low=st.integers(1, 5_000), more=st.integers(0, 5_000))
def test_more_load_wants_no_fewer_servers(low, more):
    few, many = (planner(max_change=1000).servers(view(count, most=10_000)) for count in (low, low + more))
    assert few.prefill <= many.prefill
    assert few.decode <= many.decode


def test_closed_forms():
    """A prompt of 1,000 tokens takes 0.1 s: 10 requests/s. A step of n requests takes 20 ms + n x 66 us."""
    batch = 200_000 // 1100
    decode_per_s = batch / (0.020 + batch * 1100 * 60e-9) / 200
    wanted = planner(max_change=1000).servers(view(arrived=5000, most=1000))
    assert wanted == Servers(50, ceil(500 / decode_per_s))


def test_a_batch_within_the_target_is_better_than_a_faster_one():
    """With an ITL of 21 ms, 15 requests fit: 20 ms + 15 x 66 us."""
    wanted = planner(max_change=1000, itl_ns=21_000_000).servers(view(arrived=5000, most=10_000))
    assert wanted.decode == ceil(500 / (15 / (0.020 + 15 * 66e-6) / 200))


def test_a_decision_changes_a_role_by_few_servers():
    assert planner(max_change=3).servers(view(arrived=5000, most=1000)) == Servers(4, 4)


def test_without_finished_requests_nothing_changes():
    assert planner().servers(view(arrived=5000, servers=Servers(3, 2), finished=0)) == Servers(3, 2)


@pytest.mark.parametrize(
    "changes", [{"prefill_token_ns": 0}, {"decode_base_ns": 0, "decode_kv_token_ns": 0}, {"max_kv_tokens": 0}]
)
def test_times_and_memory_are_above_zero(changes):
    with pytest.raises(ValueError, match="above 0"):
        planner(**changes)


def loaded(servers, use=(0.0, 0.0), queue=(0, 0), most=64, num_serving=None):
    """Roles whose servers together use so many pools of pages, and have so many waiting requests."""
    serving = num_serving or servers
    prefill, decode = (
        SimpleNamespace(num_servers=n, num_serving=s, page_use=u / n, num_queued=q)
        for n, s, u, q in zip(servers, serving, use, queue, strict=True)
    )
    return SimpleNamespace(prefill=prefill, decode=decode, max_servers=most)


LOADS = st.tuples(st.floats(0, 6), st.floats(0, 6))
QUEUES = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(use=LOADS, queue=QUEUES, most=st.integers(2, 12), keeps=st.booleans())
def test_spare_saturation_settles_between_one_of_each_and_the_most(use, queue, most, keeps):
    now, seen = Servers(1, most - 1), []
    for _ in range(30):
        now = SpareSaturation(keep_servers=keeps).servers(loaded(now, use, queue, most))
        assert min(now) >= 1
        assert sum(now) == most if keeps else sum(now) <= most
        seen.append(now)
    assert len({*seen[25:]}) == 1


def test_spare_saturation_at_its_triggers():
    policy = SpareSaturation()
    assert policy.servers(loaded((1, 1), use=(0.69, 0.71))) == Servers(1, 2)
    assert policy.servers(loaded((1, 1), queue=(3, 2))) == Servers(2, 1)
    assert policy.servers(loaded((2, 3), use=(0.69, 1.41))) == Servers(1, 3)
    assert policy.servers(loaded((1, 1), use=(1, 1), most=3)) == Servers(2, 1)


def test_spare_saturation_waits_for_servers_that_start():
    assert SpareSaturation().servers(loaded((2, 1), use=(2, 1), num_serving=(1, 1))) == Servers(2, 1)
