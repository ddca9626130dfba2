"""Models from config.json: sizes against what their makers publish, and what an entry cannot say."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.cli import main
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.model import window_pairs
from pdsim.cost.settings import Roofline
from pdsim.system.catalog import VARIABLE, EntryError, build, load_gpu, load_model
from pdsim.system.checkpoint.entry import entry_of
from pdsim.system.memory import Layout
from pdsim.system.model import ModelSpec

FP8 = '"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}'
MXFP4 = """
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
"""
LLAMA = """{
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "rope_scaling": {"rope_type": "llama3",
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
}"""
QWEN3 = """{
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": null, "tie_word_embeddings": true,
    "sliding_window": null, "use_sliding_window": false, "max_window_layers": 28, "torch_dtype": "bfloat16"
}"""
QWEN3_MOE = """{
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "norm_topk_prob": true,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0
}"""
DEEPSEEK = f"""{{
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1, "vocab_size": 129280, "max_position_embeddings": 163840, {FP8},
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": true, "rms_norm_eps": 1e-06,
    "rope_theta": 10000, "rope_scaling": {{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}}
}}"""
KIMI = f"""{{
    "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "vocab_size": 163840, "max_position_embeddings": 131072, {FP8}
}}"""
MIXTRAL = """{
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": null, "torch_dtype": "bfloat16"
}"""
GEMMA = """{
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}, "text_config": {
    "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024}
}"""
GPT_OSS = f"""{{
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4,
    "layer_types": {json.dumps(["sliding_attention", "full_attention"] * 18)}, "sliding_window": 128,
    "vocab_size": 201088, "max_position_embeddings": 131072, {MXFP4}
}}"""
NEXT = """{
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
    "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512, "full_attention_interval": 4,
    "vocab_size": 151936, "max_position_embeddings": 262144, "torch_dtype": "bfloat16"
}"""
QWEN35 = f"""{{
    "model_type": "qwen3_5_moe", "vision_config": {{}}, "quantization_config": {{"quant_method": "fp8"}},
    "text_config": {{
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "moe_intermediate_size": 512, "intermediate_size": 0,
    "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256,
    "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
    "layer_types": {json.dumps((["linear_attention"] * 3 + ["full_attention"]) * 10)},
    "max_position_embeddings": 262144}}
}}"""
GLM = """{
    "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1, "vocab_size": 151552, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"
}"""


def model_of(text):
    return build(ModelSpec, entry_of(json.loads(text), "a test"), name="mine")


@pytest.mark.parametrize(
    ("text", "total", "active"),
    [
        (LLAMA, 8.03e9, 8.03e9),  # model card of Llama 3.1
        (QWEN3, 0.6e9, 0.6e9),  # arXiv 2505.09388, as the next
        (QWEN3_MOE, 235e9, 22e9),
        (DEEPSEEK, 671e9, 37e9),  # arXiv 2412.19437
        (KIMI, 1.04e12, 32.6e9),  # arXiv 2507.20534
        (MIXTRAL, 46.7e9, 12.9e9),  # arXiv 2401.04088 says 47 B and 13 B; Mistral's announcement says these
        (NEXT, 80e9, 3.9e9),  # model card of Qwen3-Next says 80 B and 3 B
        (GEMMA, 1416e6 + 25600e6, 1416e6 + 25600e6),  # arXiv 2503.19786, without the image encoder
    ],
)
def test_parameters_are_the_published_ones(text, total, active):
    model = model_of(text)
    assert model.num_params == pytest.approx(total, rel=0.015)
    assert model.num_active_params == pytest.approx(active, rel=0.03 if model.experts else 0.015)


def test_glm_is_what_its_report_says():
    """arXiv 2508.06471, table 1: 355 B and 32 B with the MTP layer and without embedding and output layer."""
    model = model_of(GLM)
    embeddings, mtp_layer = 2 * model.num_embedding_params, model.num_expert_params / model.experts.num_layers
    assert model.num_params - embeddings + mtp_layer == pytest.approx(355e9, rel=0.002)
    assert model.num_active_params - embeddings == pytest.approx(32e9, rel=0.005)


def test_gpt_oss_is_what_its_model_card_says():
    """arXiv 2508.10925, table 1: 116.83 B, of which 114.71 B in MLPs; 5.13 B active without the input embedding."""
    model = model_of(GPT_OSS)
    assert model.num_params == pytest.approx(116.83e9, rel=1e-3)
    assert model.num_expert_params == pytest.approx(114.71e9, rel=1e-3)
    assert model.num_active_params - model.num_embedding_params == pytest.approx(5.13e9, rel=0.01)
    assert (model.attention.num_window_layers, model.attention.window_tokens) == (18, 128)
    assert (model.weight_dtype, model.experts.weight_dtype) == ("bf16", "fp4")
    assert model.weight_bytes == pytest.approx(60.8 * 2**30, rel=0.06)  # of the checkpoint, with scales of 6 %
    assert model.in_dtype("bf16").weight_bytes == 2 * model.num_params


INT4 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}
SHIPPED = {
    "llama-3.1-8b": LLAMA,
    "qwen3-0.6b": QWEN3,
    "qwen3-235b-a22b": QWEN3_MOE,
    "deepseek-v3": DEEPSEEK,
    "kimi-k2": KIMI,
    "mixtral-8x7b": MIXTRAL,
    "gemma-3-27b": GEMMA,
    "gpt-oss-120b": GPT_OSS,
    "glm-4.5": GLM,
    "qwen3.5-35b-a3b": QWEN35,
    "qwen3-next-80b-a3b": NEXT,
}


@pytest.mark.parametrize(("shipped", "text"), SHIPPED.items(), ids=SHIPPED)
def test_an_entry_is_the_shipped_one(shipped, text):
    made, known = model_of(text), load_model(shipped)
    assert made.num_params == pytest.approx(known.num_params, rel=0.01)
    for field in (
        "attention",
        "experts",
        "state",
        "llama",
        "hidden_size",
        "max_context_tokens",
        "weight_dtype",
        "tied_embeddings",
    ):
        assert getattr(made, field) == getattr(known, field), field


@pytest.mark.parametrize(
    "quantized", [{"quant_method": "awq", "bits": 4}, {"quant_method": "gptq", "bits": 4}, INT4], ids=str
)
def test_weights_of_4_bits(quantized):
    dense = model_of(json.dumps(json.loads(LLAMA) | {"quantization_config": quantized}))
    assert dense.weight_dtypes == ("int4",)
    left = quantized | {"modules_to_not_convert": ["re:.*self_attn.*"]}
    mixture = model_of(json.dumps(json.loads(DEEPSEEK) | {"quantization_config": left}))
    assert mixture.weight_dtypes == ("int4",)
    assert mixture.num_params_in_bf16 == pytest.approx(61 * 187.1e6, rel=0.001)  # attention


LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


@pytest.mark.parametrize(
    ("left", "dtypes", "wide"),
    [
        (["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(61))], ("fp4",), 4.25e9 + 7.16e9),
        ([f"model.layers.{i}.self_attn.{name}" for i in range(61) for name in LATENTS], ("fp4",), 4.25e9),
        (["re:.*self_attn.*", "re:.*shared_experts.*"], ("bf16", "fp4"), 0),
        (["lm_head"], ("fp4",), 0),
    ],
)
def test_attention_that_a_checkpoint_in_fp4_leaves_wide(left, dtypes, wide):
    quantized = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": left}
    model = model_of(json.dumps(json.loads(DEEPSEEK) | {"quantization_config": quantized}))
    assert model.weight_dtypes == dtypes
    assert model.num_params_wider_than_fp4 == pytest.approx(wide, rel=0.001)
    if wide == 4.25e9:
        shipped = load_model("deepseek-v3").in_dtype("fp4")
        assert model.weight_bytes == pytest.approx(shipped.weight_bytes, rel=0.002)


def test_layers_with_a_window_are_named_for_real_mode():
    qwen = json.loads(QWEN3)
    kinds = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(qwen["num_hidden_layers"])]
    model = model_of(json.dumps(qwen | {"use_sliding_window": True, "sliding_window": 64, "layer_types": kinds}))
    assert model.llama.window_layers == tuple(range(1, qwen["num_hidden_layers"], 2))
    assert model.attention.num_window_layers == len(model.llama.window_layers)
    assert model_of(QWEN3).llama.window_layers == ()
    entry = entry_of(qwen, "a test")
    with pytest.raises(EntryError, match=r"llama.window_layers: expected a list, found 'all'"):
        build(ModelSpec, entry | {"llama": {**entry["llama"], "window_layers": "all"}}, name="q")
    with pytest.raises(EntryError, match=r"llama.window_layers.1: expected a whole number from 0 on, found 'x'"):
        build(ModelSpec, entry | {"llama": {**entry["llama"], "window_layers": [0, "x"]}}, name="q")


def test_every_sixth_layer_of_gemma_sees_all():
    assert model_of(GEMMA).attention.num_window_layers == 52


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (LLAMA, None),
        (DEEPSEEK, "all else in fp8; modules that predict further tokens .MTP. count as drafts only"),
        (GEMMA, "the image encoder is left out; SGLang keeps and sends KV of all layers whole"),
        (GPT_OSS, "routed experts are in fp4 and all else in bf16"),
        (LLAMA.replace("bfloat16", "float16"), "the checkpoint's float16 is counted as bf16"),
    ],
)
def test_what_an_entry_leaves_out_is_told(text, notes):
    told = entry_of(json.loads(text), "a test")["sources"].get("notes")
    assert told is None if notes is None else re.search(notes, told)


MAMBA = ["linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("text", "change", "complaint"),
    [
        (LLAMA, {"model_type": "rwkv", "rwkv_version": 7}, "rwkv_version: rwkv has layers that pdsim does not"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"hidden_size": "big"}, "hidden_size: expected a whole number from 0 on, found 'big'"),
        (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, "expected one of fp8, .*, found 'hqq'"),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            "bits: expected 4 or 8 with gptq, found 3",
        ),
        (QWEN3, {"layer_types": MAMBA * 14}, "layer_types: expected linear_num_value_heads or .*, found none"),
        (QWEN3, {"layer_types": ["hyper_attention"] * 28}, "layer_types: expected attention .*, found hyper_attention"),
        (LLAMA, {"mamba_d_state": 64}, "layer_types is missing, which says which layers are Mamba's"),
        (DEEPSEEK, {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        (DEEPSEEK, {"mlp_only_layers": 3}, "a field has a wrong value"),
    ],
)
def test_what_an_entry_cannot_say_is_refused(text, change, complaint):
    with pytest.raises(EntryError, match=complaint):
        model_of(json.dumps(json.loads(text) | change))


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_a_model_that_real_mode_cannot_run_is_simulated(name):
    model = model_of(json.dumps(json.loads(LLAMA) | {name: None}))
    assert (model.llama, model.num_params) == (None, model_of(LLAMA).num_params)


@given(st.sampled_from([LLAMA, QWEN3_MOE, DEEPSEEK, GEMMA, GPT_OSS]), st.data())
def test_a_wrong_field_is_an_error_and_no_traceback(text, data):
    fields = json.loads(text)
    leaves = st.none() | st.booleans() | st.integers(-1, 1 << 70) | st.floats() | st.text(max_size=3)
    value = data.draw(leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=3), leaves, max_size=3))
    fields[data.draw(st.sampled_from(sorted(fields)))] = value
    try:
        model = build(ModelSpec, entry_of(fields, "a test"), name="mine")
    except EntryError:
        return
    assert model.num_active_params > 0


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 14), st.sets(st.integers(0, 14)))
def test_layers_with_experts_are_those_that_transformers_makes(num_layers, step, first, mlp_only):
    changes = {"decoder_sparse_step": step, "first_k_dense_replace": first, "mlp_only_layers": sorted(mlp_only)}
    entry = entry_of(json.loads(QWEN3_MOE) | changes | {"num_hidden_layers": num_layers}, "a test")
    made = [n for n in range(num_layers) if n >= first and n not in mlp_only and (n + 1) % step == 0]
    assert entry.get("experts", {"num_layers": 0})["num_layers"] == len(made)


def test_a_huge_number_of_layers_is_refused():
    huge = {"num_hidden_layers": 1 << 70, "first_k_dense_replace": 1 << 69}
    with pytest.raises(EntryError, match="num_hidden_layers: expected 1 to 10,000, found 1180591"):
        model_of(json.dumps(json.loads(DEEPSEEK) | huge))


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 400))
def test_pairs_within_a_window(context, num_tokens, window):
    chunk = PrefillChunk(0, context, num_tokens, True)
    counted = sum(min(position + 0.5, window) for position in range(context, context + num_tokens))
    assert window_pairs(chunk, window) == pytest.approx(counted, abs=0.2)
    assert window_pairs(chunk, 700) == chunk.num_pairs


def test_a_window_bounds_what_attention_computes_and_reads():
    model = model_of(GPT_OSS)
    widened = replace(model, attention=replace(model.attention, num_window_layers=0, window_tokens=0))
    windowed, full = (
        Roofline().model(Layout(model=spec, gpu=load_gpu("h100"), tp=2, kv_dtype="bf16")) for spec in (model, widened)
    )
    short, long = (PrefillStep(0, (PrefillChunk(0, 0, num_tokens, True),)) for num_tokens in (128, 65_536))
    assert windowed.prefill_terms(short) == full.prefill_terms(short)
    pairs = [cost.prefill_terms(long)["attention"] for cost in (windowed, full)]
    assert pairs[0] == pytest.approx(pairs[1] / 2, rel=0.01)
    lines = [cost.decode_line(8) for cost in (windowed, full)]
    at_window, far = (
        [line.base + tokens * (line.per_context_token + line.per_distinct_token) for line in lines]
        for tokens in (8 * 128, 8 * 65_536)
    )
    assert at_window[0] == pytest.approx(at_window[1], rel=1e-6)
    assert far[0] - at_window[0] == pytest.approx((far[1] - at_window[1]) / 2, rel=1e-6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "My-Model").mkdir()
    (tmp_path / "My-Model" / "config.json").write_text(GPT_OSS)
    return tmp_path


def call(*words):
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    return ended.value.code or 0


def test_an_added_model_is_listed_shown_and_simulated(folder, capsys):
    assert call("catalog", "add", folder / "My-Model" / "config.json") == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{folder}/config/pdsim/models/my-model.yaml: 116.8 B parameters, 5.7 B active\n")
    assert "note: routed experts are in fp4 and all else in bf16" in told
    assert call("catalog", "--json") == 0
    assert "my-model" in json.loads(capsys.readouterr().out)["models"]
    assert call("catalog", "show", "my-model") == 0
    assert "num_window_layers: 18" in capsys.readouterr().out
    (folder / "scenario.yaml").write_text(
        "model: my-model\nprefill: {gpu: h100, tp: 2}\ndecode: {gpu: h100, tp: 2}\n"
        "workload: {use: random_lengths, num_requests: 3, input_tokens: 999, output_tokens: 5}\n"
    )
    assert call("run", folder / "scenario.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 3


def test_a_model_goes_to_the_named_folder_which_is_made_for_it_under_its_name(folder, capsys):
    assert call("catalog", "add", folder / "My-Model", "--name", "other", "--catalog", folder / "shared") == 0
    assert (folder / "shared" / "models" / "other.yaml").is_file()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--name", "qwen3-8b"], "qwen3-8b.yaml is a model 'qwen3-8b' already: choose another --name"),
        (["--name", "a/b"], "--name: expected letters, digits, '.', '_' and '-', found 'a/b'"),
    ],
)
def test_a_wrong_name_is_refused(folder, words, complaint, capsys):
    assert call("catalog", "add", folder / "My-Model", *words) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "config.json: not JSON: "),
        ("[]", "config.json: expected a mapping of fields, found []"),
        (None, "config.json: "),
    ],
)
def test_a_wrong_file_is_one_message_and_leaves_nothing(folder, text, complaint, capsys):
    path = folder / "My-Model" / "config.json"
    path.unlink() if text is None else path.write_text(text)
    assert call("catalog", "add", path) == 2
    assert complaint in capsys.readouterr().err
    assert not (folder / "config").exists()
    assert call("catalog", "show", "h1000") == 2
    assert "no entry 'h1000'" in capsys.readouterr().err


VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "spatial_merge_size": 2}
VISION |= {"temporal_patch_size": 2, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]}


def test_an_encoder_is_read_as_the_catalog_has_it():
    fields = json.loads(QWEN3) | {"vision_config": VISION}
    found = build(ModelSpec, entry_of(fields, "a test"), name="mine")
    known = load_model("qwen3-vl-8b").encoder
    assert found.encoder == replace(known, max_image_tokens=0)  # another file of the checkpoint has this limit
    assert found.encoder.num_params == pytest.approx(0.576e9, rel=0.01)  # 8.77 B of Qwen3-VL-8B are 8.19 B and these
    assert found.encoder.embedding_bytes == 2 * 4 * 4096
    assert found.encoder.attention_flops(2) == 4 * found.encoder.attention_flops(1)


def test_windows_of_an_encoder_limit_its_attention():
    window = {"hidden_act": "silu", "window_size": 64, "fullatt_block_indexes": [7, 15]}
    fields = json.loads(QWEN3) | {"vision_config": VISION | window}
    found = build(ModelSpec, entry_of(fields, "a test"), name="mine").encoder
    assert (found.num_mlp_matrices, found.num_window_layers, found.window_patches) == (3, 25, 16)
    many = 1000
    assert found.attention_flops(many) == 4 * 1152 * 4 * many * (2 * 4 * many + 25 * 16)


AUDIO = {"d_model": 1024, "encoder_layers": 24, "encoder_ffn_dim": 4096, "max_source_positions": 1500}


@pytest.mark.parametrize(
    ("audio", "expected"),
    [
        ({"n_window": 50, "n_window_infer": 800, "output_dim": 2048}, load_model("qwen3-asr-1.7b").audio_encoder),
        (
            {"model_type": "qwen2_audio_encoder", "d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120},
            load_model("qwen2-audio-7b").audio_encoder,
        ),
        ({"model_type": "another"}, None),
    ],
)
def test_an_audio_encoder_is_read_as_the_catalog_has_it(audio, expected):
    fields = json.loads(QWEN3) | {"hidden_size": 4096, "audio_config": AUDIO | audio}
    entry = entry_of(fields, "a test")
    assert build(ModelSpec, entry, name="mine").audio_encoder == expected
    assert ("the audio encoder is left out" in str(entry)) == (expected is None)


@pytest.mark.parametrize("depth", ["27", 0, True])
def test_a_wrong_size_of_an_encoder_is_named(depth):
    with pytest.raises(EntryError, match=r"vision_config\.depth: expected a whole number from 1 on"):
        entry_of(json.loads(QWEN3) | {"vision_config": VISION | {"depth": depth}}, "a test")
