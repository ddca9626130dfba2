"""Laws of vLLM's interval between steps that compute prompts (prefill_schedule_interval)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import DecodeStep, MixedStep, PrefillStep
from pdsim.scenario.yaml_file import ConfigError
from tests.strategies import vllm_aggregated_scenarios
from tests.support import MILLISECOND, examples, request, run, run_both_ways, small_aggregated


@st.composite
def with_interval(draw: st.DrawFn):
    scenario = draw(vllm_aggregated_scenarios().filter(lambda scenario: scenario.aggregated.dp == 1))
    update = {"prefill_schedule_interval": draw(st.sampled_from([2, 3, 7]))}
    return scenario.model_copy(update={"aggregated": scenario.aggregated.model_copy(update=update)})


@examples(25)
@given(with_interval())
def test_many_steps_at_once_are_single_steps_and_all_requests_end(scenario):
    many, _ = run_both_ways(scenario)
    assert all(one.outcome == "finished" for one in many.records.requests)


def kinds(*specs, **changes):
    """D for each step that decodes alone, M and P for those that compute a prompt, with or without decoding."""
    given = {"engine": "vllm", "page_size": 16, **{f"aggregated__{name}": value for name, value in changes.items()}}
    traced = run(small_aggregated(*specs, **given), single_steps=True, checked=True)
    letters = {DecodeStep: "D", MixedStep: "M", PrefillStep: "P"}
    steps = [entry.args[0] for entry in traced.journal if entry.call == "on_step_done"]
    return "".join(letters[type(step)] for step in steps)


@pytest.mark.parametrize(("interval", "expected"), [(1, "PDDMMMMD"), (2, "PDDMDMDMDMD"), (4, "PDDDMDDDMDDDMDDDMD")])
def test_chunks_of_a_prompt_come_in_one_of_so_many_steps(interval, expected):
    """Request 1 comes in the third step, with 200 tokens for four chunks of at most 63."""
    specs = [request(0, 16, 60), request(1, 200, 2, arrival_ns=30 * MILLISECOND)]
    found = kinds(*specs, prefill_schedule_interval=interval)
    assert found.startswith(expected)
    assert found.count("M") == 4


def test_a_prompt_that_nobody_decodes_beside_is_not_held():
    assert kinds(request(0, 200, 1), prefill_schedule_interval=4) == "PPPP"


def test_nothing_is_held_while_prompts_wait_behind_a_full_step():
    """The fifth step leaves request 3 waiting, so the sixth computes prompts, too. It begins the last one."""
    specs = [request(0, 16, 60), *(request(i, 62, 2, arrival_ns=30 * MILLISECOND) for i in (1, 2, 3))]
    assert kinds(*specs, prefill_schedule_interval=4).startswith("PDDDMMDDDMD")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "sglang"}, "interval is a setting of vLLM"),
        ({"aggregated__tp": 2, "aggregated__dp": 2}, "for several ranks"),
    ],
)
def test_intervals_that_pdsim_does_not_model_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        small_aggregated(request(0, 4, 4), **{"engine": "vllm", "aggregated__prefill_schedule_interval": 2, **changes})
