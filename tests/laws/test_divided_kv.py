"""Laws of decode.dcp: memory, times of steps, and what is sent to GPUs that divide the KV of a request."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.invariants import check
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.core.sequence import Spans
from pdsim.core.transfer.send_planner import RankPairLayout, SendCursor
from pdsim.cost.settings import Roofline
from pdsim.scenario.building.sizing import layout_of, resolve, whole_layout
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.memory import Layout
from tests.strategies import divided_scenarios
from tests.support import examples, request, run, run_both_ways, small, small_aggregated

SIZES = [2, 4, 8]
NIXL = {"transport": "nixl-rdma"}
HOST = {"prefill": None, "decode": None, "aggregated": {"gpu": "h200", "tp": 8, "dcp": 2, "host_cache": "auto"}}


def of(dcp: int, tp: int = 8, **changes) -> Scenario:
    servers = {"prefill": {"gpu": "h200", "tp": 8}, "decode": {"gpu": "h200", "tp": tp, "dcp": dcp}}
    return small(request(0, 640, 2), **{"model": "moonlight-16b-a3b", **servers, **changes})


def layout(dcp: int, **changes) -> Layout:
    return layout_of(of(dcp, **changes), "decode")


@pytest.mark.parametrize("dcp", SIZES)
@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v3.2"])
@pytest.mark.parametrize(("engine", "page"), [("sglang", 1), ("sglang", 64), ("vllm", 16)])
def test_the_pool_has_the_rows_of_one_gpu_times_dcp(model, dcp, engine, page):
    """A row holds the latents of one token. Its indexer keys are those of one token, or with SGLang of dcp tokens."""
    whole, divided = layout(1, model=model), layout(dcp, model=model, engine=engine, network=NIXL)
    index = whole.model.attention.index_token_bytes
    row_bytes = whole.read_token_bytes + (index * dcp if engine == "sglang" else index // dcp * dcp)
    room = whole.gpu.memory_bytes * 0.9 - whole.weight_bytes_per_rank - 2e9
    assert divided.pool_tokens(0.9, page * dcp) == int(room // row_bytes) // page * page * dcp
    alone = {"prefill": None, "decode": None, "aggregated": {"gpu": "h200", "tp": 8, "dcp": dcp}}
    resolved = resolve(of(dcp, model=model, engine=engine, page_size=page, **alone))
    assert resolved.aggregated.pool_tokens % (page * dcp) == 0


@pytest.mark.parametrize("dcp", SIZES)
def test_a_step_reads_less_and_exchanges_more(dcp):
    whole, divided = (Roofline().model(layout(size, model="deepseek-v3")) for size in (1, dcp))
    for num_requests in (1, 64):
        before, after = whole.decode_line(num_requests), divided.decode_line(num_requests)
        assert after.base > before.base
        for name in ("per_context_token", "per_distinct_token"):
            assert getattr(after, name) * dcp == pytest.approx(getattr(before, name), abs=dcp)
    found, settings = layout(dcp, model="deepseek-v3"), Roofline()
    head_bytes = 2 * (576 + 512) + 4
    moved_ns = 1e9 * 64 * (dcp - 1) * 128 // 8 * head_bytes * 61 / found.gpu.nvlink_bandwidth / settings.link_efficiency
    gathering = divided.decode_terms(64)["gathering"]
    assert gathering == pytest.approx(moved_ns + 2 * 61 * settings.all_reduce_ns, rel=1e-6)


def test_steps_with_long_contexts_are_shorter_the_more_gpus_divide_them():
    lines = [Roofline().model(layout(dcp, model="deepseek-v3")).decode_line(8) for dcp in (1, *SIZES)]
    for context, is_shorter in ((1_000, False), (100_000, True)):
        times = [line.base + 8 * context * (line.per_context_token + line.per_distinct_token) for line in lines]
        assert all(after < before for before, after in pairwise(times)) == is_shorter


@pytest.mark.parametrize(("model", "tp", "dcp"), [("deepseek-v3", 8, 4), ("qwen3-235b-a22b", 8, 2)])
def test_aggregated_forwards_gather_contexts_or_queries(model, tp, dcp):
    """Latents of other GPUs' context tokens; for other heads queries and outputs of new tokens, as in decode."""
    found = replace(layout(1, model=model, tp=tp), dcp=dcp)
    cost = Roofline().model(found)
    first, later = (PrefillStep(1, (PrefillChunk(0, context, 100, is_last=True),)) for context in (0, 5_000))
    assert cost.prefill_terms(first)["gathering"] == 0
    gathering = cost.prefill_terms(later)["gathering"]
    if model.startswith("qwen"):
        assert gathering == cost.decode_terms(100)["gathering"]
    else:
        moved_ns = 1e9 * 5_000 * (dcp - 1) * found.read_token_bytes / found.gpu.nvlink_bandwidth / 0.8
        assert gathering == pytest.approx(moved_ns + 61 * Roofline().all_reduce_ns)
    mixed = replace(later, num_decode_tokens=3)
    assert cost.prefill_terms(mixed)["gathering"] > gathering


def rows_of_rank(rank, dcp, page, cached, first, tokens, target):
    """(token, row of the rank's pool) of each token of a chunk that a rank gets: SGLang 0.5.23,
    disaggregation/common/utils.py:145, build_dcp_token_transfer_plan, one token at a time.
    """
    mine = [t for t in tokens if t % dcp == rank]
    locals_ = [(t - cached) // dcp for t in mine]
    return [(t, target[local // page] * page + local % page) for t, local in zip(mine, locals_, strict=True)]


@given(st.data())
def test_each_rank_gets_its_tokens_of_every_piece(data):
    dcp, page = data.draw(st.sampled_from((2, 4, 8))), data.draw(st.sampled_from((1, 3, 8, 16)))
    cached = data.draw(st.integers(0, 2)) * dcp * page
    num_pages = data.draw(st.integers(1, 40))
    end = cached + num_pages * page
    target = tuple(data.draw(st.permutations(range(-(-num_pages // dcp)))))
    cuts = sorted(data.draw(st.sets(st.integers(cached + 1, end), max_size=4)) - {end})
    cursor, table = SendCursor(cached, target, page, span=dcp), range(end // page)
    wire = RankPairLayout(page_size=page, page_bytes=5 * page, num_planes=1, num_shares=dcp, num_pairs=dcp)
    start, sent = cached, 0
    for cut in (*cuts, end):
        for piece in cursor.advance(cut, table, is_last=cut == end):
            tokens = range(start, start + len(piece.source) * page)
            start = tokens.stop
            rows = [rows_of_rank(rank, dcp, page, cached, start, tokens, target) for rank in range(dcp)]
            assert {row // page for of_rank in rows for _, row in of_rank} == set(piece.target)
            runs = [sum(b != a + 1 for (_, a), (_, b) in pairwise(of_rank)) + 1 for of_rank in rows if of_rank]
            size = wire.size(piece.source, piece.target)
            assert size.num_descriptors == max(runs) or page % dcp
            assert size.num_descriptors >= max(runs)
            sent += wire.total(size.num_bytes)
    assert start == end
    assert sent == dcp * 5 * (end - cached)


@pytest.mark.parametrize(("tp", "dcp"), [(8, 2), (8, 8), (4, 4), (16, 8), (16, 16)])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_bytes_are_those_of_one_copy_per_group(tp, dcp, engine):
    if engine == "vllm" and tp != dcp:
        with pytest.raises(ConfigError, match="over all"):
            run(of(dcp, tp, engine=engine, network=NIXL, decode={"gpu": "gb200", "tp": tp, "dcp": dcp}))
        return
    decode = {"gpu": "gb200", "tp": tp}
    whole, divided = (
        run(of(size, tp, engine=engine, network=NIXL, page_size=16, decode={**decode, "dcp": size})).records.transfers
        for size in (1, dcp)
    )
    assert sum(row.num_bytes for row in divided) * dcp == sum(row.num_bytes for row in whole)


@given(divided_scenarios())
@examples(30)
def test_requests_get_all_their_kv_and_give_all_pages_back(scenario: Scenario):
    many, _ = run_both_ways(scenario)
    assert many.result.stall == []
    for instance in many.cluster.instances:
        check(instance)
        assert instance.num_available_pages == instance.cache.pool.num_pages
    page, wide = scenario.page_size, scenario.page_tokens("decode")
    copy_bytes = whole_layout(scenario, "prefill").kv_token_bytes * page * scenario.decode.tp // scenario.decode.dcp
    for r in many.records.requests:
        if r.outcome == "finished":
            assert r.num_decode_cached_tokens % wide == 0
            num_pages = -(-r.num_prompt_tokens // page) - r.num_decode_cached_tokens // page
            assert r.transfer_bytes == num_pages * copy_bytes


@pytest.mark.parametrize(("dcp", "page"), [(1, 1), (2, 1), (4, 1), (2, 8), (4, 8)])
def test_host_memory_keeps_each_gpus_share(dcp, page):
    """Two prompts of 400 tokens take turns in a pool of 640, which holds one. A token has 4 layers of 80 elements."""
    specs = [request(i, Spans.of(i % 2, 400), 2, arrival_ns=i * 2_000_000_000) for i in range(4)]
    servers = {"gpu": "h200", "tp": 4, "dcp": dcp, "pool_tokens": 640, "host_cache": f"{1000 * 640 // dcp} B"}
    traced = run(small_aggregated(*specs, model="tiny-deepseek-v3", page_size=page, aggregated=servers))
    wide = dcp * page
    cached = 400 // wide * wide - (wide if 400 % wide == 0 else 0)
    assert [r.num_prefill_cached_tokens for r in traced.records.requests] == [0, 0, cached, cached]
    fields = traced.result.summary()["pdsim"]
    assert fields["host_hit_tokens"] == 2 * cached
    assert fields["host_loaded_bytes"] == 2 * cached * 640 * 4 // dcp


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"decode__dcp": 3}, "dcp 3: it does not divide the 8 GPUs"),
        ({"model": "qwen3-32b"}, "8 GPUs hold qwen3-32b's 8 KV heads; dcp is at most 1"),
        ({"model": "qwen3-235b-a22b"}, "no latent KV.*common/conn.py:1412"),
        ({"model": "qwen3-235b-a22b", **HOST}, "divided KV to the host for dense latents only"),
        ({"model": "deepseek-v3.2", **HOST}, "divided KV to the host for dense latents only"),
        ({"model": "deepseek-v3.2"}, "cannot divide the KV of sparse"),
        ({**HOST, "storage": {}}, "beside storage"),
        ({"model": "gpt-oss-120b", "decode__tp": 16}, "layers with a window"),
        ({"decode__tp": 16, "decode__dcp": 16}, "over several hosts of 8"),
        ({"prefill__cp": 2}, "prefill.cp 1"),
        ({"prefill__layer_groups": 2}, "beside prefill.layer_groups"),
        ({"decode__host_cache": "auto", "decode__radix_cache": True}, "beside decode.host_cache"),
        ({"engine_version": "0.5.12"}, "0.5.12 does not divide KV"),
        ({"network": {"transport": "cuda-ipc"}}, "transports mooncake, nixl, mori, ascend only"),
        ({"engine": "vllm"}, "transports nixl only"),
        ({"engine": "vllm", "network": {"transport": "nixl-rdma", "nixl_push": True}}, "NixlPushConnector refuses"),
        ({"cost": "aiconfigurator"}, "beside cost aiconfigurator"),
    ],
)
def test_what_engines_do_not_divide_is_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        run(of(2, **changes))
