"""Closed forms of transfers: descriptors, layer groups, staging rings, queues of one destination, shared links."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.transfer.send_planner import RankPairLayout
from pdsim.policy.views import RoutingView, TokenSequence
from pdsim.scenario.building.wiring import wire_of
from pdsim.scenario.sections.faults import HealthSettings, Kill
from tests.support import MILLISECOND, request, run, small

TOKEN_BYTES = 114_688
"""Qwen3-0.6B: 28 layers, 8 KV heads of 128, keys and values in bf16."""


def ttft_parts(traced):
    (record,) = traced.records.requests
    return record.prefill_end_ns - record.prefill_start_ns, record.transfer_end_ns - record.prefill_end_ns


@pytest.mark.parametrize("groups", [1, 4, 28])
@pytest.mark.parametrize("bandwidth", [1e9, 1e8, 2e7])
def test_layer_groups_expose_their_tail(groups, bandwidth):
    """max(X / L, X - T (L - 1) / L), for a transfer of X in L groups behind a forward of T."""
    tokens = 100
    scenario = small(
        request(0, tokens, 2),
        page_size=1,
        prefill__layer_groups=groups,
        prefill__chunked_prefill_tokens=0,
        network__bandwidth=f"{bandwidth:.0f} B/s",
        network__transfer_latency="0 ns",
    )
    forward_ns, tail_ns = ttft_parts(run(scenario))
    x_ns = tokens * TOKEN_BYTES / bandwidth * 1e9
    assert forward_ns == tokens * MILLISECOND
    assert tail_ns == pytest.approx(max(x_ns / groups, x_ns - forward_ns * (groups - 1) / groups), rel=1e-6, abs=30)


def test_units_for_one_decode_instance_are_sent_one_after_another():
    """n prompts computed in one forward: the k-th arrives after k transfers."""
    scenario = small(
        *(request(i, 10, 2) for i in range(5)),
        page_size=1,
        prefill__chunked_prefill_tokens=0,
        network__bandwidth="1 GB/s",
        network__transfer_latency="2 ms",
    )
    records = run(scenario).records.requests
    one_ns = 2 * MILLISECOND + 10 * TOKEN_BYTES
    assert [r.transfer_end_ns - r.prefill_end_ns for r in records] == [one_ns * k for k in range(1, 6)]


def slices(*requests, **changes):
    """Four workers post head slices, 2.9 us each for a worker alone."""
    network = {"transport": "nixl-cuda-ipc-sglang", "transfer_latency": "0 ns"}
    return small(*requests, prefill__tp=2, prefill__chunked_prefill_tokens=0, network=network, **changes)


def test_workers_of_a_serial_engine_post_in_turns():
    """All four prompts of a forward post one turn of 5 ms, then each posts its rest and sends.

    In a round of k workers the loop has one turn of 0.7 ms, so they post what k workers alone post in k (5 + 0.7) ms.
    """
    rows = run(slices(*(request(i, 64, 2) for i in range(4)))).records.transfers
    round_ns = [0] + [k * 5 * MILLISECOND + MILLISECOND * 7 // 10 for k in range(1, 5)]
    rest = 64 * 56 * 2900 / round_ns[1] - 1
    moving_ns = rows[0].end_ns - rows[0].start_ns - rows[0].line_ns - rows[0].posting_ns
    end_ns = round_ns[1] + 3 / 4 * round_ns[4]  # the first one begins alone
    for row, num_posting in zip(rows, (4, 3, 2, 1), strict=True):
        end_ns += rest * round_ns[num_posting] / num_posting + moving_ns
        assert row.end_ns - row.start_ns == pytest.approx(end_ns, abs=5)
    assert 0 < moving_ns < MILLISECOND / 10


@pytest.mark.parametrize(("posts", "duration_ms"), [(False, 10), (True, 10 * (1 + 5 / 0.7))])
def test_a_forward_beside_a_worker_that_posts_waits_for_its_launch(posts, duration_ms):
    """A launch takes 10 ms. The loop has one turn of 0.7 ms behind each of 5 ms; 800 tokens are posted for 130 ms."""
    first = request(0, 800 if posts else 8, 2)
    second = request(1, 1, 2, arrival_ns=830 * MILLISECOND)
    times = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    cost = {"prefill": times, "decode": times, "host": {"launch": "10 ms"}}
    steps = run(slices(first, second, cost=cost)).records.steps
    last = [step for step in steps if step.kind == "prefill"][-1]
    assert last.duration_ns == pytest.approx(duration_ms * MILLISECOND, rel=1e-6)


def staged(**changes):
    """Ten prompts of one cell each, computed at once, into a ring that holds one cell, or as many as are given."""
    cells = changes.pop("cells", 1)
    return small(
        *(request(i, 64, 30) for i in range(10)),
        prefill__tp=4,
        prefill__chunked_prefill_tokens=0,
        network__staging={
            "ring": f"{64 * TOKEN_BYTES * cells} B",
            "gather_host": "0 ns",
            "scatter_host": "1 ms",
        },
        network__transfer_latency="0 ns",
        **changes,
    )


def test_a_ring_of_one_cell_passes_one_cell_a_decode_step():
    """A span comes back when decode's loop has seen it scattered: once a step while it runs."""
    one, many = (run(staged(cells=cells)) for cells in (1, 10))
    ends = [[r.transfer_end_ns for r in traced.records.requests] for traced in (one, many)]
    gaps = [later - earlier for earlier, later in zip(ends[0][2:], ends[0][3:], strict=False)]
    step_ns = 10 * MILLISECOND
    assert all(gap == pytest.approx(step_ns, rel=0.05) for gap in gaps)
    assert max(ends[1]) - min(ends[1]) < step_ns


@pytest.mark.parametrize(
    ("network", "staged_ms", "plain_ms"),
    [
        ({"transport": "mooncake-tcp"}, 7, 7),
        ({"transport": "nixl-cuda-ipc-sglang"}, 0, 7),
        ({"transport": "nixl-cuda-ipc-sglang", "staging": {"transfer_latency": "2 ms"}}, 2, 7),
    ],
)
def test_staged_and_plain_transfers_begin_after_times_of_their_own(network, staged_ms, plain_ms):
    """Each waits once a batch; a staged request has a batch for its cell and one for its first token."""
    staging = {"gather_host": "0 ns", "gather_efficiency": 1, **network.pop("staging", {})}
    changes = {f"network__{name}": value for name, value in network.items()} | {"network__transfer_latency": "7 ms"}
    (plain,) = run(small(request(0, 64, 2), prefill__tp=2, **changes)).records.transfers
    cell, rest = run(small(request(0, 64, 2), prefill__tp=2, network__staging=staging, **changes)).records.transfers
    assert plain.setup_ns == plain_ms * MILLISECOND
    assert rest.setup_ns == staged_ms * MILLISECOND
    assert cell.setup_ns == pytest.approx(staged_ms * MILLISECOND, abs=5000)  # and the gather


@pytest.mark.parametrize(
    ("wire", "descriptors"),
    [
        (RankPairLayout(page_size=64, page_bytes=1, num_planes=30), 30),
        (RankPairLayout(page_size=64, page_bytes=1, num_planes=30, coalesces=False), 30 * 16),
        (RankPairLayout(page_size=64, page_bytes=1, num_planes=30, slices=True), 30 * 16 * 64),
        (RankPairLayout(page_size=64, page_bytes=1, num_planes=30, slices=True, pushes=True), 1),
    ],
)
def test_descriptors_by_path(wire, descriptors):
    """Qwen3.5-397B has 15 layers with KV: 30 planes. 1,000 tokens are 16 pages of 64."""
    pages = tuple(range(5, 21))
    assert wire.size(pages, tuple(range(100, 116))).num_descriptors == descriptors


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 2), (2, 2)])
def test_a_push_takes_a_batch_for_each_decode_rank_and_its_bytes(prefill_tp, decode_tp):
    """However heads lie. Each rank's share of 64 tokens leaves its GPU, or arrives at one, at 1 GB/s."""
    tp = {"prefill__tp": prefill_tp, "decode__tp": decode_tp}
    network = {"transport": "push", "transfer_latency": "1 ms", "bandwidth": "1 GB/s"}
    (transfer,) = run(small(request(0, 64, 2), network=network, **tp)).records.transfers
    num_batches = max(1, decode_tp // prefill_tp)
    moving_ns = 64 * TOKEN_BYTES / min(prefill_tp, decode_tp)
    assert transfer.end_ns - transfer.start_ns == pytest.approx(num_batches * MILLISECOND + moving_ns, rel=1e-6)


@pytest.mark.parametrize("transport", ["mooncake-rdma", "nixl-rdma", "nixl-cuda-ipc-sglang"])
def test_sglangs_engines_join_pages_that_follow_each_other(transport):
    """Latent KV of DeepSeek-V3 in pages of 1 token, from 8 ranks to 8: a descriptor for each of 61 layers of a rank."""
    tp = {"prefill__tp": 8, "decode__tp": 8}
    changes = {"model": "deepseek-v3", "prefill__gpu": "b200", "decode__gpu": "b200", "page_size": 1} | tp
    (transfer,) = run(small(request(0, 60, 2), network__transport=transport, **changes)).records.transfers
    assert transfer.num_descriptors == 8 * 61


def test_layer_groups_are_whole_layers():
    """Five groups of the 28 layers of Qwen3-0.6B: three of six and two of five layers, K and V of each."""
    wire = RankPairLayout(page_size=16, page_bytes=28 * 2 * 1000, num_planes=56, planes_per_layer=2)
    load = wire.size((1, 2, 9), (4, 5, 6))
    parts = [wire.part(load, group, 5) for group in range(5)]
    assert [part.num_descriptors for part in parts] == [2 * 2 * layers for layers in (5, 6, 5, 6, 6)]
    assert [part.num_bytes for part in parts] == [3 * 2 * 1000 * layers for layers in (5, 6, 5, 6, 6)]


def test_groups_of_layers_with_state_are_equal_parts():
    wire = RankPairLayout(
        page_size=16, page_bytes=300, num_planes=2, planes_per_layer=2, state_bytes=100, num_state_planes=6
    )
    load = wire.size((1,), (4,), range(16))
    assert [wire.part(load, group, 4) for group in range(4)] == [(100, 2)] * 4


@given(st.integers(1, 500), st.integers(0, 30), st.integers(1, 200), st.sampled_from([1, 8, 16]))
def test_a_window_is_sent_from_its_first_page_on(num_tokens, cached_pages, window, page_size):
    """The pages with one of the last tokens of the window that decode lacks."""
    start = min(cached_pages * page_size, num_tokens // page_size * page_size)
    wire = RankPairLayout(
        page_size=page_size, page_bytes=7, num_planes=2, window_tokens=window, window_page_bytes=5, num_window_planes=2
    )
    pages = {token // page_size for token in range(max(start, num_tokens - window), num_tokens)}
    assert wire.size((), (), range(start, num_tokens)) == (5 * len(pages), 2 * min(1, len(pages)))


def test_windows_and_keys_of_indexers_are_sent_as_the_models_sizes_say():
    """gpt-oss-120b: 18 layers whole and 18 of 128 tokens; GLM-5: a key of 132 bytes beside the latent of each layer."""
    with_windows = wire_of(small(request(0, 100, 2), model="gpt-oss-120b", page_size=16))
    assert (with_windows.page_bytes, with_windows.num_planes) == (16 * 73_728 // 2, 36)
    assert with_windows.size((), (), range(1000)) == (9 * 16 * 73_728 // 2, 36)
    with_indexers = wire_of(small(request(0, 100, 2), model="glm-5", page_size=64))
    assert with_indexers.page_bytes == 64 * (89_856 + 78 * 132)


def test_runs_are_counted_where_both_sides_go_on():
    wire = RankPairLayout(page_size=1, page_bytes=1, num_planes=1)
    assert wire.size((1, 2, 3, 7, 8), (4, 5, 9, 10, 11)).num_descriptors == 3
    assert wire.size((), ()).num_descriptors == 0


@dataclass
class InTurn:
    """Sends each request where it is written."""

    instance_ids: tuple[str, ...]
    _turn: int = field(default=0, init=False)

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        self._turn += 1
        return self.instance_ids[self._turn - 1]


def seconds_to_send(pairs: list[tuple[int, int]], **changes) -> list[float]:
    """100 tokens from prefill to decode, for each pair at once, over links of 100 MB/s; two ranks to an instance."""
    sources, targets = zip(*pairs, strict=True)
    scenario = small(
        *(request(i, 100, 2) for i in range(len(pairs))),
        prefill__instances=max(sources) + 1,
        prefill__tp=2,
        prefill__chunked_prefill_tokens=0,
        decode__instances=max(targets) + 1,
        decode__tp=2,
        router={
            "prefill": InTurn(tuple(f"prefill-{i}" for i in sources)),
            "decode": InTurn(tuple(f"decode-{i}" for i in targets)),
        },
        network__bandwidth="100 MB/s",
        network__transfer_latency="0 ns",
        cost={"use": "affine", "prefill_base": "10 ms", "decode_base": "10 ms"},
        **changes,
    )
    records = run(scenario).records.requests
    return [(r.transfer_end_ns - r.prefill_end_ns) / 1e9 for r in sorted(records, key=lambda r: r.request_id)]


RANK_S = 100 * TOKEN_BYTES / 2 / 100e6
"""What one rank takes to send its half of the KV over a link of its own."""


def test_ranks_behind_one_nic_share_it():
    assert seconds_to_send([(0, 0)], network__gpus_per_nic=1) == [pytest.approx(RANK_S)]
    assert seconds_to_send([(0, 0)], network__gpus_per_nic=2) == [pytest.approx(2 * RANK_S)]


def test_instances_behind_one_nic_share_it():
    """GPUs 0 to 3 are two prefill instances, and 4 to 7 two decode instances."""
    assert seconds_to_send([(0, 0), (1, 1)], network__gpus_per_nic=4) == [pytest.approx(4 * RANK_S)] * 2


def test_what_slow_transfers_leave_of_a_nic_goes_to_the_others():
    """Max-min: three transfers of two ranks leave one NIC, a sixth of it to a rank. One of them meets a fourth, whose
    ranks get what is left of that NIC: (1 - 2/6) / 2, a third."""
    pairs = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert seconds_to_send(pairs, network__gpus_per_nic=2) == pytest.approx([6 * RANK_S] * 3 + [3 * RANK_S])


def test_a_link_shared_by_all_is_shared_by_ranks():
    """Two pairs of two ranks on a link of twice a NIC's bandwidth."""
    taken = seconds_to_send([(0, 0), (1, 1)], network__shared_bandwidth="200 MB/s")
    assert taken == [pytest.approx(2 * RANK_S)] * 2


def test_a_decode_instance_that_died_scatters_anew_at_once():
    """A cell of the lost instance would have been scattered until 2.1 s; the next comes at 0.6 s, and takes 2 s."""
    specs = request(0, 64, 2), request(1, 64, 2, arrival_ns=500 * MILLISECOND)
    staging = {"gather_host": "0 ns", "scatter_host": "2 s"}
    scenario = small(*specs, prefill__tp=2, prefill__chunked_prefill_tokens=0, network__staging=staging)
    dies = Kill(at_ns=200 * MILLISECOND, kill="decode-0", restart_after_ns=100 * MILLISECOND)
    health = HealthSettings(max_retries=0)
    records = run(scenario.model_copy(update={"faults": (dies,), "health": health})).records
    lost, served = records.requests
    assert (lost.outcome, served.outcome) == ("failed", "finished")
    assert served.end_ns - served.arrival_ns == pytest.approx(2074 * MILLISECOND, abs=20 * MILLISECOND)
