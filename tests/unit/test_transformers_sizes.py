"""Parameters of a config.json against transformers' own modules. Opt-in: `pip install transformers`."""

import pytest

from pdsim.system.checkpoint.entry import entry_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the oracle of parameters is transformers")

FAMILIES = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "glm_moe_dsa", "gpt_oss", "gemma3_text", "gemma4_text"),
    *(
        "llama4_text",
        "minimax_m2",
        "mimo_v2_flash",
        "nemotron_h",
        "kimi_linear",
        "ernie4_5_moe",
    ),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family):
    """The configuration that transformers has for a family when nothing is given."""
    try:
        config = transformers.AutoConfig.for_model(family)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(values.numel() for values in model.parameters())
    assert entry_of(config.to_dict(), "a test")["num_params"] == pytest.approx(expected, rel=2e-3)
