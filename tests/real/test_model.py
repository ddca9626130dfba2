"""The model against transformers, against itself on several ranks, and its weights against files."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

import json
from dataclasses import replace

from pdreal.model.weights import Checkpoint, RandomWeights, weight_source
from pdreal.settings.model import ModelError, from_catalog, from_checkpoint, model_config
from pdreal.settings.options import Options

from pdsim.system.catalog import load_model, names
from tests.real.models import (
    CPU,
    DEEPSEEK,
    HYBRID,
    LLAMA,
    MISTRAL,
    MOONLIGHT,
    WINDOWS,
    WholeSequence,
    generate,
    load,
    tokens,
)

TINY = from_catalog("tiny-qwen3")
QWEN = replace(TINY, vocab_size=300, hidden_size=64, max_context_tokens=512)
MOE = replace(from_catalog("tiny-qwen3-moe"), vocab_size=300, hidden_size=64, max_context_tokens=512)
FAMILIES = pytest.mark.parametrize(
    "config",
    [QWEN, MOE, LLAMA, DEEPSEEK, MOONLIGHT, WINDOWS, MISTRAL, HYBRID],
    ids=["qwen3", "qwen3-moe", "llama", "deepseek-v3", "moonlight", "windows", "mistral", "hybrid"],
)


def logits_of(model, prompt):
    with torch.inference_mode():
        return model.logits(torch.tensor(prompt), torch.arange(len(prompt)), WholeSequence())


def save(config, folder, weights=None, **changes):
    """A checkpoint of this config as others write it."""
    from safetensors.torch import save_file

    source = weights or RandomWeights(3, CPU)
    tensors = {name: source.whole(name, shape) for name, shape in config.parameters.items()}
    file_of = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        part = {name: tensor for name, tensor in tensors.items() if file_of[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    (folder / "config.json").write_text(json.dumps(published(config) | changes))


def published(config):
    family = family_of(config)
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": MODEL_TYPES[family],
        **published_attention(config),
        **published_windows(config),
        **published_delta(config),
        **published_experts(config),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.llama.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "max_position_embeddings": config.max_context_tokens,
        "rms_norm_eps": config.llama.rms_norm_eps,
        "rope_theta": config.llama.rope_theta,
        "rope_scaling": published_rope(config.llama),
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": 7,
    }


MODEL_TYPES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
    "DeepseekV3": "deepseek_v3",
    "Qwen3_5": "qwen3_5_text",
}


def family_of(config):
    if config.latent is not None:
        return "DeepseekV3"
    if config.llama.delta is not None:
        return "Qwen3_5"
    if config.llama.qk_norm:
        return "Qwen3" if config.experts is None else "Qwen3Moe"
    return "Mistral" if config.window_tokens else "Llama"


def published_delta(config):
    if (delta := config.llama.delta) is None:
        return {}
    kinds = {True: "full_attention", False: "linear_attention"}
    return {
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_tokens,
        "full_attention_interval": delta.attention_interval,
        "layer_types": [kinds[config.has_attention(i)] for i in range(config.num_layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.llama.rope_theta,
            "partial_rotary_factor": delta.rotated_share,
        },
    }


def published_windows(config):
    if not config.window_tokens:
        return {}
    windows = {"sliding_window": config.window_tokens}
    if family_of(config) == "Mistral":
        return windows
    kinds = ["sliding_attention" if config.window_of(i) else "full_attention" for i in range(config.num_layers)]
    return {**windows, "use_sliding_window": True, "layer_types": kinds}


def published_attention(config):
    if (latent := config.latent) is None:
        return {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return {
        "num_key_value_heads": config.num_query_heads,
        "q_lora_rank": config.llama.query_rank or None,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.value_dim,
    }


def published_experts(config):
    if (experts := config.experts) is None:
        return {}
    common = {
        "num_experts_per_tok": experts.num_active,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": True,
    }
    if (routing := config.llama.routing) is None:
        return {**common, "num_experts": experts.num_experts}
    return {
        **common,
        "n_routed_experts": experts.num_experts,
        "first_k_dense_replace": config.num_dense_layers,
        "n_group": routing.num_groups,
        "topk_group": routing.num_active_groups,
        "routed_scaling_factor": routing.scale,
        "n_shared_experts": routing.num_shared,
    }


def published_rope(llama):
    if llama.yarn is not None:
        return {"rope_type": "yarn", **vars(llama.yarn)}
    return None if llama.rope_scaling is None else {"rope_type": "llama3", **vars(llama.rope_scaling)}


@FAMILIES
def test_logits_are_those_of_transformers(config, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the oracle of the model is transformers")
    save(config, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    read = from_checkpoint(tmp_path)
    assert replace(read, name=config.name, end_tokens=()) == config
    assert read.end_tokens == (7,)
    prompt = tokens(1, 150, config.vocab_size).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    found = logits_of(load(config, Checkpoint(tmp_path)), prompt)
    assert expected.std() > 0.3  # they say something
    assert (found - expected).abs().max() < 1e-4


@FAMILIES
def test_a_checkpoint_of_random_weights_is_the_same_model(config, tmp_path):
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    save(config, tmp_path, RandomWeights(5, CPU))
    prompt = tokens(2, 40, config.vocab_size)
    read = load(from_checkpoint(tmp_path), weight_source(str(tmp_path), CPU))
    assert torch.equal(logits_of(read, prompt), logits_of(load(config, weight_source("seed:5", CPU)), prompt))


def test_another_seed_is_another_model():
    prompt = tokens(2, 40, LLAMA.vocab_size)
    models = [load(LLAMA, RandomWeights(seed, CPU)) for seed in (0, 1)]
    assert generate(models[0], prompt, 8) != generate(models[1], prompt, 8)


def test_the_catalog_counts_the_parameters_that_are_there():
    models = {name: load_model(name) for name in names("models")}
    stated = {name: model.num_params for name, model in models.items() if model.llama}
    assert {name: from_catalog(name).num_params for name in stated} == pytest.approx(stated, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is none of LlamaForCausalLM, MistralForCausalLM, "),
        ({"attention_bias": True}, "attention_bias is True, and only False can be run"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, and only True can be run"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], and only \[\] can be run"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' is none of default, llama3"),
        ({"quantization_config": {"bits": 4}}, "quantised weights can be run in fp8 with blocks"),
        ({"max_position_embeddings": "many"}, "a field has a wrong value: invalid literal"),
        ({"head_dim": None, "num_attention_heads": 0}, "a field has a wrong value: integer division"),
        ({"rope_scaling": [1]}, "a field has a wrong value: 'list' object"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config.json: factor is missing"),
    ],
)
def test_checkpoints_that_cannot_be_run(changes, complaint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published(LLAMA) | changes))
    with pytest.raises(ModelError, match=complaint):
        from_checkpoint(tmp_path)


@pytest.mark.parametrize(("text", "complaint"), [("{", "cannot be read"), ("[]", "no JSON object"), ("{}", "none is")])
def test_configs_that_are_none(text, complaint, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=complaint):
        from_checkpoint(tmp_path)


@pytest.mark.parametrize("missing", ["vocab_size", "num_attention_heads", "intermediate_size", "rms_norm_eps"])
def test_a_config_that_lacks_a_field(missing, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in published(QWEN).items() if k != missing}))
    with pytest.raises(ModelError, match=rf"config\.json: {missing} is missing"):
        from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("field", "complaint"),
    [
        ({"num_key_value_heads": 1}, "num_kv_heads is 1, and 4 of tiny-qwen3"),
        ({"head_dim": 8}, "head_dim is 8, and 32"),
        ({"num_hidden_layers": "4"}, "num_layers is '4', and 4"),
        ({"vocab_size": 300}, "vocab_size is 300, and 512"),
        ({"intermediate_size": 7}, "intermediate_size is 7, and 512"),
        ({"architectures": ["LlamaForCausalLM"]}, "qk_norm is False, and True"),
    ],
)
def test_a_checkpoint_of_another_shape_than_the_scenarios_model(field, complaint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published(TINY)))
    options = Options(weights=str(tmp_path))
    assert model_config(options, TINY.name).num_params == TINY.num_params
    (tmp_path / "config.json").write_text(json.dumps(published(TINY) | field))
    with pytest.raises(ModelError, match=complaint):
        model_config(options, TINY.name)


def test_weights_that_are_damaged(tmp_path):
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(LLAMA, Checkpoint(tmp_path))


def test_checkpoints_that_are_not_whole(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        from_checkpoint(tmp_path)
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    save(LLAMA, tmp_path)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is \[300, 96\], and config.json makes it"):
        load(replace(LLAMA, vocab_size=299), Checkpoint(tmp_path))
    with pytest.raises(ModelError, match=r"has no tensor lm_head\.weight"):
        load(replace(LLAMA, tied_embeddings=False), Checkpoint(tmp_path))


@pytest.mark.parametrize(("text", "complaint"), [("seed:x", "a whole number"), ("nowhere", "neither seed:N nor")])
def test_weights_that_are_none(text, complaint):
    with pytest.raises(ModelError, match=complaint):
        weight_source(text, CPU)


def test_models_whose_layers_are_not_known_cannot_be_run():
    with pytest.raises(ModelError, match="no section `llama`"):
        from_catalog("gemma-3-27b")


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (1, 2, 3)),
        ({"use_sliding_window": False, "sliding_window": 8}, ()),
        ({"use_sliding_window": True, "sliding_window": None}, ()),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, ()),  # transformers reads no window either
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_a_window_are_those_of_transformers(changes, layers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published(TINY) | changes))
    read = from_checkpoint(tmp_path)
    assert read.llama.window_layers == layers
    assert read.window_tokens == (8 if layers else 0)


def test_a_window_bounds_what_a_token_depends_on():
    """Through layers that all have one, a token sees as far as the windows reach one behind another."""
    model = load(MISTRAL)
    prompt = tokens(1, 100, 300).tolist()
    reach = 1 + sum(MISTRAL.window_of(layer) - 1 for layer in range(MISTRAL.num_layers))
    unseen = [(token + 1) % 300 for token in prompt[:-reach]] + prompt[-reach:]
    seen = [*prompt[:-reach], (prompt[-reach] + 1) % 300, *prompt[-reach + 1 :]]
    last = [logits_of(model, p)[-1] for p in (prompt, unseen, seen)]
    torch.testing.assert_close(last[0], last[1], atol=1e-5, rtol=1e-5)
    assert (last[0] - last[2]).abs().max() > 1e-4


def test_attention_plans_nothing_for_each_length():
    """As cuDNN's would; CUDA picks what is enabled here."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
