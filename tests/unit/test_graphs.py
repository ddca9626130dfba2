"""Captured batch sizes, and what decode steps take that run in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdsim
from pdsim.cost.affine import AffineModel
from pdsim.cost.drafts import Drafting
from pdsim.cost.model import DecodeLine
from pdsim.cost.settings import Affine
from pdsim.cost.step_times import Graphs, StepTimes, captured_batches, captured_by_vllm
from pdsim.scenario.building.cluster import build
from pdsim.scenario.loading import load_scenario
from pdsim.sim.instances.lockstep import mean_expert_tokens
from tests.support import request, small

MODEL = AffineModel(Affine(decode_base_ns=1000, decode_per_request_ns=10, decode_per_context_token_ns=2))


def times(**around):
    return StepTimes(prefill=MODEL, decode=MODEL, **around)


def test_sizes_are_sglangs():
    assert captured_batches(32, 4096) == [1, 2, 4, 8, 12, 16, 24, 32]
    assert captured_batches(560, 4096)[-6:] == [464, 480, 496, 512, 544, 560]
    assert captured_batches(256, 20) == [1, 2, 4, 8, 12, 16, 20]
    drafting = captured_batches(80, 4096, speculative=True)
    assert drafting == [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), 72, 80]


@given(st.integers(1, 700), st.integers(1, 600), st.integers(1, 600), st.booleans())
def test_a_step_takes_what_the_next_captured_size_takes(batch: int, largest: int, running: int, speculative: bool):
    sizes = captured_batches(largest, running, speculative=speculative)
    replay, launch = times(graphs=Graphs(sizes, launch_ns=5000)), DecodeLine.of_ns(5000, 0, 0).base
    padded = [size for size in sizes if size >= batch]
    if padded:
        assert replay.decode_line(batch) == MODEL.decode_line(padded[0])
    else:
        line = MODEL.decode_line(batch)
        assert replay.decode_line(batch) == line._replace(base=max(line.base, launch))


def test_empty_rows_take_their_share_of_the_kv_that_the_others_read():
    """6 requests in a graph of 8: a third of a row is empty for each, and takes 0.6 of its KV."""
    line = times(graphs=Graphs([4, 8], launch_ns=0, empty_row_kv=0.6)).decode_line(6)
    assert line.base == MODEL.decode_line(8).base
    assert line.per_context_token == pytest.approx(1.2 * MODEL.decode_line(8).per_context_token, rel=1e-5)


@given(st.integers(1, 9))
def test_free_rows_leave_a_step_what_its_requests_take(batch: int):
    """Beside a graph that pads, only the base differs, and the time of KV in empty rows stays."""
    padded, free = (times(graphs=Graphs([4, 8], 0, 0.6, is_free)).decode_line(batch) for is_free in (False, True))
    assert free.base == MODEL.decode_line(batch).base
    assert free._replace(base=padded.base) == padded


def test_drafted_tokens_pass_the_matrices_as_requests_do():
    verifying = times(drafting=Drafting(tokens=4, step_ns=300))
    assert verifying.decode_line(3) == DecodeLine.of_ns(1000 + 10 * 12 + 300, 2, 0)


def test_a_cluster_pads_requests_then_counts_their_drafts():
    lines = {"use": "affine", "decode_base": "1 ms", "decode_per_request": "10 us"}
    scenario = small(
        request(0, 10, 10),
        cost={"prefill": lines, "decode": lines, "graph_sizes": [8, 4]},
        decode__speculative_draft_tokens=3,
        decode__speculative_accept_length=2,
        decode__speculative_drafting="2 us",
    )
    assert build(scenario).costs["decode-0"].decode_line(5) == DecodeLine.of_ns(1_002_000 + 10_000 * 8 * 3, 0, 0)


def test_without_graphs_a_step_is_as_large_as_its_batch():
    costs = build(small(request(0, 10, 10))).costs
    assert costs["decode-0"].graphs is None


def test_sizes_of_vllm_end_at_twice_its_requests():
    assert captured_by_vllm(6) == [1, 2, 4, 6, 8]
    assert captured_by_vllm(140)[-4:] == [240, 248, 256, 272]
    assert 140 in captured_by_vllm(140)


@pytest.mark.parametrize(("blackwell", "most"), [(False, 512), (True, 1024)])
def test_sizes_of_vllm_end_at_the_limit_of_its_gpu(blackwell, most):
    assert captured_by_vllm(600, blackwell=blackwell)[-1] == most
    assert (600 in captured_by_vllm(600, blackwell=blackwell)) == blackwell
    assert captured_by_vllm(4096, blackwell=blackwell)[-1] == most


def graphs_of(tmp_path, **changed):
    """Graphs of a decode instance of DeepSeek-R1 with the default cost."""
    fields = {
        "model": "deepseek-r1",
        "gpu": "b200",
        "ep": 1,
        "engine": "sglang",
        "version": "0.5.12",
        "tp": 8,
    } | changed
    path = tmp_path / "scenario.yaml"
    release = f"engine_version: {fields['version']}\n" if fields["engine"] == "sglang" else ""
    servers = f"{{gpu: {fields['gpu']}, tp: {fields['tp']}, ep: {fields['ep']}, max_running_requests: 20}}"
    path.write_text(
        f"name: a\nmodel: {fields['model']}\nengine: {fields['engine']}\n{release}"
        f"prefill: {servers}\ndecode: {servers}\nnetwork: {{transport: mooncake-rdma}}\n"
        "workload: {use: random_lengths, num_requests: 1, input_tokens: 10, output_tokens: 2}\n"
        "client: {use: closed_loop, concurrency: 1}\n"
    )
    return build(load_scenario(path)).costs["decode-0"].graphs


def test_experts_make_the_default_cost_pad_as_the_engine_does(tmp_path):
    assert graphs_of(tmp_path).sizes == [1, 2, 4, 8, 12, 16, 20]
    assert graphs_of(tmp_path, engine="vllm").sizes == [1, 2, 4, 8, 16, 20, 24, 32, 40]
    assert graphs_of(tmp_path, model="qwen3-8b", tp=1) is None


@pytest.mark.parametrize(
    ("changed", "are_free"),
    [
        ({}, False),
        ({"version": "0.5.23"}, False),
        ({"ep": 8}, False),  # Blackwell's kernel knows no mask
        ({"ep": 8, "version": "0.5.23"}, True),
        ({"ep": 8, "gpu": "h200"}, True),
        ({"ep": 8, "gpu": "h200", "engine": "vllm"}, False),
    ],
)
def test_whole_experts_mask_empty_rows(tmp_path, changed, are_free):
    assert graphs_of(tmp_path, **changed).has_free_rows is are_free


class StandInRank:
    def __init__(self, graphs):
        self._cost = times(graphs=graphs)

    def num_tokens(self, num_requests):
        return self._cost.num_computed(num_requests)

    def pads(self, num_requests):
        return self._cost.pads(num_requests)


@pytest.mark.skipif(pdsim.is_compiled(), reason="compiled ranks take no stand-in")
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
def test_all_ranks_run_the_graph_of_the_largest_batch(batches, is_free):
    """Four ranks, of which some have no requests. Batches above 8 have no graph."""
    steps = [(StandInRank(Graphs([1, 4, 8], 0, has_free_rows=is_free)), batch) for batch in batches]
    tokens = mean_expert_tokens(steps, 4)
    if is_free or max(batches) > 8:
        assert tokens == sum(rank.num_tokens(batch) for rank, batch in steps) / 4
    else:
        assert tokens == min(size for size in (1, 4, 8) if size >= max(batches))
