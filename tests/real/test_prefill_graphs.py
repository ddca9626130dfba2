"""Short prefill forwards as GPUs run them, without one in Triton's interpreter: padded tokens over pages."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")
pytest.importorskip("triton", reason="the graphs' attention is written in Triton")

from dataclasses import replace

from pdreal.control.tasks import PrefillBatch, StateUse
from pdreal.memory.paged_kv import bits_of
from pdreal.model.weights import RandomWeights
from pdreal.rank.graphs import SIZES, PrefillGraphs, has_prefill_graphs
from pdreal.settings.model import from_catalog

from tests.real.models import CPU, DEEPSEEK, GPU_OR_CPU, HYBRID, LLAMA, MISTRAL, chunk, load, runner, state_pool, tokens

QWEN_MOE = replace(from_catalog("tiny-qwen3-moe"), vocab_size=300, max_context_tokens=512)
CHUNKS = [(0, 21), (37, 8), (64, 1), (0, 70), (12, 3)]
"""Tokens of each sequence's context, and of its chunk."""


def tables_of(page_size):
    num_pages = -(-128 // page_size)
    return [[1 + num_pages * i + page for page in range(num_pages)] for i in range(len(CHUNKS))]


@pytest.mark.parametrize(
    ("config", "page_size", "kv_dtype"),
    [(LLAMA, 1, None), (QWEN_MOE, 16, None), (LLAMA, 64, torch.float8_e4m3fn), (MISTRAL, 4, None)],
    ids=["llama", "moe", "kv in fp8", "windows"],
)
def test_padded_forwards_over_pages_make_the_same_tokens_and_kv(config, page_size, kv_dtype):
    model = load(config, device=GPU_OR_CPU)
    tables = tables_of(page_size)
    num_pages = sum(map(len, tables))
    eager, padded = (runner(model, page_size=page_size, num_pages=num_pages, kv_dtype=kv_dtype) for _ in range(2))
    graphs = PrefillGraphs(model, padded.kv, records_experts=config.experts is not None)
    prompts = [tokens(seed, sum(lengths), 300) for seed, lengths in enumerate(CHUNKS)]
    given = list(zip(prompts, CHUNKS, tables, strict=True))
    for r in (eager, padded):
        r.prefill(PrefillBatch(tuple(chunk(p, 0, max(1, context), t) for p, (context, _), t in given)))
    for rows in (range(len(CHUNKS)), [1], [3, 0]):  # 103 tokens, 8 and 91
        chunks = [chunk(p, context, len(p), t) for p, (context, _), t in (given[row] for row in rows)]
        batch = PrefillBatch(tuple(chunks))
        with torch.inference_mode():
            made = model.best_tokens(model.logits_of(graphs.hidden(batch))).tolist()
        assert made == eager.prefill(batch)
        assert all(len(chosen) == sum(len(c.tokens) for c in chunks) for chosen in graphs.choices)
        assert len(graphs.choices) == (config.num_layers if config.experts else 0)
        assert model.choices is None
    page_bytes = bits_of(padded.kv.memory)[:, page_size:], bits_of(eager.kv.memory)[:, page_size:]
    if kv_dtype is None:
        torch.testing.assert_close(*page_bytes, atol=2e-4, rtol=2e-4)
    else:
        assert (page_bytes[0] != page_bytes[1]).float().mean() < 0.01  # what lies between two values of e4m3


def test_padded_forwards_over_states_make_the_same_tokens_and_states():
    """Beside a runner without graphs, on a CPU. The first prompt leaves a state to the cache and goes on from there."""
    delta = replace(HYBRID.llama.delta, num_key_heads=1, num_value_heads=2)
    config = replace(HYBRID, num_layers=2, llama=replace(HYBRID.llama, delta=delta))
    models = [load(config, RandomWeights(0, CPU), device=device) for device in (GPU_OR_CPU, CPU)]
    padded, eager = (runner(model, page_size=16, num_pages=12, states=state_pool(model, 3)) for model in models)
    graphs = PrefillGraphs(models[0], padded.kv, states=padded.states)
    prompts = [tokens(seed, 70, config.vocab_size) for seed in range(2)]
    tables = [[1 + 5 * i + page for page in range(5)] for i in range(2)]
    for cuts, uses in (
        ([(0, 64), (0, 3)], [StateUse(0, 1, 3, 64), StateUse(0, 2)]),
        ([(64, 70), (3, 9)], [StateUse(3, 1), StateUse(2, 2)]),
    ):
        given = zip(prompts, cuts, tables, uses, strict=True)
        chunks = tuple(chunk(p, *cut, table)._replace(state=use) for p, cut, table, use in given)
        with torch.inference_mode():
            made = models[0].best_tokens(models[0].logits_of(graphs.hidden(PrefillBatch(chunks)))).tolist()
        assert made == eager.prefill(PrefillBatch(chunks))
        for ours, theirs in zip(padded.states.planes, eager.states.planes, strict=True):
            torch.testing.assert_close(ours[1:].cpu(), theirs[1:], rtol=1e-3, atol=1e-4)
    assert not graphs.hold(PrefillBatch(chunks[:1] * 17))


@pytest.mark.skipif(GPU_OR_CPU.type != "cuda", reason="CUDA graphs need a GPU")
def test_a_graph_makes_the_bytes_of_the_forward_that_it_holds():
    model = load(LLAMA, device=GPU_OR_CPU)
    r = runner(model, page_size=16, num_pages=64, prefills=True)
    graphs = r._prefill_graphs
    batch = PrefillBatch((chunk(tokens(0, 70, 300), 0, 70, range(1, 6)),))
    with torch.inference_mode():
        hidden, kv = graphs.hidden(batch).clone(), r.kv.memory.clone()
        r.kv.memory[:, 16:].zero_()
        graphs._forward(96)
        assert torch.equal(graphs._hidden[96][:1], hidden)
    assert torch.equal(r.kv.memory[:, 16:], kv[:, 16:])


def test_what_graphs_do_not_hold():
    """Latents, whose contexts are expanded, more tokens than the largest, and more sequences."""
    assert has_prefill_graphs(load(LLAMA))
    assert not has_prefill_graphs(load(DEEPSEEK))
    r = runner(load(LLAMA, device=GPU_OR_CPU), page_size=16, num_pages=256)
    graphs = PrefillGraphs(r.model, r.kv)

    def of(num_tokens):
        return chunk(tokens(0, num_tokens, 300), 0, num_tokens, [1] * -(-num_tokens // 16))

    assert graphs.hold(PrefillBatch((of(SIZES[-1]),)))
    assert not graphs.hold(PrefillBatch((of(SIZES[-1]), of(1))))
    assert graphs.hold(PrefillBatch((of(1),) * 64))
    assert not graphs.hold(PrefillBatch((of(1),) * 65))
