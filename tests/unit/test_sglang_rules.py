"""Rules of SGLang's scheduler, each on the smallest load that shows it, and what its releases do differently."""

from dataclasses import replace

import pytest

from pdsim.core.aggregated_instance import AggregatedInstance
from pdsim.core.aggregated_limits import AggregatedLimits
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.engine_rules import RELEASES, SGLANG_0_5_12, SGLANG_0_5_23, EngineRules
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import (
    Abort,
    AskOutput,
    Cancel,
    Command,
    DecodeStep,
    Finished,
    KvArrived,
    KvGranted,
    KvSent,
    LoadKv,
    NewRequest,
    PrefillStep,
    PutOut,
    Retracted,
    Send,
    StepResult,
    Wait,
)
from pdsim.core.prefill.prefill_instance import PrefillInstance
from pdsim.core.prefill.prefill_limits import PrefillLimits
from pdsim.core.sequence import Spans, TokenIds
from pdsim.core.transfer.send_planner import RankPairLayout, SendPlanner
from pdsim.policy.pages import FewestOutputsFirst, LeastFrequentlyUsed, LeastRecentlyUsed, ReserveDecodeTokens
from pdsim.policy.prefill import EveryChunk, FirstComeFirstServed, HighestPriorityFirst, LongestPrefixFirst
from pdsim.scenario.yaml_file import ConfigError
from tests.support import request, small, small_aggregated

OLD_AND_NEW = pytest.mark.parametrize("rules", [SGLANG_0_5_12, SGLANG_0_5_23], ids=["0.5.12", "0.5.23"])


def cache(
    num_pages: int, page: int = 1, *, radix: bool = True, rules: EngineRules = SGLANG_0_5_23, eviction=None
) -> KvCache:
    pool = PagePool(num_pages)
    tree = RadixCache(pool, page, eviction or LeastRecentlyUsed()) if radix else None
    return KvCache(pool, page, tree, splits_at_prompt=rules.splits_at_prompt)


def aggregated(
    num_pages: int = 100, *, radix: bool = True, page: int = 1, policy=None, eviction=None, **limits
) -> AggregatedInstance:
    defaults = {"max_running_requests": 8, "chunked_prefill_tokens": None, "max_prefill_tokens": 1000}
    rules = limits.get("rules", SGLANG_0_5_23)
    if policy is None:
        policy = HighestPriorityFirst() if "preemption_threshold" in limits else FirstComeFirstServed()
    return AggregatedInstance(
        "a",
        cache=cache(num_pages, page, radix=radix, rules=rules, eviction=eviction),
        limits=AggregatedLimits(**{**defaults, "overlap": False, **limits}),
        policy=policy,
        preemption_policy=FewestOutputsFirst(),
    )


def decode(num_pages: int = 100, *, page: int = 1, radix: bool = False, reserved: int = 0, **limits) -> DecodeInstance:
    return DecodeInstance(
        "d",
        cache=cache(num_pages, page, radix=radix),
        limits=DecodeLimits(**{"max_running_requests": 8, "saves_retracted": True, **limits}),
        admission_policy=ReserveDecodeTokens(reserved_tokens=reserved),
        preemption_policy=FewestOutputsFirst(),
    )


def prefill_instance(num_pages: int = 100, *, radix: bool = True, **limits) -> PrefillInstance:
    defaults = {"max_running_requests": 8, "chunked_prefill_tokens": 8, "max_prefill_tokens": 1000, "overlap": False}
    return PrefillInstance(
        "p",
        cache=cache(num_pages, radix=radix),
        limits=PrefillLimits(**{**defaults, **limits}),
        policy=FirstComeFirstServed(),
        planner=SendPlanner("p", RankPairLayout(page_size=1, page_bytes=1, num_planes=1), EveryChunk()),
    )


def arrive(instance, i: int, num_tokens: int, max_output: int = 10, *, prompt=None, priority=0, fixed=False) -> None:
    prompt = Spans.of(i, num_tokens) if prompt is None else prompt
    instance.on_message(NewRequest(i, i, prompt, max_output, "p", "d", priority, fixed), 0)
    if isinstance(instance, PrefillInstance):
        instance.on_message(KvGranted(i, 0, tuple(range(num_tokens))), 0)


def begun(instance) -> list[tuple[int, int, int]]:
    """Chunks of the next step, which is run."""
    step, _ = instance.next_step(0)
    if not isinstance(step, PrefillStep):
        return []
    instance.on_step_done(step, StepResult(), 0)
    return [(chunk.request_id, chunk.num_context_tokens, chunk.num_tokens) for chunk in step.chunks]


def run(d: DecodeInstance, *ids: int) -> DecodeStep:
    """The KV of these has come."""
    d.next_step(0)
    for i in ids:
        d.on_message(KvArrived(i, first_token_ends=False), 0)
    step, _ = d.next_step(0)
    assert isinstance(step, DecodeStep)
    return step


# Outputs that only their longest ends, where nothing is cached.


def test_a_request_that_ignores_eos_begins_only_if_all_can_run_to_their_ends():
    for fixed, expected in ((False, [(1, 0, 10)]), (True, [])):
        a = aggregated(62, radix=False, schedule_conservativeness=0.1)
        for i in range(2):
            arrive(a, i, 10, max_output=25, fixed=fixed)
            found = begun(a)
        assert found == expected  # together they grow to 70 tokens


def test_one_that_ends_early_makes_room_for_the_growth_of_the_other():
    for outputs, num_begun in (((40, 5), 2), ((5, 40), 1)):  # the last of all is put before the last but one
        a = aggregated(62, radix=False)
        for i, max_output in enumerate(outputs):
            arrive(a, i, 10, max_output=max_output, fixed=True)
        assert len(begun(a)) == num_begun


def test_what_is_expected_of_those_that_run_depends_on_the_release():
    for rules, expected in ((SGLANG_0_5_12, [(1, 0, 10)]), (SGLANG_0_5_23, [])):
        a = aggregated(100, rules=rules, schedule_conservativeness=0.1)
        arrive(a, 0, 10, max_output=70, fixed=True)
        begun(a)
        arrive(a, 1, 10, max_output=20, fixed=True)
        assert begun(a) == expected  # 90 tokens are free, of which the first takes 70 if it is believed


# Retraction.


def test_of_equal_requests_the_last_of_the_batch_is_retracted_and_the_batch_is_sorted():
    d = decode(15, saves_retracted=False)
    for i, num_tokens in enumerate((4, 3, 4)):
        arrive(d, i, num_tokens, max_output=3)
    d.on_step_done(run(d, 0, 1, 2), StepResult(), 0)
    _, commands = d.next_step(0)
    assert commands == [Retracted(2)]
    assert [request.request_id for request in d.batch.requests()] == [1, 0]


def test_outputs_of_a_retracted_request_are_cached_when_it_is_back():
    d = decode(19, radix=True)
    for i in range(2):
        arrive(d, i, 4)
    d.on_step_done(run(d, 0, 1), StepResult(5), 0)
    _, commands = d.next_step(0)
    assert AskOutput("d", 1, 6) in commands
    d.on_message(PutOut(1, Spans.of(9, 6)), 0)
    step, _ = d.next_step(0)
    d.on_step_done(step, StepResult(1, ((0, Spans.of(8, 7)),)), 0)
    _, commands = d.next_step(0)
    assert [command.request_id for command in commands if isinstance(command, LoadKv)] == [1]
    assert d.cache.num_cached_tokens(Spans(((1, 0, 4), (9, 0, 6)))) == 4 + 5  # the last has no KV


@OLD_AND_NEW
def test_a_retracted_request_asks_for_tokens_or_pages(rules):
    assert decode(page=4, rules=rules).resume_unit_tokens == (1 if rules.resumes_by_tokens else 4)


def test_the_ratio_is_the_initial_one_again_only_if_nobody_waits():
    a = aggregated(40, max_running_requests=1)
    arrive(a, 0, 10)
    begun(a)
    step, _ = a.next_step(0)
    arrive(a, 1, 10)
    a.on_step_done(step, StepResult(5, ((0, Spans.of(9, 6)),)), 0)
    expected = a._ratio.at(5)
    begun(a)
    assert a._ratio.at(5) == expected < a._ratio._initial


def test_a_prompt_computed_again_reserves_its_whole_longest_output():
    a = aggregated(60, schedule_conservativeness=0.01)
    arrive(a, 0, 10, max_output=30)
    begun(a)
    (running,) = a.running
    a.batch.requests()[0].num_output_tokens = 20
    assert (running.num_growth_tokens, running.num_reserved_tokens) == (10, 30)


# A forward that a begun prompt takes for itself.


@OLD_AND_NEW
def test_the_first_that_waits_behind_a_full_chunk_is_looked_at(rules):
    p = prefill_instance(rules=rules)
    for i in range(2):
        arrive(p, i, 6)
        begun(p)
    arrive(p, 2, 30)
    assert begun(p) == [(2, 0, 8)]
    arrive(p, 3, 7, prompt=Spans(((0, 0, 6), (9, 0, 1))))  # begins like the first
    begun(p)
    tree = p.cache.prefix_cache
    last = {node.sequence.spans[0][0]: node.last_access for node in tree.root.children.values()}
    assert (last[0] > last[1]) == rules.tries_when_spent


@OLD_AND_NEW
def test_a_partial_prompt_goes_on_though_what_runs_is_expected_to_take_all(rules):
    a = aggregated(60, chunked_prefill_tokens=8, schedule_conservativeness=1.4, rules=rules)
    arrive(a, 0, 8, max_output=16)
    begun(a)
    arrive(a, 1, 24, max_output=1)
    assert begun(a) == [(1, 0, 8)]
    a.batch.requests()[0].max_output_tokens = 60
    assert begun(a) == [(1, 8, 8)]


@OLD_AND_NEW
def test_one_that_does_not_fit_behind_a_full_chunk_blocks_the_others(rules):
    a = aggregated(62, chunked_prefill_tokens=8, rules=rules)
    arrive(a, 9, 1)
    begun(a)
    arrive(a, 0, 16)
    assert begun(a) == [(0, 0, 8)]
    arrive(a, 1, 30, max_output=20)
    assert begun(a) == [(0, 8, 8)]
    assert a.levels().blocked_by == ("pages" if rules.tries_when_spent else "")


@OLD_AND_NEW
def test_a_long_prompt_begins_behind_others_only_in_the_newer_release(rules):
    p = prefill_instance(chunked_prefill_tokens=20, max_prefill_tokens=24, rules=rules)
    arrive(p, 0, 6)
    arrive(p, 1, 30)
    assert begun(p) == [(0, 0, 6), *([] if rules.caps_chunked_prompts else [(1, 0, 14)])]


@OLD_AND_NEW
def test_of_a_spent_forward_only_a_prompt_whose_output_is_fixed_is_let_in_by_the_older_release(rules):
    for fixed in (False, True):
        a = aggregated(radix=False, chunked_prefill_tokens=8, max_prefill_tokens=4, rules=rules)
        arrive(a, 0, 12)
        assert begun(a) == [(0, 0, 8)]
        arrive(a, 1, 4, fixed=fixed)
        assert begun(a) == [(0, 8, 4), *([(1, 0, 4)] if fixed and rules.tries_when_spent else [])]


def test_lpm_sorts_the_queue_and_who_comes_later_stands_behind():
    a = aggregated(chunked_prefill_tokens=8, policy=LongestPrefixFirst())
    arrive(a, 0, 60)
    begun(a)
    arrive(a, 1, 6)
    arrive(a, 2, 20, prompt=Spans(((0, 0, 8), (2, 0, 12))))
    begun(a)
    arrive(a, 3, 20, prompt=Spans(((0, 0, 8), (3, 0, 12))))
    a.look([])
    assert [request.request_id for request in a._builder.waiting] == [2, 3, 1]


@pytest.mark.parametrize("policy", ["hrrn", "shortest_prefill_first"])
def test_orders_that_the_older_release_does_not_have_are_refused(policy):
    one = request(0, 9, 9)
    assert small(one, prefill__policy=policy)
    for make, role in ((small, "prefill"), (small_aggregated, "aggregated")):
        with pytest.raises(ConfigError, match=rf"{role}\.policy: SGLang 0\.5\.12 has neither"):
            make(one, **{f"{role}__policy": policy, "engine_version": "0.5.12"})


# Iterations without a step.


@OLD_AND_NEW
def test_the_older_release_drops_an_ended_batch_in_an_iteration_of_its_own(rules):
    a = aggregated(max_running_requests=1, rules=rules)
    arrive(a, 0, 4)
    begun(a)
    step, _ = a.next_step(0)
    arrive(a, 1, 4)
    a.on_step_done(step, StepResult(1, ((0, Spans.of(9, 2)),)), 0)
    assert isinstance(a.look([]), PrefillStep if rules.filters_ended else type(None))
    assert begun(a) == ([] if rules.filters_ended else [(1, 0, 4)])


# Priorities.


def test_a_running_request_gives_way_while_a_partial_prompt_goes_on():
    a = aggregated(100, max_running_requests=2, chunked_prefill_tokens=8, preemption_threshold=0)
    arrive(a, 0, 4, max_output=30)
    begun(a)
    arrive(a, 1, 10, priority=1)
    assert begun(a) == [(1, 0, 8)]
    arrive(a, 2, 4, priority=2)
    step, commands = a.next_step(0)
    assert [chunk.request_id for chunk in step.chunks] == [1, 2]
    assert commands[0] == Retracted(0)


def test_pages_that_are_freed_as_a_request_gives_way_are_for_ended_requests_too():
    a = aggregated(55, max_running_requests=2, preemption_threshold=0, rules=SGLANG_0_5_12)
    arrive(a, 9, 30, max_output=1)
    step, _ = a.next_step(0)
    a.on_step_done(step, StepResult(1, ((9, Spans.of(8, 1)),)), 0)
    arrive(a, 0, 4)
    arrive(a, 1, 4)
    begun(a)
    step, _ = a.next_step(0)
    a.on_step_done(step, StepResult(1, ((0, Spans.of(7, 2)),)), 0)
    arrive(a, 2, 4, priority=2)
    assert begun(a) == [(2, 0, 4)]
    assert [request.request_id for request in a.retracted] == [1]
    assert a.cache.num_cached_tokens(Spans.of(9, 30)) == 0  # 20 pages are to be free for request 0


def test_ready_requests_join_by_priority():
    d = decode(max_running_requests=1, extra_slots=2)
    for i in range(3):
        arrive(d, i, 4, priority=i)
    step = run(d, 0, 1, 2)
    assert step.joined == (2,)


# Metadata buffers, and places of a merge.


def test_no_more_kv_is_on_its_way_than_there_are_metadata_buffers():
    d = decode(max_running_requests=1, extra_slots=9)
    for i in range(4):
        arrive(d, i, 4)
    granted = [command for command in d.next_step(0)[1] if isinstance(command, Send)]
    assert [command.message.request_id for command in granted if isinstance(command.message, KvGranted)] == [0, 1]


def test_one_that_ends_with_its_first_token_takes_a_place_of_its_merge():
    d = decode(max_running_requests=2)
    for i in range(3):
        arrive(d, i, 4)
    d.limits = replace(d.limits, max_running_requests=4)  # or the third would get no pages
    d.next_step(0)
    d.limits = replace(d.limits, max_running_requests=2)
    for i in range(3):
        d.on_message(KvArrived(i, first_token_ends=i == 0), 0)
    step, _ = d.next_step(0)
    assert (step.joined, step.max_steps) == ((1,), 1)
    d.on_step_done(step, StepResult(), 0)
    assert d.next_step(0)[0].joined == (2,)


# Requests that are given up.


def test_a_running_request_that_is_given_up_gets_one_more_token_and_is_cached():
    a = aggregated()
    arrive(a, 0, 4)
    begun(a)
    a.on_message(Cancel(0, "enough"), 0)
    step, _ = a.next_step(0)
    assert (step.num_requests, step.max_steps) == (1, 1)
    assert a.on_step_done(step, StepResult(), 0) == [AskOutput("a", 0, 2)]
    a.on_message(PutOut(0, Spans.of(9, 2)), 0)
    assert a.next_step(0) == (Wait(), [])
    assert a.requests() == []
    assert a.cache.num_cached_tokens(Spans(((0, 0, 4), (9, 0, 2)))) == 5


def test_its_own_end_is_told_to_nobody():
    d = decode()
    arrive(d, 0, 4)
    step = run(d, 0)
    d.on_message(Cancel(0, "enough"), 0)
    assert not any(isinstance(c, Finished) for c in d.on_step_done(step, StepResult(1, ((0, Spans.of(9, 2)),)), 0))
    assert d.next_step(0) == (Wait(), [])
    assert d.num_available_pages == 100


@OLD_AND_NEW
def test_a_partial_prompt_that_is_given_up_is_computed_to_its_end_by_the_older_release(rules):
    p = prefill_instance(rules=rules)
    arrive(p, 0, 20)
    chunks = begun(p)
    p.on_message(Cancel(0, "enough"), 0)
    while found := begun(p):
        chunks += found
    assert len(chunks) == (3 if rules.computes_aborted_prompts else 1)


@OLD_AND_NEW
def test_a_partial_prompt_of_an_aggregated_instance_is_cached_when_it_is_computed_to_its_end(rules):
    a = aggregated(chunked_prefill_tokens=8, rules=rules)
    arrive(a, 0, 20)
    chunks = begun(a)
    a.on_message(Cancel(0, "enough"), 0)
    chunks += begun(a)
    step, _ = a.next_step(0)
    if rules.computes_aborted_prompts:
        assert a.on_step_done(step, StepResult(), 0) == [AskOutput("a", 0, 1)]
        a.on_message(PutOut(0, Spans.of(9, 1)), 0)
    assert a.requests() == []
    assert a.num_available_pages == 100
    assert a.cache.num_cached_tokens(Spans.of(0, 20)) == (20 if rules.computes_aborted_prompts else 0)


@OLD_AND_NEW
def test_one_that_is_given_up_in_the_queue_of_decode_keeps_its_place_in_the_older_release(rules):
    d = decode(11, rules=rules)
    for i, num_tokens in enumerate((8, 8, 1)):
        arrive(d, i, num_tokens, max_output=1)
    d.next_step(0)
    d.on_message(Cancel(1, "enough"), 0)
    granted = [command.message.request_id for command in d.next_step(0)[1]]
    assert granted == ([] if rules.keeps_aborted_places else [2])
    arrive(d, 3, 1, max_output=1)  # which makes the server look at all of its queue
    assert [command.message.request_id for command in d.next_step(0)[1]] == ([2, 3] if not granted else [3])


@OLD_AND_NEW
def test_its_sender_that_stops_does_not_take_its_place(rules):
    d = decode(11, rules=rules)
    for i in range(2):
        arrive(d, i, 8, max_output=1)
    d.next_step(0)
    d.on_message(Cancel(1, "enough"), 0)
    d.on_message(Abort(1, "stopped"), 0)
    assert d.requests() == ([0, 1] if rules.keeps_aborted_places else [0])


def test_one_that_was_given_up_in_the_queue_takes_a_slot_of_those_behind_it_until_all_are_admitted():
    d = decode(12, rules=SGLANG_0_5_12, max_running_requests=2)
    for i, num_tokens in enumerate((8, 8, 1, 1)):
        arrive(d, i, num_tokens, max_output=1)
    d.next_step(0)
    d.on_message(Cancel(1, "enough"), 0)
    d.on_message(Cancel(0, "enough"), 0)
    d.on_message(Abort(0, "stopped"), 0)
    granted = [[command.message.request_id for command in d.next_step(0)[1]] for _ in range(2)]
    assert granted == [[2], [3]]


# Least frequently used.


@OLD_AND_NEW
def test_an_insert_counts_once_for_each_request_or_each_time(rules):
    pool = PagePool(20)
    tree = RadixCache(pool, 1, LeastFrequentlyUsed())
    kv = KvCache(pool, 1, tree, counts_every_insert=rules.counts_every_insert)
    prompt = Spans.of(1, 4)
    lease = kv.open(prompt, 0)
    kv.grow(lease, 4)
    kv.checkpoint(lease, prompt, 2, is_chunk=True)
    kv.checkpoint(lease, prompt, 4)
    kv.close(lease, prompt, 4)
    (first,) = tree.root.children.values()
    assert first.num_hits == (2 if rules.counts_every_insert else 1)


# What is evicted.


@OLD_AND_NEW
def test_outputs_of_a_request_that_is_back_are_evicted_alone_or_with_its_prompt(rules):
    kv, tokens = cache(8, rules=rules), Spans(((0, 0, 4), (9, 0, 3)))
    lease = kv.open(tokens, 0)
    kv.grow(lease, 7)
    kv.checkpoint(lease, tokens, 7, 4)
    kv.drop(lease)
    kv.make_free(3)
    assert kv.num_cached_tokens(tokens) == (4 if rules.splits_at_prompt else 0)


def test_what_was_split_off_is_evicted_before_what_split_it_off():
    kv, first, second = cache(6), TokenIds([1, 2, 3]), TokenIds([1, 2, 6])
    leases = [kv.open(first, 3), kv.open(second, 3)]
    for lease in leases:
        kv.grow(lease, 3)
    kv.checkpoint(leases[0], first, 3)
    kv.close(leases[1], second, 3)
    kv.drop(leases[0])
    kv.make_free(3)
    assert (kv.num_cached_tokens(first), kv.num_cached_tokens(second)) == (2, 3)


def test_all_that_merge_are_cached_before_one_of_them_ends():
    d = decode(20, radix=True)
    arrive(d, 0, 6, max_output=1)
    arrive(d, 1, 1, max_output=1)
    arrive(d, 2, 3, prompt=Spans.of(0, 3))
    run(d, 0, 1, 2)
    kv = d.cache
    kv.make_free(kv.pool.num_free + 1)
    assert (kv.num_cached_tokens(Spans.of(0, 6)), kv.num_cached_tokens(Spans.of(1, 1))) == (3, 1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [29]),
        ({"rules": replace(SGLANG_0_5_23, refreshes_waiting=False)}, []),
        ({"eviction": LeastFrequentlyUsed()}, []),
        ({"policy": LongestPrefixFirst()}, list(range(1, 33))),
    ],
    ids=["0.5.23", "before", "lfu", "lpm"],
)
def test_every_32nd_choice_uses_the_cached_prefixes_of_those_that_wait(change, expected):
    a = aggregated(400, chunked_prefill_tokens=4, **change)
    for i in (0, 1):
        arrive(a, i, 4, max_output=1)
        step, _ = a.next_step(0)
        a.on_step_done(step, StepResult(1, ((i, Spans.of(9, 1)),)), 0)
    arrive(a, 2, 200)
    begun(a)
    arrive(a, 3, 8, prompt=Spans(((0, 0, 4), (3, 0, 4))))
    accesses = []
    for _ in range(33):
        begun(a)
        nodes = a.cache.prefix_cache.root.children.values()
        accesses += [node.last_access for node in nodes if node.sequence.spans[0][0] == 0]
    assert [i for i in range(1, 33) if accesses[i] != accesses[i - 1]] == expected


def test_the_last_chunk_of_an_aborted_prompt_is_not_cached():
    a = aggregated(100, chunked_prefill_tokens=8)
    arrive(a, 0, 30)
    for _ in range(2):
        begun(a)
    a.on_message(Cancel(0, "aborted"), 0)
    assert a.cache.num_cached_tokens(Spans.of(0, 30)) == 8
    assert a.cache.num_available_pages == 100


def test_prefill_does_not_cache_the_last_chunk_of_an_aborted_prompt():
    p = prefill_instance()
    arrive(p, 0, 30)
    for _ in range(2):
        begun(p)
    p.on_message(Cancel(0, "aborted"), 0)
    p.on_message(KvSent(0), 0)
    p.next_step(0)
    assert p.cache.num_cached_tokens(Spans.of(0, 30)) == 8
    assert p.cache.num_available_pages == 100


def test_an_aborted_transfer_keeps_its_metadata_buffer_until_its_sender_stops():
    d = decode(max_running_requests=1, extra_slots=9)
    for i in range(2):
        arrive(d, i, 4)
    d.next_step(0)
    d.on_message(Cancel(0, "aborted"), 0)
    arrive(d, 2, 4)
    d.next_step(0)
    assert list(d.transferring) == [1]
    d.on_message(Abort(0, "stopped"), 0)
    d.next_step(0)
    assert list(d.transferring) == [1, 2]


def test_an_aborted_transfer_keeps_its_reserve_until_decode_has_looked_at_transfers():
    d = decode(30, reserved=4)
    for i in range(2):
        arrive(d, i, 4)
    d.next_step(0)
    d.on_message(Cancel(0, "aborted"), 0)
    arrive(d, 2, 12, 1)  # 22 pages are free: 12 + 4 fit beside 4 in reserve, and not beside 8
    commands: list[Command] = []
    assert d.look(commands) is None
    assert list(d.transferring) == [1]
    d.look(commands)
    assert list(d.transferring) == [1, 2]


def test_all_that_can_be_evicted_goes_before_a_request_is_retracted():
    d = decode(37, radix=True)
    for i, num_tokens in enumerate((1, 8, 24)):
        arrive(d, i, num_tokens, 4)
    step = run(d, 0, 1, 2)
    d.on_step_done(step, StepResult(1, ((0, Spans.of(9, 2)),)), 0)  # its 2 tokens are cached last
    step, _ = d.next_step(0)
    d.on_step_done(step, StepResult(1), 0)
    _, commands = d.next_step(0)
    assert Retracted(2) in commands
    assert d.cache.levels() == (11, 0, 26)


def test_an_aborted_request_whose_kv_has_come_is_cached():
    d = decode(radix=True, max_running_requests=1, extra_slots=9)
    for i in range(2):
        arrive(d, i, 4)
    run(d, 0, 1)
    d.on_message(Cancel(1, "aborted"), 0)
    assert d.cache.num_cached_tokens(Spans.of(1, 5)) == 4


# Room for a prompt that ignores the end of sequence, to the fraction of a token.


def test_a_fraction_of_a_token_that_others_are_expected_to_take_counts():
    for max_output, expected in ((20, [(1, 0, 36)]), (21, [])):
        a = aggregated(20 + max_output * 7 // 10 + 37, radix=False)
        arrive(a, 0, 20, max_output=max_output + 1)
        begun(a)
        arrive(a, 1, 36, max_output=1, fixed=True)
        assert begun(a) == expected  # 0.7 * 20 tokens are whole, and 0.7 * 21 are not


def test_prefill_keeps_a_token_for_each_prompt_that_ignores_eos():
    for fixed, expected in ((False, [0, 1]), (True, [0])):
        p = prefill_instance(21, radix=False, chunked_prefill_tokens=None)
        for i, num_tokens in enumerate((14, 2)):
            arrive(p, i, num_tokens, fixed=fixed)
        assert [i for i, _, _ in begun(p)] == expected


# Longest prefix first.


def test_lpm_without_a_cache_is_fcfs():
    a = aggregated(radix=False, policy=LongestPrefixFirst(), chunked_prefill_tokens=200, max_running_requests=2)
    for i, num_tokens in enumerate((40, 40, 8)):
        arrive(a, i, num_tokens, max_output=1, prompt=Spans.of(9, num_tokens))
    assert [i for i, _, _ in begun(a)] == [0, 1]  # though the second begins like the first


@OLD_AND_NEW
def test_the_last_token_of_a_cached_prompt_counts_as_cached_or_not(rules):
    a = aggregated(policy=LongestPrefixFirst(), max_running_requests=1, rules=rules)
    arrive(a, 0, 5, max_output=1)
    step, _ = a.next_step(0)
    a.on_step_done(step, StepResult(1, ((0, Spans.of(9, 1)),)), 0)
    arrive(a, 1, 9, prompt=Spans(((0, 0, 4), (1, 0, 5))))
    arrive(a, 2, 5, prompt=Spans.of(0, 5))
    assert [i for i, _, _ in begun(a)] == [1 if rules.computes_last_token else 2]


def test_the_newest_release_comes_first():
    assert [next(iter(releases)) for releases in RELEASES.values()] == ["0.5.23", "0.33.0"]


def test_one_that_came_behind_the_choice_may_take_a_slot_with_the_next():
    a = aggregated(max_running_requests=1, overlap=True, preemption_threshold=0)
    arrive(a, 0, 4)
    begun(a)
    arrive(a, 1, 4, priority=0)
    step, _ = a.next_step(0)
    a.on_step_done(step, StepResult(), 0)
    arrive(a, 2, 4, priority=1)
    step, _ = a.next_step(0)  # chosen before the newcomer is looked at
    assert (step.num_requests, step.max_steps) == (1, 1)
    a.on_step_done(step, StepResult(), 0)
    assert begun(a) == [(2, 0, 4)]
