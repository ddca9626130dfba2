"""HiSparse: KV in host memory, and buffers on the GPU. Numbers of tokens follow SGLang's rules, times a closed form."""

import csv
from pathlib import Path
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdsim.core.messages import HiSparseStep
from pdsim.cost.swaps import SwapCosts
from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.sizing import layout_of
from pdsim.scenario.yaml_file import ConfigError
from tests.support import examples, request, run, run_both_ways, small

ROOT = Path(__file__).parents[2]
TOP_K, PAGE = 2048, 64  # DeepSeek-V3.2's index_topk, and a page of SGLang's for it


def hisparse(*specs, pool_pages=200, rate=0.25, buffer=2 * TOP_K, ratio=2, **changes):
    given = {
        "model": "deepseek-v3.2",
        "page_size": PAGE,
        "prefill__pool_tokens": 40_000,
        "prefill__chunked_prefill_tokens": 16_384,
        "decode__pool_tokens": pool_pages * PAGE,
        "decode__hisparse": {"miss_rate": rate, "device_buffer_tokens": buffer, "host_to_device_ratio": ratio},
    }
    return small(*specs, **{**given, **changes})


def copies(scenario):
    return build(scenario).costs["decode-0"].swaps


def buffer_slots(num_tokens: int, buffer: int) -> int:
    """Capacity of a request's buffer as SGLang's alloc_device_buffer and _grow_device_buffers compute it."""
    size = min((num_tokens + PAGE - 1) // PAGE * PAGE, buffer)
    return buffer + PAGE if size == buffer else size


class Twin:
    """A request of HiSparse, token by token. Its tokens are on the GPU until they outgrow the buffer."""

    def __init__(self, num_tokens: int, buffer: int) -> None:
        self.num_tokens, self.buffer, self.has_run = num_tokens, buffer, False

    def step(self) -> tuple[int, bool, bool, int]:
        """Returns the tokens that one step fills in, whether all or some of its chosen tokens are missing, and the
        tokens it saves.
        """
        is_first, self.has_run = not self.has_run, True
        before, self.num_tokens = self.num_tokens, self.num_tokens + 1
        if is_first:
            return (before, False, False, 0) if before <= self.buffer else (0, True, False, 0)
        return 0, False, self.num_tokens > self.buffer, 1


prompts = st.one_of(st.integers(1, 6000), st.sampled_from([2048, 4031, 4032, 4095, 4096, 4097]))
loads = st.lists(st.tuples(prompts, st.integers(1, 150), st.integers(0, 20)), min_size=1, max_size=7)


def specs_of(load):
    return [request(i, prompt, output, arrival_ns=at * 1_000_000_000) for i, (prompt, output, at) in enumerate(load)]


@st.composite
def scenarios(draw, **changes):
    """Random requests on a decode instance that may lack host memory or GPU pages."""
    buffer, pool_pages = draw(st.sampled_from([2048, 2112, 4096])), draw(st.sampled_from([66, 67, 100, 200]))
    ratio = draw(st.integers(1, 3))
    room = ratio * pool_pages * PAGE - 512
    load = [(min(prompt, room - output), output, at) for prompt, output, at in draw(loads)]
    return hisparse(*specs_of(load), pool_pages=pool_pages, buffer=buffer, ratio=ratio, **changes)


@given(scenarios())
@examples(20)
def test_every_step_copies_what_a_twin_of_each_request_copies(scenario):
    made = run(scenario, checked=True)
    buffer, lengths = scenario.decode.hisparse.device_buffer_tokens, {}
    twins: dict[int, Twin] = {}
    for spec in scenario.workload.specs:
        lengths[spec.request_id] = len(spec.prompt)
    for entry in made.journal:
        if entry.instance_id != "decode-0" or entry.call != "on_step_done":
            continue
        step, result, _ = entry.args
        twins |= {i: Twin(lengths[i], buffer) for i in step.joined}
        for i in step.left:
            del twins[i]
        found = (step.num_filled_tokens, step.num_first_requests, step.num_long_requests, step.num_saved_tokens)
        for _ in range(result.num_steps):
            rows = [twin.step() for twin in twins.values()]
            assert found == tuple(sum(column) for column in zip(*rows, strict=True))
            assert step.num_requests == len(rows)
        for i, _ in result.ended:
            del twins[i]
    assert made.records.requests


def few_places(num_places):
    """Requests whose KV arrives while the batch is full. This alone makes room for one more transfer."""
    specs = [request(i, 50, 60) for i in range(6)]
    return hisparse(*specs, pool_pages=100, decode__max_running_requests=num_places)


@given(scenarios())
@examples(8)
@example(few_places(1))
@example(few_places(2))
def test_many_steps_at_once_equal_single_steps(scenario):
    run_both_ways(scenario)


@given(scenarios())
@examples(8)
def test_buffers_have_the_sizes_that_sglang_computes(scenario):
    """And a request is admitted only if the GPU has a whole buffer for it and for each request in transfer."""
    made = run(scenario)
    decode = next(machine for machine in made.machines if getattr(machine, "instance_id", "") == "decode-0")
    buffers, page = decode.cache.buffers, PAGE
    for num_pages in range(1, 80):
        assert buffers.num_needed(num_pages) * page == buffer_slots(num_pages * page, buffers.buffer_tokens)
    assert buffers.num_free == buffers.num_pages


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.25, 1.0])
@pytest.mark.parametrize(
    ("prompt", "filled", "first", "short", "long"),
    [(5000, 0, 1, 0, 38), (1000, 1000, 0, 39, 0), (4090, 4090, 0, 6, 33)],
)
def test_decode_time_is_a_closed_form_of_the_miss_rate(rate, prompt, filled, first, short, long):
    """40 output tokens take 39 steps of 10 ms, each with a kernel in 61 layers. The last 38 steps save a token."""
    scenario = hisparse(request(0, prompt, 40), rate=rate)
    record, costs = run(scenario).records.requests[0], copies(scenario)
    token_ns = 1e9 * costs.token_bytes / costs.load_bandwidth
    block_ns = max(token_ns, 61 * 118.5)
    swaps_ns = TOP_K * block_ns * (first + rate * long) + 61 * (5_000 * short + 11_200 * (first + long))
    save_ns = 38e9 * costs.token_bytes / costs.save_bandwidth
    expected = 39 * 10_000_000 + filled * token_ns + swaps_ns + save_ns
    assert record.end_ns - record.first_token_ns == pytest.approx(expected, abs=40)


def kernel_us(row) -> float:
    """Time of one layer's kernel, as simulated, where nothing else computes."""
    batch, fits = int(row["batch"]), int(row["context_tokens"]) <= 2 * TOP_K
    one = SwapCosts(
        num_layers=1,
        num_index_layers=int(row["kernel"] == "swap_in"),
        token_bytes=int(row["token_bytes"]),
        buffer_tokens=2 * TOP_K,
        chosen_tokens=TOP_K,
        miss_rate=int(row["missed_tokens"]) / TOP_K,
        load_bandwidth=0.74 * 64e9,
        save_bandwidth=1,
    )
    return one.step_ns(HiSparseStep(0, (), (), batch, 0, 0, 1, 0, 0, 0 if fits else batch, 0), 0) / 1e3


@pytest.mark.parametrize(("kernel", "most"), [("swap_in", 0.45), ("copy", 0.7)])
def test_kernels_take_as_long_as_measured(kernel, most):
    """SGLang's kernels on an H200: 6 % at the median. Those that copy nothing vary most."""
    rows = csv.DictReader((ROOT / "experiments/hisparse/swap_in.csv").read_text().splitlines())
    errors = [abs(kernel_us(row) / float(row["layer_us"]) - 1) for row in rows if row["kernel"] == kernel]
    assert median(errors) < 0.07
    assert max(errors) < most


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5])
def test_copies_for_layers_that_share_an_index_overlap_with_computation(rate):
    """GLM-5.2: 21 of 78 layers have an indexer. A step computes 10 ms, so that a layer takes 128 µs."""
    scenario = hisparse(request(0, 5000, 40), rate=rate, model="glm-5.2")
    record, costs = run(scenario).records.requests[0], copies(scenario)
    assert (costs.num_layers, costs.num_index_layers) == (78, 21)
    layer_ns, moved = 1e7 / 78, [TOP_K] + 38 * [rate * TOP_K]
    find_ns = sum(11_200 + missed * 118.5 for missed in moved)
    late_ns = sum(max(0, 4_800 + 28 * missed - layer_ns) for missed in moved)
    save_ns = 38e9 * costs.token_bytes / costs.save_bandwidth
    expected = 39 * 1e7 + 21 * find_ns + 57 * late_ns + save_ns
    assert record.end_ns - record.first_token_ns == pytest.approx(expected, abs=40)


def test_the_gpu_holds_indexer_keys_of_all_layers_and_of_all_tokens_in_host_memory():
    """132 bytes a token and layer; KV of 1,152. GLM-5.2 without HiSparse has indexers in 21 of its 78 layers."""
    without, found = (
        layout_of(hisparse(model="glm-5.2", ratio=4, **changes), "decode")._mean_token_bytes("sglang")
        for changes in ({"decode__hisparse": None}, {})
    )
    assert without == 78 * 1152 + 21 * 132
    assert found == 78 * (1152 + 4 * 132)


@pytest.mark.parametrize("prompt", [1000, 6000])
def test_the_terms_of_a_step_add_up_to_its_duration(prompt):
    made = run(hisparse(request(0, prompt, 40)))
    usual = [row for row in made.records.steps if row.kind == "decode"][-1]
    terms = build(made.result.scenario).costs["decode-0"].decode_terms(1, prompt, prompt)
    assert terms["copies from host memory"] > 0
    assert sum(terms.values()) == pytest.approx(usual.first_ns, abs=2)


def test_host_memory_admits_as_many_requests_as_have_buffers():
    """Prompts of 79 pages: 394 pages on the GPU hold 4 of them whole, and 6 buffers of 65 pages."""
    specs, most = [request(i, 5000, 100) for i in range(8)], {}
    for ratio in (1, 2, 5):
        made = run(hisparse(*specs, ratio=ratio, pool_pages=394, cost__decode_base="1 s"))
        assert all(row.outcome == "finished" for row in made.records.requests)
        most[ratio] = max(row.num_requests for row in made.records.steps if row.kind == "decode")
    assert most == {1: 4, 2: 6, 5: 6}


def test_a_short_pool_on_the_gpu_limits_requests_in_transfer():
    specs = [request(i, 3000, 5) for i in range(6)]
    made = run(hisparse(*specs, pool_pages=65 * 2, ratio=20))
    in_transfer = most = 0
    for _, change in sorted(
        [(row.admitted_ns, 1) for row in made.records.requests]
        + [(row.first_token_ns, -1) for row in made.records.requests]
    ):
        in_transfer += change
        most = max(most, in_transfer)
    assert most == 2


def test_a_request_without_room_fails_and_is_not_resumed():
    specs = [request(i, 4000 + 20 * i, 400) for i in range(2)]
    first, second = run(hisparse(*specs, pool_pages=2 * 65)).records.requests
    assert first.outcome == "finished"
    assert (second.outcome, second.num_retractions) == ("failed", 0)
    assert second.reason.startswith("retracted without a copy of its KV: 0 of 130 pages are free on the GPU")


def test_a_page_that_the_gpu_lacks_ends_a_run_of_many_steps():
    """Both buffers are whole, and no page is free: the first step that opens a page fails the second request."""
    many, _ = run_both_ways(hisparse(request(0, 5000, 900), request(1, 4900, 900), pool_pages=130))
    first, second = many.records.requests
    assert (first.outcome, second.outcome) == ("finished", "failed")
    assert second.reason.startswith("retracted without a copy")


def test_a_request_fails_if_others_have_outgrown_its_buffer():
    """SGLang reserves no pages for buffers that grow (disaggregation/decode.py:1424)."""
    made = run(hisparse(request(0, 60, 900), request(1, 5000, 10), pool_pages=66))
    first, second = made.records.requests
    assert (first.outcome, second.outcome) == ("finished", "failed")
    assert second.reason.startswith("no buffer: ")


def test_data_parallel_ranks_wait_for_the_copies_of_the_slowest():
    """The request of one rank fits its buffer. Its steps take as long as those of the other rank's request."""
    changes = {"prefill__tp": 2, "decode__tp": 2, "decode__dp": 2, "rate": 1.0}
    scenario = hisparse(request(0, 5000, 300), request(1, 1000, 300), **changes)
    short, costs = run(scenario).records.requests[1], build(scenario).costs["decode-0.dp1"].swaps
    load_ns = 61 * (11_200 + TOP_K * 118.5)
    assert load_ns > 1e9 * TOP_K * costs.token_bytes / costs.load_bandwidth
    assert (short.end_ns - short.first_token_ns) / 299 == pytest.approx(10_000_000 + load_ns, rel=0.005)


REFUSED = [
    ({"decode__radix_cache": True}, "pd_disaggregation_hook.py:100"),
    ({"decode__tp": 2, "decode__dcp": 2}, "hicache_hook.py:152"),
    ({"decode__allocation": "prefill_complete"}, "pd_disaggregation_hook.py:217"),
    ({"network__transport": "ascend-rdma"}, "ascend/conn.py:286"),
    ({"network__transport": "mooncake-nvlink"}, "GPU memory"),
    ({"engine_version": "0.5.12"}, "0.5.12"),
    ({"model": "qwen3-0.6b"}, "hisparse_hook.py:104"),
    ({"decode__hisparse": {"miss_rate": 0.1, "device_buffer_tokens": 1024}}, "factory.py:86"),
    ({"decode__hisparse": {"miss_rate": 0.1, "device_buffer_tokens": 2050}}, "allocator/hisparse.py:161"),
    ({"decode__hisparse": {}}, "miss_rate"),
    ({"decode__pool_tokens": 4096}, "no request is ever admitted"),
    ({"aggregated__hisparse": {"miss_rate": 0.1}}, "hisparse_coordinator.py:838"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_what_hisparse_excludes_is_refused_with_the_reason(changes, why):
    with pytest.raises(ConfigError, match=why):
        build(hisparse(request(0, 100, 2), **changes))
