"""Models, GPUs and memory, against published figures."""

from collections import Counter
from random import Random
from statistics import fmean

import pytest

from pdsim.system.catalog import CatalogError, load_gpu, load_model, load_transport, names
from pdsim.system.memory import Layout, LayoutError, default_max_running, default_mem_fraction, memory_tier, vllm_batch


def layout(model, gpu, tp=1, kv_dtype="bf16"):
    return Layout(model=load_model(model), gpu=load_gpu(gpu), tp=tp, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("model", "kv_bytes"),
    [
        ("qwen3-32b", 262_144),
        ("qwen3-0.6b", 114_688),
        ("minimax-m2.5", 253_952),
        ("qwen3.5-397b-a17b", 30_720),
        ("qwen3.5-35b-a3b", 20_480),
        ("deepseek-v3", 70_272),
        ("deepseek-r1", 70_272),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("qwen3-1.7b", 114_688),
        ("qwen3-4b", 147_456),
        ("qwen3-14b", 163_840),
        ("qwen3-vl-8b", 147_456),
        ("qwen3-235b-a22b", 192_512),
        ("kimi-k2", 70_272),
        ("glm-4.5", 376_832),
        ("glm-4.6", 376_832),
        ("mixtral-8x7b", 131_072),
        ("gemma-3-27b", 507_904),
        ("gpt-oss-20b", 49_152),
        ("gpt-oss-120b", 73_728),
    ],
)
def test_kv_bytes_of_a_token(model, kv_bytes):
    assert layout(model, "gb200").kv_token_bytes == kv_bytes


def test_every_entry_loads_and_names_its_sources():
    for name in names("models"):
        assert load_model(name).sources
    for name in names("gpus"):
        assert load_gpu(name).sources


@pytest.mark.parametrize("name", names("transports"))
def test_every_transport_says_where_each_flag_comes_from(name):
    """What was fitted to transfers alone says nothing of who joins pages, or which worker sends."""
    told = {field for fields in load_transport(name).sources for field in fields.split(", ")}
    assert {"coalesces", "num_queues", "queue_by", "serial"} <= told


def test_kv_heads_are_copied_beyond_one_a_rank_and_latents_on_every_rank():
    assert layout("qwen3.5-397b-a17b", "gb200", tp=4).kv_token_bytes == 30_720 // 2
    assert layout("deepseek-v3", "gb200", tp=8).kv_token_bytes == 70_272


def test_pool_of_the_decode_radix_study():
    """2.12 M tokens a rank, so that 54,500 + 355 / 2 + 400 reserved tokens fit 38 times; the log says about 37."""
    tokens = layout("qwen3-32b", "b200", tp=2, kv_dtype="fp8").pool_tokens(0.9, 64)
    assert tokens == pytest.approx(2.12e6, rel=0.01)
    assert int(tokens / (54_500 + 355 / 2 + 400)) == 38


def test_pool_of_the_incremental_transfer_study():
    """MiniMax-M2.5 on the 96 GB H20 holds 72 to 77 requests of 7161 tokens; Little's law on its table says 72.7."""
    tokens = layout("minimax-m2.5", "h20", tp=4).pool_tokens(0.9, 64)
    assert 0.515e6 <= tokens <= 0.55e6
    assert 72 <= tokens / 7161 <= 77


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "complaint"),
    [
        ("qwen3-32b", "b200", 3, "tp 3 does not divide the 64 query heads"),
        ("qwen3.5-35b-a3b", "h20", 0, "tp 0 does not divide"),
        ("llama-3.1-70b", "h100", 1, "no room for KV; use a larger tp or GPU"),
    ],
)
def test_what_cannot_be_laid_out(model, gpu, tp, complaint):
    with pytest.raises(LayoutError, match=complaint):
        layout(model, gpu, tp).pool_tokens(0.9, 64)


def test_an_unknown_model_gets_the_nearest_name():
    with pytest.raises(CatalogError, match="did you mean 'qwen3-32b'"):
        load_model("qwen3-32B")


def test_defaults_by_memory():
    assert memory_tier(load_gpu("h100"), 1).chunked_prefill_tokens == 8192
    assert memory_tier(load_gpu("b200"), 4).chunked_prefill_tokens == 16384
    assert memory_tier(load_gpu("h100"), 4).max_graph_batch == 512
    assert default_mem_fraction(load_gpu("h200"), 1, "decode", None, None) == pytest.approx(0.929, abs=0.01)
    assert default_max_running(400_000, 131_072) == 2048
    assert default_max_running(1_000, 131_072) == 500


@pytest.mark.parametrize(
    ("gpu", "batch"),
    [
        ("b200", (16384, 1024)),
        ("h200", (8192, 1024)),
        ("h100", (8192, 1024)),
        ("a100", (2048, 256)),
        ("l40s", (2048, 256)),
    ],
)
def test_batches_of_vllm_by_memory(gpu, batch):
    assert vllm_batch(load_gpu(gpu)) == batch


@pytest.mark.parametrize(("model", "num_gpus"), [("deepseek-v3", 8), ("qwen3-30b-a3b", 2)])
def test_the_busiest_gpu_reads_as_many_experts_as_random_tokens_use(model, num_gpus):
    experts, draws = load_model(model).experts, Random(1)
    everyone = range(experts.num_experts)
    for num_tokens in (1, 4, 16, 64):
        most = []
        for _ in range(100):
            used = {expert for _ in range(num_tokens) for expert in draws.sample(everyone, experts.num_active)}
            most.append(max(Counter(expert % num_gpus for expert in used).values()) * num_gpus / experts.num_experts)
        assert experts.fraction_read(num_tokens, num_gpus) == pytest.approx(fmean(most), rel=0.13)
        assert experts.fraction_read(num_tokens) < experts.fraction_read(num_tokens, num_gpus) <= 1
    assert experts.fraction_read(0, num_gpus) == 0


def test_experts_read_grow_with_the_batch():
    model = load_model("deepseek-v3")
    reads = [model.shared_bytes_read + model.expert_bytes_read(n) for n in (1, 8, 64, 4096)]
    assert reads == sorted(reads)
    assert reads[0] == pytest.approx(37e9, rel=0.02)
    assert reads[-1] == pytest.approx(671e9, rel=0.01)
