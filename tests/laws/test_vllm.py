"""Laws of vLLM's instances: computed prompts are held, preempted requests are computed again."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.journal.lines import digest
from pdsim.core.messages import (
    Cancel,
    DecodeStep,
    KvArrived,
    KvGranted,
    KvSent,
    NewRequest,
    PrefillStep,
    PromptComputed,
    Retracted,
    Send,
    StopSending,
    Tell,
)
from pdsim.core.sequence import Spans
from pdsim.policy.pages import LastArrivedFirst
from pdsim.scenario.building.machines import build_machine
from pdsim.scenario.building.sizing import layout_of
from pdsim.scenario.building.wiring import wire_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.model import GroupedQueryAttention
from tests.strategies import fault_schedules, vllm_scenarios
from tests.support import (
    MILLISECOND,
    Traced,
    chunks,
    decisions,
    examples,
    parts,
    request,
    require_whole_gaps,
    run,
    run_both_ways,
    small,
    small_aggregated,
)

SHORT_MS = st.sampled_from([5, 30, 200])
VLLM = {
    "engine": "vllm",
    "decode__admission": "free_pages",
    "decode__preemption": "last_arrived_first",
}


def computed_at(traced: Traced) -> dict[int, int]:
    """When prefill said that a prompt is computed."""
    return {
        command.message.request_id: entry.args[-1]
        for entry in traced.journal
        if entry.call == "on_step_done"
        for command in entry.returned
        if isinstance(command, Send) and isinstance(command.message, PromptComputed)
    }


def messages(traced: Traced, kind: type) -> dict[int, int]:
    """When the last message of a kind came to an instance, by request."""
    found = {}
    for entry in traced.journal:
        if entry.call == "on_message" and isinstance(entry.args[0], kind):
            found[entry.args[0].request_id] = entry.args[-1]
    return found


def forwards(traced: Traced, role: str) -> list[PrefillStep]:
    steps = [e.returned[0] for e in traced.journal if e.call == "next_step" and e.instance_id.startswith(role)]
    return [part for step in steps for part in parts(step) if isinstance(part, PrefillStep)]


@given(vllm_scenarios())
@examples(80)
def test_decode_allocates_pages_for_computed_prompts_only(scenario: Scenario):
    traced = run(scenario)
    computed, granted = computed_at(traced), messages(traced, KvGranted)
    assert all(granted[request_id] > computed[request_id] for request_id in granted)


@given(vllm_scenarios())
@examples(80)
def test_prefill_computes_each_prompt_once_and_holds_it_until_it_is_read(scenario: Scenario):
    """Nothing gives way: a prompt that did would be computed twice."""
    traced = run(scenario)
    last = [chunk.request_id for step in forwards(traced, "prefill") for chunk in step.chunks if chunk.is_last]
    assert len(last) == len(set(last)) == len(computed_at(traced))
    read, arrived = messages(traced, KvSent), messages(traced, KvArrived)
    for r in traced.records.requests:
        if r.outcome == "finished":
            assert read[r.request_id] >= r.transfer_end_ns
            assert arrived[r.request_id] >= r.transfer_end_ns


@given(vllm_scenarios())
@examples(60)
def test_hand_offs_in_flight_fit_the_pool_of_prefill(scenario: Scenario):
    """Without a prefix cache each computed prompt has pages of its own."""
    prefill = scenario.pair.prefill.model_copy(update={"radix_cache": False})
    traced = run(scenario.model_copy(update={"prefill": prefill}))
    computed, read = computed_at(traced), messages(traced, KvSent)
    page, pool = scenario.page_size, traced.cluster.scenario.pair.prefill.pool_tokens
    requests = {r.request_id: r for r in traced.records.requests}
    for prefill_id in {r.prefill_id for r in requests.values()}:
        held = [
            (i, -(-requests[i].num_prompt_tokens // page)) for i in computed if requests[i].prefill_id == prefill_id
        ]
        changes = [(computed[i], num_pages) for i, num_pages in held] + [(read[i], -num_pages) for i, num_pages in held]
        in_flight = 0
        for _, num_pages in sorted(changes):
            in_flight += num_pages
            assert in_flight * page <= pool


@given(vllm_scenarios(SHORT_MS))
@examples(100)
def test_what_nobody_reads_in_time_expires_and_is_free_again(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    computed, granted = computed_at(traced), messages(traced, KvGranted)
    timeout_ns = scenario.pair.prefill.hold_timeout
    for entry in traced.journal:
        if entry.call == "next_step" and "hold_timeout" in str(commands := entry.returned[1]):
            assert any(isinstance(command, Tell) and isinstance(command.message, StopSending) for command in commands)
    for r in traced.records.requests:
        if "hold_timeout" in r.reason:
            assert r.end_ns >= computed[r.request_id] + timeout_ns
            assert r.first_token_ns is None
        elif r.request_id in granted:
            assert r.outcome == "finished" or "not fit" in r.reason


class Tokens:
    """Counts each request's tokens from the steps of decode instances."""

    def __init__(self) -> None:
        self.num_tokens: Counter[int] = Counter()
        self._batches: dict[str, set[int]] = {}

    def see(self, instance_id: str, step: PrefillStep | DecodeStep, num_steps: int, ended: set[int]) -> None:
        batch = self._batches.setdefault(instance_id, set())
        if isinstance(step, PrefillStep):
            self.num_tokens.update(chunk.request_id for chunk in step.chunks if chunk.is_last)
            return
        for request_id in step.joined:
            self.num_tokens[request_id] = self.num_tokens[request_id] or 1
        batch -= set(step.left)
        batch |= set(step.joined)
        assert len(batch) == step.num_requests
        self.num_tokens.update(dict.fromkeys(batch, num_steps))
        batch -= ended


@given(vllm_scenarios())
@examples(80)
def test_a_preempted_request_computes_all_that_it_had_and_has_as_many_tokens(scenario: Scenario):
    traced = run(scenario)
    requests = {r.request_id: r for r in traced.records.requests}
    tokens, again = Tokens(), Counter()
    for entry in traced.journal:
        if entry.call == "on_step_done" and entry.instance_id.startswith("decode"):
            step, result, _ = entry.args
            for chunk in chunks(step):
                r = requests[chunk.request_id]
                if chunk.is_last:
                    had = r.num_prompt_tokens + (tokens.num_tokens[r.request_id] or 1)
                    assert chunk.num_context_tokens + chunk.num_tokens == had
                    tokens.num_tokens[r.request_id] = tokens.num_tokens[r.request_id] or 1
                    again[r.request_id] += 1
            for part in parts(step):
                tokens.see(entry.instance_id, part, result.num_steps, {request_id for request_id, _ in result.ended})
    for r in traced.records.requests:
        assert r.outcome == "finished", r.reason
        assert again[r.request_id] == r.num_retractions
        assert (tokens.num_tokens[r.request_id] or 1) == r.num_output_tokens
    for instance in traced.cluster.instances:
        assert instance.num_available_pages == instance.cache.pool.num_pages


@given(vllm_scenarios())
@examples(200)
def test_whoever_came_last_gives_way_first(scenario: Scenario):
    """Who decodes on came before."""
    prefill = scenario.pair.prefill.model_copy(update={"chunked_prefill_tokens": 16})
    decode = scenario.pair.decode.model_copy(update={"preemption": LastArrivedFirst()})
    traced = run(scenario.model_copy(update={"prefill": prefill, "decode": decode}))
    arrivals = {r.request_id: (r.arrival_ns, r.request_id) for r in traced.records.requests}
    running: dict[str, set[int]] = defaultdict(set)
    for entry in traced.journal:
        if not entry.instance_id.startswith("decode"):
            continue
        where = running[entry.instance_id]
        if entry.call == "next_step":
            step, commands = entry.returned
            gave_way = [arrivals[command.request_id] for command in commands if isinstance(command, Retracted)]
            for part in parts(step):
                if isinstance(part, DecodeStep):
                    where -= set(part.left)
                    if gave_way and where:  # else all is chosen anew
                        assert max(arrivals[request_id] for request_id in where) < min(gave_way)
                    where |= set(part.joined)
        elif entry.call == "on_step_done":
            where -= {request_id for request_id, _ in entry.args[1].ended}


@given(vllm_scenarios())
@examples(80)
def test_gaps_between_tokens_add_up_to_the_time_after_the_first(scenario: Scenario):
    records = run(scenario).records
    if all(r.outcome == "finished" for r in records.requests):
        require_whole_gaps(records)


@given(vllm_scenarios(st.sampled_from([5, 30, None])))
@examples(60)
def test_many_steps_at_once_are_single_steps_and_runs_repeat(scenario: Scenario):
    many, _ = run_both_ways(scenario)
    assert digest(many.journal) == digest(run(scenario).journal)


def test_a_request_that_ends_as_it_is_merged_makes_room_for_one_to_be_computed_again():
    """Its pages come free after the instance has looked for such room: it looks again after one step."""
    sizes = [(67, 39), (39, 8), (121, 6), (66, 17), (16, 21), (1, 1), (1, 22), *[(1, 1)] * 5]
    load = [request(i, prompt, output, after=(0,) if i == 2 else ()) for i, (prompt, output) in enumerate(sizes)]
    changes = {
        "prefill__pool_tokens": 164,
        "prefill__chunked_prefill_tokens": 32,
        "prefill__max_prefill_tokens": 16,
        "prefill__max_running_requests": 1,
        "decode__pool_tokens": 160,
        "decode__max_running_requests": 2,
        "decode__radix_cache": False,
        "client": {"use": "closed_loop", "concurrency": 6},
    }
    many, _ = run_both_ways(small(*load, **VLLM, **changes))
    assert sum(r.num_retractions for r in many.records.requests)


def test_a_grant_that_takes_the_pages_of_a_begun_prompt_is_noticed_after_one_step():
    """The prompt, of a preempted request, lacks pages for its next chunk, and is preempted again."""
    sizes = [(2, 15), (7, 19), (1, 15), (7, 37), (5, 15), (7, 15), (1, 15), (1, 15), (7, 15)]
    load = [request(i, *tokens, arrival_ns=i * MILLISECOND) for i, tokens in enumerate(sizes)]
    steps = {"use": "affine", "prefill_base": "3 ms", "prefill_per_token": "17.3 us", "prefill_per_pair": "700 ns"}
    steps |= {"decode_base": "1.7 ms", "decode_per_request": "33.3 us"}
    changes = {
        "page_size": 2,
        "prefill__pool_tokens": 44,
        "prefill__chunked_prefill_tokens": 16,
        "decode__pool_tokens": 48,
        "decode__max_running_requests": 3,
        "network__bandwidth": "1 MB/s",
        "cost": steps,
    }
    many, _ = run_both_ways(small(*load, **VLLM, **changes))
    assert sum(r.num_retractions for r in many.records.requests)


@given(fault_schedules(vllm_scenarios(SHORT_MS)))
@examples(60)
def test_nothing_leaks_when_things_go_wrong(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert len(traced.records.requests) == len(traced.cluster.requests)


def test_the_last_to_arrive_is_preempted_and_ends_last():
    load = [request(i, 8, 40, arrival_ns=i * 20 * MILLISECOND) for i in range(3)]
    traced = run(small(*load, decode__pool_tokens=96, decode__radix_cache=False, **VLLM))
    first, second, third = traced.records.requests
    assert (first.num_retractions, second.num_retractions) == (0, 0)
    assert third.num_retractions > 0
    assert first.end_ns < second.end_ns < third.end_ns
    assert sum(s.num_tokens for s in traced.records.steps if s.kind == "decode") == 3 * 39 - third.num_retractions


def test_a_full_decode_pool_fills_the_pool_of_prefill_which_then_computes_nothing():
    """A decode pool for one request at a time, and a prefill pool for two prompts."""
    load = [request(i, 100, 20) for i in range(6)]
    one_slot = {"prefill__pool_tokens": 212, "prefill__radix_cache": False, "prefill__max_running_requests": 1}
    traced = run(small(*load, **one_slot, decode__pool_tokens=132, **VLLM))
    starts = [r.prefill_start_ns for r in traced.records.requests]
    ends = [r.end_ns for r in traced.records.requests]
    assert all(r.outcome == "finished" for r in traced.records.requests)
    assert starts[3] > ends[0] > starts[2]  # one is decoded, two are held, and the next waits


def test_the_policy_sees_all_waiting_prompts():
    """vLLM's waiting queue has no limit: the short prompt goes before all nine that came earlier, but the first two."""
    load = [request(i, 40 if i < 9 else 8, 2, arrival_ns=i) for i in range(10)]
    changes = {"prefill__max_running_requests": 2, "prefill__policy": "shortest_prompt_first"}
    starts = [r.prefill_start_ns for r in run(small(*load, **VLLM, **changes)).records.requests]
    assert sorted(range(10), key=lambda i: starts[i])[:3] == [0, 1, 9]


def test_who_is_computed_again_has_a_place_of_the_batch():
    """The second is preempted; when the first has ended, one of the small ones may run beside its chunks."""
    load = [request(i, prompt, output) for i, (prompt, output) in enumerate([(8, 30), (40, 40), (4, 30), (4, 30)])]
    limits = {"prefill__chunked_prefill_tokens": 16, "decode__max_running_requests": 2, "decode__pool_tokens": 84}
    traced = run(small(*load, **limits, decode__radix_cache=False, **VLLM), levels=True)
    assert traced.records.requests[1].num_retractions > 0
    levels = [row.levels.num_running for row in traced.records.levels if row.instance_id == "decode-0"]
    assert max(levels) == 2


def test_any_number_of_requests_may_have_kv_on_its_way():
    """SGLang's decode has metadata buffers for twice as many as may run; vLLM's has none."""
    load = [request(i, 100, 20) for i in range(6)]
    traced = run(small(*load, decode__max_running_requests=1, **VLLM), levels=True)
    assert max(row.levels.num_transferring for row in traced.records.levels if row.instance_id == "decode-0") > 2


def test_one_step_gives_pages_to_any_number_of_computed_prompts():
    d = build_machine(small(request(0, 9, 9), decode__max_running_requests=1, **VLLM), "decode-0")
    assert isinstance(d, DecodeInstance)
    for i in range(3):
        d.on_message(NewRequest(i, i, Spans.of(i, 9), 9, "prefill-0", "decode-0"), 0)
        d.on_message(PromptComputed(i), 0)
    d.next_step(0)
    assert list(d.transferring) == [0, 1, 2]


def test_a_request_that_fails_on_its_way_takes_no_slot():
    d = build_machine(small(request(0, 9, 9), decode__max_running_requests=1, **VLLM), "decode-0")
    assert isinstance(d, DecodeInstance)
    for i in range(2):
        d.on_message(NewRequest(i, i, Spans.of(i, 9), 9, "prefill-0", "decode-0"), 0)
        d.on_message(PromptComputed(i), 0)
        d.next_step(0)
        if i == 0:
            d.on_message(Cancel(i, "aborted"), 0)
    assert list(d.transferring) == [1]


@given(st.sampled_from([(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]), st.integers(1, 300), st.sampled_from([4, 16]))
@examples(30)
def test_ranks_of_unequal_tensor_parallelism_move_a_piece_of_each_block(
    tp: tuple[int, int], num_tokens: int, page_size: int
):
    """All pairs of ranks together move each KV head of each token once, whatever the sizes of the two sides."""
    changes = {"model": "qwen3-8b", "page_size": page_size, "prefill__tp": tp[0], "decode__tp": tp[1]}
    scenario = small(request(0, num_tokens, 3), engine="vllm", **changes)
    wire, attention = wire_of(scenario), layout_of(scenario, "prefill").model.attention
    assert isinstance(attention, GroupedQueryAttention)
    num_pages = -(-num_tokens // page_size)
    (unit,) = run(scenario).records.transfers
    assert unit.num_descriptors == wire.num_pairs * num_pages * 2 * attention.num_layers
    assert unit.num_bytes == num_pages * page_size * attention.num_kv_elements(1) * 2


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(2, 30), st.integers(0, 60)), min_size=2, max_size=5),
    st.integers(12, 30),
)
@examples(40)
def test_a_reserve_for_longest_outputs_is_looked_at_in_the_same_steps(sizes, num_pages):
    """A step that opens a page has taken it before the admission policy looks, and has not counted its tokens."""
    specs = [request(i, prompt, output, arrival_ns=ms * MILLISECOND) for i, (prompt, output, ms) in enumerate(sizes)]
    changes = {"decode__pool_tokens": 4 * num_pages, "decode__admission": "reserve_max_output"}
    many, single = run_both_ways(small(*specs, **{**VLLM, **changes}))
    assert decisions(many.journal) == decisions(single.journal)


def test_a_block_of_which_a_later_request_has_its_own_copy_can_still_be_evicted():
    """Two prompts share 10 tokens and are computed beside each other; the blocks of the first are needed once it has
    ended.
    """
    shared = Spans.of(1, 10)
    specs = [request(0, shared.then(Spans.of(2, 1)), 1), request(1, 19, 1), request(2, shared.then(Spans.of(3, 1)), 1)]
    sizes = {"pool_tokens": 26, "chunked_prefill_tokens": 0, "long_prefill_tokens": 5}
    changes = {f"aggregated__{name}": size for name, size in sizes.items()}
    traced = run(small_aggregated(*specs, engine="vllm", page_size=1, **changes), checked=True)
    assert all(one.outcome == "finished" for one in traced.records.requests)


@pytest.mark.parametrize(
    ("network", "grant_ns"),
    [
        ({"transport": "nixl-rdma"}, 0),
        ({"transport": "nixl-rdma", "nixl_push": True}, MILLISECOND + MILLISECOND // 2),
        ({"transport": "mooncake-rdma"}, MILLISECOND),
    ],
)
def test_kv_moves_beside_the_next_forward_of_prefill(network, grant_ns):
    """A message takes 1 ms, the writer of pushes waits half a millisecond. Prefill computes without pause."""
    changes = {f"network__{name}": value for name, value in network.items()}
    specs = [request(i, 64, 1) for i in range(3)]
    traced = run(small(*specs, engine="vllm", decode__admission="free_pages", **changes), checked=True)
    assert traced.records.requests[0].prefill_end_ns == 65 * MILLISECOND
    assert traced.records.requests[0].admitted_ns == 66 * MILLISECOND
    assert traced.records.requests[0].transfer_start_ns == 66 * MILLISECOND + grant_ns


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "sglang"}, "nixl_push is a setting of vLLM"),
        ({"network__transport": "mooncake-rdma"}, "give one of NIXL"),
        ({"decode__returns_kv": True, "decode__radix_cache": True}, "NixlPushConnector returns no KV"),
    ],
)
def test_pushes_that_vllm_has_not_are_refused(changes, reason):
    given = {"engine": "vllm", "network__transport": "nixl-rdma", "decode__admission": "free_pages", **changes}
    with pytest.raises(ConfigError, match=reason):
        small(request(0, 4, 4), network__nixl_push=True, **given)
