"""When a loop takes new requests that arrive while requests decode (--scheduler-recv-interval)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim import simulate
from pdsim.core.aggregated_limits import ReceiveInterval
from pdsim.core.messages import DecodeStep, MixedStep, PrefillStep, StepResult, Wait
from pdsim.scenario.yaml_file import ConfigError
from tests.support import request, small_aggregated
from tests.unit.test_aggregated_instance import arrive, instance


def run_one(a):
    """Runs the next step of an instance, at most one decode step of it."""
    step, _ = a.next_step(0)
    a.on_step_done(step, StepResult(), 0)
    return step


@given(st.integers(1, 7), st.integers(0, 20))
def test_prompts_wait_for_every_nth_decode_step(interval, num_before):
    """The chosen step is launched before the loop looks at what arrived."""
    a = instance(overlap=True, recv_interval_steps=interval)
    arrive(a, 0, 4, max_output=60)
    assert isinstance(run_one(a), PrefillStep)
    for _ in range(num_before):
        assert isinstance(run_one(a), DecodeStep)
    arrive(a, 1, 4)
    num_more = 0
    while isinstance(run_one(a), DecodeStep):
        num_more += 1
    assert num_before + num_more == -(-(num_before + 1) // interval) * interval


@given(st.integers(1, 9), st.lists(st.sampled_from(["decode", "mixed", "prefill", "idle"]), max_size=40))
def test_the_count_is_that_of_sglangs_loop(interval, kinds):
    """Beside a loop that adds each step's weight to a counter, as recv_skipper.py does. Idle loops receive at once."""
    steps = {"decode": DecodeStep(1, (), (), 1, 1, 1, 1), "prefill": PrefillStep(1, ()), "idle": Wait()}
    steps["mixed"] = MixedStep(steps["prefill"], steps["decode"])
    receives, counter, num_done = ReceiveInterval(interval), 0, 0
    receives.num_held_steps(steps["idle"], 0)
    for kind in kinds:
        counter += 1 if kind == "decode" else 1000
        is_received = counter >= interval
        counter = 0 if is_received else counter
        assert (receives.num_held_steps(steps[kind], num_done) == 0) == is_received
        num_done += kind in ("decode", "mixed")


@settings(max_examples=30)
@given(st.lists(st.integers(0, 600), min_size=1, max_size=8), st.integers(1, 12))
def test_joined_steps_are_single_steps(arrivals_ms, interval):
    specs = [request(i, 8, 9 + i, arrival_ns=ms * 10**6) for i, ms in enumerate(sorted(arrivals_ms))]
    servers = {"aggregated__overlap": True, "aggregated__scheduler_recv_interval": interval}
    scenario = small_aggregated(*specs, **servers)
    many, single = simulate(scenario), simulate(scenario, single_steps=True)
    assert many.records.requests == single.records.requests
    assert many.summary()["completed"] == len(specs)


@pytest.mark.parametrize(
    "changed", [{"overlap": False}, {"overlap": True, "dp": 2, "tp": 1}, {"overlap": True, "pp": 2}]
)
def test_other_loops_are_refused(changed):
    fields = {f"aggregated__{name}": value for name, value in changed.items()}
    with pytest.raises(ConfigError, match="pdsim models it with overlap, dp: 1 and pp: 1"):
        small_aggregated(request(0, 8, 2), aggregated__scheduler_recv_interval=2, **fields)


def test_it_is_a_setting_of_sglang():
    fields = {"overlap": True, "scheduler_recv_interval": 2}
    with pytest.raises(ConfigError, match=r"scheduler_recv_interval is a setting of SGLang"):
        small_aggregated(request(0, 8, 2), engine="vllm", **{f"aggregated__{name}": fields[name] for name in fields})


def test_an_interval_above_a_forwards_weight_is_refused():
    with pytest.raises(ConfigError, match=r"scheduler_recv_interval.*1000"):
        small_aggregated(request(0, 8, 2), aggregated__scheduler_recv_interval=1001)
