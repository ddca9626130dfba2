"""Drafts as GPUs compute them, without one in Triton's interpreter: padded batches over pages."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")
pytest.importorskip("triton", reason="the graphs' attention is written in Triton")

from dataclasses import replace

from pdreal.control.tasks import DecodeBatch, DraftRows, PrefillBatch, whole_tables
from pdreal.model.draft import DraftHead
from pdreal.rank.drafting import Drafter, seeds_of
from pdreal.rank.graphs import PrefillGraphs
from pdreal.rank.verify_graphs import VerifyGraphs
from pdreal.settings.model import from_catalog

from tests.real.models import GPU_OR_CPU, LLAMA, chunk, load, runner, tokens, whole

QWEN_MOE = replace(from_catalog("tiny-qwen3-moe"), vocab_size=300, max_context_tokens=512)
NUM_VERIFIED, LENGTHS = 4, [9, 40, 1]
STEPS = [  # rows, accepted tokens of each, taught tokens of each
    ((0, 1, 2), (2, 4, 1), ((7,), (), ())),
    ((0, 1, 2), (1, 3, 4), ((), (3, 9), (1, 2, 4))),
    ((1,), (2,), ((),)),
]
"""In graphs of 4, 4 and 1 rows."""


def two_ways(config, page_size, make_graphs):
    """A runner that computes kernel by kernel, one whose cache graphs fill, and the graphs."""
    model = load(config, device=GPU_OR_CPU)
    head = DraftHead(model)
    num_pages = 3 * -(-64 // page_size)
    drafters = [Drafter(head, NUM_VERIFIED, 4) for _ in range(2)]
    eager, padded = (runner(model, page_size=page_size, num_pages=num_pages, drafter=d) for d in drafters)
    return eager, padded, make_graphs(model, padded.kv, drafters[1])


def tables_of(page_size):
    num_pages = -(-64 // page_size)
    return [[1 + num_pages * i + page for page in range(num_pages)] for i in range(3)]


def assert_same_state(eager, padded, page_size):
    """Of the caches but their scratch pages, and of the drafts of the places that sequences may have."""
    here, there = (r.kv.memory[:, page_size:] for r in (eager, padded))
    torch.testing.assert_close(here, there, atol=3e-4, rtol=3e-4)
    here, there = (r._drafter for r in (eager, padded))
    assert torch.equal(here._proposals[1:], there._proposals[1:])
    torch.testing.assert_close(here._hidden[1:], there._hidden[1:], atol=3e-4, rtol=3e-4)


@pytest.mark.skipif(GPU_OR_CPU.type == "cuda", reason="on GPUs steps without graphs do not verify drafts")
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_padded_step_verifies_drafts_as_an_eager_one_does(page_size):
    eager, padded, graphs = two_ways(LLAMA, page_size, lambda _, kv, drafter: VerifyGraphs(drafter, kv, 4))
    tables, prompts = tables_of(page_size), [tokens(i, n, 300) for i, n in enumerate(LENGTHS)]
    for r in (eager, padded):
        last = r.run(whole(*zip(prompts, tables, strict=True)))
    lengths, seeds = list(LENGTHS), list(enumerate(eager.seeds, 1))
    for i, (rows, accepted, taught) in enumerate(STEPS):
        drafts = DraftRows(tuple(row + 1 for row in rows), accepted, taught, () if i else tuple(seeds))
        changes = whole_tables([tables[row] for row in rows])
        given = tuple(last[row] for row in rows), tuple(lengths[row] for row in rows)
        batch = DecodeBatch(*given, changes, drafts=drafts)
        made = graphs.decode(batch)
        assert eager.decode(batch) == made
        for at, row in enumerate(rows):
            lengths[row] += accepted[at]
            last[row] = made[(3 * NUM_VERIFIED - 2) * at + NUM_VERIFIED - 2 + accepted[at]]
        assert_same_state(eager, padded, page_size)


@pytest.mark.parametrize(("config", "page_size"), [(LLAMA, 16), (QWEN_MOE, 1)], ids=["llama", "moe"])
def test_a_padded_prompt_leaves_the_seeds_and_the_kv_of_an_eager_one(config, page_size):
    eager, padded, graphs = two_ways(config, page_size, lambda model, kv, d: PrefillGraphs(model, kv, drafter=d))
    tables, prompts = tables_of(page_size), [tokens(i, n, 300) for i, n in enumerate(LENGTHS)]
    begun = PrefillBatch((chunk(prompts[1], 0, 20, tables[1])._replace(next_token=prompts[1][20]),))
    batches = [begun, PrefillBatch((chunk(prompts[1], 20, 40, tables[1]), chunk(prompts[0], 0, 9, tables[0])))]
    for batch in batches:
        chosen = eager.run(batch)
        with torch.inference_mode():
            model = padded.model
            assert model.best_tokens(model.logits_of(graphs.hidden(batch))).tolist() == chosen
            seeds = seeds_of(*(made.cpu() for made in graphs.draft(batch, chosen)))
        assert [seed.token for seed in seeds] == [seed.token for seed in eager.seeds]
    assert_same_state(eager, padded, page_size)
