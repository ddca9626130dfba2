"""Laws of context parallelism in prefill: work and communication of a forward, memory, and what is sent."""

import pytest

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.settings import Roofline
from pdsim.scenario.building.sizing import layout_of, resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
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
