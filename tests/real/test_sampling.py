"""Tokens by temperature and seed: the right distribution, the same tokens by every way, and how likely they were."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from pdreal.control.requests import Draw, Sampling
from pdreal.model.parallel import TensorParallel
from pdreal.model.sampling import choose

from tests.real.local import Local, aggregated, pair
from tests.real.models import tokens

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def drawn(num_draws, **changes):
    draw = Draw(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=3, position=0, num_logprobs=None)._replace(
        **changes
    )
    rows = LOGITS.expand(num_draws, -1)
    return torch.tensor(choose(rows, [draw._replace(position=i) for i in range(num_draws)])[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_they_are_likely(temperature):
    num_draws = 20_000
    shares = drawn(num_draws, temperature=temperature).bincount(minlength=len(LOGITS)) / num_draws
    expected = (LOGITS / temperature).softmax(0)
    deviation = (expected * (1 - expected) / num_draws).sqrt()
    assert ((shares - expected).abs() < 5 * deviation).all()


@pytest.mark.parametrize(
    ("cut", "left"),
    [({"top_k": 2}, {0, 1}), ({"top_p": 0.6}, {0, 1}), ({"min_p": 0.2}, {0, 1, 2}), ({"top_p": 0.0}, {0})],
)
def test_cuts_leave_the_likeliest(cut, left):
    """The likeliest has 0.56; with the second it is 0.77, and the third has 0.22 of the first."""
    assert set(drawn(2000, **cut).tolist()) == left


def test_a_draw_depends_on_seed_position_and_token_alone():
    alone = [drawn(1, seed=seed).item() for seed in range(200)]
    draws = [Draw(1.0, 1.0, 0, 0.0, seed, 0, None) for seed in range(200)]
    assert choose(LOGITS.expand(200, -1), [*draws])[0] == alone
    assert len(set(alone)) > 3


def test_greedy_rows_stay_greedy_beside_others():
    draws = [None, Draw(1.0, 1.0, 0, 0.0, 1, 0, None), Draw(0.0, 1.0, 0, 0.0, 1, 0, 3)]
    chosen, logprobs = choose(LOGITS.expand(3, -1), draws)
    assert (chosen[0], chosen[2]) == (0, 0)
    assert logprobs[:2] == [None, None]
    own, tops = logprobs[2]
    every = LOGITS.log_softmax(0)
    assert own == pytest.approx(float(every[0]))
    assert tops == [[i, pytest.approx(float(every[i]))] for i in range(3)]


def test_a_rank_alone_has_the_whole_vocabulary():
    logits = torch.randn(2, 8)
    assert torch.equal(TensorParallel().whole_vocabulary(logits), logits)


def test_two_instances_and_one_draw_the_same_tokens():
    """Also when some are retracted, and computed again."""
    sampling = Sampling(20, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)
    prompts = [tokens(seed, 10 + 7 * seed) for seed in range(5)]
    outputs = []
    few_pages = {"aggregated__pool_tokens": 160}
    for scenario in (pair(), aggregated(), aggregated(**few_pages)):
        local = Local(scenario, sampling)
        local.serve(prompts)
        outputs.append(local.outputs)
    assert outputs[0] == outputs[1] == outputs[2]
    greedy = Local(pair(), sampling._replace(temperature=0.0))
    greedy.serve(prompts)
    assert greedy.outputs != outputs[0]
