"""Defaults of drafts, as SGLang chooses them, and drafts that a model or a server does not have."""

from pathlib import Path

import pytest

from pdsim.formats.deployments.importing import changed, import_deployment
from pdsim.scenario.building.cost_models import draft_times
from pdsim.scenario.building.sizing import layout_of, resolve
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from tests.support import request, small


def drafting(model: str = "qwen3-8b", servers: dict[str, object] | None = None, **drafts: object) -> Scenario:
    named = {f"decode__speculative_{name}": value for name, value in {"accept_length": 1.5, **drafts}.items()}
    named |= {f"{role}__{name}": value for role in ("prefill", "decode") for name, value in (servers or {}).items()}
    return small(request(0, 9, 9), model=model, **named)


@pytest.mark.parametrize(
    ("model", "given", "chosen"),
    [
        ("qwen3-8b", {"algorithm": "EAGLE3"}, (3, 1, 4)),
        ("llama-3.1-8b", {"algorithm": "EAGLE3"}, (5, 4, 8)),
        ("qwen3-8b", {"algorithm": "STANDALONE", "draft_model": "qwen3-0.6b"}, (3, 1, 4)),
        ("qwen3-8b", {"num_steps": 5}, (5, None, 6)),
        ("qwen3-8b", {"num_steps": 5, "eagle_topk": 1, "draft_tokens": 3}, (5, 1, 6)),
        ("qwen3-8b", {"num_steps": 5, "eagle_topk": 4, "draft_tokens": 8}, (5, 4, 8)),
        ("qwen3-8b", {"draft_tokens": 4}, (3, None, 4)),
        ("qwen3-8b", {"algorithm": "dspark", "draft_layers": 5}, (1, 1, 8)),
        ("qwen3-8b", {"algorithm": "NGRAM"}, (11, None, 12)),
    ],
)
def test_what_is_missing_is_the_engines_choice(model: str, given: dict[str, object], chosen: tuple[int | None, ...]):
    decode = drafting(model, **given).decode
    assert decode is not None
    assert (decode.num_draft_steps, decode.speculative_eagle_topk, decode.speculative_draft_tokens) == chosen


@pytest.mark.parametrize(("page_size", "tokens"), [(1, 20), (4, 32), (64, 512)])
def test_a_tree_needs_pages_for_each_branch(page_size: int, tokens: int):
    """5 steps of 4 branches: with pages of 4 tokens ceil((3 + 5) / 4) = 2 pages for each, with pages of 64 ceil(68 /
    64) = 2.
    """
    decode = drafting(num_steps=5, eagle_topk=4, draft_tokens=8).decode
    assert decode is not None
    assert decode.num_ahead_tokens(page_size) == 2 * tokens


def test_a_run_keeps_the_entry_of_its_draft_model():
    scenario = drafting(algorithm="STANDALONE", draft_model="qwen3-0.6b", num_steps=2)
    assert ("models", "qwen3-0.6b") in scenario.entries
    assert len(scenario.entries) == len(drafting(num_steps=2).entries) + 1


@pytest.mark.parametrize(
    ("drafts", "says"),
    [
        ({"algorithm": "NEXTN"}, "NEXTN: the checkpoint of qwen3-8b has no layers that predict further tokens"),
        ({"algorithm": "DSPARK"}, "DSPARK needs speculative_draft_layers"),
        ({"algorithm": "STANDALONE"}, "speculative_draft_model and speculative_algorithm STANDALONE: give both"),
        ({"algorithm": "STANDALONE", "draft_model": "llama-3.1-8b"}, "a STANDALONE draft shares the vocabulary"),
        ({"algorithm": "STANDALONE", "draft_model": "qwen4"}, "qwen4"),
        ({"algorithm": "EAGLE4"}, "EAGLE"),
        ({"num_steps": 2, "accept_length": None}, "speculative_accept_length is missing"),
        ({"num_steps": 2, "draft_tokens": 0}, "speculative_draft_tokens: .*found 0"),
        ({"algorithm": "NGRAM", "draft_tokens": 0}, "speculative_draft_tokens: .*found 0"),
        ({"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 4}, "speculative_draft_tokens is missing"),
    ],
)
def test_drafts_that_there_are_not(drafts: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        resolve(drafting(**drafts))


def test_a_checkpoints_own_layer_has_experts_and_a_head_of_eagle3_has_its_own_projection():
    own = layout_of(drafting("deepseek-v3", algorithm="NEXTN", draft_tokens=4), "decode").draft
    assert own is not None
    assert own.expert_bytes == 256 * 3 * 7168 * 2048
    assert own.own_bytes == pytest.approx(2 * 7168**2 + 187e6 + 44e6, rel=0.1)  # MLA and the shared expert, in fp8
    head = layout_of(drafting(algorithm="EAGLE3"), "decode").draft
    plain = layout_of(drafting(algorithm="EAGLE"), "decode").draft
    assert head is not None
    assert plain is not None
    projections = 2 * (4096**2 + 4096 * 48 * 128 + 32_000 * 4096)
    assert head.own_bytes - plain.own_bytes == pytest.approx(projections)


def test_a_draft_without_experts_sends_no_tokens_to_experts():
    servers = {"gpu": "h200", "tp": 4, "ep": 4}
    sending, gathering = (
        draft_times(drafting("moonlight-16b-a3b", {**servers, "moe_a2a_backend": backend}, draft_tokens=4), "decode")
        for backend in ("deepep", "none")
    )
    assert sending is not None
    assert gathering is not None
    assert sending.layers.decode_line(8) == gathering.layers.decode_line(8)


SCRIPT = """
python -m sglang.launch_server --model-path Qwen/Qwen3.5-35B-A3B --tp-size 4 --disaggregation-mode {} \\
  --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 \\
  --mamba-scheduler-strategy extra_buffer --speculative-draft-model-path Qwen/Qwen3.5-35B-A3B
"""


def test_flags_of_drafts_are_read_once_their_acceptance_is_said(tmp_path: Path):
    script = tmp_path / "servers.sh"
    script.write_text(SCRIPT.format("prefill") + SCRIPT.format("decode"))
    found = import_deployment([script], gpu="h20")
    assert parse_scenario(changed(found, []), base=tmp_path).acceptance is None
    assert any("set speculative_accept_length" in line for line in found.aside)
    found = import_deployment([script], gpu="h20")
    scenario = parse_scenario(changed(found, ["decode.speculative_accept_length=2.5"]), base=tmp_path)
    assert not any("set speculative_accept_length" in line for line in found.aside)
    prefill, decode = scenario.pair
    assert (decode.speculative_algorithm, decode.num_draft_steps, decode.speculative_draft_tokens) == ("NEXTN", 3, 4)
    assert prefill.mamba_radix_cache_strategy == "extra_buffer"
