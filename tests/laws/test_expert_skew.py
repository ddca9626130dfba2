"""Experts whose load is not even among the GPUs of a server."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.roofline import balance, balanced_skew, loads, popularities, skew_of
from pdsim.cost.settings import Kernels, Roofline
from pdsim.scenario.building.sizing import layout_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from tests.support import examples, request, run, small_aggregated

COSTS = (Kernels(), Roofline(), Roofline(expert_efficiency=0.3, expert_exchange_efficiency=0.5))
SKEWS = st.floats(0, 6.9)
FULL = 128 * 7
"""Redundant experts with which each of eight GPUs has all."""


def server(skew: float, redundant: int | None = None, **changes: Any) -> Scenario:
    servers = {"gpu": "h200", "tp": 8, "dp": 8, "expert_skew": skew, "redundant_experts": redundant, **changes}
    specs = [request(i, 100 * i + 50, 20) for i in range(12)]
    return small_aggregated(*specs, model="qwen3-30b-a3b", aggregated=servers, cost="kernels")


def times(cost: Kernels | Roofline, scenario: Scenario, num_tokens: int) -> tuple[int, int]:
    model = cost.model(layout_of(scenario, "aggregated"))
    step = PrefillStep(0, (PrefillChunk(0, 0, num_tokens, is_last=True),))
    assert sum(model.prefill_terms(step).values()) == pytest.approx(model.prefill_ns(step, 0), abs=1)
    return model.prefill_ns(step, 0), model.decode_line(num_tokens).base


@given(st.sampled_from(COSTS), SKEWS, SKEWS, st.integers(1, 8192))
@examples(60)
def test_a_step_takes_no_less_time_with_more_skew(cost: Kernels | Roofline, one: float, other: float, num_tokens: int):
    less, more = sorted((one, other))
    assert all(a <= b for a, b in zip(*(times(cost, server(skew), num_tokens) for skew in (less, more)), strict=True))


@given(st.sampled_from(COSTS), st.integers(1, 8192))
@examples(20)
def test_experts_on_every_gpu_take_the_skew_away(cost: Kernels | Roofline, num_tokens: int):
    assert times(cost, server(3, FULL), num_tokens) == times(cost, server(0, FULL), num_tokens)


def test_the_busiest_gpu_counts_in_every_round():
    """Rounds are those of a server all of whose ranks have as many tokens more."""
    cost = {"use": "roofline", "prefill_layer": 0, "expert_efficiency": 0.5}
    servers = (server(skew, moe_a2a_backend="deepep") for skew in (0, 1))  # tokens reach the GPUs of their experts only
    scenarios = [one.model_copy(update={"cost": small_aggregated(cost=cost).cost}) for one in servers]
    even, skewed = (run(scenario).records.steps for scenario in scenarios)
    assert max(s.duration_ns for s in even) < max(s.duration_ns for s in skewed)
    models = [scenario.cost.prefill.model(layout_of(scenario, "aggregated")) for scenario in scenarios]
    assert models[1].decode_line(16) == models[0].decode_line(16, 32.0)


@example(2e-16, 32, 0)
@given(SKEWS, st.sampled_from([2, 4, 8, 32]), st.integers(0, 12))
@examples(60)
def test_a_balancer_keeps_all_tokens_and_adds_no_skew(skew: float, num_gpus: int, more: int):
    skew, num_redundant = min(skew, num_gpus - 1.0), more * num_gpus
    assert 0 <= balanced_skew(skew, 128, num_redundant, num_gpus) <= skew
    popular = popularities(skew / 3, 128)
    assert sum(balance(popular, num_redundant, num_gpus)) == pytest.approx(sum(popular))
    assert skew_of(loads(popular, num_gpus)) >= 0
    assert balanced_skew(0, 128, num_redundant, num_gpus) == 0


def test_a_balancer_shares_one_popular_expert_among_its_copies():
    """One of eight has two ninths of the tokens: two copies of it make nine experts alike, of which three fit a GPU."""
    assert balance([2, 1, 1, 1, 1, 1, 1, 1], 1, 3) == [3, 3, 3]


def test_experts_that_are_whole_take_the_memory_of_divided_ones():
    layouts = [layout_of(server(0, dp=dp, ep=ep), "aggregated") for dp, ep in ((1, 1), (1, 8), (8, 1), (8, None))]
    assert [one.has_whole_experts for one in layouts] == [False, True, False, True]
    assert layouts[0].weight_bytes_per_rank == layouts[1].weight_bytes_per_rank
    assert layouts[2].weight_bytes_per_rank == layouts[3].weight_bytes_per_rank
    assert layout_of(server(1, dp=1, ep=8), "aggregated").expert_skew == 1


def test_copies_take_memory():
    weights = [layout_of(server(0, redundant), "aggregated").weight_bytes_per_rank for redundant in (None, 0, 128)]
    experts = layout_of(server(0), "aggregated").model.expert_bytes / 8
    assert weights == [weights[0], weights[0], pytest.approx(weights[0] + experts)]


@pytest.mark.parametrize(
    ("servers", "cost", "wrong"),
    [
        ({"skew": 1, "dp": 1}, "kernels", "aggregated.expert_skew: .* dp > 1 or ep > 1 only, found dp 1"),
        ({"skew": 1, "ep": 1}, "kernels", "aggregated.expert_skew: .* found dp 8 and ep 1"),
        ({"skew": 0, "ep": 4}, "kernels", "aggregated.ep: 4: pdsim models ep 1, and ep of all 8 GPUs of a server"),
        ({"skew": 8}, "kernels", "at most 7, when one of 8 GPUs has all tokens; found 8"),
        ({"skew": 0, "redundant": 3}, "kernels", r"128 \+ 3 experts do not divide among 8 GPUs; try 0 or 8"),
        (
            {"skew": 1},
            {"use": "affine", "decode_base": "1 ms"},
            "only the cost models kernels and roofline have times of experts",
        ),
    ],
)
def test_what_cannot_be_skewed(servers: dict[str, Any], cost: Any, wrong: str):
    scenario = server(**servers).model_copy(update={"cost": small_aggregated(cost=cost).cost})
    with pytest.raises(ConfigError, match=wrong):
        layout_of(scenario, "aggregated")
