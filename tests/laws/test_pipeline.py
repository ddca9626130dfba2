"""Laws of prefill in pipeline stages: when chunks leave the last, what is sent, and what each GPU holds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.prefill.chunk_sizer import ChunkSizer
from pdsim.cost.step_times import pipeline_times
from pdsim.scenario.building.cost_models import fitted_parabola
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import layout_of, resolve
from pdsim.scenario.building.wiring import interconnect
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_gpu, load_model, names
from pdsim.system.memory import Layout
from pdsim.system.pipeline_stages import largest_stage, stage_layers
from tests.strategies import scenarios, vllm_scenarios
from tests.support import MILLISECOND, examples, request, run, run_both_ways, small

CHUNK = 64


def forwards(traced):
    return [step for step in traced.records.steps if step.kind == "prefill"]


def hop_ns(scenario: Scenario, num_tokens: int) -> int:
    layout = layout_of(scenario, "prefill")
    return round(pipeline_times(layout, load_model(scenario.model).num_layers).hop_token_ns * num_tokens)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 9])
@pytest.mark.parametrize("pp", [1, 2, 4, 7])
def test_equal_chunks_pass_through_stages(num_chunks, pp):
    """n chunks through p stages of t take (n + p - 1) t, and the hops of every p-th: the loop waits for its result."""
    scenario = small(request(0, num_chunks * CHUNK, 2), prefill__pp=pp)
    stage_ns, pass_ns = CHUNK * MILLISECOND // pp, (pp - 1) * hop_ns(scenario, CHUNK)
    steps = forwards(run(scenario, checked=True))
    starts = [step.start_ns - steps[0].start_ns for step in steps]
    assert starts == pytest.approx([i * stage_ns + i // pp * pass_ns for i in range(num_chunks)], abs=num_chunks)
    took_ns = steps[-1].start_ns + steps[-1].duration_ns - steps[0].start_ns
    num_passes = 1 + (num_chunks - 1) // pp
    expected_ns = (num_chunks + pp - 1) * stage_ns + num_passes * pass_ns
    assert took_ns == pytest.approx(expected_ns, abs=num_chunks + pp)


def test_the_largest_stage_sets_the_pace():
    """28 layers in 3 stages: 9, 9 and 10."""
    scenario = small(request(0, 12 * CHUNK, 2), prefill__pp=3)
    steps = forwards(run(scenario))
    ends = [step.start_ns + step.duration_ns for step in steps]
    largest_ns = CHUNK * MILLISECOND * 10 / 28
    assert [later - earlier for earlier, later in pairwise(ends)][3:] == pytest.approx([largest_ns] * 8, rel=1e-3)
    assert steps[0].duration_ns == pytest.approx(CHUNK * MILLISECOND, rel=1e-3)


@given(st.integers(1, 200), st.data())
@examples(100)
def test_layers_are_dealt_out_evenly(num_layers, data):
    layers = stage_layers(num_layers, data.draw(st.integers(1, num_layers)))
    assert sum(layers) == num_layers
    assert layers == sorted(layers)
    assert layers[-1] - layers[0] <= 1


LAYERED = [name for name in names("models") if load_model(name).num_layers > 1]


@given(st.sampled_from(LAYERED), st.data())
@examples(300)
def test_stages_hold_the_model_together(name, data):
    """No stage holds more than the model, and the stages of equal size hold it all."""
    whole = load_model(name)
    num_stages = data.draw(st.integers(1, whole.num_layers), label="stages")
    part = largest_stage(whole, num_stages)

    def counts(model):
        attention = model.attention
        ratios = getattr(attention, "compress_ratios", None) or {}
        state_layers = 0 if model.state is None else model.state.num_layers
        indexers = getattr(attention, "num_index_layers", 0)
        return [attention.num_layers, attention.num_window_layers, state_layers, indexers, *ratios.values()]

    kinds = list(zip(counts(whole), counts(part), strict=True))
    assert all(of_part <= of_whole for of_whole, of_part in kinds)
    ranks = {"gpu": load_gpu("h200"), "tp": 1, "kv_dtype": "bf16"}
    all_layers, layers = (Layout(model=model, **ranks) for model in (whole, part))
    assert layers.kv_token_bytes <= all_layers.kv_token_bytes <= num_stages * layers.kv_token_bytes + num_stages
    assert layers.state_bytes <= all_layers.state_bytes <= num_stages * layers.state_bytes
    if all(of_whole % num_stages == 0 for of_whole in (whole.num_layers, *counts(whole))):
        assert all(of_part * num_stages == of_whole for of_whole, of_part in kinds)
        assert layers.state_bytes * num_stages == all_layers.state_bytes


@pytest.mark.parametrize(
    ("name", "num_stages", "expected"),
    [("deepseek-v4-flash", 2, {4: 11, 128: 11}), ("deepseek-v4-pro", 2, {4: 16, 128: 16})],
)
def test_a_stage_has_its_part_of_compressed_layers(name, num_stages, expected):
    """21 of the 43 layers of Flash, and 30 of the 61 layers of Pro, have an indexer."""
    attention = largest_stage(load_model(name), num_stages).attention
    assert attention.compress_ratios == expected
    assert attention.num_index_layers == expected[4]


@st.composite
def pipelined(draw: st.DrawFn) -> Scenario:
    scenario = draw(st.one_of(scenarios(), vllm_scenarios()))
    network = scenario.network.model_copy(update={"staging": None})
    dynamic = scenario.engine == "sglang" and scenario.pair.prefill.chunked_prefill_tokens != 0 and draw(st.booleans())
    update = {"pp": draw(st.sampled_from([2, 3, 4, 28])), "layer_groups": 0, "dynamic_chunks": dynamic}
    prefill = scenario.pair.prefill.model_copy(update=update)
    return scenario.model_copy(update={"prefill": prefill, "network": network})


@given(pipelined())
@examples(100)
def test_every_request_ends_and_forwards_keep_their_order(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert all(r.outcome == "finished" or "not fit" in r.reason for r in traced.records.requests)
    by_instance: dict[str, list] = {}
    for step in forwards(traced):
        by_instance.setdefault(step.instance_id, []).append(step)
    for steps in by_instance.values():
        for earlier, later in pairwise(steps):
            assert earlier.start_ns + earlier.first_ns <= later.start_ns
            assert earlier.start_ns + earlier.duration_ns < later.start_ns + later.duration_ns
        for before, step in zip(steps, steps[scenario.prefill.pp :], strict=False):
            assert before.start_ns + before.duration_ns <= step.start_ns


@given(pipelined())
@examples(40)
def test_many_steps_at_once_are_single_steps_with_stages(scenario: Scenario):
    run_both_ways(scenario)


@given(pipelined())
@examples(30)
def test_a_journal_of_stages_replays(scenario: Scenario):
    traced = run(scenario)
    written = from_lines([to_line(entry) for entry in traced.journal])
    assert replay(written, state_machines(resolve(scenario))) == len(traced.journal)


@pytest.mark.parametrize("transport", ["mooncake-rdma", "nixl-rdma"])
@pytest.mark.parametrize(
    ("model", "tps", "pps"),
    [
        ("qwen3-0.6b", (1, 1), (2, 3, 28)),
        ("qwen3-32b", (4, 2), (2, 5)),
        ("deepseek-v3", (8, 8), (2, 4)),
        ("qwen3.5-35b-a3b", (1, 2), (2, 5, 10)),
        ("gpt-oss-120b", (1, 4), (2, 3, 6)),
    ],
)
def test_stages_together_send_what_one_sends(transport, model, tps, pps):
    """Bytes and descriptors of all ranks are the same; those of one rank are its layers' part."""

    def units(pp):
        scenario = small(
            request(0, 100, 2),
            model=model,
            prefill__tp=tps[0],
            decode__tp=tps[1],
            prefill__pp=pp,
            network__transport=transport,
        )
        return interconnect(scenario).wire, run(scenario).records.transfers

    wire, rows = units(1)
    for pp in pps:
        of_stage, of_stages = units(pp)
        assert of_stage.num_layers == -(-wire.num_layers // pp)
        assert of_stage.page_bytes * wire.num_layers == wire.page_bytes * of_stage.num_layers
        assert [(row.num_bytes, row.num_descriptors) for row in of_stages] == [
            (row.num_bytes, row.num_descriptors) for row in rows
        ]


def test_stages_send_side_by_side():
    """Each rank sends its layers over its own link; decode's links take all in, as fast as from one stage."""

    def moving_ns(pp, gpus_per_nic, decode_tp):
        network = {"bandwidth": "1 GB/s", "gpus_per_nic": gpus_per_nic, "transfer_latency": 0, "descriptor_latency": 0}
        scenario = small(request(0, 64, 2), prefill__pp=pp, prefill__tp=2, decode__tp=decode_tp, network=network)
        (row,) = run(scenario).records.transfers
        return row.end_ns - row.start_ns

    for decode_tp in (1, 2, 4):
        assert moving_ns(4, 1, decode_tp) == pytest.approx(moving_ns(1, 1, decode_tp), rel=1e-6)
    assert moving_ns(4, 8, 2) == pytest.approx(2 * moving_ns(4, 1, 2), rel=1e-6)


def test_a_stage_has_its_part_of_the_weights_and_of_the_cost():
    """DeepSeek-V3 does not fit eight H100s, and two stages of eight hold it."""

    def of(pp):
        return small(request(0, 64, 2), model="deepseek-v3", prefill={"gpu": "h100", "tp": 8, "pp": pp})

    with pytest.raises(ConfigError, match="no room for KV"):
        resolve(of(1))
    whole, half = (layout_of(of(pp), "prefill") for pp in (1, 2))
    assert half.weight_bytes_per_rank == pytest.approx(whole.weight_bytes_per_rank * 31 / 61, rel=0.02)
    assert half.kv_token_bytes * 61 == whole.kv_token_bytes * 31
    assert half.model.flops_per_token == pytest.approx(whole.model.flops_per_token * 31 / 61, rel=0.02)
    assert resolve(of(2)).prefill.pool_tokens > 100_000
    assert of(2).prefill.num_gpus == 16


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prefill__layer_groups": 2}, "beside prefill.layer_groups"),
        ({"prefill__optimistic_attempts": 1}, "beside prefill.optimistic_attempts"),
        ({"engine": "vllm", "prefill__host_cache": 0, "prefill__host_cache_connector": "lmcache"}, "connector lmcache"),
        ({"decode__pp": 2, "decode__radix_cache": True, "decode__host_cache": 0}, "decode.py:3460"),
        ({"network__staging": {}, "prefill__tp": 2}, "beside network.staging"),
        ({"prefill__dp": 2, "prefill__tp": 2, "health": {}}, "beside prefill.dp with faults or health"),
        ({"prefill__dp": 2, "prefill__tp": 2, "engine": "vllm"}, "core.py:2507"),
        ({"engine": "vllm", "prefill__dynamic_chunks": True}, "is a setting of SGLang"),
        ({"engine": "vllm", "model": "gpt-oss-120b", "network__transport": "nixl-rdma"}, "pulls no hybrid layouts"),
        ({"engine": "vllm", "model": "gpt-oss-120b"}, "pdsim does not model hybrid layouts"),
        ({"prefill__pp": 29}, "28 layers"),
    ],
)
def test_what_stages_do_not_have_is_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        run(small(request(0, 64, 2), **{"prefill__pp": 2, **changes}))


def test_vllm_pulls_kv_of_sparse_attention_from_stages():
    """Its layers keep the KV of all tokens, though each token attends to few (0.33.0, v1/kv_cache_interface.py:729)."""
    wide = {"gpu": "b200", "tp": 8, "ep": 8}
    transport = {"transport": "nixl-rdma"}
    roles = {"prefill": {**wide, "pp": 2}, "decode": wide}
    traced = run(small(request(0, 64, 2), engine="vllm", model="deepseek-v3.2", network=transport, **roles))
    assert traced.result.summary()["completed"] == 1


coefficients = st.floats(1e-9, 1e3)


@given(coefficients, coefficients, st.integers(64, 16384), st.integers(0, 200_000), st.sampled_from([1, 64, 128]))
@examples(200)
def test_dynamic_chunks_take_as_long_as_the_first(quadratic, linear, first, num_before, page):
    sizer = ChunkSizer(
        quadratic=quadratic, linear=linear, first_tokens=first, max_tokens=16384, context_tokens=10**9, page_size=page
    )

    def takes(before, tokens):
        return quadratic * ((before + tokens) ** 2 - before**2) + linear * tokens

    assert takes(num_before, sizer.equal_tokens(num_before)) == pytest.approx(takes(0, first), rel=1e-3)
    tokens, later = sizer.num_tokens(num_before), sizer.num_tokens(num_before + 1000)
    assert max(64, page) <= tokens <= max(first, 64, page)
    assert later <= tokens
    assert tokens % page == 0
    step, whole = max(64, page), max(int(first + 0.75 * (sizer.equal_tokens(num_before) - first)), first // 4)
    assert tokens == min(max(whole // step * step, step), 16384 // step * step)
    assert tokens >= min(first // 4, 16384) - max(64, page)


@given(coefficients, coefficients, st.integers(3, 100), st.integers(1, 500))
@examples(50)
def test_a_parabola_is_found_again(quadratic, linear, count, step):
    lengths = range(count * step, 0, -step)
    found = fitted_parabola(lengths, [7 + linear * n + quadratic * n * n for n in lengths])
    at = lengths[0]
    expected = linear * at + quadratic * at * at
    assert found[0] * at * at + found[1] * at == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_dynamic_chunks_leave_shorter_bubbles():
    """Attention alone: chunk k of n takes 2 k - 1 of the first, and stages wait for the later chunk."""
    cost = {"use": "affine", "prefill_per_pair": "1 us", "prefill_per_token": "10 ns", "decode_base": "10 ms"}

    def took(dynamic):
        scenario = small(
            request(0, 4000, 2),
            prefill={"gpu": "h100", "pp": 4, "chunked_prefill_tokens": 512, "dynamic_chunks": dynamic},
            cost=cost,
        )
        steps = forwards(run(scenario))
        longest = max(step.first_ns for step in steps) / sum(step.first_ns for step in steps)
        return steps[-1].start_ns + steps[-1].duration_ns, longest

    (fixed_ns, fixed_longest), (dynamic_ns, dynamic_longest) = took(False), took(True)
    assert dynamic_longest < 0.6 * fixed_longest
    assert dynamic_ns < 0.8 * fixed_ns


def test_dynamic_chunks_need_stages():
    with pytest.raises(ConfigError, match="pp > 1"):
        small(request(0, 64, 2), prefill__dynamic_chunks=True)
