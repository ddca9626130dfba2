"""Laws of context parallelism: work and communication of forwards and decode steps, memory, and what is sent."""

import pytest

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.settings import Kernels, Roofline
from pdsim.scenario.building.sizing import layout_of, resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_model
from tests.support import request, run, small

MODELS = ["qwen3-32b", "qwen3-30b-a3b", "deepseek-v3"]
FORWARD = PrefillStep(1, (PrefillChunk(0, 20_000, 8_192, is_last=False),))


def of(model: str, tp: int, cp: int, **changes) -> Scenario:
    prefill = {"gpu": "h200", "tp": tp, "cp": cp}
    return small(request(0, 640, 2), model=model, prefill=prefill, decode={"gpu": "h200", "tp": tp // cp}, **changes)


def terms(model: str, tp: int, cp: int) -> dict[str, float]:
    return Roofline().model(layout_of(of(model, tp, cp), "prefill")).prefill_terms(FORWARD)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cp", [2, 4])
def test_groups_share_the_work_that_tensor_parallelism_shares(model, cp):
    """The same GPUs compute the same; each group reduces its own tokens among fewer GPUs."""
    split, whole = terms(model, 8, cp), terms(model, 8, 1)
    for name in ("matrices", "attention"):
        assert split[name] == pytest.approx(whole[name], rel=1e-9)
    assert "gathering" not in whole
    layout, settings = layout_of(of(model, 8, cp), "prefill"), Roofline()
    rate = layout.gpu.nvlink_bandwidth * settings.link_efficiency
    tp, num_tokens, hidden = 8 // cp, FORWARD.num_tokens, layout.model.hidden_size
    ring_ns = 1e9 * 2 * (tp - 1) / tp * 2 * hidden / rate * num_tokens / cp
    assert split["all-reduce"] == pytest.approx(2 * layout.model.num_layers * (settings.all_reduce_ns + ring_ns))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cp", [2, 8])
def test_every_group_gathers_all_keys_and_values(model, cp):
    """(cp - 1) / cp of the KV of the forward's tokens; hidden states to the experts, and back."""
    layout, settings = layout_of(of(model, 8, cp), "prefill"), Roofline()
    num_expert_layers = 0 if layout.model.experts is None else layout.model.experts.num_layers
    token_bytes = layout.kv_token_bytes + 2 * num_expert_layers * 2 * layout.model.hidden_size
    moved_ns = 1e9 * FORWARD.num_tokens * token_bytes * (cp - 1) / cp
    moved_ns /= layout.gpu.nvlink_bandwidth * settings.link_efficiency
    calls_ns = (layout.model.num_layers + 2 * num_expert_layers) * settings.all_reduce_ns
    assert terms(model, 8, cp)["gathering"] == pytest.approx(moved_ns + calls_ns)


@pytest.mark.parametrize(
    "unshared", [PrefillChunk(1, 0, 15, is_last=True), None], ids=["a short chunk", "decoding requests"]
)
def test_groups_share_no_forward_with_short_chunks_or_decoding_requests(unshared):
    """Each of the 8 groups computes all tokens, as one GPU would."""
    chunks = FORWARD.chunks if unshared is None else (*FORWARD.chunks, unshared)
    step = PrefillStep(1, chunks, num_decode_tokens=4 if unshared is None else 0)
    split, alone = (Roofline().model(layout_of(of("qwen3-32b", cp, cp), "prefill")) for cp in (8, 1))
    found, expected = split.prefill_terms(step), alone.prefill_terms(step)
    assert found.pop("gathering") == 0
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cost", [Roofline(), Kernels()], ids=["roofline", "kernels"])
def test_each_group_computes_all_of_a_decode_step_but_the_experts(model, cost):
    """As a server of the group's size would, but the experts are those of a server of all GPUs, and all groups add up
    the experts' outputs.
    """
    split, narrow, whole = (
        cost.model(layout_of(of(model, tp, cp), "prefill")).decode_terms(64) for tp, cp in [(8, 4), (2, 1), (8, 1)]
    )
    experts = layout_of(of(model, 8, 4), "prefill").model.experts
    assert split["matrices"] == pytest.approx(narrow["matrices"]) or (experts and "experts" not in split)
    assert split["state"] == narrow["state"]
    assert split.get("experts") == pytest.approx(whole.get("experts"))
    if isinstance(cost, Roofline):  # whose all-reduces have one rate, among however many GPUs
        share = 0 if experts is None else experts.num_layers / (2 * load_model(model).num_layers)
        summed = (1 - share) * narrow["all-reduce"] + share * whole["all-reduce"]
        assert split["all-reduce"] == pytest.approx(summed)


def test_context_parallelism_shortens_prompts_of_an_aggregated_server_and_prolongs_its_decode_steps():
    """Of the GPUs that a server of tp 4 has."""

    def run_of(cp):
        servers = {"gpu": "h200", "tp": 4, "cp": cp, "instances": 1}
        changes = {"prefill": None, "decode": None, "aggregated": servers, "cost": "kernels"}
        return run(small(request(0, 40_000, 50), model="qwen3-32b", **changes)).records.requests[0]

    whole, split = run_of(1), run_of(4)
    assert split.first_token_ns - split.arrival_ns < whole.first_token_ns - whole.arrival_ns
    assert split.end_ns - split.first_token_ns > 2 * (whole.end_ns - whole.first_token_ns)


@pytest.mark.parametrize("cp", [2, 4])
def test_each_group_holds_all_kv_and_all_weights_but_experts(cp):
    for model in ("qwen3-32b", "qwen3-30b-a3b"):
        split, narrow = layout_of(of(model, 8, cp), "prefill"), layout_of(of(model, 8 // cp, 1), "prefill")
        assert split.kv_token_bytes == narrow.kv_token_bytes
        experts = narrow.model.expert_bytes / (8 // cp)
        assert narrow.weight_bytes_per_rank - split.weight_bytes_per_rank == pytest.approx(experts * (1 - 1 / cp))


@pytest.mark.parametrize("model", ["qwen3-32b", "moonlight-16b-a3b"])
def test_one_group_sends(model):
    """As a server of its size would, over as many links."""

    def rows(tp, cp):
        scenario = of(model, tp, cp, network={"bandwidth": "1 GB/s", "message_latency": "1 ms"})
        return [
            (row.num_bytes, row.num_descriptors, row.end_ns - row.start_ns) for row in run(scenario).records.transfers
        ]

    assert rows(8, 2) == rows(4, 1)
    assert resolve(of(model, 8, 2)).prefill.num_gpus == 8


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prefill__layer_groups": 2}, "beside prefill.layer_groups"),
        ({"prefill__host_cache": "auto"}, "beside prefill.host_cache"),
        ({"prefill__pp": 2}, "does not model prefill.pp 2 beside prefill.cp"),
        ({"prefill__cp": 3}, "does not divide"),
        ({"engine": "vllm"}, "prefill.cp"),
    ],
)
def test_what_is_not_modelled_is_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        run(small(request(0, 64, 2), **{"prefill__tp": 4, "prefill__cp": 2, **changes}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dp": 2}, "does not model aggregated.cp 2 beside aggregated.dp"),
        ({"pp": 2}, "does not model aggregated.cp 2 beside aggregated.pp"),
        ({"host_cache": "auto"}, "beside aggregated.host_cache"),
        ({"dcp": 2}, "SGLang refuses it with aggregated.dcp"),
    ],
)
def test_what_an_aggregated_server_cannot_have_is_refused(changes, told):
    servers = {"gpu": "h200", "tp": 4, "cp": 2, **changes}
    with pytest.raises(ConfigError, match=told):
        run(small(request(0, 64, 2), prefill=None, decode=None, aggregated=servers))
