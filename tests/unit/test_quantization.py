"""A checkpoint's quantisation: ModelOpt's file beside config.json, what it leaves in bf16, and its KV."""

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.launch import ENGINES
from pdsim.scenario.loading import parse_scenario
from pdsim.system.catalog import EntryError, build, searched
from pdsim.system.checkpoint.config import Config
from pdsim.system.checkpoint.entry import entry_of
from pdsim.system.checkpoint.layers import layers_of
from pdsim.system.checkpoint.modules import modules_of
from pdsim.system.checkpoint.quantization import covers
from pdsim.system.model import ModelSpec
from tests.cli.test_commands import output
from tests.unit.test_published import DEEPSEEK, GEMMA, GLM, LLAMA, NEXT, QWEN3_MOE, QWEN35

PLAIN = {
    name: {**json.loads(text), "quantization_config": None} for name, text in (("deepseek", DEEPSEEK), ("llama", LLAMA))
}
WORKLOAD = {"use": "random_lengths", "num_requests": 9, "input_tokens": 100, "output_tokens": 10}


def beside(**fields):
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, **fields}}


def made(fields, quantized):
    entry = entry_of(fields, "a test", quantized)
    return build(ModelSpec, entry, name="mine"), entry["sources"].get("notes", "")


def modules(fields):
    config = Config(fields)
    return dict(modules_of(config, layers_of(config)))


@pytest.mark.parametrize("text", [LLAMA, QWEN3_MOE, DEEPSEEK, GLM, GEMMA, QWEN35, NEXT])
def test_modules_embeddings_and_routed_experts_are_all_parameters(text):
    fields = json.loads(text)
    model = build(ModelSpec, entry_of(fields, "a test"), name="mine")
    embeddings = model.vocab_size * model.hidden_size * (2 - model.tied_embeddings)
    assert sum(modules(fields).values()) + embeddings + model.num_expert_params == model.num_params


@cache
def without_exclusions(name):
    """Parameters of each module of a checkpoint, the modules' names, and its model in FP4."""
    known = modules(PLAIN[name])
    return known, st.sampled_from(sorted(known)), made(PLAIN[name], beside(exclude_modules=["lm_head"]))[0]


@given(st.sampled_from(sorted(PLAIN)), st.data())
def test_what_is_excluded_is_counted_in_bf16(name, data):
    """The law holds for any modules; two bytes each are kept, and 9 bits in four of 16 for the rest."""
    known, any_module, none = without_exclusions(name)
    left = data.draw(st.sets(any_module, max_size=9))
    model, notes = made(PLAIN[name], beside(exclude_modules=["lm_head", *left]))
    assert "not known" not in notes
    assert model.num_params_wider_than_fp4 == sum(known[one] for one in left)
    assert model.weight_bytes - none.weight_bytes == pytest.approx(sum(known[one] for one in left) * (2 - 0.5625))


def test_nvfp4_beside_config_json_is_a_quarter_of_bf16():
    left = [f"model.layers.{i}.self_attn.{name}" for i in range(61) for name in ("q_a_proj", "q_b_proj", "kv_b_proj")]
    model, _ = made(PLAIN["deepseek"], beside(exclude_modules=["lm_head", *left], kv_cache_quant_algo="FP8"))
    bf16, _ = made(PLAIN["deepseek"], None)
    assert (model.weight_dtypes, model.kv_dtype, bf16.kv_dtype) == (("fp4",), "fp8", None)
    assert 0.28 < model.weight_bytes / bf16.weight_bytes < 0.30


def test_config_json_comes_before_the_file_beside():
    fp8 = {**PLAIN["llama"], "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    assert made(fp8, beside())[0].weight_dtype == "fp8"


def test_modules_that_are_not_known_are_named():
    _, notes = made(PLAIN["llama"], beside(exclude_modules=["lm_head", "model.layers.3.adapter", "extra*"]))
    assert "modules of unknown type, counted in fp4: extra*, model.layers.N.adapter" in notes


def test_fp8_that_leaves_modules_wide_counts_their_bytes():
    model, notes = made(PLAIN["llama"], beside(quant_algo="FP8", group_size=None, exclude_modules=["*self_attn*"]))
    assert "1.34 B parameters of layers are counted in bf16, all else in fp8" in notes
    narrow, _ = made(PLAIN["llama"], beside(quant_algo="FP8", group_size=None))
    assert model.weight_bytes - narrow.weight_bytes == model.num_params_in_bf16 == pytest.approx(1.34e9, rel=0.01)


MIXED = {
    **{
        f"language_model.model.layers.{i}.self_attn.{one}_proj": {"quant_algo": "FP8"}
        for i in range(32)
        for one in "qkvo"
    },
    **{f"model.layers.{i}.mlp": {"quant_algo": "NVFP4", "group_size": 16} for i in range(32)},
}


def test_layers_of_two_types_have_their_bytes():
    """Attention in fp8 and MLPs in fp4, embeddings and output projection in bf16."""
    model, _ = made(PLAIN["llama"], beside(quant_algo="MIXED_PRECISION", quantized_layers=MIXED))
    sizes = modules(PLAIN["llama"])
    attention = sum(size for name, size in sizes.items() if "self_attn" in name)
    embeddings = 2 * model.vocab_size * model.hidden_size
    expected = attention + (sum(sizes.values()) - attention) * 0.5625 + 2 * embeddings
    assert (model.weight_dtype, model.weight_bytes) == ("fp4", pytest.approx(expected))


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, "fp8"),
        ({"quant_method": "mxfp4"}, "fp4"),
        ({"quant_method": "w8a8_int8"}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["re:.*self_attn.*"]},
                    "b": {"weights": {"num_bits": 4, "type": "float"}, "targets": ["Linear"]},
                },
            },
            "fp4",
        ),
    ],
)
def test_methods_of_quantisation(how, dtype):
    assert made({**PLAIN["llama"], "quantization_config": how}, None)[0].weight_dtype == dtype


def test_groups_of_another_size_are_told():
    _, notes = made(PLAIN["llama"], beside(group_size=32))
    assert "groups of 32 weights have 0.531 bytes each; fp4 is counted with 0.5625" in notes


def test_the_checkpoints_size_is_a_check():
    whole = entry_of(PLAIN["llama"], "a test", None, 16.06e9)
    half = entry_of(PLAIN["llama"], "a test", None, 8e9)
    assert "notes" not in whole["sources"]
    assert "its files have 8.0 GB, where 16.1 GB are counted" in half["sources"]["notes"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers: expected the modules of MIXED_PRECISION, found None"),
        ({"quant_algo": "NVFP2"}, "hf_quant_config.json: expected one of FP8, .*, found 'NVFP2'"),
        ({"exclude_modules": "lm_head"}, "expected names of modules"),
        ({"kv_cache_quant_algo": 8}, "kv_cache_quant_algo: expected a name such as FP8, found 8"),
    ],
)
def test_what_would_change_bytes_is_refused(fields, complaint):
    with pytest.raises(EntryError, match=complaint):
        made(PLAIN["llama"], beside(**fields))


@pytest.mark.parametrize("found", [[], "NVFP4", 5, {"quantization": ["NVFP4"]}])
def test_a_file_beside_that_is_no_mapping_is_refused(found):
    with pytest.raises(EntryError, match=r"hf_quant_config\.json: expected a mapping of fields, found"):
        made(PLAIN["llama"], found)


@pytest.mark.parametrize("fields", [{}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, {"config_groups": {}}])
def test_a_file_beside_without_an_algorithm_is_told(fields):
    """SGLang 0.5.23 reads nothing else of such a file: configs/model_config.py:1853."""
    model, notes = made(PLAIN["llama"], {"quantization": fields})
    assert (model.weight_dtype, model.kv_dtype) == ("bf16", None)
    assert "hf_quant_config.json has no quant_algo: weights and KV are in bf16" in notes


def test_an_unknown_scheme_of_kv_is_told():
    model, notes = made(PLAIN["llama"], beside(kv_cache_quant_algo="NVFP4"))
    assert model.kv_dtype is None
    assert "the KV type NVFP4 is unknown" in notes


@pytest.mark.parametrize(
    ("pattern", "module", "is_covered"),
    [
        ("model.layers.1.self_attn", "model.layers.1.self_attn.q_proj", True),
        ("model.layers.1.self_attn", "model.layers.10.self_attn.q_proj", False),
        ("model.layers.1.self_attn*", "model.layers.1.self_attn.q_proj", True),
        ("language_model.model.layers.1.mlp*", "model.layers.1.mlp.gate_proj", True),
        ("shared_experts", "model.layers.1.mlp.shared_experts.up_proj", True),
        ("re:.*self_attn.*", "model.layers.1.self_attn.q_proj", True),
        ("q_proj", "model.layers.1.self_attn.q_a_proj", False),
    ],
)
def test_which_modules_a_name_covers(pattern, module, is_covered):
    assert covers(pattern, module) == is_covered


def test_the_command_reads_the_file_beside_and_scenarios_have_its_kv(tmp_path, capsys):
    folder = tmp_path / "mine-nvfp4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLAIN["llama"]))
    (folder / "hf_quant_config.json").write_text(json.dumps(beside(kv_cache_quant_algo="FP8")))
    (tmp_path / "catalog").mkdir()
    with searched(tmp_path / "catalog"):
        told = output(capsys, "--catalog", tmp_path / "catalog", "catalog", "add", folder)
        assert "KV is in fp8, unless a scenario gives kv_dtype" in told
        plain = {"model": "mine-nvfp4", "workload": WORKLOAD, "aggregated": {"gpu": "b200"}}
        assert parse_scenario(plain, base=None).kv_dtype == "fp8"
        wide = parse_scenario({**plain, "kv_dtype": "bf16"}, base=None)
        assert wide.kv_dtype == "bf16"
        assert "--kv-cache-dtype bf16" in ENGINES["sglang"](wide, ["s.yaml"], "m").commands["aggregated-0"]
        assert "--kv-cache-dtype bfloat16" in ENGINES["vllm"](wide, ["s.yaml"], "m").commands["aggregated-0"]
