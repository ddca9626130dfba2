"""Parameters of a config.json against transformers' own modules. Opt-in: `pip install transformers`."""

import pytest

from pdsim.system.catalog import EntryError
from pdsim.system.checkpoint.entry import entry_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the oracle of parameters is transformers")

EXACT = ("llama", "mixtral", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "gpt_oss")
EXACT += ("gemma4_text", "llama4_text", "mimo_v2_flash", "nemotron_h", "kimi_linear", "ernie4_5_moe")
WITH_ENCODERS = ("gemma3", "git", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal")
"""Families whose causal model holds an encoder of images or sound, which an entry leaves out."""


FAMILIES = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*WITH_ENCODERS}))
def test_parameters_are_those_of_transformers_or_the_family_is_refused(family):
    """The configuration that transformers has for a family when nothing is given."""
    try:
        config = transformers.AutoConfig.for_model(family)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as wrong:  # noqa: BLE001  its defaults make no model
        pytest.skip(f"transformers makes no {family} of its defaults: {wrong!r:.80}")
    expected = sum(values.numel() for values in model.parameters())
    try:
        entry = entry_of(config.to_dict(), "a test")
    except EntryError:
        assert family not in EXACT
        return
    assert entry["num_params"] == pytest.approx(expected, rel=2e-3 if family in EXACT else 2e-2)
