"""Models by structure: layer patterns, sparse and compressed attention, states, windows of other heads, wrappers.

Fields are of the public config.json files; totals are what the makers publish.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.system.catalog import EntryError, build, load_gpu, load_model
from pdsim.system.checkpoint.entry import entry_of
from pdsim.system.memory import Layout
from pdsim.system.model import ModelSpec

COMMON = {"vocab_size": 131072, "max_position_embeddings": 262144, "tie_word_embeddings": False}
NEMOTRON_NANO = {
    **COMMON,
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712,
}
LATENT_MOE = {**NEMOTRON_NANO, "moe_latent_size": 1024}
DEEPSEEK_V4 = {
    **COMMON,
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "vocab_size": 129280,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GLM_5 = {
    **COMMON,
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "vocab_size": 154880,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "first_k_dense_replace": 3,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}
MIMO = {
    **COMMON,
    "model_type": "mimo_v2_flash",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "vocab_size": 152576,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, *[1, 1, 1, 1, 0], *[1, 1, 1, 1, 1, 0] * 7],
    "moe_layer_freq": [0, *[1] * 47],
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": None,
}
SCOUT = {
    "model_type": "llama4",
    "text_config": {
        **COMMON,
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "vocab_size": 202048,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
}
GEMMA_4 = {
    "model_type": "gemma4",
    "text_config": {
        **COMMON,
        "model_type": "gemma4_text",
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "layer_types": ([*["sliding_attention"] * 5, "full_attention"] * 5),
        "sliding_window": 1024,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
KIMI_LINEAR = {
    **COMMON,
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "vocab_size": 163840,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 1024,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_layers": [layer for layer in range(1, 28) if layer % 4 and layer != 27],
    },
}


def model_of(fields):
    return build(ModelSpec, entry_of(fields, "a test"), name="mine")


@pytest.mark.parametrize(
    ("fields", "total", "active"),
    [
        (NEMOTRON_NANO, 31.6e9, 3.6e9),
        (DEEPSEEK_V4, 284e9, 13.8e9),
        (GLM_5, 744e9, 41.8e9),  # published as 744 B and 40 B
        (MIMO, 309e9, 15.4e9),
        (SCOUT, 107.8e9, 17.2e9),  # published as 109 B with the image encoder
        (GEMMA_4, 25.2e9, 3.8e9),
        (KIMI_LINEAR, 49.1e9, 3.5e9),  # published as 48 B and 3 B
    ],
)
def test_parameters_are_the_published_ones(fields, total, active):
    model = model_of(fields)
    assert model.num_params == pytest.approx(total, rel=0.005)
    assert model.num_active_params == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "elements"),
    [
        (NEMOTRON_NANO, 6 * 2 * 2 * 128),  # six layers have attention
        (DEEPSEEK_V4, 512 * 21 // 4 + 512 * 20 // 128),  # a latent of 512 for 4 tokens, or for 128
        (GLM_5, 78 * 576),
        (MIMO, 9 * 4 * 320 + 39 * 8 * 320),  # keys of 192 and values of 128
        (SCOUT, 48 * 2 * 8 * 128),
        (GEMMA_4, 5 * 2 * 2 * 512 + 25 * 2 * 8 * 256),
        (KIMI_LINEAR, 7 * 576),
    ],
)
def test_kv_of_a_token(fields, elements):
    assert model_of(fields).attention.num_kv_elements(1) == elements


@pytest.mark.parametrize(
    "changes",
    [
        {"multi_query": True},  # falcon: one KV head, which no other field tells
        {"conv_L_cache": 3},  # lfm2: convolutions keep a state
        {"type_vocab_size": 2},  # an encoder
        {"model_type": "jetmoe"},
    ],
)
def test_a_family_that_would_be_read_wrongly_is_refused(changes):
    fields = {**COMMON, "model_type": "x", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    assert model_of({**fields, "num_hidden_layers": 2}).num_params
    with pytest.raises(EntryError, match="has layers that pdsim does not model; write the entry by hand"):
        model_of({**fields, "num_hidden_layers": 2, **changes})


@pytest.mark.parametrize(("family", "num_matrices"), [("starcoder2", 2), ("llama", 3), ("bitnet", 3)])
def test_mlps_without_a_gate_are_known_by_their_family(family, num_matrices):
    activation = "relu2" if family == "bitnet" else "gelu_pytorch_tanh"
    fields = {**COMMON, "model_type": family, "hidden_size": 512, "num_attention_heads": 8, "hidden_act": activation}
    small, large = (model_of({**fields, "num_hidden_layers": 2, "intermediate_size": size}) for size in (1000, 2000))
    assert large.num_params - small.num_params == 2 * num_matrices * 512 * 1000


def test_states_of_a_request():
    mamba, delta = model_of(NEMOTRON_NANO).state, model_of(KIMI_LINEAR).state
    assert (mamba.num_layers, mamba.ssm_elements) == (23, 64 * 64 * 128)
    assert mamba.conv_bytes == 2 * 3 * (64 * 64 + 2 * 8 * 128)
    assert (delta.num_layers, delta.ssm_elements, delta.conv_bytes) == (20, 32 * 128 * 128, 2 * 3 * 3 * 32 * 128)
    chunks = [model_of({**one, "chunk_size": 128}).state.chunk_tokens for one in (NEMOTRON_NANO, KIMI_LINEAR)]
    assert chunks == [128, 64]  # SGLang reads chunk_size of Nemotron-H only


def test_experts_behind_a_projection_are_narrow():
    wide, narrow = model_of(NEMOTRON_NANO), model_of(LATENT_MOE)
    assert narrow.num_expert_params * 2688 == wide.num_expert_params * 1024
    assert narrow.experts.num_matrices == 2  # squared ReLU has no gate


def test_a_sparse_attention_reads_what_its_indexer_chooses():
    attention = model_of(GLM_5).attention
    assert (attention.window_share, attention.window_tokens) == (1, 2048)


def test_types_of_deepseek_v4():
    model = model_of(DEEPSEEK_V4)
    assert model.weight_dtypes == ("fp8", "fp4")
    converted = model_of({name: value for name, value in DEEPSEEK_V4.items() if name != "expert_dtype"})
    assert converted.weight_dtypes == ("fp8",)


KINDS = st.sampled_from(["full_attention", "sliding_attention"])


@given(st.lists(KINDS, min_size=1, max_size=40).filter(lambda kinds: "full_attention" in kinds), st.integers(1, 4096))
def test_layer_types_are_counted(kinds, window):
    fields = {
        **COMMON,
        "model_type": "anything",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": window,
    }
    attention = model_of(fields).attention
    assert attention.num_layers == len(kinds)
    assert attention.num_window_layers == kinds.count("sliding_attention")
    assert attention.num_kv_elements(1) == len(kinds) * 2 * 512


def test_vllms_pool_holds_more_tokens_where_layers_have_windows():
    """A real vLLM reports 1,630,790 tokens of gpt-oss-120b on an H200, with prefill's default of 8,192 a forward."""
    layout = Layout(model=load_model("gpt-oss-120b"), gpu=load_gpu("h200"), tp=1, kv_dtype="bf16")
    whole = layout.pool_tokens(0.92, 16)
    assert layout.pool_tokens(0.92, 16, engine="vllm") == pytest.approx(1_630_790, rel=0.03)
    assert layout.pool_tokens(0.92, 16, engine="vllm") < 2 * whole  # half of the layers have no window


def test_vllms_pool_is_the_same_without_windows():
    layout = Layout(model=load_model("qwen3-8b"), gpu=load_gpu("h100"), tp=1, kv_dtype="bf16")
    assert layout.pool_tokens(0.9, 16, engine="vllm") == layout.pool_tokens(0.9, 16)
