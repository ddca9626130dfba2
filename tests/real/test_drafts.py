"""Decoding with drafts: the tokens of greedy decoding, the KV of a prefill, and the acceptance of the simulation."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from itertools import islice
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from pdreal.control.requests import Drafted, Sampling
from pdreal.control.tasks import DecodeBatch, DraftRows, PrefillBatch, whole_tables
from pdreal.model.draft import DraftHead
from pdreal.rank.drafting import Drafter
from pdreal.rank.speculation import SequenceToVerify, Speculation

from pdsim.core.messages import DecodeStep
from pdsim.core.sequence import Spans, TokenIds
from pdsim.sim.instances.executor import SpeculativeExecutor
from pdsim.workload.lengths import Acceptance
from pdsim.workload.request_spec import Streams
from tests.real.local import Local, aggregated, pair
from tests.real.models import DEEPSEEK, LLAMA, chunk, generate, load, runner, tiny_model, tokens, whole
from tests.support import examples


def drafting(model=None, num_verified=4, **sizes):
    return runner(model, drafter=Drafter(DraftHead(model or tiny_model()), num_verified, 8), **sizes)


def kv_of(r, table, num_tokens):
    """Of all layers, the draft's last."""
    return r.kv.memory[:, r.kv.slots(table, 0, num_tokens)]


def _numbers(rng, most):
    while True:
        yield rng.randint(1, most)


def decode_on(r, speculation, seeds, prompts, tables, references, num_tokens):
    """Steps until each sequence has num_tokens tokens. The first ones come from prefill."""
    outputs = [list(reference[:1]) for reference in references]
    for row, seed in enumerate(seeds):
        speculation.keep_seed(row, seed)
    is_first = True
    while min(map(len, outputs)) < num_tokens:
        rows = [
            SequenceToVerify(i, len(output), max(1, num_tokens - len(output)), reference)
            for i, (output, reference) in enumerate(zip(outputs, references, strict=True))
        ]
        lengths = tuple(len(p) + len(o) - 1 for p, o in zip(prompts, outputs, strict=True))
        last = tuple(output[-1] for output in outputs)
        changes = whole_tables(tables) if is_first else ()
        drafts, is_first = speculation.begin(rows), False
        made = speculation.new_tokens(r.decode(DecodeBatch(last, lengths, changes, drafts=drafts)))
        for output, new in zip(outputs, made, strict=True):
            output.extend(new)
    return [output[:num_tokens] for output in outputs]


def test_drafts_that_the_target_did_not_choose_are_counted_by_how_near_they_are():
    speculation = Speculation(3, lambda _: iter([3, 2]))
    for computed in ([7, 8, 7, 9, 5, 1, 1], [7, 8, 4, 9, 5, 0, 1]):  # drafts, choices, whether they are near
        speculation.begin([SequenceToVerify(0, 1, 9, ())])
        speculation.new_tokens(computed)
    assert speculation.drafted(0) == Drafted(num_accepted=3, num_confirmed=1, num_near=1)


def test_near_is_one_step_of_bf16():
    best, near, far = 2.0, 2.0 - 2.0**-6, 2.0 - 1.1 * 2.0**-6
    found = tiny_model().are_near(torch.tensor([[near, best, far]] * 2), torch.tensor([1, 1]), torch.tensor([0, 2]))
    assert found.tolist() == [True, False]


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "latents"])
@given(st.data())
@examples(8)
def test_tokens_are_greedy_and_the_kv_is_that_of_a_prefill(config, data):
    """KV of target and draft, whatever a step accepts, and whatever rejected drafts have left behind it."""
    model = load(config)
    page_size, num_verified = data.draw(st.sampled_from([1, 4, 16])), data.draw(st.integers(2, 5))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    prompts = [tokens(seed, n, 300) for seed, n in enumerate(lengths)]
    num_tokens = data.draw(st.integers(2, 12))
    references = [generate(model, prompt, num_tokens) for prompt in prompts]
    num_pages = -(-(40 + 12 + 5) // page_size)
    tables = [[1 + len(prompts) * page + i for page in range(num_pages)] for i in range(len(prompts))]
    drafter = Drafter(DraftHead(model), num_verified, 8)
    r = runner(model, drafter=drafter, page_size=page_size, num_pages=2 * len(prompts) * num_pages)
    first = r.run(whole(*zip(prompts, tables, strict=True)))
    assert first == [reference[0] for reference in references]
    seed, is_taught = data.draw(st.integers(0, 99)), data.draw(st.booleans())
    most = num_verified if is_taught else 1
    speculation = Speculation(num_verified, lambda i: _numbers(Random(seed + i), most))
    given_references = references if is_taught else [reference[:1] for reference in references]
    outputs = decode_on(r, speculation, r.seeds, prompts, tables, given_references, num_tokens)
    assert outputs == references
    for prompt, output, table in zip(prompts, outputs, tables, strict=True):
        sequence, num_kv_tokens = [*prompt, *output], len(prompt) + num_tokens - 1
        twin = [page + len(prompts) * num_pages for page in table]
        r.run(PrefillBatch((chunk(sequence, 0, num_kv_tokens, twin)._replace(next_token=sequence[-1]),)))
        here, there = (kv_of(r, pages, num_kv_tokens) for pages in (table, twin))
        torch.testing.assert_close(here, there, atol=2e-4, rtol=2e-4)
    if len(prompts) == 1:  # others went on behind num_tokens
        assert drafter._proposals[1] == r.seeds[0].token
        torch.testing.assert_close(drafter._hidden[1], drafter._state_of(r.seeds[0]), atol=2e-4, rtol=2e-4)


def test_without_a_reference_the_heads_own_proposals_are_accepted():
    prompt, table = tokens(1, 20), list(range(1, 20))
    r = drafting()
    first = r.run(whole((prompt, table)))
    speculation = Speculation(4, lambda _: iter([3]))
    (output,) = decode_on(r, speculation, r.seeds, [prompt], [table], [first], 4)
    assert output[1] == r.seeds[0].token
    assert output[3] == generate(tiny_model(), [*prompt, *output[:3]], 1)[0]
    assert output != generate(tiny_model(), prompt, 4)


@given(st.lists(st.integers(2, 60), min_size=1, max_size=6), st.integers(0, 9))
@examples(20)
def test_each_step_accepts_as_many_tokens_as_in_the_simulation(lengths, seed):
    acceptance, streams = Acceptance(draft_tokens=5, accept_length=2.5), Streams(seed)

    def accepted(request_id):
        return acceptance.stream(streams.named(f"accepted/{request_id}"))

    simulated = SpeculativeExecutor({i: Spans.of(i, n) for i, n in enumerate(lengths)}, accepted)
    real, lacking = Speculation(5, accepted), {i: n - 1 for i, n in enumerate(lengths)}
    joined = tuple(lacking)
    while lacking:
        simulated.begin(DecodeStep(0, joined, (), len(lacking), 0, 0, 1))
        gained = real.begin([SequenceToVerify(i, 1, n, ()) for i, n in lacking.items()]).num_accepted
        assert simulated.finish(1).num_tokens == gained
        lacking = {i: n - g for (i, n), g in zip(lacking.items(), gained, strict=True) if n > g}
        joined = ()


DRAFTS = {"speculative_num_steps": 3, "speculative_accept_length": 2.5}


def serve(scenario, prompts, num_tokens):
    reference = {i: generate(tiny_model(), prompt, num_tokens) for i, prompt in enumerate(prompts)}
    local = Local(scenario, Sampling(num_tokens, ignore_eos=True), reference=reference)
    local.serve(prompts)
    assert not local.failed
    assert local.outputs == reference
    return local


@pytest.mark.parametrize("page_size", [1, 4])
def test_decodes_radix_cache_keeps_the_kv_that_prefill_computes(page_size):
    """Of the model and of the draft, behind transfers of suffixes."""
    prompts = [tokens(7, 30) + tokens(100 + i, 4 + 5 * i) for i in range(3)]
    prompts += [prompt + tokens(200, 3) for prompt in prompts]
    changes = {f"decode__{name}": value for name, value in DRAFTS.items()}
    local = serve(pair(page_size=page_size, decode__radix_cache=True, **changes), prompts, 9)
    twin = drafting(page_size=page_size)
    for worker in local.workers.values():
        for request_id, prompt in enumerate(prompts):
            sequence = [*prompt, *local.outputs[request_id]]
            _, pages = worker.instance.cache.prefix_cache.match(TokenIds(sequence), len(sequence))
            num_tokens = len(pages) * page_size
            least = len(sequence) - 2 if worker.instance.instance_id == "decode-0" else len(prompt) - 1
            assert num_tokens > least - page_size
            table = list(range(1, 257 // page_size))
            twin.run(PrefillBatch((chunk(sequence, 0, len(sequence) - 1, table)._replace(next_token=sequence[-1]),)))
            kept, expected = kv_of(worker.runner, pages, num_tokens), kv_of(twin, table, num_tokens)
            torch.testing.assert_close(kept, expected, atol=2e-4, rtol=2e-4)


def test_retracted_requests_go_on():
    changes = {f"decode__{name}": value for name, value in DRAFTS.items()}
    tight = {"decode__pool_tokens": 200, "decode__admission": {"use": "reserve_decode_tokens", "reserved_tokens": 0}}
    local = serve(pair(page_size=4, **changes, **tight), [tokens(i, 20) for i in range(8)], 30)
    assert local.num_retractions > 1


def test_an_aggregated_instance_drafts():
    changes = {f"aggregated__{name}": value for name, value in DRAFTS.items()}
    tight = {"aggregated__pool_tokens": 150, "aggregated__schedule_conservativeness": 0.01}
    local = serve(aggregated(page_size=1, **changes, **tight), [tokens(i, 6) for i in range(8)], 30)
    assert local.num_retractions > 0


def test_a_sequence_keeps_its_place_while_it_runs():
    speculation = Speculation(3, lambda _: iter([1] * 9))
    rows = [SequenceToVerify(i, 1, 9, ()) for i in range(3)]
    assert speculation.begin(rows) == DraftRows((1, 2, 3), (1, 1, 1), ((), (), ()), ((1, None), (2, None), (3, None)))
    speculation.leave(1)
    assert speculation.begin([rows[2], rows[0], SequenceToVerify(7, 1, 9, ())]).slots == (3, 1, 2)
    speculation.forget(1)
    assert list(islice(speculation._states, 5)) == [0, 2, 7]
