"""The decode path of GPUs, without one in Triton's interpreter: padded batches over pages, and the fused operations."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")
pytest.importorskip("triton", reason="the decode path of GPUs is written in Triton")

from dataclasses import replace

from pdreal.control.tasks import DecodeBatch, PrefillBatch, StateUse, whole_tables
from pdreal.memory.paged_kv import bits_of
from pdreal.model import fused, operations
from pdreal.model.weights import RandomWeights
from pdreal.rank.graphs import DecodeGraphs, batch_sizes
from pdreal.settings.model import from_catalog

from tests.real.models import (
    CPU,
    DEEPSEEK,
    GPU_OR_CPU,
    HYBRID,
    LLAMA,
    WINDOWS,
    chunk,
    load,
    runner,
    state_pool,
    tokens,
    whole,
)


@pytest.mark.parametrize(
    "config", [LLAMA, DEEPSEEK, replace(WINDOWS, window_tokens=5)], ids=["llama", "latent", "windows"]
)
@pytest.mark.parametrize(("page_size", "kv_dtype"), [(1, None), (16, None), (16, torch.float8_e4m3fn)])
def test_padded_batches_over_pages_make_the_same_tokens(page_size, kv_dtype, config):
    """A step is a chunk of one token behind its context."""
    model = load(config, device=GPU_OR_CPU)
    prompts = [tokens(seed, 3 + 7 * seed, config.vocab_size) for seed in range(3)]
    num_pages = -(-64 // page_size)
    tables = [[1 + num_pages * i + page for page in range(num_pages)] for i in range(3)]
    r = runner(model, page_size=page_size, num_pages=3 * num_pages, kv_dtype=kv_dtype)
    graphs = DecodeGraphs(model, r.kv, max_running_requests=4)
    r.warm_up()
    last = r.prefill(whole(*zip(prompts, tables, strict=True)))
    lengths = [len(prompt) for prompt in prompts]
    used = torch.cat([r.kv.slots(t, 0, n) for t, n in zip(tables, lengths, strict=True)]).to(GPU_OR_CPU)
    before = bits_of(r.kv.memory)[:, used].clone()
    for rows in ((0, 1, 2), (1,)):  # in graphs of 4 and of 1
        of_rows = [tuple(values[i] for i in rows) for values in (last, lengths, tables)]
        batch = DecodeBatch(*of_rows[:2], whole_tables(of_rows[2]))
        made = graphs.decode(batch)
        chunks = [chunk([*prompts[i], last[i]], lengths[i], lengths[i] + 1, tables[i]) for i in rows]
        assert made == r.prefill(PrefillBatch(tuple(chunks)))
    assert torch.equal(bits_of(r.kv.memory)[:, used], before)


def test_padded_batches_over_states_make_the_same_tokens():
    """Beside a runner without graphs, on a CPU; a step also leaves a state in a second slot."""
    models = [load(HYBRID, RandomWeights(0, CPU), device=device) for device in (GPU_OR_CPU, CPU)]
    prompts = [tokens(seed, 5 + 7 * seed, HYBRID.vocab_size) for seed in range(3)]
    tables = [[1 + 2 * i, 2 + 2 * i] for i in range(3)]
    runners = [runner(model, page_size=16, num_pages=6, states=state_pool(model, 6)) for model in models]
    chunks = [
        chunk(p, 0, len(p), t)._replace(state=StateUse(0, 1 + i))
        for i, (p, t) in enumerate(zip(prompts, tables, strict=True))
    ]
    last, _ = (r.prefill(PrefillBatch(tuple(chunks))) for r in runners)
    graphs = DecodeGraphs(models[0], runners[0].kv, max_running_requests=4, states=runners[0].states)
    states = ((1, 0), (2, 5), (3, 0))
    batch = DecodeBatch(tuple(last), tuple(map(len, prompts)), whole_tables(tables), states=states)
    assert graphs.decode(batch) == runners[1].decode(batch)
    for ours, theirs in zip(*(r.states.planes for r in runners), strict=True):
        close(ours[1:], theirs[1:], rtol=1e-3, atol=1e-4)
        assert torch.equal(ours[5], ours[2])


def close(found, expected, **tolerances):
    """Expected is of the CPU."""
    torch.testing.assert_close(found, expected, check_device=False, **tolerances)


def test_batch_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(25) == [1, 2, 4, 8, 16, 32]
    assert batch_sizes(150) == [1, 2, 4, 8, 16, 32, 64, 128, 192]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [96, 256])
def test_fused_norm(size, dtype):
    given = [torch.randn(*shape).to(dtype) for shape in ((5, size), (5, size), (size,))]
    x, residual, weight = (part.to(GPU_OR_CPU, copy=True) for part in given)
    expected = operations.add_rms_norm_(*given, 1e-5)
    close(fused.add_rms_norm_(x, residual, weight, 1e-5), expected)


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("normed", [False, True])
def test_fused_rotation(normed, position_dtype):
    angles = operations.rotary_angles(from_catalog("tiny-qwen3").llama, 32, 100, CPU)
    norms = (torch.randn(32), torch.randn(32)) if normed else None
    qkv, positions = torch.randn(3, 14, 32), torch.tensor([7, 0, 99], dtype=position_dtype)
    expected = operations.norm_rotate_(qkv[:, :11].clone(), 8, norms, 1e-6, angles, positions)
    values = qkv[:, 11:].clone()
    qkv, angles, positions = (part.to(GPU_OR_CPU) for part in (qkv, angles, positions))
    norms = norms and tuple(norm.to(GPU_OR_CPU) for norm in norms)
    close(fused.norm_rotate_(qkv[:, :11], 8, norms, 1e-6, angles, positions), expected)
    close(qkv[:, 11:], values, rtol=0, atol=0)


def test_fused_rotation_of_a_part_of_each_head():
    angles, positions = operations.rotary_angles(DEEPSEEK.llama, 16, 100, CPU), torch.tensor([7, 0, 99])
    heads = torch.randn(3, 5, 48)
    expected = operations.norm_rotate_(heads[..., 32:].clone(), 5, None, 1e-6, angles, positions)
    given = heads.to(GPU_OR_CPU, copy=True)
    fused.norm_rotate_(given[..., 32:], 5, None, 1e-6, angles.to(GPU_OR_CPU), positions.to(GPU_OR_CPU))
    close(given, torch.cat((heads[..., :32], expected), dim=-1))


@pytest.mark.parametrize("size", [96, 1500])
def test_fused_silu(size):
    gate_up = torch.randn(3, 2 * size)
    close(fused.silu_and_multiply(gate_up.to(GPU_OR_CPU)), operations.silu_and_multiply(gate_up))
