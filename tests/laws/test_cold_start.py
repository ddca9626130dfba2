"""Steps of several requests stall by their number in an instance's life, and the first steps of each power of two of
requests while their kernels are compiled. Many steps at once are single steps.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.cold_server import ColdServer
from pdsim.scenario.building.sizing import server_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.cost import ColdKernels, HostSettings
from pdsim.scenario.yaml_file import ConfigError
from tests.laws.test_lockstep import with_ranks
from tests.strategies import aggregated_scenarios, scenarios
from tests.support import MILLISECOND, decisions, examples, request, run, small, small_aggregated

STALL_NS = 1_000_000_000_000
"""Longer than any step."""
clusters = st.one_of(scenarios(), aggregated_scenarios())
ordinals = st.sets(st.integers(1, 30), max_size=4)


def cold(scenario: Scenario, cold_start: dict[int, int]) -> Scenario:
    return scenario.model_copy(update={"cost": scenario.cost.model_copy(update={"cold_start": cold_start})})


@given(clusters, ordinals)
@examples(60)
def test_each_ordinal_stalls_once(scenario: Scenario, chosen: set[int]):
    traced = run(cold(scenario, dict.fromkeys(chosen, STALL_NS)))
    with_prompts = {(step.instance_id, step.start_ns) for step in traced.records.steps if step.kind != "decode"}
    before = Counter()
    for step in traced.records.steps:
        is_mixed = (step.instance_id, step.start_ns) in with_prompts
        if step.kind == "decode" and step.num_requests > 1 and not is_mixed:
            numbers = range(before[step.instance_id] + 1, before[step.instance_id] + step.num_steps + 1)
            stalled = [number for number in numbers if number in chosen]
            assert len(stalled) == step.duration_ns // STALL_NS
            assert not stalled or step.num_steps == 1
            before[step.instance_id] += step.num_steps
        else:
            assert step.duration_ns < STALL_NS


def compiling(scenario: Scenario, prefill_ns: int, decode_ns: int, release: str | None = None) -> Scenario:
    kernels = ColdKernels.model_construct(prefill=prefill_ns, decode=decode_ns)
    cost = scenario.cost.model_copy(update={"cold_kernels": kernels})
    return scenario.model_copy(update={"cost": cost, "engine_version": release})


@given(clusters, st.sampled_from([("0.5.12", 2), (None, 1)]))
@examples(60)
def test_each_power_of_two_compiles_its_kernels(scenario: Scenario, release: tuple[str | None, int]):
    version, num_kernels = release
    traced = run(compiling(scenario, 0, STALL_NS, version))
    with_prompts = {(step.instance_id, step.start_ns) for step in traced.records.steps if step.kind != "decode"}
    before: Counter[tuple[str, int]] = Counter()
    for step in traced.records.steps:
        if step.kind != "decode" or (step.instance_id, step.start_ns) in with_prompts:
            assert step.duration_ns < STALL_NS
            continue
        group = step.instance_id, (step.num_requests - 1).bit_length()
        is_compiling = before[group] < num_kernels
        assert step.duration_ns // STALL_NS == is_compiling
        assert not is_compiling or step.num_steps == 1
        before[group] += step.num_steps


@pytest.mark.parametrize("cluster", [small, small_aggregated])
def test_all_ranks_of_a_server_wait_while_one_of_them_compiles(cluster: Callable[..., Scenario]):
    scenario = with_ranks(cluster(*(request(i, 10 + i, 5 + i, arrival_ns=i * MILLISECOND) for i in range(9))), 2)
    rounds = defaultdict(list)
    for step in run(compiling(scenario, 0, STALL_NS)).records.steps:
        rounds[server_of(step.instance_id), step.start_ns].append(step)
    compiled: set[tuple[str, int]] = set()
    num_waits = 0
    for _, steps in sorted(rounds.items(), key=lambda item: item[0][1]):
        with_prompts = {step.instance_id for step in steps if step.kind != "decode"}
        decoding = [step for step in steps if step.instance_id not in with_prompts]
        needed = {(step.instance_id, (step.num_requests - 1).bit_length()) for step in decoding}
        assert {step.duration_ns // STALL_NS for step in steps} == {not needed <= compiled}
        num_waits += not needed <= compiled and len(steps) > 1
        compiled |= needed
    assert num_waits


def test_pages_that_a_prompt_has_already_are_not_allocated_again():
    server = ColdServer(steps={}, prefill_kernel_ns=3, num_variants=2, page_size=4)
    chunks = [(0, 6), (6, 2), (8, 5), (13, 4), (0, 4)]  # 2, 0, 2, 1 and 1 new pages
    forwards = [PrefillStep(i, (PrefillChunk(i, start, num, False),)) for i, (start, num) in enumerate(chunks)]
    assert [server.forward_stall_ns(step) for step in forwards] == [3, 0, 0, 0, 3]


@pytest.mark.parametrize(
    ("release", "num_tokens", "num_kernels"),
    [("0.5.12", 36, 2), ("0.5.23", 36, 1), pytest.param("0.5.12", 40, 1, id="free pages always at even entries")],
)
def test_a_forward_begins_when_its_kernel_is_compiled(release: str, num_tokens: int, num_kernels: int):
    one_by_one = small(*(request(i, num_tokens, 3) for i in range(5)), client={"use": "closed_loop", "concurrency": 1})
    records = run(compiling(one_by_one, STALL_NS, 0, release)).records.requests
    waits_ns = [record.prefill_start_ns - record.arrival_ns for record in records]
    assert [wait_ns // STALL_NS for wait_ns in waits_ns] == [1] * num_kernels + [0] * (5 - num_kernels)


def test_the_loop_chooses_nothing_while_it_compiles():
    arrivals = (request(i, 10, 3, arrival_ns=10 * i * MILLISECOND) for i in range(3))
    scenario = small(*arrivals, prefill__overlap=True)
    launches = scenario.cost.model_copy(update={"host": HostSettings.model_validate({"launch": "15 ms"})})
    launching = scenario.model_copy(update={"cost": launches})
    first, second, third = run(compiling(launching, STALL_NS, 0)).records.requests
    assert first.prefill_start_ns < second.prefill_start_ns == third.prefill_start_ns


@given(clusters, ordinals)
@examples(30)
def test_many_steps_at_once_are_single_steps_with_stalls(scenario: Scenario, chosen: set[int]):
    stall_ns = STALL_NS // 1_000_000
    stalled = compiling(cold(scenario, dict.fromkeys(chosen, stall_ns)), stall_ns, stall_ns)
    many, single = run(stalled), run(stalled, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)
    assert many.records.requests == single.records.requests


@given(clusters)
@examples(30)
def test_what_no_step_reaches_changes_nothing(scenario: Scenario):
    warm, unmet = run(scenario), run(cold(scenario, {1_000_000: STALL_NS}))
    assert warm.journal == unmet.journal
    assert warm.records.requests == unmet.records.requests


def forward(num_prompts: int) -> PrefillStep:
    return PrefillStep(0, tuple(PrefillChunk(i, 0, 10, True) for i in range(num_prompts)))


def test_an_instance_that_is_restarted_is_cold_again():
    server = ColdServer(steps={1: 7, 4: 9}, prefill_kernel_ns=3, decode_kernel_ns=20)
    assert server.next_stall(2) == (0, 27)
    server.count_steps(2, 1)
    server.count_steps(1, 5)
    assert server.next_stall(2) == (2, 9)
    assert server.next_stall(8) == (0, 20)
    assert [server.forward_stall_ns(forward(num_prompts)) for num_prompts in (3, 4, 5)] == [3, 0, 3]
    server.restart()
    assert server.next_stall(3) == (0, 27)
    assert server.forward_stall_ns(forward(4)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "vllm", "page_size": 16}, "vLLM allocates pages without a kernel"),
        ({"page_size": 1}, "SGLang allocates pages of one token without a kernel"),
        ({"decode__pp": 2, "prefill__pp": 2}, "does not model decode.pp 2 beside cost.cold_kernels"),
    ],
)
def test_servers_without_such_kernels_are_refused(changes: dict[str, Any], message: str):
    cost = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    costs = {"prefill": cost, "decode": cost, "cold_kernels": {"decode": "66 ms"}}
    with pytest.raises(ConfigError, match=message):
        small(request(0, 4, 4), cost=costs, **changes)
