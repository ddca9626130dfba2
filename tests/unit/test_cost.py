"""The roofline against measurements it was not fitted to, and its laws."""

from dataclasses import replace
from math import gcd

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdsim.core.encode.media_item import MediaItem
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.affine import AffineModel, TableModel
from pdsim.cost.drafts import Drafting
from pdsim.cost.encoding import EmbeddingLoads, EncodingStepTimes
from pdsim.cost.model import FRACTION_BITS
from pdsim.cost.settings import Affine, AffineTable, Roofline
from pdsim.cost.step_times import DecodeHostOverhead, Graphs, StepTimes
from pdsim.scenario.building.cluster import build
from pdsim.scenario.loading import load_scenario
from pdsim.system.catalog import load_gpu, load_model, names
from pdsim.system.memory import Layout


def cost(model="qwen3-8b", gpu="h200", tp=1, kv_dtype="bf16", **settings):
    return Roofline(**settings).model(Layout(model=load_model(model), gpu=load_gpu(gpu), tp=tp, kv_dtype=kv_dtype))


def prefill(*chunks):
    return PrefillStep(0, tuple(PrefillChunk(i, context, n, True) for i, (context, n) in enumerate(chunks)))


def decode_ms(model, n, context, distinct=None):
    line = model.decode_line(n)
    total = line.base + line.per_context_token * context + line.per_distinct_token * (distinct or context)
    return total / (1 << FRACTION_BITS) / 1e6


@pytest.mark.parametrize(
    ("chunk", "gpu_ms"),
    [((0, 128), 12.0), ((0, 1024), 22.2), ((0, 4096), 92.5), ((0, 8192), 208.6), ((8192, 8192), 269.0)],
)
def test_prefill_of_qwen3_8b_on_h200(chunk, gpu_ms):
    """Forward times that an SGLang server on H200 reported; nothing is fitted here."""
    assert cost().prefill_ns(prefill(chunk), 0) / 1e6 - 4.5 == pytest.approx(gpu_ms, rel=0.2)


@pytest.mark.parametrize(
    ("n", "context", "gpu_ms"), [(1, 1646, 5.08), (8, 8600, 5.66), (32, 33_290, 6.52), (64, 71_542, 8.12)]
)
def test_decode_of_qwen3_8b_on_h200(n, context, gpu_ms):
    assert decode_ms(cost(), n, context) - 0.3 == pytest.approx(gpu_ms, rel=0.15)


@given(st.sampled_from(names("models")), st.integers(1, 20_000), st.integers(0, 100_000), st.integers(1, 300))
def test_more_work_never_takes_less(model, n, context, batch):
    roofline = cost(model, "gb200", tp=gcd(8, load_model(model).attention.num_query_heads), kv_dtype="fp8")
    assert roofline.prefill_ns(prefill((context, n)), 0) <= roofline.prefill_ns(prefill((context + 1000, n + 1)), 0)
    assert roofline.prefill_ns(prefill((context, n)), 0) <= roofline.prefill_ns(prefill((context, n), (0, 1)), 0)
    assert decode_ms(roofline, batch, context) <= decode_ms(roofline, batch + 1, context + 1)
    assert roofline.decode_line(batch).per_context_token >= 0


def test_a_shared_prefix_is_read_once():
    model = cost()
    alone, together = decode_ms(model, 8, 80_000, 80_000), decode_ms(model, 8, 80_000, 12_000)
    hbm_ms = 68_000 * 147_456 / (4.8e12 * 0.85) * 1e3
    assert alone - together == pytest.approx(hbm_ms, rel=0.01)


def test_a_state_is_read_and_written_by_each_step_that_decodes_its_request():
    layout = Layout(model=load_model("qwen3-next-80b-a3b"), gpu=load_gpu("h200"), tp=4, kv_dtype="bf16")
    state_ns = 2e9 * layout.state_bytes / (layout.gpu.memory_bandwidth * Roofline().memory_efficiency)
    assert Roofline().model(layout).decode_terms(3)["state"] == pytest.approx(3 * state_ns)


@pytest.mark.parametrize("num_verified", [1, 2, 5])
def test_tokens_that_a_step_verifies_of_a_request_share_one_read_of_its_state(num_verified):
    """Each writes a state of its own. The step has 3 requests."""
    model, gpu = load_model("qwen3-next-80b-a3b"), load_gpu("h200")
    layout = Layout(model=model, gpu=gpu, tp=4, kv_dtype="bf16", num_verified_tokens=num_verified)
    state_ns = 1e9 * layout.state_bytes / (layout.gpu.memory_bandwidth * Roofline().memory_efficiency)
    found_ns = Roofline().model(layout).decode_terms(3 * num_verified)["state"]
    assert found_ns == pytest.approx(3 * (1 + num_verified) * state_ns)


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_layers_with_a_window_attend_to_the_window_and_the_others_to_all(num_context_tokens, num_tokens):
    model = load_model("gpt-oss-120b")
    window, share = model.attention.window_tokens, model.attention.window_share
    seen = range(num_context_tokens + 1, num_context_tokens + num_tokens + 1)
    pairs = (1 - share) * sum(seen) + share * sum(min(token, window) for token in seen)
    found_ns = cost("gpt-oss-120b").prefill_terms(prefill((num_context_tokens, num_tokens)))["attention"]
    rate = load_gpu("h200").flops_for("bf16") * Roofline().attention_efficiency
    assert found_ns == pytest.approx(1e9 * model.attention.flops_per_pair * pairs / rate, rel=0.01, abs=200)


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_tokens_go_to_their_experts_in_fp8_and_come_back_in_bf16(num_tokens):
    """Once to each of the other GPUs that has one of a token's experts."""
    model, gpu = load_model("qwen3-30b-a3b"), load_gpu("h200")
    ranks = {"tp": 1, "dp": 8, "has_whole_experts": True, "moe_a2a_backend": "deepep"}
    layout = Layout(model=model, gpu=gpu, kv_dtype="bf16", **ranks)
    free, reached = (Roofline(expert_exchange_efficiency=one).model(layout) for one in (None, 0.5))
    added_ns = reached.decode_terms(num_tokens)["matrices"] - free.decode_terms(num_tokens)["matrices"]
    num_others = 7 * (1 - (7 / 8) ** model.experts.num_active)
    num_bytes = num_tokens * model.experts.num_layers * model.hidden_size * (1 + 2) * num_others
    assert added_ns == pytest.approx(1e9 * num_bytes / (0.5 * gpu.nvlink_bandwidth))


def test_more_ranks_are_faster():
    step = prefill((0, 8192))
    times = [cost("llama-3.1-70b", "h200", tp=tp).prefill_ns(step, 0) for tp in (2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_affine_adds_up():
    lines = Affine(prefill_base_ns=5, prefill_per_token_ns=3, prefill_per_pair_ns=0.5, prefill_per_prompt_ns=7)
    model = AffineModel(lines)
    assert model.prefill_ns(prefill((10, 4), (0, 2)), 0) == 5 + 3 * 6 + 0.5 * (4 * 12 + 2 * 1) + 7 * 2


def test_affine_takes_more_for_prompts_behind_a_context_and_at_least_their_launch():
    step = prefill((10, 4), (0, 2))
    work = AffineModel(Affine(prefill_per_pair_ns=1, prefill_per_continued_pair_ns=2, prefill_per_context_token_ns=3))
    launch = AffineModel(
        Affine(prefill_least_ns=5, prefill_least_per_prompt_ns=7, prefill_least_per_continued_prompt_ns=11)
    )
    assert work.prefill_ns(step, 0) == 3 * (4 * 12) + 2 * 1 + 3 * 10
    assert launch.prefill_ns(step, 0) == 5 + 7 * 2 + 11


def test_a_forward_in_a_graph_takes_what_its_padding_does_and_pairs_what_its_kernel_takes():
    lines = Affine(
        prefill_per_token_ns=3, prefill_per_pair_ns=1, prefill_graph_per_pair_ns=2, prefill_graph_sizes=(4, 8)
    )
    model = AffineModel(lines)
    assert model.prefill_ns(prefill((10, 2), (0, 2)), 0) == 3 * 4 + 2 * (2 * 11 + 2)
    assert model.prefill_ns(prefill((10, 5)), 0) == 3 * 8 + 2 * 5 * 12.5
    assert model.prefill_ns(prefill((10, 10)), 0) == 3 * 10 + 10 * 15


def test_graphs_that_do_not_rise_are_refused():
    with pytest.raises(ValueError, match=r"needs ascending prefill_graph_sizes above 0, found \[4, 2\]"):
        Affine(prefill_graph_sizes=(4, 2))


def test_a_rest_follows_each_decode_step_and_no_forward():
    lines = AffineModel(Affine(prefill_base_ns=3, decode_base_ns=5, decode_per_request_ns=2))
    resting = StepTimes(prefill=lines, decode=lines, host_overhead=DecodeHostOverhead(step_ns=100, request_ns=10))
    assert resting.decode_line(4) == lines.decode_line(4)._replace(base=(5 + 8 + 140) << FRACTION_BITS)
    assert resting.prefill_ns(prefill((0, 1)), 0) == 3


@pytest.mark.parametrize("added", [{}, {"host_overhead": DecodeHostOverhead(prefill_ns=50)}, {"speedup": (2, 1)}])
def test_a_forward_is_priced_by_its_model_alone_only_if_nothing_is_added(added):
    lines = AffineModel(Affine(prefill_base_ns=300))
    times = StepTimes(prefill=lines, decode=lines, **added)
    assert times.forward_ns(prefill((0, 1)), 0) == times.prefill_ns(prefill((0, 1)), 0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 60))
@example([90, 90, 90, 1, 1, 1], 10)
def test_a_loop_with_overlap_launches_a_forward_while_the_one_before_runs_and_none_before(durations_ns, launch_ns):
    """A naive twin of the loop: it launches a forward, then waits for the end of the one before."""
    lines = AffineModel(Affine(prefill_per_token_ns=1))
    overhead = DecodeHostOverhead(launch_ns=launch_ns, launches_ahead=True)
    times = StepTimes(prefill=lines, decode=lines, host_overhead=overhead)
    loop_ns = end_ns = 7
    for duration_ns in durations_ns:
        start_ns, loop_ns = end_ns, loop_ns + launch_ns
        end_ns = max(start_ns + duration_ns, loop_ns)
        assert times.prefill_ns(prefill((0, duration_ns)), start_ns) == end_ns - start_ns
        loop_ns = max(loop_ns, start_ns)


def test_a_forward_that_also_loads_embeddings_ends_no_earlier_than_its_launch():
    lines, loads = AffineModel(Affine(prefill_per_token_ns=1)), EmbeddingLoads(embedding_bytes=1, bandwidth=1e9)
    overhead = DecodeHostOverhead(launch_ns=50)
    times = EncodingStepTimes(prefill=lines, decode=lines, host_overhead=overhead, encoders={"image": loads}, own=None)
    for num_tokens, duration_ns in ((10, 50), (30, 60)):
        step = replace(prefill((0, num_tokens)), media=(MediaItem(0, num_tokens, 1),))
        assert times.forward_ns(step, 0) == duration_ns


@given(st.integers(1, 5000), st.integers(0, 3000), st.integers(1, 64))
def test_a_table_of_points_on_a_line_is_the_line(num_tokens, num_context_tokens, batch):
    """Between its entries; what is beside them is as in affine."""
    beside = {"prefill_per_pair_ns": 0.5, "prefill_per_context_token_ns": 3, "prefill_per_prompt_ns": 40}
    beside |= {"prefill_least_ns": 900, "prefill_slowdown": 0.2, "decode_per_context_token_ns": 2}
    lines = AffineModel(
        Affine(prefill_base_ns=700, prefill_per_token_ns=2, decode_base_ns=300, decode_per_request_ns=8, **beside)
    )
    at_tokens, at_batches = {n: 700 + 2 * n for n in (1, 70, 5000)}, {n: 300 + 8 * n for n in (1, 16, 64)}
    table = TableModel(AffineTable(prefill_ns=at_tokens, decode_ns=at_batches, **beside))
    step = prefill((num_context_tokens, num_tokens))
    assert table.prefill_ns(step, 0) == pytest.approx(lines.prefill_ns(step, 0), abs=1)
    assert table.decode_line(batch) == pytest.approx(lines.decode_line(batch), abs=1)


def test_a_slow_host_is_late_with_launches_rests_its_loop_and_posting(tmp_path):
    """Half as long again; what the GPU takes stays."""
    path = tmp_path / "scenario.yaml"
    path.write_text("""\
name: slow host
model: tiny-qwen3
page_size: 16
prefill: {gpu: h100, pool_tokens: 4096}
decode: {gpu: h100, pool_tokens: 4096}
network: {transport: mooncake-tcp, transfer_latency: 100 us, descriptor_latency: 10 us}
cost:
  prefill: {use: affine, prefill_least: 100 ns, prefill_per_token: 2 ns}
  decode: {use: affine, decode_base: 50 ns}
  host: {start: 20 us, decode_step: 10 ns, slowdown: 1.5}
workload: {use: random_lengths, num_requests: 1, input_tokens: 40, output_tokens: 6}
""")
    cluster = build(load_scenario(path))
    costs = cluster.costs
    assert [costs["prefill-0"].prefill_ns(prefill((0, n)), 0) for n in (4, 60, 90)] == [150, 150, 180]
    assert costs["decode-0"].decode_line(1).base == (50 + 15) << FRACTION_BITS
    assert cluster.hosts["prefill-0"].start == 30_000
    assert cluster.interconnect.transport.batch_ns == 150_000
    assert cluster.interconnect.transport.descriptor_ns == 15_000


@given(
    st.sampled_from(["roofline", "affine"]),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=5),
    st.integers(1, 300),
    st.integers(0, 10**6),
)
def test_terms_add_up_to_the_time_of_a_step(kind, chunks, num_requests, context):
    """Graphs up to 64, larger batches eager; drafts and host work around them."""
    lines = Affine(
        prefill_base_ns=700, prefill_per_token_ns=20, prefill_per_pair_ns=0.5, prefill_per_context_token_ns=3,
        prefill_least_ns=90_000, decode_base_ns=9000, decode_per_request_ns=80, decode_per_context_token_ns=2,
    )  # fmt: skip
    model = cost() if kind == "roofline" else AffineModel(lines)
    graphs = Graphs([1, 8, 64], launch_ns=30e6, empty_row_kv=0.3)
    drafting, host_overhead = Drafting(tokens=3, step_ns=500), DecodeHostOverhead(step_ns=200, request_ns=7)
    times = StepTimes(prefill=model, decode=model, graphs=graphs, drafting=drafting, host_overhead=host_overhead)
    step = prefill(*chunks)
    assert sum(times.prefill_terms(step).values()) == pytest.approx(times.prefill_ns(step, 0), abs=1)
    line = times.decode_line(num_requests)
    total = (line.base + line.per_context_token * context + line.per_distinct_token * context) / (1 << FRACTION_BITS)
    assert sum(times.decode_terms(num_requests, context, context).values()) == pytest.approx(total, abs=1)
