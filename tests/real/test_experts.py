"""A layer's experts against a loop over tokens, and against those that several ranks hold."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pdreal.model.exchange import packed, unpacked
from pdreal.model.experts import mix, route, run_experts
from pdreal.model.parallel import TensorParallel
from pdreal.model.weights import ExpertWeights, RandomWeights, load_weights
from pdreal.settings.model import ModelError, from_catalog
from torch.nn.functional import linear, silu

from tests.real.models import CPU, GPU_OR_CPU

CONFIG = replace(from_catalog("tiny-qwen3-moe"), num_layers=1)
_DEEPSEEK = from_catalog("tiny-deepseek-v3")
_ONE_LAYER = replace(_DEEPSEEK, num_layers=1, experts=replace(_DEEPSEEK.experts, num_layers=1))
UNGROUPED = replace(_DEEPSEEK.llama.routing, num_groups=1, num_active_groups=1)
CONFIGS = {
    "softmax": CONFIG,
    "groups": _ONE_LAYER,
    "one group": replace(_ONE_LAYER, llama=replace(_DEEPSEEK.llama, routing=UNGROUPED)),
    "odd sizes": replace(
        _ONE_LAYER,
        experts=replace(_ONE_LAYER.experts, num_experts=30, num_active=3),
        llama=replace(_DEEPSEEK.llama, routing=replace(_DEEPSEEK.llama.routing, num_groups=3)),
    ),
}
TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 1e-5}


def experts(tp=None, dtype=torch.float32, device=CPU, config=CONFIG) -> ExpertWeights:
    weights = load_weights(config, RandomWeights(0, CPU), tp or TensorParallel(), dtype, device).layers[0].mlp
    assert isinstance(weights, ExpertWeights)
    return weights


def hidden(num_tokens, dtype=torch.float32):
    return torch.randn(num_tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)


def one_by_one(x, weights):
    """Token by token, expert by expert, in fp32."""
    rows = []
    for row, shares, chosen in zip(x.float(), *route(x, weights), strict=True):
        parts = []
        for share, expert in zip(shares.float(), chosen, strict=True):
            gate, up = linear(row, weights.gate_up[expert].float()).chunk(2)
            parts.append(share * linear(silu(gate) * up, weights.down[expert].float()))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


CASES = [("softmax", 1), ("softmax", 3), ("softmax", 40), ("softmax", 80)]
CASES += [("groups", 9), ("one group", 9), ("odd sizes", 9)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("config", "num_tokens"), CASES)
def test_the_mix_is_that_of_each_token_alone(config, num_tokens, dtype, fused):
    """fused: the kernels of GPUs, without one in Triton's interpreter."""
    device, run = CPU, run_experts
    if fused:
        pytest.importorskip("triton", reason="the experts of GPUs are written in Triton")
        from pdreal.model import fused_experts

        device, run = GPU_OR_CPU, fused_experts.run_experts
    weights, x = experts(dtype=dtype, device=device, config=CONFIGS[config]), hidden(num_tokens, dtype).to(device)
    expected = one_by_one(x, weights)
    assert expected.std() > 0.1
    assert (run(x, weights)[0].float() - expected).abs().max() < TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize(("config", "num_more"), [("softmax", 40), ("groups", 7)])
def test_padding_of_a_graph_changes_nothing_of_the_tokens_before_it(config, num_more):
    """Rows that are all alike crowd the same experts, and may be in blocks of another size."""
    pytest.importorskip("triton", reason="the experts of GPUs are written in Triton")
    from pdreal.model import fused_experts

    weights, x = experts(device=GPU_OR_CPU, config=CONFIGS[config]), hidden(9).to(GPU_OR_CPU)
    mixed, chosen = fused_experts.run_experts(x, weights)
    padded = fused_experts.run_experts(torch.cat([x, x[:1].expand(num_more, -1)]), weights)
    torch.testing.assert_close(padded[0][:9], mixed, atol=1e-5, rtol=1e-5)
    assert (padded[1][:9] == chosen).all()


@given(st.integers(1, 64))
def test_each_token_has_as_many_experts_as_the_model_says(num_tokens):
    shares, chosen = route(hidden(num_tokens), experts())
    assert all(len(set(row)) == CONFIG.experts.num_active for row in chosen.tolist())
    torch.testing.assert_close(shares.sum(-1), torch.ones(num_tokens))


@given(st.integers(1, 64))
def test_experts_come_from_the_best_groups(num_tokens):
    """One after another, in words other than the code's."""
    weights, routing = experts(config=_ONE_LAYER), _ONE_LAYER.llama.routing
    x = hidden(num_tokens)
    shares, chosen = route(x, weights)
    scores = (x @ weights.router.T).sigmoid()
    size = _ONE_LAYER.experts.num_experts // routing.num_groups
    for row, found, said in zip(scores, chosen.tolist(), shares, strict=True):
        judged = (row + weights.bias).tolist()
        groups = [range(first, first + size) for first in range(0, len(judged), size)]
        groups.sort(key=lambda group: -sum(sorted(judged[i] for i in group)[-2:]))
        candidates = [i for group in groups[: routing.num_active_groups] for i in group]
        assert set(found) == set(sorted(candidates, key=judged.__getitem__)[-weights.num_active :])
        torch.testing.assert_close(said, routing.scale * row[found] / row[found].sum())


@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
@pytest.mark.parametrize("size", [2, 4])
def test_what_ranks_compute_adds_up(size, whole):
    x = hidden(9)
    mixes = [run_experts(x, experts(TensorParallel(rank, size, whole))) for rank in range(size)]
    mixed, chosen = run_experts(x, experts())
    torch.testing.assert_close(sum(mix for mix, _ in mixes), mixed)
    assert all(torch.equal(of_rank, chosen) for _, of_rank in mixes)


@pytest.mark.parametrize(("config", "num_tokens"), [("softmax", 40), ("groups", 9), ("odd sizes", 1)])
def test_kernels_compute_the_experts_of_a_rank(config, num_tokens):
    """A token that chose none of them adds nothing."""
    pytest.importorskip("triton", reason="the experts of GPUs are written in Triton")
    from pdreal.model import fused_experts

    x = hidden(num_tokens)
    for rank in range(2):
        ranks = TensorParallel(rank, 2, has_whole_experts=True)
        mixed, chosen = run_experts(x, experts(ranks, config=CONFIGS[config]))
        weights = experts(ranks, device=GPU_OR_CPU, config=CONFIGS[config])
        fused, fused_chosen = fused_experts.run_experts(x.to(GPU_OR_CPU), weights)
        torch.testing.assert_close(fused.cpu(), mixed, atol=1e-5, rtol=1e-5)
        assert torch.equal(fused_chosen.cpu().long(), chosen)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("config", "num_tokens"), [("softmax", 40), ("groups", 9), ("odd sizes", 1)])
def test_packed_tokens_are_mixed_by_the_experts_of_another_rank(config, num_tokens, fused):
    """The rows lie apart, as they are received."""
    device, x = CPU, hidden(num_tokens)
    if fused:
        pytest.importorskip("triton", reason="the experts of GPUs are written in Triton")
        from pdreal.model import fused_experts

        device = GPU_OR_CPU
    own_mix, own_route = (fused_experts.mix, fused_experts.route) if fused else (mix, route)
    for rank in range(2):
        ranks = TensorParallel(rank, 2, has_whole_experts=True)
        mixed, _ = run_experts(x, experts(ranks, config=CONFIGS[config]))
        weights = experts(ranks, device=device, config=CONFIGS[config])
        rows = packed(x.to(device), *own_route(x.to(device), weights))
        torch.testing.assert_close(own_mix(*unpacked(rows, x.shape[1]), weights).cpu(), mixed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", ["softmax", "groups"])
def test_a_rank_loads_its_experts_as_they_are(config):
    whole, size = experts(config=CONFIGS[config]), 4
    for rank in range(size):
        weights = experts(TensorParallel(rank, size, has_whole_experts=True), config=CONFIGS[config])
        assert weights.own == range(4 * rank, 4 * rank + 4)
        own = slice(weights.own.start, weights.own.stop)
        assert torch.equal(weights.gate_up, whole.gate_up[own])
        assert torch.equal(weights.down, whole.down[own])
        assert torch.equal(weights.router, whole.router)


def test_ranks_that_do_not_divide_an_expert():
    with pytest.raises(ModelError, match="tp 8 does not divide its intermediate size of 60"):
        load_weights(
            replace(CONFIG, experts=replace(CONFIG.experts, intermediate_size=60)),
            RandomWeights(0, CPU),
            TensorParallel(0, 8),
            torch.float32,
            CPU,
        )


def test_ranks_that_do_not_divide_the_number_of_experts():
    with pytest.raises(ModelError, match="tp 4 does not divide its number of experts of 30"):
        TensorParallel(0, 4, has_whole_experts=True).check(CONFIGS["odd sizes"])
    with pytest.raises(ModelError, match="tiny-qwen3 has no experts"):
        TensorParallel(0, 2, has_whole_experts=True).check(from_catalog("tiny-qwen3"))
