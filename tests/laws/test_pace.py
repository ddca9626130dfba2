"""Laws of cores whose speed comes and goes: the process itself, and runs under it. docs/invariants.md lists them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal import decisions, digest
from pdsim.cost.pace import Pace
from pdsim.scenario.cores import PaceSettings
from pdsim.scenario.schema import Scenario
from tests.strategies import any_scenarios, paces
from tests.support import MILLISECOND, examples, request, run, small

SLOWDOWN = 0.6
SPELL_NS = 100 * MILLISECOND

seeds = st.integers(0, 10**6)
shares = st.floats(0.02, 0.6)
ranks = st.integers(1, 4)


def pace(seed, num_ranks=1, share=0.1):
    return Pace("decode-0", num_ranks, slowdown=SLOWDOWN, share=share, spell_ns=SPELL_NS, seed=seed)


def stretches(of: Pace, until_ns):
    """Spells in turn: how long each lasted, and what it was."""
    found, at_ns = [], 0
    while at_ns < until_ns:
        stretch, steady_ns = of.stretch(at_ns), of.steady_ns(at_ns)
        if found and found[-1][1] == stretch:
            found[-1][0] += steady_ns
        else:
            found.append([steady_ns, stretch])
        at_ns += steady_ns
    return found


@given(seeds, ranks, shares, st.lists(st.integers(0, 300 * MILLISECOND), min_size=1, max_size=50))
@examples(50)
def test_a_step_takes_as_long_as_ever_or_longer_by_the_slowdown_and_nothing_changes_meanwhile(
    seed, num_ranks, share, gaps
):
    often, rarely, at_ns = pace(seed, num_ranks, share), pace(seed, num_ranks, share), 0
    for gap_ns in gaps:
        at_ns += gap_ns
        stretch, steady_ns = often.stretch(at_ns), often.steady_ns(at_ns)
        assert stretch in {1, 1 + SLOWDOWN}
        assert steady_ns > 0
        assert often.stretch(at_ns + steady_ns - 1) == stretch
        at_ns += steady_ns - 1
    assert rarely.stretch(at_ns) == stretch


@given(seeds, ranks, shares)
@examples(12)
def test_an_instance_is_slow_for_the_time_that_any_core_is(seed, num_ranks, share):
    """Each core is slow for its share whatever the others are: together for 1 - (1 - share)^ranks."""
    spells = stretches(pace(seed, num_ranks, share), 4000 * SPELL_NS)
    slow_ns = sum(spell_ns for spell_ns, stretch in spells if stretch > 1)
    assert slow_ns / sum(spell_ns for spell_ns, _ in spells) == pytest.approx(1 - (1 - share) ** num_ranks, abs=0.06)


@given(seeds, shares)
@examples(12)
def test_slow_spells_last_as_long_as_the_settings_say_and_full_ones_by_the_share(seed, share):
    spells = stretches(pace(seed, 1, share), 2000 * SPELL_NS / share)[1:-1]
    mean_ns = {
        slow: sum(lasted := [spell_ns for spell_ns, stretch in spells if (stretch > 1) == slow]) / len(lasted)
        for slow in (True, False)
    }
    assert mean_ns[True] == pytest.approx(SPELL_NS, rel=0.13)
    assert mean_ns[False] == pytest.approx(SPELL_NS * (1 - share) / share, rel=0.13)
    assert all(a[1] != b[1] for a, b in pairwise(spells))


def test_it_begins_as_it_is_at_any_time():
    slow = [pace(seed, share=0.3).stretch(0) > 1 for seed in range(3000)]
    assert sum(slow) / len(slow) == pytest.approx(0.3, abs=0.03)
    left_ns = [pace(seed, share=0.3).steady_ns(0) for seed, is_slow in enumerate(slow) if is_slow]
    assert sum(left_ns) / len(left_ns) == pytest.approx(SPELL_NS, rel=0.15)


@given(seeds)
@examples(10)
def test_one_seed_is_one_pace_and_instances_and_ranks_have_their_own(seed):
    until_ns = 50 * SPELL_NS
    assert stretches(pace(seed), until_ns) == stretches(pace(seed), until_ns)
    assert stretches(pace(seed), until_ns) != stretches(pace(seed + 1), until_ns)
    assert stretches(pace(seed), until_ns) != stretches(pace(seed, 2), until_ns)


# Runs.


def paced(scenario: Scenario, settings: PaceSettings) -> Scenario:
    return scenario.model_copy(update={"cost": scenario.cost.model_copy(update={"pace": settings})})


@given(any_scenarios(), paces())
@examples(60)
def test_many_steps_at_once_are_single_steps_while_the_pace_changes(scenario: Scenario, settings: PaceSettings):
    scenario = paced(scenario, settings)
    many, single = run(scenario), run(scenario, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)
    assert many.records.requests == single.records.requests
    assert many.records.transfers == single.records.transfers
    a, b = many.result.summary(), single.result.summary()
    for field in ("mean_itl_ms", "median_itl_ms", "p99_itl_ms", "std_itl_ms"):
        assert a[field] == pytest.approx(b[field], abs=2e-6)


@given(any_scenarios(), paces())
@examples(20)
def test_a_run_follows_from_its_seed_and_without_slowdown_there_is_no_pace(scenario: Scenario, settings: PaceSettings):
    assert digest(run(paced(scenario, settings)).journal) == digest(run(paced(scenario, settings)).journal)
    none = settings.model_copy(update={"slowdown": 0.0})
    assert run(paced(scenario, none)).records == run(scenario).records


def test_steps_one_behind_the_other_are_as_long_as_the_mean_speed_says():
    """Of time a share is slow, and in it fewer steps are made: 1 - share + share / (1 + slowdown) as many in all."""
    share, steps = 0.3, 60_000
    alone = small(
        request(0, 8, steps + 1),
        decode__pool_tokens=4 * steps,
        model={"name": "qwen3-0.6b", "context_tokens": 2 * steps},
    )
    traced = run(paced(alone, PaceSettings(slowdown=SLOWDOWN, share=share, spell=f"{SPELL_NS} ns")))
    (record,) = traced.records.requests
    mean_ms = (record.end_ns - record.first_token_ns) / steps / MILLISECOND
    assert mean_ms == pytest.approx(10 / (1 - share + share / (1 + SLOWDOWN)), rel=0.01)
    assert len(traced.records.steps) < steps / 5


def test_a_forward_has_the_pace_in_which_it_begins():
    """One prompt of 20 ms every 2 s: each is as long as ever, or longer by the slowdown, in a share as time is slow."""
    share = 0.3
    prompts = [request(i, 20, 1, arrival_ns=2000 * i * MILLISECOND) for i in range(1500)]
    settings = PaceSettings(slowdown=SLOWDOWN, share=share, spell=f"{SPELL_NS} ns")
    forwards = [
        step.duration_ns for step in run(paced(small(*prompts), settings)).records.steps if step.kind == "prefill"
    ]
    assert set(forwards) == {20 * MILLISECOND, 32 * MILLISECOND}
    assert forwards.count(32 * MILLISECOND) / len(forwards) == pytest.approx(share, abs=0.04)


def test_steps_of_either_kind_have_a_slowdown_of_their_own_and_the_rest_has_the_hosts():
    prompts = [request(i, 20, 2, arrival_ns=2000 * i * MILLISECOND) for i in range(300)]
    lines = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    scenario = small(*prompts, cost={"prefill": lines, "decode": lines, "rest": {"step": "5 ms"}})
    settings = PaceSettings(slowdown=0.8, share=0.3, spell=f"{SPELL_NS} ns", prefill_slowdown=0.2, decode_slowdown=0.4)
    steps = run(paced(scenario, settings)).records.steps
    assert {step.duration_ns / MILLISECOND for step in steps if step.kind == "prefill"} == {20, 24}
    assert {step.duration_ns / MILLISECOND for step in steps if step.kind == "decode"} == {15, 14 + 9}


def test_a_transfer_has_the_pace_in_which_its_host_posts_it():
    """A batch of 2 ms and 5 descriptors of 1 ms, of prompts far apart; senders have cores of their own."""
    prompts = [request(i, 20, 2, arrival_ns=2000 * i * MILLISECOND) for i in range(600)]
    network = {"network__transfer_latency": "2 ms", "network__descriptor_latency": "1 ms"}
    scenario = small(*prompts, **network)
    traced = run(paced(scenario, PaceSettings(slowdown=SLOWDOWN, share=0.3, spell=f"{SPELL_NS} ns")))
    posted = [(transfer.setup_ns, transfer.posting_ns) for transfer in traced.records.transfers]
    plain = [(transfer.setup_ns, transfer.posting_ns) for transfer in run(scenario).records.transfers]
    ((setup_ns, posting_ns),) = set(plain)
    slow = round(setup_ns * (1 + SLOWDOWN)), round(posting_ns * (1 + SLOWDOWN))
    assert set(posted) == {(setup_ns, posting_ns), slow}
    assert posted.count(slow) / len(posted) == pytest.approx(0.3, abs=0.06)
    forwards = [step.duration_ns for step in traced.records.steps if step.kind == "prefill"]
    assert len(set(zip(forwards, posted, strict=True))) == 4


def test_a_loop_takes_its_host_work_slowly_as_well():
    """3 ms before each forward of prompts far apart, from the grant to its begin; forwards themselves are a GPU's."""
    prompts = [request(i, 20, 1, arrival_ns=2000 * i * MILLISECOND) for i in range(600)]
    lines = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    scenario = small(*prompts, cost={"prefill": lines, "decode": lines, "host": {"start": "3 ms"}})
    traced = run(paced(scenario, PaceSettings(slowdown=SLOWDOWN, share=0.3, spell=f"{SPELL_NS} ns", slows="launches")))
    starts = [one.prefill_start_ns - one.admitted_ns for one in traced.records.requests]
    (plain_ns,) = {one.prefill_start_ns - one.admitted_ns for one in run(scenario).records.requests}
    assert set(starts) == {plain_ns, plain_ns + round(SLOWDOWN * 3 * MILLISECOND)}
    assert {step.duration_ns for step in traced.records.steps if step.kind == "prefill"} == {20 * MILLISECOND}
