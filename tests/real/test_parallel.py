"""Several ranks, each a process of its own, make the tokens of one."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from dataclasses import replace
from multiprocessing import get_context

from pdreal.model import exchange
from pdreal.model.parallel import TensorParallel
from pdreal.settings.model import ModelError, from_catalog

from tests.real.models import CPU, LLAMA, decode_on, load, runner, tokens, whole


def serve(config, tp=None):
    """Tokens of a few sequences, over a paged cache."""
    r = runner(load(config, tp=tp), page_size=16)
    prompts = [tokens(seed, 5 + 9 * seed, config.vocab_size) for seed in range(3)]
    tables = [[1 + i, 4 + i, 7 + i] for i in range(3)]
    first = r.prefill(whole(*zip(prompts, tables, strict=True)))
    return decode_on(r, first, [len(prompt) for prompt in prompts], tables, 12)


CONFIGS = [
    from_catalog("tiny-qwen3"),
    from_catalog("tiny-qwen3-moe"),
    from_catalog("tiny-deepseek-v3"),
    replace(LLAMA, num_kv_heads=1),
]
"""Heads are divided, and experts; a single KV head is held by both."""
OF_EXPERTS = [config for config in CONFIGS if config.experts is not None]


def rank(index, size, rendezvous, results):
    torch.set_num_threads(1)
    tp = TensorParallel.join(index, size, rendezvous, CPU)
    divided = [serve(config, tp) for config in CONFIGS]
    whole = [serve(config, replace(tp, has_whole_experts=True)) for config in OF_EXPERTS]
    sending = replace(tp, has_whole_experts=True, sends_to_experts=True)
    sent = [serve(config, sending) for config in OF_EXPERTS]
    exchange.MOST_FIXED_TOKENS = 0
    counted = [serve(config, sending) for config in OF_EXPERTS]
    results.put((index, [*divided, *whole, *sent, *counted]))
    tp.leave()


@pytest.mark.slow
def test_two_ranks_make_the_tokens_of_one(tmp_path):
    context = get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank, args=(index, 2, f"file://{tmp_path}/meet", results)) for index in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    expected = [serve(config) for config in [*CONFIGS, *3 * OF_EXPERTS]]
    assert found == {0: expected, 1: expected}


@pytest.mark.parametrize("size", [4, 5])
def test_ranks_that_do_not_divide_the_heads(size):
    with pytest.raises(ModelError, match=f"tp {size} does not divide its query heads of 6"):
        load(LLAMA, tp=TensorParallel(0, size))
