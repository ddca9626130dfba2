"""Laws of aggregated and decode instances with pipeline stages: one micro-batch a stage, of SGLang and of vLLM."""

from collections import Counter, deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import DecodeStep, PrefillStep, SaveKv, Wait
from pdsim.core.sequence import Spans
from pdsim.cost.copies import HostMemory
from pdsim.cost.step_times import PipelineTimes, pipeline_times
from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import layout_of, resolve, server_of
from pdsim.scenario.building.wiring import host_copies, storage_costs
from pdsim.scenario.rules import RULES
from pdsim.scenario.schema import Scenario
from pdsim.sim.simulation import Simulation
from pdsim.system.catalog import load_model
from tests.laws.test_host_cache import TOKEN_BYTES, WRITES
from tests.strategies import aggregated_scenarios, fault_schedules, scenarios, vllm_aggregated_scenarios
from tests.support import (
    MILLISECOND,
    chunks,
    examples,
    parts,
    request,
    require_whole_gaps,
    run,
    run_both_ways,
    small,
    small_aggregated,
)

ENGINES = ("sglang", "vllm")
STEP_NS = 10 * MILLISECOND
STAGES = [1, 2, 4, 7]
"""Numbers of stages among which the 28 layers of the model divide evenly."""


def test_a_resolved_scenario_of_vllm_with_stages_is_accepted_again():
    """vLLM computes prompts before decode has pages, which SGLang cannot do with stages."""
    scenario = resolve(small(request(0, 9, 9), engine="vllm", prefill__pp=2, decode__admission="free_pages"))
    assert scenario.prefill.optimistic_attempts == 1
    assert not any(wrong(scenario) for wrong in RULES)


def host_memory(draw: st.DrawFn, scenario: Scenario) -> dict[str, Any]:
    """Fields of servers whose prefix cache has host memory behind it, or has none."""
    if draw(st.booleans()):
        return {}
    own = {"radix_cache": True, "host_cache": draw(st.sampled_from([0, 100, 10_000])) * TOKEN_BYTES}
    if scenario.engine == "vllm":
        return own | {"eviction": type(scenario.servers[0]).model_fields["eviction"].default}
    return own | {"host_cache_write": draw(st.sampled_from(WRITES))}


@st.composite
def staged(draw: st.DrawFn) -> Scenario:
    scenario = draw(st.one_of(aggregated_scenarios(), vllm_aggregated_scenarios(), scenarios()))
    pp = draw(st.sampled_from([2, 3, 4]))
    host = host_memory(draw, scenario)
    if scenario.aggregated is not None:
        aggregated = scenario.aggregated.model_copy(update={"pp": pp, **host})
        return scenario.model_copy(update={"aggregated": aggregated})
    prefill = scenario.prefill.model_copy(update={"pp": pp, "layer_groups": 0, **host})
    decode = scenario.decode.model_copy(update={"pp": pp, "polling_interval": 1})
    network = scenario.network.model_copy(update={"staging": None})
    return scenario.model_copy(update={"prefill": prefill, "decode": decode, "network": network})


def hops_ns(scenario: Scenario, num_tokens: int) -> int:
    layout = layout_of(scenario, "decode" if scenario.aggregated is None else "aggregated")
    hop_ns = pipeline_times(layout, load_model(scenario.model).num_layers).hop_token_ns
    return (layout.pp - 1) * round(hop_ns * num_tokens)


def decode_rows(traced):
    return [step for step in traced.records.steps if step.kind == "decode"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pp", STAGES)
def test_one_request_waits_for_all_stages(engine, pp):
    """A step of one request takes the time of the whole model, and p - 1 hops."""
    scenario = small_aggregated(request(0, 40, 9), aggregated__pp=pp, engine=engine)
    (row,) = run(scenario, checked=True).records.requests
    expected_ns = 8 * (STEP_NS + hops_ns(scenario, 1))
    assert row.end_ns - row.first_token_ns == pytest.approx(expected_ns, abs=8 * pp)


@pytest.mark.parametrize("pp", STAGES)
def test_decode_stages_receive_at_once(pp):
    """Each decode stage gets the layers of its prefill stage over its own NIC. TPOT is that of the whole model, and the
    hops.
    """
    both = small(request(0, 40, 9), prefill__pp=pp, decode__pp=pp)
    one = small(request(0, 40, 9), prefill__pp=pp)
    (row,), (other,) = (run(scenario, checked=True).records.requests for scenario in (both, one))
    assert row.transfer_bytes == other.transfer_bytes
    whole_ns = other.transfer_bytes / 100  # at 100 GB/s
    assert other.transfer_end_ns - row.transfer_end_ns == pytest.approx(whole_ns * (1 - 1 / pp), abs=2)
    assert row.end_ns - row.first_token_ns == pytest.approx(8 * (STEP_NS + hops_ns(both, 1)), abs=8 * pp)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pp", STAGES[1:])
def test_p_micro_batches_decode_p_times_as_many(engine, pp):
    """p prompts that fill a forward each decode side by side, as fast as one of them alone."""
    prompts = [request(i, 64, 60) for i in range(pp)]
    scenario = small_aggregated(*prompts, aggregated__pp=pp, engine=engine)
    traced = run(scenario, checked=True)
    rows = decode_rows(traced)
    assert {row.num_requests for row in rows} == {1}
    last_ns = max(row.start_ns + row.duration_ns for row in rows)
    spent_ns = 59 * (STEP_NS + hops_ns(scenario, 1)) + (pp - 1) * STEP_NS
    first_ns = min(r.first_token_ns for r in traced.records.requests)
    prefill_ns = 64 * MILLISECOND + hops_ns(scenario, 64)
    assert last_ns - first_ns <= spent_ns + prefill_ns
    assert last_ns - first_ns < pp * 59 * STEP_NS / 1.5


@pytest.mark.parametrize(("engine", "num_batches"), [("sglang", 1), ("vllm", 2)])
def test_who_arrives_during_a_lone_step(engine, num_batches):
    """SGLang takes a later arrival into the micro-batch that has just ended its step; vLLM, into the next."""
    prompts = [request(0, 8, 40), request(1, 8, 20, arrival_ns=65 * MILLISECOND)]
    scenario = small_aggregated(*prompts, aggregated__pp=2, engine=engine)
    steps = [entry.returned[0] for entry in run(scenario).journal if entry.call == "next_step"]
    together = any(isinstance(step, DecodeStep) and step.num_requests == 2 for step in steps)
    assert together == (num_batches == 1)


@pytest.mark.parametrize("pp", [1, 2])
def test_no_id_of_a_computed_prompt_is_kept(pp):
    simulation = Simulation(build(small_aggregated(request(0, 8, 4), aggregated__pp=pp, engine="vllm")))
    simulation.run()
    assert simulation._clients.local == set()


@given(st.one_of(staged(), fault_schedules(staged())))
@examples(40)
def test_every_request_ends(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    if not scenario.faults:
        wrong = [r.reason for r in traced.records.requests if r.outcome != "finished"]
        assert all("not fit" in reason for reason in wrong)
        if not wrong:
            require_whole_gaps(traced.records)


@given(staged())
@examples(15)
def test_a_request_is_in_one_decode_step_at_a_time(scenario: Scenario):
    """At most p steps are under way, their requests differ, and results come in the order of steps."""
    traced = run(scenario)
    under_way: dict[str, deque] = {}
    for entry in traced.journal:
        steps = under_way.setdefault(entry.instance_id, deque())
        if entry.call == "next_step" and not isinstance(entry.returned[0], Wait):
            steps.append(entry.returned[0])
            assert len(steps) <= scenario.servers[1].pp
            if entry.instance_id.startswith("prefill"):
                continue
            counts = Counter(i for step in steps for one in parts(step) for i in getattr(one, "joined", ()))
            assert not counts or max(counts.values()) == 1
            computed = Counter(chunk.request_id for step in steps for chunk in chunks(step) if chunk.is_last)
            assert not counts.keys() & computed.keys()
        elif entry.call == "on_step_done":
            assert steps.popleft() == entry.args[0]


@given(staged())
@examples(12)
def test_stages_do_one_step_at_a_time(scenario: Scenario):
    by_instance: dict[str, list] = {}
    for step in run(scenario).records.steps:
        by_instance.setdefault(step.instance_id, []).append((step.start_ns, step.first_ns))
    for rows in by_instance.values():
        for (start_ns, first_ns), (later_ns, _) in pairwise(sorted(set(rows))):
            assert start_ns + first_ns <= later_ns


@given(staged())
@examples(12)
def test_a_journal_of_micro_batches_replays(scenario: Scenario):
    traced, _ = run_both_ways(scenario)
    written = from_lines([to_line(entry) for entry in traced.journal])
    assert replay(written, state_machines(resolve(scenario))) == len(traced.journal)


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 200), st.integers(0, 30), st.integers(1, 4), st.data())
@examples(100)
def test_each_layer_of_each_stage_waits_for_its_load(start_ns, layer_ns, first_ns, part_ns, pp, data):
    """Beside a walk over all layers. All stages load at the same time, and are free."""
    num_layers = data.draw(st.integers(1, 6))
    hop_ns = data.draw(st.integers(0, 20))
    end_ns = start_ns - hop_ns
    for _ in range(pp):
        end_ns += hop_ns
        for layer in range(1, num_layers + 1):
            end_ns = max(end_ns, first_ns + layer * part_ns) + layer_ns
    times = PipelineTimes(layers=(num_layers,) * pp, hop_token_ns=hop_ns)
    load = (first_ns, first_ns + num_layers * part_ns)
    assert times.pass_on(start_ns, num_layers * layer_ns, 1, [0] * pp, [load]) == end_ns


@pytest.mark.parametrize("pp", STAGES[1:])
@pytest.mark.parametrize("engine", ENGINES)
def test_stages_load_their_layers_at_once(engine, pp):
    """Two prompts of 400 tokens take turns in a pool that holds one. The third request finds the first one's KV in host
    memory. All stages together copy as many bytes as one stage, in a p-th of the time.
    """
    specs = [request(i, Spans.of(i % 2, 400), 2, arrival_ns=i * 2_000_000_000) for i in range(3)]
    servers = {"gpu": "h100", "pool_tokens": 600, "host_cache": "1 GB", "chunked_prefill_tokens": 0, "overlap": False}
    both = [small_aggregated(*specs, engine=engine, aggregated={**servers, "pp": size}) for size in (1, pp)]
    loads = [row for one in both for row in run(one, checked=True).records.host_copies if row.kind == "load"]
    whole, staged = loads
    assert staged.num_bytes == whole.num_bytes > 0
    assert staged.end_ns - staged.start_ns == pytest.approx((whole.end_ns - whole.start_ns) / pp, abs=1)


def test_storage_has_an_object_of_each_stage():
    prefill = {"prefill__tp": 2, "prefill__host_cache": "auto", "storage": {}, "decode__tp": 2}
    whole, staged = (storage_costs(resolve(small(request(0, 9, 9), prefill__pp=pp, **prefill))) for pp in (1, 4))
    assert (staged.read_page_objects, staged.read_page_bytes) == (4 * whole.read_page_objects, whole.read_page_bytes)
    assert staged.num_pages == whole.num_pages


def test_a_loop_with_stages_stands_still_while_kv_is_copied():
    """Two requests outgrow their pool: one makes way, and its KV goes to host memory and comes back."""
    specs = [request(0, 8, 20), request(1, 8, 24)]
    servers = {"prefill__pp": 2, "decode__pp": 2, "decode__pool_tokens": 40, "decode__admission__reserved_tokens": 0}
    scenario = small(*specs, decode__retraction_backup=True, **servers)
    traced = run(scenario, checked=True)
    saves = [c for e in traced.journal if e.call == "next_step" for c in e.returned[1] if isinstance(c, SaveKv)]
    memory = HostMemory(host_copies(scenario))
    copies_ns = sum(memory.save_ns(one.request_id, len(one.pages)) + memory.load_ns(one.request_id) for one in saves)
    assert sum(step.copying_ns for step in traced.records.steps) == copies_ns > 0


# Ranks of a server with data-parallel attention.


@st.composite
def ranked(draw: st.DrawFn) -> Scenario:
    """SGLang's staged clusters, each server with two or three ranks."""
    scenario = draw(staged().filter(lambda one: one.engine == "sglang"))
    changes = {}
    for role, servers in scenario.roles.items():
        dp = draw(st.sampled_from([2, 3]))
        chunk = servers.chunked_prefill_tokens if role != "decode" else 0
        sizes = {"dp": dp, "tp": dp, "max_running_requests": servers.max_running_requests and 14}
        changes[role] = servers.model_copy(update=sizes | ({"chunked_prefill_tokens": dp * chunk} if chunk else {}))
    return scenario.model_copy(update=changes)


def turns_of(traced) -> dict[str, dict[str, dict[int, Any]]]:
    """The steps of each server's ranks, by the number of their turn: each call of next_step is a turn."""
    found: dict[str, dict[str, dict[int, Any]]] = {}
    counts: Counter[str] = Counter()
    for entry in traced.journal:
        if entry.call == "next_step":
            ranks = found.setdefault(server_of(entry.instance_id), {})
            steps = ranks.setdefault(entry.instance_id, {})
            if not isinstance(entry.returned[0], Wait):
                steps[counts[entry.instance_id]] = entry.returned[0]
            counts[entry.instance_id] += 1
    return found


@pytest.mark.parametrize("pp", STAGES)
def test_a_rank_decodes_as_an_instance_alone(pp):
    scenario = small_aggregated(request(0, 40, 9), aggregated__pp=pp, aggregated__dp=2, aggregated__tp=2)
    (row,) = run(scenario, checked=True).records.requests
    assert row.end_ns - row.first_token_ns == pytest.approx(8 * (STEP_NS + hops_ns(scenario, 1)), abs=8 * pp)


@pytest.mark.parametrize("pp", STAGES[1:])
def test_an_idle_rank_joins_the_turn_of_the_others(pp):
    """The second rank gets its prompt while the first one decodes alone. It waits until this step has ended, and then
    both are in every turn.
    """
    prompts = [request(0, 8, 40), request(1, 8, 20, arrival_ns=65 * MILLISECOND)]
    traced = run(small_aggregated(*prompts, aggregated__pp=pp, aggregated__dp=2, aggregated__tp=2), checked=True)
    first, second = ([row for row in traced.records.steps if row.instance_id == f"aggregated-0.dp{i}"] for i in (0, 1))
    starts_ns = [row.start_ns for row in first]
    assert second[0].start_ns in starts_ns
    assert second[0].start_ns > 65 * MILLISECOND
    at = starts_ns.index(second[0].start_ns)
    assert starts_ns[at : at + 20] == [row.start_ns for row in second]


@given(ranked())
@examples(30)
def test_ranks_take_their_turns_together(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome == "finished" or "not fit" in r.reason for r in traced.records.requests)
    rows: dict[str, list] = {}
    for row in traced.records.steps:
        rows.setdefault(row.instance_id, []).append((row.start_ns, row.start_ns + row.duration_ns))
    for ranks in turns_of(traced).values():
        at: dict[int, set] = {}
        for name, steps in ranks.items():
            for turn, span in zip(steps, dict.fromkeys(sorted(rows.get(name, []))), strict=True):
                at.setdefault(turn, set()).add(span)
        assert all(len(spans) == 1 for spans in at.values())
    turns = {(server_of(one.instance_id), one.micro.turn) for one in traced.machines if hasattr(one, "micro")}
    assert len({server for server, _ in turns}) == len(turns)


def test_sglang_gives_each_micro_batch_its_share():
    """A forward begins at most 1/p of the running requests (managers/scheduler.py, 0.5.23, :1237)."""
    prompts = [request(i, 8, 30) for i in range(6)]
    scenario = small_aggregated(*prompts, aggregated__pp=2, aggregated__max_running_requests=4)
    steps = [entry.returned[0] for entry in run(scenario).journal if entry.call == "next_step"]
    assert [len(step.chunks) for step in steps if isinstance(step, PrefillStep)] == [2, 2, 2]
    assert max(len(step.joined) for step in steps if isinstance(step, DecodeStep)) == 2


def test_micro_batches_of_decode_share_its_slots():
    prompts = [request(i, 40, 30) for i in range(6)]
    scenario = small(*prompts, prefill__pp=2, decode__pp=2, decode__max_running_requests=3, decode__extra_slots=0)
    levels = [row.levels for row in run(scenario, levels=True).records.levels if row.instance_id == "decode-0"]
    assert max(one.num_transferring + one.num_ready + one.num_running for one in levels) == 3
