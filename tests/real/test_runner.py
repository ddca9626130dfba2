"""Chunks, cached prefixes and batches over a paged cache: whatever the way, the tokens are those of one process."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from pdreal.control.tasks import ForgetKv, PrefillBatch, RestoreKv, SaveKv

from tests.real.models import chunk, decode_on, generate, runner, tiny_model, tokens, whole
from tests.support import examples


def kv_of(r, table, num_tokens):
    return r.kv.memory[:, r.kv.slots(table, 0, num_tokens)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_and_decode_make_the_tokens_of_the_reference(page_size):
    prompt = tokens(1, 70)
    r = runner(page_size=page_size, num_pages=1024 // page_size)
    table = list(range(1, 128 // page_size + 1))
    Random(0).shuffle(table)
    first = r.prefill(whole((prompt, table)))
    assert decode_on(r, first, [70], [table], 19) == [generate(tiny_model(), prompt, 20)]


def test_a_warm_up_leaves_nothing_behind():
    prompt, table = tokens(1, 70), [*range(1, 33)]
    r = runner(page_size=4, num_pages=32, prefills=True)
    r.warm_up()
    first = r.prefill(whole((prompt, table)))
    assert decode_on(r, first, [70], [table], 9) == [generate(tiny_model(), prompt, 10)]


@given(st.data())
@examples(30)
def test_chunks_make_the_kv_and_the_token_of_the_whole(data):
    page_size = data.draw(st.sampled_from([1, 4, 16, 64]))
    num_tokens = data.draw(st.integers(1, 150))
    prompt = tokens(data.draw(st.integers(0, 9)), num_tokens)
    cuts = sorted({0, num_tokens, *data.draw(st.lists(st.integers(1, num_tokens), max_size=6))})
    num_pages = -(-num_tokens // page_size)
    tables = data.draw(st.permutations(range(1, 2 * num_pages + 1)))
    once, chunked = tables[:num_pages], tables[num_pages:]
    r = runner(page_size=page_size, num_pages=2 * num_pages)
    token = r.prefill(whole((prompt, once)))
    for start, stop in pairwise(cuts):
        last = r.prefill(PrefillBatch((chunk(prompt, start, stop, chunked),)))
    assert last == token
    difference = (kv_of(r, once, num_tokens) - kv_of(r, chunked, num_tokens)).abs().max()
    assert difference < 1e-4


def test_a_prefix_that_another_computed_is_as_good_as_ones_own():
    prompts = [tokens(1, 48) + tokens(2, 9), tokens(1, 48) + tokens(3, 30)]
    r = runner(page_size=16)
    r.prefill(whole((prompts[0], [1, 2, 3, 4])))
    token = r.prefill(PrefillBatch((chunk(prompts[1], 48, 78, [1, 2, 3, 9, 8]),)))
    assert token == generate(tiny_model(), prompts[1], 1)


def test_a_batch_makes_the_tokens_of_each_alone():
    prompts = [tokens(seed, 3 + 11 * seed) for seed in range(6)]
    tables = [[1 + 6 * page + i for page in range(20)] for i in range(6)]
    r = runner()
    first = r.prefill(whole(*zip(prompts, tables, strict=True)))
    made = decode_on(r, first, [len(p) for p in prompts], tables, 11)
    assert made == [generate(tiny_model(), prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 7])
def test_groups_of_layers_are_told_of_when_their_kv_is_there(num_groups):
    r = runner(layer_groups=num_groups)
    num_layers, told = r.kv.num_layers, []

    def on_layers(num_done):
        told.append(num_done)
        done = num_layers * num_done // num_groups
        written = [bool(plane[r.kv.slots([5, 3], 0, 8)].all()) for plane in r.kv.planes]
        assert all(written[: 2 * done])
        assert not any(written[2 * (done + 1) :])

    r.prefill(whole((tokens(1, 8), [5, 3])), on_layers)
    assert told == sorted(set(told))
    assert told[-1] == num_groups
    assert len(told) == min(num_groups, num_layers)


def test_without_groups_nothing_is_told():
    told = []
    runner().prefill(whole((tokens(1, 8), [5, 3])), told.append)
    assert told == []


def test_kv_that_was_saved_comes_back_into_other_pages():
    prompt = tokens(4, 30)
    r = runner()
    table = [1, 2, 3, 4, 5, 6, 7, 8]
    first = r.prefill(whole((prompt, table)))
    r.run(SaveKv(17, 30, table))
    r.prefill(whole((tokens(5, 32), table)))
    r.run(RestoreKv(17, [16, 15, 14, 13, 12, 11, 10, 9]))
    made = decode_on(r, first, [30], [[16, 15, 14, 13, 12, 11, 10, 9, 1]], 4)
    assert made == [generate(tiny_model(), prompt, 5)]


def test_kv_that_was_saved_is_kept_once():
    r = runner()
    r.run(SaveKv(17, 3, [1]))
    r.run(ForgetKv(17))
    r.run(ForgetKv(17))
    with pytest.raises(KeyError):
        r.run(RestoreKv(17, [1]))


def test_a_cache_lies_in_the_memory_it_is_given():
    given = []

    def allocate(num_bytes):
        given.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return given[0]

    r = runner(num_pages=8, page_size=4, allocate=allocate)
    (memory,) = given
    r.prefill(whole((tokens(1, 4), [8])))
    assert memory.any()
    assert r.kv.planes[0].data_ptr() == memory.data_ptr()
    assert all(plane.is_contiguous() for plane in r.kv.planes)
