"""Ranks of a server with data-parallel attention step together."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.settings import Roofline
from pdsim.scenario.building.sizing import layout_of, server_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.faults import HealthSettings, Kill
from tests.strategies import aggregated_scenarios, faults, scenarios
from tests.support import MILLISECOND, examples, request, run, small, small_aggregated

ROLES = ("prefill", "decode", "aggregated")


def with_ranks(scenario: Scenario, num_ranks: int) -> Scenario:
    """Each server with so many ranks of what it was."""
    changes: dict[str, Any] = {}
    for role in ROLES:
        if (servers := getattr(scenario, role)) is not None:
            update = {"dp": num_ranks, "tp": servers.tp * num_ranks}
            for limit in ("chunked_prefill_tokens", "max_running_requests"):
                if given := getattr(servers, limit, None):
                    update[limit] = given * num_ranks
            changes[role] = servers.model_copy(update=update)
    return scenario.model_copy(update=changes)


@st.composite
def clusters(draw: st.DrawFn) -> Scenario:
    any_kind = st.one_of(scenarios(), aggregated_scenarios())
    fits = any_kind.filter(lambda s: all(r is None or r.tp <= 2 for r in (s.prefill, s.decode, s.aggregated)))
    return with_ranks(draw(fits), draw(st.sampled_from([2, 4])))


def rounds(records: Any) -> dict[str, list[tuple[int, int]]]:
    """Begin and end of each server's steps, one of each kind of pair."""
    found: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for step in records.steps:
        found[server_of(step.instance_id)].add((step.start_ns, step.start_ns + step.duration_ns))
    return {server: sorted(pairs) for server, pairs in found.items()}


@given(clusters())
@examples(60)
def test_steps_of_a_server_begin_and_end_together(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert all(r.outcome == "finished" or "not fit" in r.reason for r in traced.records.requests)
    for pairs in rounds(traced.records).values():
        for (_, end_ns), (next_start_ns, _) in pairwise(pairs):
            assert next_start_ns >= end_ns
    alone = {(step.instance_id, step.kind, step.start_ns) for step in traced.records.steps}
    assert len(alone) == len(traced.records.steps), "a rank has one step in a round"


@given(clusters())
@examples(30)
def test_the_run_is_the_same_again_and_in_single_steps(scenario: Scenario):
    first, again, single = run(scenario), run(scenario), run(scenario, single_steps=True)
    assert first.journal == again.journal == single.journal
    assert first.records.requests == single.records.requests


@given(st.integers(1, 90), st.integers(1, 20), st.sampled_from([2, 4]))
@examples(20)
def test_a_request_alone_is_served_as_without_other_ranks(prompt: int, output: int, num_ranks: int):
    spec = request(0, prompt, output)
    for scenario in (small(spec), small_aggregated(spec)):
        (alone,), (among,) = (run(s).records.requests for s in (scenario, with_ranks(scenario, num_ranks)))
        assert (alone.first_token_ns, alone.end_ns) == (among.first_token_ns, among.end_ns)


def with_host(**host: str) -> dict[str, Any]:
    """The times of small clusters, and of the loops on the CPU."""
    lines = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    return {"cost": {"prefill": lines, "decode": lines, "host": host}}


def test_a_round_waits_for_the_host_of_every_rank():
    """Two chunks of one rank, whose host takes 40 ms for a result; meanwhile a prompt comes to the other rank."""
    specs = request(0, 128, 1), request(1, 10, 1, arrival_ns=85 * MILLISECOND)
    scenario = with_ranks(
        small(*specs, prefill__overlap=False, prefill__load_balance_method="router", **with_host(result="40 ms")), 2
    )
    steps = [step for step in run(scenario).records.steps if step.kind == "prefill"]
    (_, second), (other,) = ([s for s in steps if s.instance_id == f"prefill-0.dp{rank}"] for rank in (0, 1))
    assert (second.start_ns, second.duration_ns) == (other.start_ns, other.duration_ns)


def test_a_round_waits_for_copies_of_retracted_requests():
    specs = [request(i, 60, 120, arrival_ns=5 * i * MILLISECOND) for i in range(24)]
    scenario = with_ranks(small(*specs, decode__retraction_backup=True, decode__pool_tokens=512), 2)
    copying = 0
    for rank in range(2):
        steps = [s for s in run(scenario).records.steps if s.instance_id == f"decode-0.dp{rank}"]
        for before, step in pairwise(steps):
            assert step.start_ns >= before.start_ns + before.duration_ns + step.copying_ns
            copying += step.copying_ns > 0
    assert copying


def test_a_prompt_on_one_rank_holds_all():
    """Steps of 10 ms, and a prompt of 60 tokens in 60 ms that arrives on the other rank meanwhile."""
    specs = request(0, 10, 20), request(1, 60, 2, arrival_ns=50 * MILLISECOND)
    scenario = with_ranks(small_aggregated(*specs), 2)
    records = run(scenario).records
    steps = [s for s in records.steps if s.instance_id == "aggregated-0.dp0" and s.kind == "decode"]
    assert sorted({s.duration_ns for s in steps}) == [10 * MILLISECOND, 60 * MILLISECOND]
    assert sum(s.duration_ns == 60 * MILLISECOND for s in steps) == 1


@given(st.data())
@examples(60)
def test_a_rank_that_dies_holds_nobody_up(data: st.DataObject):
    scenario = data.draw(clusters())
    wrong = tuple(data.draw(faults(scenario)) for _ in range(data.draw(st.integers(1, 2))))
    traced = run(scenario.model_copy(update={"faults": wrong, "health": HealthSettings()}), checked=True)
    assert not traced.result.stall
    assert len(traced.records.requests) == len(scenario.workload.specs)


def test_the_other_ranks_go_on_when_one_dies_within_a_round():
    specs = [request(i, 10, 30) for i in range(4)]
    scenario = with_ranks(small_aggregated(*specs), 2)
    wrong = (Kill(at_ns=75 * MILLISECOND, kill="aggregated-0.dp1"),)
    records = run(scenario.model_copy(update={"faults": wrong, "health": HealthSettings()})).records
    assert {request.outcome for request in records.requests} == {"finished", "failed"}


def test_a_step_that_waits_for_its_round_dies_with_its_rank():
    specs = request(0, 60, 2), request(1, 10, 2, arrival_ns=20 * MILLISECOND)
    wrong = (Kill(at_ns=30 * MILLISECOND, kill="aggregated-0.dp1", restart_after_ns=5 * MILLISECOND),)
    scenario = with_ranks(small_aggregated(*specs), 2)
    records = run(scenario.model_copy(update={"faults": wrong, "health": HealthSettings()})).records
    assert all(request.outcome == "finished" for request in records.requests), "the other rank serves both"
    assert {step.instance_id for step in records.steps} == {"aggregated-0.dp0"}


def test_experts_compute_the_mean_of_all_ranks():
    servers = {"gpu": "h200", "tp": 8, "dp": 8}
    scenario = small_aggregated(model="qwen3-30b-a3b", aggregated=servers)
    roofline = Roofline(expert_efficiency=0.5).model(layout_of(scenario, "aggregated"))
    assert roofline.decode_line(16, 16.0) == roofline.decode_line(16)
    assert roofline.decode_line(16, 2.0).base < roofline.decode_line(16).base
    assert roofline.decode_line(1, 2.0).base > roofline.decode_line(1).base


def test_a_prompt_alone_has_the_experts_of_all_ranks():
    """Eight prompts on eight ranks load each rank's share of the experts as one prompt on each alone would."""
    servers = {"gpu": "h200", "tp": 8, "dp": 8}
    cost = {"use": "roofline", "prefill_layer": 0, "expert_efficiency": 0.5}
    durations = {}
    for num_prompts in (1, 8):
        specs = [request(i, 1000, 1) for i in range(num_prompts)]
        scenario = small_aggregated(*specs, model="qwen3-30b-a3b", aggregated=servers, cost=cost)
        traced = run(scenario)
        (durations[num_prompts],) = {step.duration_ns for step in traced.records.steps if step.kind == "prefill"}
    roofline = scenario.cost.prefill.model(layout_of(scenario, "aggregated"))
    step = PrefillStep(0, (PrefillChunk(0, 0, 1000, is_last=True),))
    assert durations[1] < durations[8] == roofline.prefill_ns(step, 0)


def test_copies_before_a_step_count_once():
    """The ranks' hosts wait for blocking copies to host memory, so a step does not wait for the same copies again."""
    ranks = {"tp": 2, "dp": 2, "radix_cache": True, "pool_tokens": 12000}
    data = {
        "model": "qwen3-8b",
        "page_size": 64,
        "cost": "roofline",
        "prefill": {"gpu": "h200"},
        "decode": {"gpu": "h200", "host_cache": "10 GB", "host_cache_write": "write_back", **ranks},
        "workload": {
            "use": "prefix_pool",
            "num_requests": 60,
            "num_prefixes": 20,
            "prefix_tokens": 3000,
            "input_tokens": 200,
            "output_tokens": 40,
        },
        "client": {"use": "closed_loop", "concurrency": 12},
    }
    records = run(Scenario.model_validate(data)).records
    assert any(copy.kind == "write" for copy in records.host_copies)
    assert not any(step.copying_ns for step in records.steps)
