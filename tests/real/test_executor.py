"""Instances served by executors and runners: the tokens of the reference, whatever the core decides."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

import asyncio
from array import array
from random import Random
from time import monotonic_ns
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from pdreal.control.clock import Timeline
from pdreal.control.requests import Sampling
from pdreal.control.tasks import ForgetKv, SaveKv
from pdreal.memory.paged_kv import HostKv, SavedKv
from pdreal.rank import step_loop
from pdreal.rank.executor import Executor, NewToken

from pdsim.core import messages as m
from pdsim.core.memory.kv_cache import Lease
from pdsim.core.messages import DecodeStep, PrefillChunk, PrefillStep, StepResult
from pdsim.core.sequence import TokenIds
from tests.real.local import Local, aggregated, pair
from tests.real.models import WholeSequence, tiny_model, tokens
from tests.support import examples


def is_greedy(prompt, output):
    """Whether each token is the best behind what was before it: one forward says so of a whole sequence."""
    model = tiny_model()
    sequence = torch.tensor([*prompt, *output[:-1]])
    with torch.inference_mode():
        logits = model.logits(sequence, torch.arange(len(sequence)), WholeSequence())
    return model.best_tokens(logits[len(prompt) - 1 :]).tolist() == output


def shared_prefix_prompts(num_prompts, seed=0):
    """Random parts behind prefixes that several have in common."""
    rng = Random(seed)
    prefixes = [tokens(100 + i, rng.randrange(8, 60)) for i in range(max(1, num_prompts // 6))]
    return [
        rng.choice(prefixes)[: rng.randrange(61)] + tokens(1000 + i, rng.randrange(1, 25)) for i in range(num_prompts)
    ]


def serve(scenario, prompts, num_tokens, **options):
    local = Local(scenario, Sampling(num_tokens, ignore_eos=True), **options)
    local.serve(prompts)
    for request_id, output in local.outputs.items():
        assert len(output) == num_tokens
        assert is_greedy(prompts[request_id], output), f"request {request_id}"
    return local


@pytest.mark.slow
def test_200_prompts_with_shared_prefixes():
    prompts = shared_prefix_prompts(200)
    scenario = pair(prefill__overlap=True, decode__radix_cache=True, decode__max_running_requests=24)
    assert len(serve(scenario, prompts, 8).outputs) == 200


@given(st.data())
@examples(6)
def test_a_pair_of_instances_under_whatever_settings(data):
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    prompts = shared_prefix_prompts(data.draw(st.integers(1, 8)), data.draw(st.integers(0, 99)))
    num_tokens = data.draw(st.integers(1, 20))
    least = max(map(len, prompts)) + num_tokens + 3 * page_size
    scenario = pair(
        page_size=page_size,
        prefill__chunked_prefill_tokens=data.draw(st.sampled_from([0, 16, 32])),
        prefill__overlap=data.draw(st.booleans()),
        prefill__radix_cache=data.draw(st.booleans()),
        prefill__transfer=data.draw(st.sampled_from(["every_chunk", "whole_prompt"])),
        prefill__pool_tokens=least + 16 + data.draw(st.sampled_from([0, 200])),
        decode__radix_cache=data.draw(st.booleans()),
        decode__pool_tokens=least + data.draw(st.sampled_from([0, 40, 400])),
        decode__admission={"use": "reserve_decode_tokens", "reserved_tokens": 0},
        decode__max_running_requests=data.draw(st.integers(1, 6)),
    )
    local = serve(scenario, prompts, num_tokens, seed=data.draw(st.integers(0, 99)))
    assert all("do not fit" in reason for reason in local.failed.values())


TIGHT = {
    "decode__pool_tokens": 200,
    "decode__admission": {"use": "reserve_decode_tokens", "reserved_tokens": 0},
}


@pytest.mark.parametrize("radix", [False, True])
def test_retracted_requests_come_back_with_their_kv(radix):
    local = serve(pair(decode__radix_cache=radix, **TIGHT), shared_prefix_prompts(8), 30)
    assert local.num_retractions > 3


def test_an_aggregated_instance_computes_retracted_requests_again():
    prompts = [tokens(i, 6) for i in range(8)]
    scenario = aggregated(
        aggregated__pool_tokens=130, aggregated__schedule_conservativeness=0.01, aggregated__radix_cache=True
    )
    assert serve(scenario, prompts, 30).num_retractions > 1


def test_kv_that_does_not_come_back_is_seen(monkeypatch):
    monkeypatch.setattr(SavedKv, "restore", lambda *_: None)
    with pytest.raises(AssertionError, match="request"):
        serve(pair(**TIGHT), shared_prefix_prompts(8), 30)


WRITES = ["write_through", "write_through_selective", "write_back"]


def turns(num_turns, num_sessions, seed=0):
    """Prompts of sessions that take turns at random, each of which continues the last one's."""
    rng = Random(seed)
    sessions = [tokens(500 + i, rng.randrange(20, 60)) for i in range(num_sessions)]
    prompts = []
    for i in range(num_turns):
        at = rng.randrange(num_sessions)
        sessions[at] = sessions[at] + tokens(700 + i, rng.randrange(1, 20))
        prompts.append(sessions[at][:140])
    return prompts


@given(st.data())
@examples(8)
def test_host_memory_behind_the_prefix_caches(data):
    """Tokens are those of one process, whatever was written there and loaded back between steps."""
    write, host = data.draw(st.sampled_from(WRITES)), data.draw(st.sampled_from(["0.1 MB", "1 MB"]))
    scenario = pair(
        page_size=data.draw(st.sampled_from([1, 4, 16])),
        prefill__host_cache=host,
        prefill__host_cache_write=write,
        prefill__overlap=data.draw(st.booleans()),
        prefill__chunked_prefill_tokens=data.draw(st.sampled_from([0, 32])),
        prefill__pool_tokens=data.draw(st.sampled_from([256, 400])),
        decode__radix_cache=True,
        decode__host_cache=host,
        decode__host_cache_write=write,
        decode__pool_tokens=data.draw(st.sampled_from([256, 400])),
        decode__max_running_requests=data.draw(st.integers(1, 6)),
        decode__admission={"use": "reserve_decode_tokens", "reserved_tokens": 0},
    )
    local = serve(scenario, turns(12, 3, data.draw(st.integers(0, 99))), 6, seed=data.draw(st.integers(0, 99)))
    assert all("do not fit" in reason for reason in local.failed.values())


@pytest.mark.parametrize("write", WRITES)
def test_tokens_are_the_same_with_host_memory_and_without(write):
    """Both sides evict, write and load; aggregated instances as well."""
    prompts = turns(24, 6)
    tight = {"prefill__pool_tokens": 300, "decode__pool_tokens": 400, "decode__radix_cache": True}
    host = {"host_cache": "2 MB", "host_cache_write": write}
    hosts = {f"{role}__{name}": value for role in ("prefill", "decode") for name, value in host.items()}
    with_host = pair(**hosts, **tight)
    tiered, plain = serve(with_host, prompts, 6), serve(pair(**tight), prompts, 6)
    assert tiered.outputs == plain.outputs
    assert {(who, type(copy)) for who, copy in tiered.copies} == {
        (who, kind) for who in tiered.workers for kind in (m.WriteBackup, m.LoadBack)
    }
    small = {"aggregated__pool_tokens": 300, "aggregated__radix_cache": True}
    alone = serve(aggregated(aggregated__host_cache="2 MB", aggregated__host_cache_write=write, **small), prompts, 6)
    assert alone.outputs == plain.outputs
    assert {type(copy) for _, copy in alone.copies} == {m.WriteBackup, m.LoadBack}


def test_pages_that_are_not_loaded_back_are_seen(monkeypatch):
    monkeypatch.setattr(HostKv, "_load", lambda *_: None)
    with pytest.raises(AssertionError, match="request"):
        serve(pair(prefill__pool_tokens=300, prefill__host_cache="2 MB"), turns(24, 6), 6)


class Tables:
    """An instance whose requests have as many pages of 4 as their tokens need, each of its own."""

    def __init__(self):
        self.num_tokens = {}

    def lease(self, request_id):
        return Lease(table=[100 * request_id + i for i in range(-(-self.num_tokens[request_id] // 4))])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=30))
@examples(60)
def test_ranks_that_make_the_changes_know_all_page_tables(turns):
    """Each turn so many requests join and one leaves; all that run get a token."""
    instance, known, running = Tables(), {}, []
    e, ids = Executor(instance, 4), iter(range(1000))
    for num_joining, leaving in turns:
        joined = tuple(next(ids) for _ in range(num_joining))
        for request_id in joined:
            e.add(request_id, TokenIds(range(3)), Sampling(1000))
            e.add_first_token(request_id, 7, 0)
            instance.num_tokens[request_id] = 4
        left = tuple(running[leaving : leaving + 1])
        running = [request_id for request_id in (*running, *joined) if request_id not in left]
        step = DecodeStep(1, joined, left, len(running), 0, 0, 1)
        batch = e.begin(step)
        for row, start, pages in batch.changes:
            known[row] = [*known.get(row, [])[:start], *pages]
        new = e.finish(step, [7] * len(running)).new_tokens
        assert sorted(token.request_id for token in new) == sorted(running)
        assert [known[row] for row in range(len(new))] == [instance.lease(token.request_id).table for token in new]
        assert [n + 1 for n in batch.num_kv_tokens] == [instance.num_tokens[token.request_id] for token in new]
        for request_id in running:
            instance.num_tokens[request_id] += 1


class OnePage:
    def lease(self, request_id):
        return Lease(table=[1])


def executor(sampling, end_tokens=()):
    e = Executor(OnePage(), 64, end_tokens)
    e.add(0, TokenIds([5, 6]), sampling)
    return e


def first(e, token):
    step = PrefillStep(1, (PrefillChunk(0, 0, 2, is_last=True),))
    e.begin(step)
    return e.finish(step, [token])


def after(e, *made):
    """The result of the decode step that makes the last of these tokens."""
    outcome = None
    for i, token in enumerate(made):
        step = DecodeStep(i, (0,) if i == 0 else (), (), 1, 3, 3, 1)
        e.begin(step)
        outcome = e.finish(step, [token])
    return outcome


@pytest.mark.parametrize(
    ("sampling", "made", "output"),
    [
        (Sampling(3), [1, 2, 3], [1, 2, 3]),
        (Sampling(9, stop_after_tokens=2), [1, 2], [1, 2]),
        (Sampling(9), [1, 42], [1, 42]),
        (Sampling(9, ignore_eos=True), [1, 42], None),
        (Sampling(9, stop_token_ids=(2,)), [1, 2], [1, 2]),
        (Sampling(9, stop_token_ids=(2,), ignore_eos=True), [1, 2], [1, 2]),
        (Sampling(9), [1, 2], None),
    ],
)
def test_what_ends_a_sequence(sampling, made, output):
    e = executor(sampling, end_tokens=(42,))
    first(e, made[0])
    outcome = after(e, *made[1:])
    assert outcome.new_tokens == [NewToken(0, made[-1])]
    assert outcome.result.ended == (() if output is None else ((0, TokenIds(output)),))


@pytest.mark.parametrize(
    ("sampling", "is_fixed"),
    [
        (Sampling(9), False),
        (Sampling(9, ignore_eos=True), True),
        (Sampling(9, ignore_eos=True, stop_after_tokens=9), True),
        (Sampling(9, ignore_eos=True, stop_after_tokens=2), False),
        (Sampling(9, ignore_eos=True, stop_token_ids=(2,)), False),
    ],
)
def test_a_length_is_fixed_if_no_token_can_end_the_output(sampling, is_fixed):
    assert sampling.has_fixed_length == is_fixed


def test_a_sequence_can_end_with_its_first_token():
    assert first(executor(Sampling(1)), 9).result.ended == ((0, TokenIds([9])),)
    assert first(executor(Sampling(9), end_tokens=(9,)), 9).result.ended == ((0, TokenIds([9])),)


def test_nothing_comes_of_requests_that_were_forgotten():
    e = executor(Sampling(9))
    step = PrefillStep(1, (PrefillChunk(0, 0, 2, is_last=True),))
    e.begin(step)
    assert e.forget(0) is None
    assert e.forget(0) is None
    assert e.finish(step, [7]) == (StepResult(), [])


def test_what_was_saved_is_forgotten_with_its_request():
    e = executor(Sampling(9))
    first(e, 1)
    assert e.save(m.SaveKv(0, (1,))) == SaveKv(0, 2, array("i", [1]))
    assert e.forget(0) == ForgetKv(0)


def test_a_wait_that_a_message_ends_is_not_ended_again_when_its_time_comes(monkeypatch):
    """The loop would turn while a step runs, and begin another."""
    turns = []

    def asks(_, *, drain, **__):
        while True:
            turns.append(drain())
            yield m.Wait(until_ns=50_000_000 if len(turns) == 1 else None)

    monkeypatch.setattr(step_loop, "instance_loop", asks)
    seen = dict.fromkeys(("carry_out", "on_tokens", "on_layers", "forget"), None)

    async def main():
        timeline = Timeline(monotonic_ns(), asyncio.get_running_loop())
        log = SimpleNamespace(levels=lambda _: None)
        idle = SimpleNamespace(num_requests=0)
        loop = step_loop.StepLoop(None, idle, None, timeline, log, **seen, flush_soon=lambda: None)
        loop.go_on()
        await asyncio.sleep(0.01)
        loop.post(m.Woken())
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert turns == [[], [m.Woken()]]
