"""The default cost: kernels that were measured, and a range around what they give."""

from dataclasses import replace
from math import log
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim import load_scenario, simulate
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.kernels import Spread, beyond_tables, has_kernels, leaving_out, medians_of, origins, reached, spread
from pdsim.cost.roofline import activation_bytes
from pdsim.cost.settings import KERNELS_SPREAD, Kernels, Roofline
from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.sections.cost import ENDS, GROUPS
from pdsim.system.catalog import load_gpu, load_model, names
from pdsim.system.memory import Layout, LayoutError
from tests.cli.test_commands import output, output_json
from tests.cli.test_warnings import SCENARIO

MODELS = ("llama-3.1-8b", "deepseek-r1", "qwen3-30b-a3b")


def layout(model: str, gpu: str, tp: int) -> Layout:
    return Layout(model=load_model(model), gpu=load_gpu(gpu), tp=tp, kv_dtype="bf16")


def forward(num_tokens: int) -> PrefillStep:
    return PrefillStep(0, (PrefillChunk(0, 0, num_tokens, is_last=True),))


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "llama-3.1-70b"])
def test_activations_are_those_of_a_layers_kernels_counted_one_by_one(name, weights):
    """Bytes per element of each kernel's inputs and outputs. The output projection is no layer's."""
    spec = load_model(name).in_dtype(weights)
    assert spec.llama is not None
    hidden, inner, attention = spec.hidden_size, spec.llama.intermediate_size, spec.attention
    queries = attention.num_query_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    norms, rotation, activation = 2 * 4 * 2 * hidden, 2 * 2 * (queries + 2 * keys), 3 * 2 * inner
    quantised = (2 + 1) * (2 * hidden + queries + inner) if weights == "fp8" else 0
    found = activation_bytes(spec, 1) - (3 if weights == "fp8" else 2) * spec.vocab_size
    assert found / spec.num_layers == pytest.approx(norms + rotation + activation + quantised, rel=0.08)


@given(st.integers(1, 8192), st.sampled_from([1, 2, 4, 8]))
def test_norms_run_on_each_gpu_and_other_activations_are_divided(num_tokens, tp):
    terms = [
        Kernels().model(layout("llama-3.1-70b", "h200", ranks)).prefill_terms(forward(num_tokens))["activations"]
        for ranks in (1, tp)
    ]
    assert terms[0] / tp <= terms[1] <= terms[0]
    spec = load_model("llama-3.1-70b")
    norms = 16 * spec.hidden_size * spec.num_layers / activation_bytes(spec, 1)
    assert terms[1] == pytest.approx(terms[0] * (norms + (1 - norms) / tp))


def test_a_forwards_first_prompt_has_the_longest_host_time():
    model = Kernels().model(layout("llama-3.1-8b", "h200", 1))
    chunks = [PrefillChunk(i, 0, 4000, is_last=True) for i in range(3)]
    one, three = (model.prefill_terms(PrefillStep(0, tuple(chunks[:n])))["overhead"] for n in (1, 3))
    assert (one, three - one) == (4.5e6, 2e6)


@pytest.mark.parametrize(
    ("weights", "gpu", "is_tiled"), [("fp8", "h200", True), ("bf16", "h200", False), ("fp8", "b200", False)]
)
def test_fp8_products_on_hopper_compute_whole_tiles(weights, gpu, is_tiled):
    spec = replace(layout("llama-3.1-8b", gpu, 1), model=load_model("llama-3.1-8b").in_dtype(weights))
    matrices_ns = [Kernels().model(spec).prefill_terms(forward(n))["matrices"] for n in (1024, 1025, 1280)]
    assert (matrices_ns[1] == matrices_ns[2]) is is_tiled
    assert matrices_ns[2] == pytest.approx(1.25 * matrices_ns[0])


@pytest.mark.parametrize("gpu", names("gpus"))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weights", ["bf16", "fp8", "fp4", "int4"])
def test_every_gpu_of_the_catalog_has_a_cost(gpu, model, weights):
    most = load_gpu(gpu).gpus_per_server
    for tp in {1, min(4, most), min(8, most)}:
        if load_model(model).attention.num_query_heads % tp:
            continue
        spec = replace(layout(model, gpu, tp), model=load_model(model).in_dtype(weights))
        made = Kernels().roofline(spec)
        fractions = [value for name, value in vars(made).items() if name.endswith(("efficiency", "bandwidth"))]
        assert all(0 < fraction <= 1 for fraction in fractions if fraction is not None)


def test_a_gpu_that_was_not_measured_has_the_median_of_the_others():
    assert not has_kernels("mi300x")
    assert 0.6 <= reached("mi300x", "gemm", "bf16").compute <= 0.8
    assert origins(layout("llama-3.1-8b", "mi300x", 1))["gemm"].startswith("bf16, the median of")
    assert origins(layout("llama-3.1-8b", "h100", 1))["gemm"].startswith("bf16, measured on h100, median error")


def test_groups_of_one_gpu_add_up_the_outputs_of_experts():
    """A short prompt is computed by all groups (LayerSums)."""
    of_experts, dense = (replace(layout(name, "h200", 1), cp=4) for name in ("qwen3-30b-a3b", "qwen3-8b"))
    sums = [Kernels().model(one).prefill_terms(forward(3)).get("all-reduce", 0) for one in (of_experts, dense)]
    assert sums[0] > sums[1] == 0
    assert origins(of_experts)["all_reduce"].startswith("4 GPUs")
    assert "all_reduce" not in origins(dense)


@pytest.mark.parametrize("operator", ["gemm", "decode_attention", "experts"])
def test_a_time_that_was_not_measured_is_the_median_of_the_others_with_their_range(operator):
    """Rates of H20 are stated, and its fixed times are not. They count neither for H20 nor for other GPUs."""
    own, other = (reached(gpu, operator, "bf16") for gpu in ("h20", "a10"))
    assert own[:2] != other[:2]
    assert own.fixed_us == other.fixed_us > 1
    assert spread("h20", operator, "bf16") == Spread(fixed_us=spread("a10", operator, "bf16").fixed_us)


def test_an_unmeasured_gpu_that_keeps_its_clock_multiplies_like_measured_ones_that_do():
    """H20 and RTX 4090 have 0.4 nominal TFLOP/s per watt of their boards, other GPUs 0.6 to 2.5."""
    like_h20, others = reached("rtx-4090", "gemm", "bf16"), reached("mi300x", "gemm", "bf16")
    assert like_h20 == others._replace(compute=reached("h20", "gemm", "bf16").compute)
    assert reached("rtx-4090", "prefill_attention", "bf16") == reached("mi300x", "prefill_attention", "bf16")
    assert origins(layout("llama-3.1-8b", "rtx-4090", 1))["gemm"] == "bf16, the median of 2 other GPUs"
    with leaving_out(["h20"]):
        assert reached("rtx-4090", "gemm", "bf16") == reached("mi300x", "gemm", "bf16")


@pytest.mark.parametrize("kind", ["fp8", "whole fp8"])
def test_experts_in_fp8_reach_similar_rates_on_all_gpus(kind):
    """By similar shares of nominal operations, as of other operators, the median would be off by a factor of 2.2."""

    def deviation(gpu: str) -> float:
        own = reached(gpu, "experts", kind).compute
        with leaving_out([gpu]):
            return abs(log(reached(gpu, "experts", kind).compute / own))

    assert median(map(deviation, ("h100", "h200", "b200", "b300", "gb200", "gb300", "rtx-pro-6000"))) < log(1.3)


def test_experts_in_fp8_reach_one_rate_on_unmeasured_gpus_up_to_the_nominal_one():
    shares = {gpu: reached(gpu, "experts", "fp8").compute for gpu in ("mi300x", "mi355x", "l40s")}
    rates = [share * load_gpu(gpu).flops_for("fp8") for gpu, share in shares.items()]
    assert rates[0] == pytest.approx(rates[1])
    assert shares["l40s"] == 1 > rates[2] / rates[0]


def test_weights_of_4_bits_save_time_in_small_batches_only():
    """They are computed in bf16, after they are unpacked."""
    models = [load_model("llama-3.1-70b").in_dtype(dtype) for dtype in ("bf16", "int4")]
    layouts = [replace(layout("llama-3.1-70b", "a100", 4), model=model) for model in models]
    wide, narrow = (Kernels().model(made) for made in layouts)
    ratios = [narrow.decode_terms(batch)["matrices"] / wide.decode_terms(batch)["matrices"] for batch in (1, 256, 2048)]
    assert ratios[0] < 0.35 < ratios[1] <= 1.2
    assert 0.9 < ratios[2] < 1.2
    assert origins(layouts[1])["gemm"].startswith("int4, measured on a100")
    on_h200 = replace(layouts[1], gpu=load_gpu("h200"))
    assert origins(on_h200)["gemm"] == "int4, the median of 1 other GPUs"


@pytest.mark.parametrize(("dtype", "num_bytes"), [("int4", 0.52), ("fp4", 0.5625), ("fp8", 1)])
def test_embeddings_keep_16_bits_when_all_else_has_fewer(dtype, num_bytes):
    model = load_model("llama-3.1-70b")
    num_wide = 2 * model.vocab_size * model.hidden_size
    narrow = model.in_dtype(dtype)
    assert narrow.weight_bytes == pytest.approx(num_bytes * (model.num_params - num_wide) + 2 * num_wide)
    assert narrow.weight_bytes - narrow.shared_bytes_read == pytest.approx(num_wide)


@pytest.mark.parametrize(
    ("model", "published_gb", "share"), [("deepseek-v3", 413.3 - 27, 0.005), ("kimi-k2", 590, 0.01)]
)
def test_a_checkpoint_in_fp4_is_as_large_as_the_published_one(model, published_gb, share):
    """nvidia/DeepSeek-R1-0528-NVFP4-v2 without its layer for MTP, which is wide, and Kimi-K2.6-NVFP4."""
    assert load_model(model).in_dtype("fp4").weight_bytes == pytest.approx(1e9 * published_gb, rel=share)


def test_products_with_wide_weights_take_what_bf16_takes():
    narrow = replace(layout("deepseek-r1", "b200", 1), model=load_model("deepseek-r1").in_dtype("fp4"))
    bare = replace(narrow, model=replace(narrow.model, num_params_wider_than_fp4=0))
    fp4, bf16 = (reached("b200", "gemm", kind) for kind in ("fp4", "bf16"))
    flops, added = narrow.gpu.flops, narrow.model.num_params_wider_than_fp4
    read, computed = (
        Kernels().model(narrow).decode_terms(batch)["matrices"] - Kernels().model(bare).decode_terms(batch)["matrices"]
        for batch in (1, 4096)
    )
    assert read == pytest.approx(1e9 * added * (2 / bf16.memory - 0.5625 / fp4.memory) / narrow.gpu.memory_bandwidth)
    rates = bf16.compute * flops["bf16"], fp4.compute * flops["fp4"]
    assert computed == pytest.approx(1e9 * 2 * added * 4096 * (1 / rates[0] - 1 / rates[1]))


def test_only_what_a_layout_has_is_told():
    assert "experts" not in origins(layout("llama-3.1-8b", "h100", 1))
    assert "all_reduce" not in origins(layout("llama-3.1-8b", "h100", 1))
    assert origins(layout("deepseek-r1", "h200", 8))["all_reduce"].startswith("8 GPUs")


def test_whole_experts_and_all_heads_have_kernels_of_their_own():
    divided = layout("deepseek-r1", "b200", 8)
    whole, ranks = replace(divided, has_whole_experts=True), replace(divided, tp=1, dp=8, has_whole_experts=True)
    assert [origins(one)["experts"].partition(",")[0] for one in (divided, whole, ranks)] == ["fp8", *["whole fp8"] * 2]
    assert [origins(one)["decode_attention"].partition(",")[0] for one in (whole, ranks)] == [
        "latent bf16",
        "latent wide bf16",
    ]
    launches = [Kernels().roofline(one).expert_prefill_layer_ns for one in (divided, whole, ranks)]
    assert launches == [Kernels().latent_expert_prefill_layer_ns] * 3
    slow, fast = (Kernels().model(one).decode_terms(4)["experts"] for one in (whole, divided))
    assert slow > 1.3 * fast
    reads = [Kernels().model(one).decode_line(1) for one in (whole, ranks)]
    assert (
        reads[0].per_context_token + reads[0].per_distinct_token
        < reads[1].per_context_token + reads[1].per_distinct_token
    )


@pytest.mark.parametrize("tp", [1, 4])
def test_a_token_in_an_expert_takes_its_operations_and_its_activations(tp):
    """Each GPU has a part of every expert, and moves the whole input and output of each expert of a token."""
    place = layout("qwen3-30b-a3b", "h200", tp)
    model, gpu, kernel = place.model, place.gpu, reached("h200", "experts", "bf16")
    few, many = (Kernels().model(place).prefill_terms(forward(n))["experts"] for n in (20_000, 40_000))
    moved_bytes = 2 * (3 * 2048 + 6 * 768 / tp) * 8 * 48
    computed_s = model.expert_flops_per_token / (tp * gpu.flops["bf16"] * kernel.compute)
    token_ns = 1e9 * (computed_s + moved_bytes / (gpu.memory_bandwidth * kernel.memory))
    assert (many - few) / 20_000 == pytest.approx(token_ns, rel=1e-3)


def test_whole_experts_move_activations_on_the_gpus_that_hold_them():
    """Four GPUs with parts of all experts move four times the inputs and outputs, and as many intermediate states."""
    divided = layout("qwen3-30b-a3b", "h200", 4)
    whole = replace(divided, has_whole_experts=True)
    token_ns = []
    for place in (divided, whole):
        few, many = (Kernels().model(place).prefill_terms(forward(n))["experts"] for n in (20_000, 40_000))
        token_ns.append((many - few) / 20_000)
    rate = 4 * divided.gpu.memory_bandwidth * reached("h200", "experts", "bf16").memory
    assert token_ns[0] - token_ns[1] == pytest.approx(1e9 * 48 * 8 * 3 * 2 * 3 * 2048 / rate, rel=1e-3)


def test_a_token_of_whole_experts_takes_a_part_of_its_time_on_every_gpu():
    """Twice the ranks have twice the tokens, of which each rank computes as many as before, and touches all."""
    ranks = [replace(layout("deepseek-r1", "b200", 1), dp=dp, has_whole_experts=True) for dp in (4, 8)]
    few, many = ([Kernels().model(one).prefill_terms(forward(n))["experts"] for n in (16_384, 32_768)] for one in ranks)
    each_ns = 58 * 1e3 * reached("b200", "experts", "whole fp8").token_us * beyond_tables(ranks[0]).slowness
    assert (many[1] - many[0]) - (few[1] - few[0]) == pytest.approx(16_384 * 4 * each_ns, rel=0.01)


def test_servers_take_longer_than_the_tables_for_whole_experts_in_fp8_on_one_host():
    whole = replace(layout("deepseek-r1", "b200", 8), has_whole_experts=True)
    narrow = replace(whole, model=whole.model.in_dtype("fp4"))
    hosts = replace(whole, tp=1, dp=16)
    beyond = [beyond_tables(one).slowness for one in (whole, narrow, hosts, layout("deepseek-r1", "b200", 8))]
    assert beyond == [2.5, 1, 1, 1]
    assert Kernels().roofline(hosts).expert_token_ns == 0
    slow, best = (
        cost.model(whole).prefill_terms(forward(32_768))["experts"] for cost in (Kernels().ends[1], Kernels())
    )
    assert slow > 1.5 * best


def test_a_server_may_choose_flashinfer_where_its_kernels_were_measured_beside_the_default():
    def kinds_of(model: str, gpu: str) -> list[str]:
        chosen = replace(layout(model, gpu, 2), attention_backend="flashinfer", kv_dtype="fp8")
        return [origins(chosen)[f"{role}_attention"].partition(",")[0] for role in ("prefill", "decode")]

    assert kinds_of("qwen3-32b", "b200") == ["flashinfer bf16", "flashinfer fp8"]
    assert kinds_of("qwen3-32b", "h100") == ["bf16", "fp8"]
    assert kinds_of("deepseek-r1", "b200") == ["bf16", "latent wide fp8"]
    assert (
        reached("b200", "decode_attention", "flashinfer fp8").memory
        < 0.5 * reached("b200", "decode_attention", "fp8").memory
    )


def test_tokens_go_to_their_experts_only_among_ranks_and_longer_the_more_they_are():
    gathered = replace(layout("deepseek-r1", "h200", 1), dp=8, has_whole_experts=True)
    ranks = replace(gathered, moe_a2a_backend="deepep")
    assert "expert_exchange" not in origins(gathered)
    assert origins(ranks)["expert_exchange"].startswith("deepep, measured on h200")
    assert "expert_exchange" not in origins(replace(gathered, tp=8, dp=1))
    few, many = (Kernels().roofline(ranks).model(ranks).decode_terms(batch)["matrices"] for batch in (1, 128))
    copies = 7 * (1 - (7 / 8) ** 8)
    reached_bytes = reached("h200", "expert_exchange", "deepep").memory * load_gpu("h200").nvlink_bandwidth
    assert many - few == pytest.approx(58 * 127 * 3 * 7168 * copies / reached_bytes * 1e9)


def test_ranks_sum_over_all_gpus_where_each_has_a_part_of_every_expert():
    """Like tensor parallelism: two all-reduces of all tokens a layer with experts. Besides, each GPU writes and reads a
    token's activations four times, in bf16.
    """
    ranks, one = replace(layout("deepseek-r1", "b200", 1), dp=8), layout("deepseek-r1", "b200", 8)
    assert "expert_exchange" not in origins(ranks)
    assert origins(ranks)["all_reduce"].startswith("8 GPUs, measured on b200")
    summed = Kernels().model(ranks).prefill_terms(forward(1024))["all-reduce"]
    bandwidth = ranks.gpu.memory_bandwidth * Kernels().roofline(ranks).activation_efficiency
    copied = 1e9 * 4 * 2 * 7168 * 58 * 8192 / bandwidth
    assert summed - copied == pytest.approx(58 / 61 * Kernels().model(one).prefill_terms(forward(8192))["all-reduce"])


def test_without_an_all_to_all_library_each_gpu_gets_the_tokens_of_all_ranks():
    """Whole experts then need the collectives of divided experts, and each GPU handles all tokens."""
    divided = replace(layout("deepseek-r1", "b200", 1), dp=8)
    whole = replace(divided, has_whole_experts=True)
    sent = replace(whole, moe_a2a_backend="deepep")
    for collectives in ("prefill_terms", "decode_terms"):
        work = forward(1024) if collectives == "prefill_terms" else 64
        found, same = (getattr(Kernels().model(one), collectives)(work)["all-reduce"] for one in (whole, divided))
        assert found == same > getattr(Kernels().model(sent), collectives)(work)["all-reduce"] == 0
    token_ns = [Kernels().roofline(one).expert_token_ns for one in (whole, sent)]
    assert token_ns[0] > token_ns[1] == 0
    assert Kernels().model(replace(whole, moe_a2a_backend="mori")).decode_line(64) == Kernels().model(sent).decode_line(
        64
    )


def test_vllm_gives_prompts_to_all_ranks_as_it_gives_decoded_tokens():
    """By an all-gather and a reduce-scatter, which aiconfigurator's table of 8 B200 has at 207 us for 64 Mi numbers."""
    place = replace(layout("deepseek-r1", "b200", 1), dp=8, sums_prompts=False)
    model = Kernels().model(place)
    assert model.prefill_terms(forward(64))["all-reduce"] == model.decode_terms(64)["all-reduce"]
    num_tokens = (64 << 20) // place.model.hidden_size // 8
    found_ns = model.prefill_terms(forward(num_tokens))["all-reduce"] / (2 * 58)
    assert found_ns == pytest.approx(1e3 * 207, rel=0.3)


def test_gpus_of_an_instance_that_divide_its_tokens_sum_and_gather_them_and_exchange_as_ranks_do():
    """In a layer of experts, halves of one all-reduce take the place of two."""
    settings = Roofline(all_reduce_ns=7_000, expert_exchange_ns=9_000, expert_exchange_efficiency=0.5)
    whole = replace(layout("deepseek-r1", "h200", 8), has_whole_experts=True)
    kept, sent = (settings.model(replace(whole, moe_a2a_backend=backend)) for backend in ("none", "deepep"))
    all_reduce_ns = kept.prefill_terms(forward(8192))["all-reduce"] / (2 * 61)
    expected_ns = 2 * 3 * all_reduce_ns + 58 * (all_reduce_ns + settings.all_reduce_ns)
    assert sent.prefill_terms(forward(8192))["all-reduce"] == pytest.approx(expected_ns)

    def exchange_ns(place, batch):
        none, deepep = (settings.model(replace(place, moe_a2a_backend=backend)) for backend in ("none", "deepep"))
        return deepep.decode_terms(batch)["matrices"] - none.decode_terms(batch)["matrices"]

    assert exchange_ns(whole, 512) == pytest.approx(exchange_ns(replace(whole, tp=1, dp=8), 64))
    assert exchange_ns(whole, 512) > 2 * 58 * settings.expert_exchange_ns


@pytest.mark.parametrize("changes", [{"dp": 1}, {"has_whole_experts": False}, {"model": "qwen3-32b"}])
def test_only_whole_experts_of_other_ranks_are_sent_tokens(changes):
    ranks = replace(layout("deepseek-r1", "b200", 1), dp=8, has_whole_experts=True)
    if "model" in changes:
        changes = {"model": load_model(changes["model"])}
    with pytest.raises(LayoutError, match="moe_a2a_backend deepep: pdsim models deepep with whole experts on several"):
        replace(ranks, **changes, moe_a2a_backend="deepep")
    assert not replace(ranks, **changes, moe_a2a_backend="none").sends_to_experts


@pytest.mark.parametrize(("changes", "beside"), [({"tp": 4, "cp": 2}, "cp 2"), ({"tp": 16}, "2 NVLink domains")])
def test_an_instance_alone_sends_tokens_within_one_domain_only(changes, beside):
    one = replace(layout("deepseek-r1", "h200", 8), has_whole_experts=True)
    assert not replace(one, **changes).sends_to_experts
    with pytest.raises(LayoutError, match=f"moe_a2a_backend deepep: pdsim does not model dp 1 and {beside} with it"):
        replace(one, **changes, moe_a2a_backend="deepep")


def test_large_all_reduces_are_those_of_nccl():
    """aiconfigurator's table of 8 B200: 80 us for 4 Mi numbers, 397 us for 64 Mi."""
    place = layout("deepseek-r1", "b200", 8)
    for num_numbers, measured_us in ((4 << 20, 80), (64 << 20, 397)):
        step = forward(num_numbers // place.model.hidden_size)
        found_ns = Kernels().model(place).prefill_terms(step)["all-reduce"] / (2 * place.model.num_layers)
        assert found_ns == pytest.approx(1e3 * measured_us, rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "tp", "ratio"), [("b200", 8, 0.85 / 0.7), ("a100", 8, 1), ("b200", 4, 1), ("b200", 2, 1)]
)
def test_without_switches_a_large_all_reduce_is_as_slow_as_a_ring(gpu, tp, ratio):
    """SGLang switches NVLS off. The fixed time stays."""
    switched, ring = (
        replace(layout("llama-3.1-70b", gpu, tp), switches_reduce=switches_reduce) for switches_reduce in (True, False)
    )
    times = [
        [Kernels().model(place).prefill_terms(forward(num_tokens))["all-reduce"] for num_tokens in (8192, 16_384)]
        for place in (switched, ring)
    ]
    grown_ns = [long_ns - short_ns for short_ns, long_ns in times]
    assert grown_ns[1] / grown_ns[0] == pytest.approx(ratio)
    assert 2 * times[0][0] - times[0][1] == pytest.approx(2 * times[1][0] - times[1][1])


@given(
    model=st.sampled_from(MODELS),
    gpu=st.sampled_from(["h100", "b200", "rtx-pro-6000"]),
    num_tokens=st.integers(1, 16_384),
    batch=st.integers(1, 512),
)
def test_the_ends_are_a_factor_away_and_more_work_takes_longer(model, gpu, num_tokens, batch):
    place = layout(model, gpu, min(4, load_gpu(gpu).gpus_per_server))
    fast, best, slow = (cost.model(place) for cost in (Kernels().ends[0], Kernels(), Kernels().ends[1]))
    for one, other in ((fast, best), (best, slow)):
        ratio = other.prefill_ns(forward(num_tokens), 0) / one.prefill_ns(forward(num_tokens), 0)
        assert ratio == pytest.approx(KERNELS_SPREAD, rel=1e-4)
        assert other.decode_line(batch).base / one.decode_line(batch).base == pytest.approx(KERNELS_SPREAD, rel=1e-4)
    assert best.prefill_ns(forward(num_tokens), 0) <= best.prefill_ns(forward(num_tokens + 1), 0)
    assert best.decode_line(batch).base <= best.decode_line(batch + 1).base
    assert sum(best.prefill_terms(forward(num_tokens)).values()) == pytest.approx(
        best.prefill_ns(forward(num_tokens), 0), abs=1
    )


@pytest.mark.parametrize("split", [{"tp": 16}, {"tp": 1, "dp": 16, "has_whole_experts": True}])
def test_traffic_between_hosts_has_the_range_of_other_times(split):
    place = Layout(model=load_model("deepseek-r1"), gpu=load_gpu("h200"), kv_dtype="bf16", **split)

    def between_ns(cost):
        model = cost.model(place)
        return [terms["between hosts"] for terms in (model.prefill_terms(forward(4096)), model.decode_terms(32))]

    fast, slow = Kernels().ends
    for cost, times in ((fast, 1 / KERNELS_SPREAD), (slow, KERNELS_SPREAD), (Kernels(factor=2), 2)):
        assert between_ns(cost) == pytest.approx([times * ns for ns in between_ns(Kernels())])
    assert between_ns(Kernels()) == between_ns(Roofline())


def test_kernels_of_experts_reach_less_than_those_of_large_matrices():
    """By nominal rates a prompt of DeepSeek-R1 takes a third of the time."""
    place = layout("deepseek-r1", "h200", 8)
    terms = Kernels().model(place).prefill_terms(forward(8192))
    assert terms["experts"] > 3 * terms["matrices"]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plain.yaml"
    path.write_text(SCENARIO)
    return path


def test_requests_take_time_outside_the_gpus_where_no_server_was_measured(path):
    def latency_ns(*changes: str) -> int:
        return build(load_scenario(path, changes)).front_end.latency_in

    assert latency_ns() == 5_000_000
    assert latency_ns("front_end=dynamo") == 100_000_000
    assert latency_ns("cost=roofline") == latency_ns("front_end={}") == 0


def test_a_run_prints_its_range_and_every_number_lies_inside(path, capsys):
    summary = output_json(capsys, "run", path)
    for metric, (low, high) in summary["pdsim"]["interval"].items():
        assert low < summary[metric] < high
    least, most = summary["pdsim"]["interval"]["mean_tpot_ms"]
    assert f"{least:.2f} to {most:.2f}" in output(capsys, "run", path, "--details")
    assert "between the fastest and the slowest" in output(capsys, "compare", path, path, "--repeats", 0, "--details")
    assert "interval" not in output_json(capsys, "run", path, "--set", "cost=roofline")["pdsim"]
    alone = output_json(capsys, "run", path, "--no-ranges")
    del summary["pdsim"]["interval"]
    assert alone == summary


def test_the_ends_of_a_scenario_keep_the_front_end_that_it_states(path):
    ends = [build(end).front_end.latency_in for end in load_scenario(path, ["front_end={latency_in: 1 ms}"]).ends]
    assert ends == [1_000_000, 1_000_000]
    assert [build(end).front_end.latency_in for end in load_scenario(path).ends] == [0, 20_000_000]


def test_a_corner_is_an_end_of_some_groups(path):
    scenario = load_scenario(path, ["corner=slowest"])
    assert build(scenario).scenario == build(load_scenario(path).ends[1]).scenario
    assert resolve(resolve(scenario)) == resolve(scenario)
    assert scenario.ends == ()
    alone = load_scenario(path, ["corner.prefill=slowest"])
    assert alone.uncertain == ("decode", "outside")
    assert resolve(alone).cost.decode == resolve(load_scenario(path)).cost.decode
    assert load_scenario(path, ["cost=roofline"]).uncertain == ()


@pytest.mark.parametrize("group", GROUPS)
def test_a_slower_group_alone_slows_its_own_latency(path, group):
    fast, slow = (simulate(load_scenario(path, [f"corner.{group}={end}"])).summary() for end in ENDS)
    own = "mean_tpot_ms" if group == "decode" else "mean_ttft_ms"
    assert fast[own] < slow[own]


def test_explain_says_where_the_times_come_from(path, capsys):
    assert "measured on h100" in output(capsys, "explain", "--cost", path)
    assert output_json(capsys, "explain", "--cost", path)["kernels"]["decode"]["decode_attention"].startswith("bf16")


def test_the_range_of_a_run_is_that_of_its_ends(path):
    scenario = load_scenario(path)
    fast, slow = (simulate(end).summary() for end in scenario.ends)
    assert fast["mean_ttft_ms"] < simulate(scenario).summary()["mean_ttft_ms"] < slow["mean_ttft_ms"]


def test_kernels_of_other_gpus_have_a_width_and_own_kernels_none():
    assert spread("h100", "experts", "fp8") == Spread()
    wide = spread("mi355x", "experts", "fp8")
    assert wide.compute > spread("mi355x", "prefill_attention", "bf16").compute > 1
    assert medians_of(layout("deepseek-r1", "h200", 8)) == []
    assert {"gemm", "experts", "all_reduce"} <= set(medians_of(layout("deepseek-r1", "mi355x", 8)))


def test_the_range_is_wider_where_kernels_are_those_of_other_gpus():
    def width(gpu: str) -> float:
        fast, slow = (end.model(layout("deepseek-r1", gpu, 8)).decode_terms(16)["experts"] for end in Kernels().ends)
        return slow / fast

    assert width("mi355x") > 1.2 * width("h200")


def test_without_a_gpu_its_kernels_are_medians_of_other_generations():
    before = reached("h100", "experts", "fp8")
    with leaving_out(["h100"]):
        assert not has_kernels("h200")
        assert medians_of(layout("deepseek-r1", "h100", 8))
        assert reached("h100", "experts", "fp8") != before
    assert reached("h100", "experts", "fp8") == before


def test_a_warning_names_the_operators_that_decide(path):
    def told(*changes: str) -> str:
        return simulate(load_scenario(path, changes)).warnings()[0]

    assert "other GPUs" not in told()
    assert "matrix products" in told("prefill.gpu=mi355x", "decode.gpu=mi355x")
    assert "of a decode step" in told("prefill.gpu=mi355x", "decode.gpu=mi355x")
