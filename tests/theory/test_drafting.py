"""The time of a speculative decode step of one request, computed by hand from the sizes of model and draft."""

import pytest

from tests.support import request, run, small

PARAMS, LAYERS, HIDDEN, VOCABULARY = 8.19e9, 36, 4096, 151_936
"""Qwen3-8B, in bf16."""
EMBEDDINGS = VOCABULARY * HIDDEN
"""Parameters; the output projection has as many."""
LAYER_KV = 2 * 8 * 128 * 2
"""Bytes of a token's keys and values in one layer."""
FLOPS, BANDWIDTH = 1e15 * 0.5, 3e12 * 0.8
KV_BANDWIDTH = 3e12 * 0.8
LAYER_NS, STEP_NS, PROMPT_NS = 5_000, 100_000, 1_000_000
COST = {
    "use": "roofline",
    "matrix_efficiency": 0.5,
    "memory_efficiency": 0.8,
    "kv_bandwidth": 0.8,
    "decode_layer": f"{LAYER_NS} ns",
    "step_overhead": f"{STEP_NS} ns",
    "prompt_overhead": f"{PROMPT_NS} ns",
    "prefill_layer": "0 ns",
}
GPU = {"flops": {"bf16": 1e15}, "memory_bandwidth": 3e12}
PROMPT, OUTPUT = 1000, 20


def products_ns(num_params: float, num_tokens: int) -> float:
    return 1e9 * max(2 * num_params * num_tokens / FLOPS, 2 * num_params / BANDWIDTH)


def reading_ns(num_layers: int, num_tokens: int) -> float:
    return 1e9 * num_layers * LAYER_KV * num_tokens / KV_BANDWIDTH


def draft_params(*, is_eagle3: bool) -> tuple[float, float]:
    """Parameters of a layer with its projections, and of the output projection."""
    layer = (PARAMS - 2 * EMBEDDINGS) / LAYERS
    if is_eagle3:  # three hidden states in, and attention over twice the width; a vocabulary of its own
        return layer + 3 * HIDDEN**2 + HIDDEN * (32 + 2 * 8) * 128, 32_000 * HIDDEN
    return layer + 2 * HIDDEN**2, EMBEDDINGS


def step_ns(num_steps: int, num_context_tokens: int, *, is_eagle3: bool) -> float:
    """A step that drafts num_steps tokens, and verifies one more."""
    verified, (layer, head) = num_steps + 1, draft_params(is_eagle3=is_eagle3)
    proposing = products_ns(layer + head, 1)
    extending = products_ns(layer, verified) + proposing - products_ns(layer, 1)
    drafts = (num_steps - 1) * proposing + extending + num_steps * (LAYER_NS + reading_ns(1, num_context_tokens))
    verifying = products_ns(PARAMS - EMBEDDINGS, verified) + LAYERS * LAYER_NS + STEP_NS
    return drafts + verifying + reading_ns(LAYERS, num_context_tokens)


@pytest.fixture
def _a_gpu(monkeypatch, tmp_path):
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "round.yaml").write_text(
        "memory_bytes: 80e+9\nmemory_bandwidth: 3e+12\nflops: {bf16: 1e+15}\nnvlink_bandwidth: 1e+11\n"
        "nic_bandwidth: 1e+10\nhost_bandwidth: 1e+10\nsources: {everything: round}\n"
    )
    monkeypatch.setenv("PDSIM_CATALOG", str(tmp_path))


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_without_an_accepted_draft_each_token_costs_drafting_and_verifying(algorithm: str, num_steps: int):
    drafts = {"speculative_algorithm": algorithm, "speculative_num_steps": num_steps, "speculative_accept_length": 1}
    cluster = {"gpu": "round", "pool_tokens": 8192}
    given = {"prefill": cluster, "decode": {**cluster, **drafts, "retraction_backup": False}}
    (r,) = run(small(request(0, PROMPT, OUTPUT), model="qwen3-8b", cost=COST, **given)).records.requests
    is_eagle3, verified = algorithm == "EAGLE3", num_steps + 1
    steps = [step_ns(num_steps, PROMPT + i + verified, is_eagle3=is_eagle3) for i in range(OUTPUT - 1)]
    assert r.end_ns - r.first_token_ns == pytest.approx(sum(steps), abs=OUTPUT)


@pytest.mark.usefixtures("_a_gpu")
def test_a_prompt_passes_the_draft_after_the_model():
    def prefill_ns(**drafts: object) -> int:
        cluster = {"gpu": "round", "pool_tokens": 8192}
        given = {"prefill": {**cluster, "chunked_prefill_tokens": 4096}, "decode": {**cluster, **drafts}}
        records = run(small(request(0, PROMPT, 2), model="qwen3-8b", cost=COST, **given)).records
        return next(step.duration_ns for step in records.steps if step.kind == "prefill")

    drafts = {"speculative_num_steps": 3, "speculative_accept_length": 2}
    attended = 1e9 * 2 * 32 * 2 * 128 * PROMPT**2 / 2 / (1e15 * 0.5)
    layer, _ = draft_params(is_eagle3=False)
    assert prefill_ns(**drafts) - prefill_ns() == pytest.approx(products_ns(layer, PROMPT) + attended, abs=2)
    assert prefill_ns(**drafts, speculative_drafting=0) == prefill_ns()
