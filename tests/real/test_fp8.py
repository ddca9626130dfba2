"""Weights in e4m3 with block scales, and KV in e4m3: against the same numbers in fp32."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from dataclasses import replace

from pdreal.model.block_scaled import BLOCK, BlockScaled, quantise, widen
from pdreal.model.parallel import TensorParallel
from pdreal.model.weights import (
    Checkpoint,
    ExpertWeights,
    GroupedWeights,
    QuantisedWeights,
    RandomWeights,
    load_weights,
)
from pdreal.settings.model import from_catalog, from_checkpoint
from torch.nn.functional import linear

from tests.real.models import CPU, DEEPSEEK, GPU_OR_CPU, WholeSequence, chunk, decode_on, generate, load, runner, tokens
from tests.real.test_model import MOE, QWEN, logits_of, save


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 5)])
def test_a_matrix_comes_back_within_a_sixteenth_of_each_value(shape):
    matrix = torch.randn(shape)
    found = widen(quantise(matrix))
    step = (matrix.abs() / 16).clamp(min=float(matrix.abs().max()) / 448 / 2**3)
    assert ((found - matrix).abs() <= step).all()


def test_a_rank_takes_whole_blocks():
    scaled = quantise(torch.randn(256, 384))
    part = scaled.part(slice(128, 256), slice(128, 384))
    assert torch.equal(widen(part), widen(scaled)[128:, 128:])
    with pytest.raises(ValueError, match="is 64 of 256, not whole fp8 blocks of 128"):
        scaled.part(slice(64), slice(None))


@pytest.mark.parametrize("config", [QWEN, MOE, DEEPSEEK], ids=["qwen3", "qwen3-moe", "deepseek-v3"])
def test_logits_of_a_checkpoint_in_fp8_are_those_of_transformers(config, tmp_path):
    """transformers has the weights that fp8 stands for."""
    transformers = pytest.importorskip("transformers", reason="the oracle of the model is transformers")
    from safetensors.torch import load_file, save_file

    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    for folder in (wide, narrow):
        folder.mkdir()
    source = QuantisedWeights(RandomWeights(3, CPU))
    save(config, wide, source)
    save(config, narrow, source, quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    for path in narrow.glob("*.safetensors"):
        kept = {}
        for name, tensor in load_file(path).items():
            scaled = source.scaled(name, tuple(tensor.shape))
            kept |= {name: tensor} if scaled is None else {name: scaled.values, f"{name}_scale_inv": scaled.scales}
        save_file(kept, path, metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32)
    prompt = tokens(1, 100, config.vocab_size).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    found = logits_of(load(from_checkpoint(narrow), Checkpoint(narrow)), prompt)
    assert (found - expected).abs().max() < 1e-4
    exact = logits_of(load(config, RandomWeights(3, CPU)), prompt)
    assert (found - exact).abs().mean() > 1e-3  # fp8 is not lost on the way


def test_attention_of_a_hybrid_model_is_widened():
    """On a GPU, too, where other matrices stay in fp8: its queries and gates alternate in the checkpoint."""
    config = replace(from_catalog("tiny-hybrid"), num_layers=4)
    given = config, QuantisedWeights(RandomWeights(0, CPU)), TensorParallel(), torch.float32, CPU
    narrow, wide = (load_weights(*given, keeps_fp8=keeps) for keeps in (True, False))
    for one, other in zip(narrow.layers, wide.layers, strict=True):
        if isinstance(one.attention, GroupedWeights):
            assert torch.equal(one.attention.qkv, other.attention.qkv)
        assert isinstance(one.mlp.gate_up, BlockScaled)


@pytest.mark.parametrize("num_inputs", [384, 512])
@pytest.mark.parametrize("num_tokens", [1, 20, 70, 150])
def test_fused_products(num_tokens, num_inputs):
    """Of 512 inputs up to four parts are added, and again where others have been before."""
    pytest.importorskip("triton", reason="what multiplies fp8 on GPUs is written in Triton")
    from pdreal.model import fused_fp8

    scaled = quantise(torch.randn(256, num_inputs))
    for x in torch.randn(2, num_tokens, num_inputs):
        found = fused_fp8.linear(x.to(GPU_OR_CPU), scaled.to(GPU_OR_CPU)).cpu()
        torch.testing.assert_close(found, linear(x, widen(scaled)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_fused_experts(num_tokens):
    pytest.importorskip("triton", reason="what multiplies fp8 on GPUs is written in Triton")
    from pdreal.model import fused_experts
    from pdreal.model.experts import run_experts

    tiny = from_catalog("tiny-qwen3-moe")
    config = replace(tiny, num_layers=1, experts=replace(tiny.experts, intermediate_size=128))
    given = config, QuantisedWeights(RandomWeights(0, CPU)), TensorParallel(), torch.float32, GPU_OR_CPU
    narrow = load_weights(*given, keeps_fp8=True).layers[0].mlp
    assert isinstance(narrow, ExpertWeights)
    assert isinstance(narrow.down, BlockScaled)
    wide = replace(narrow, router=narrow.router.cpu(), gate_up=_each(narrow.gate_up), down=_each(narrow.down))
    x = torch.randn(num_tokens, config.hidden_size)
    found = fused_experts.run_experts(x.to(GPU_OR_CPU), narrow)[0].cpu()
    torch.testing.assert_close(found, run_experts(x, wide)[0], rtol=1e-4, atol=1e-4)


def _each(stacked):
    return torch.stack([widen(BlockScaled(*parts)).cpu() for parts in zip(*stacked, strict=True)])


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-deepseek-v3"])
def test_kv_in_fp8_makes_the_same_tokens_in_chunks_and_behind_prefixes(name):
    model = load(from_catalog(name))
    prompt, table = tokens(1, 70), [*range(1, 33)]
    r = runner(model, kv_dtype=torch.float8_e4m3fn)
    assert r.kv.memory.element_size() == 1
    from pdreal.control.tasks import PrefillBatch

    for start, stop in ((0, 30), (30, 31), (31, 70)):
        first = r.prefill(PrefillBatch((chunk(prompt, start, stop, table),)))
    expected = generate(model, prompt, 10, WholeSequence(narrow_kv=True))
    assert decode_on(r, first, [70], [table], 9) == [expected]
