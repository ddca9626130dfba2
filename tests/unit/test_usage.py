"""How full instances are, and when transfers move, by hand."""

import pytest

from pdsim.core.instance import Levels
from pdsim.metrics.explanation.usage import Window, instance_usage, loaded_window, moving_span
from pdsim.metrics.records import LevelRecord, RequestRecord, RunRecords, StepRecord, TransferRecord
from tests.support import run, small

WINDOW = Window(0, 100)


def arrived(request_id, arrival_ns, end_ns):
    return RequestRecord(request_id, 10, 2, arrival_ns, end_ns=end_ns)


def step(kind, start_ns, duration_ns):
    return StepRecord(f"{kind}-0", kind, start_ns, duration_ns, duration_ns, 1, 1, 1, 0, 0.0)


def level(time_ns, blocked_by="", *, used=5, queued=0, ready=0, running=0, retracted=0):
    return LevelRecord(
        "decode-0", time_ns, Levels(used, 2, 10 - used - 2, queued, 0, ready, running, retracted, blocked_by)
    )


def sent(queued_ns, start_ns, end_ns, *, target="decode-0", **changes):
    return TransferRecord(0, "prefill-0", target, 1000, 1, 10, False, queued_ns, start_ns, end_ns, **changes)


def test_start_and_tail_of_a_run_are_no_load():
    """Eight requests from 10 to 20, and one before and after: a mean of 2.7, so half is less than two."""
    crowd = [arrived(i, 10, 20) for i in range(7)]
    assert loaded_window(RunRecords(requests=[arrived(9, 0, 40), *crowd])) == (10, 20)


def test_the_window_of_a_closed_loop_is_nearly_all_of_it():
    requests = [arrived(i, 10 * i, 10 * i + 10) for i in range(50)]
    assert loaded_window(RunRecords(requests=requests)) == (0, 500)


@pytest.mark.parametrize("requests", [[], [arrived(0, 5, 5)], [arrived(0, 5, None)]])
def test_a_window_of_almost_nothing(requests):
    assert loaded_window(RunRecords(requests=requests)).length_ns >= 1


def test_instances_by_hand():
    steps = [step("prefill", -50, 60), step("prefill", 30, 20), step("decode", 50, 100)]
    levels = [
        level(-10, "slots", running=4),
        level(20, "pages", queued=3, running=2),
        level(60, retracted=2),
        level(80, ready=1, used=8),
        level(200, "slots"),
    ]
    decode, prefill = instance_usage(RunRecords(steps=steps, levels=levels, transfers=[sent(0, 10, 40)]), WINDOW)
    assert (prefill.computing, prefill.decoding, decode.computing, decode.decoding) == (0.3, 0, 0, 0.5)
    assert (decode.lacks_pages, decode.lacks_slots) == (0.6, 0.4)
    assert decode.mean_running == pytest.approx(0.2 * 4 + 0.4 * 2)
    assert decode.mean_waiting == pytest.approx(0.4 * 3 + 0.2 * 2 + 0.2 * 1)
    assert decode.mean_pages_used == pytest.approx(0.8 * 0.5 + 0.2 * 0.8)
    assert prefill.link_busy == decode.link_busy == pytest.approx(0.3)


def test_a_transfer_moves_when_nothing_holds_it_up():
    assert moving_span(sent(0, 10, 50, setup_ns=5, line_ns=7, posting_ns=8)) == (30, 50)


TRANSFERS = {
    "posting before bytes": ("nixl-cuda-ipc", "1 us", "100 GB/s"),
    "descriptors set the pace": ("nixl-rdma", "1 us", "1000 GB/s"),
    "half of each": ("mooncake-rdma", "1 us", "100 GB/s"),
    "links set the pace": ("nixl-rdma", "1 ns", "1 GB/s"),
}


@pytest.mark.parametrize("case", TRANSFERS)
def test_the_times_of_a_transfer(case):
    """One prompt of 64 tokens in pages of 4, each with 56 planes; SGLang's engines join neighbours."""
    transport, descriptor, bandwidth = TRANSFERS[case]
    changes = {
        "transport": transport,
        "descriptor_latency": descriptor,
        "bandwidth": bandwidth,
        "transfer_latency": "3 us",
    }
    scenario = small(
        workload={"use": "random_lengths", "num_requests": 1, "input_tokens": 64, "output_tokens": 2},
        **{f"network__{name}": value for name, value in changes.items()},
    )
    (row,) = run(scenario).records.transfers
    assert row.setup_ns == 3000
    assert (row.needs, row.worker, row.line_ns) == ("", 0, 0)
    num_bytes = 64 * 114_688
    bytes_ns = num_bytes / (100 if bandwidth == "100 GB/s" else 1)
    descriptors_ns = row.num_descriptors * (1000 if descriptor == "1 us" else 1)
    start, end = moving_span(row)
    if case == "posting before bytes":
        assert row.posting_ns == descriptors_ns == 16 * 56_000
        assert end - start == pytest.approx(bytes_ns, abs=2)
    elif case == "descriptors set the pace":
        assert row.posting_ns == pytest.approx(descriptors_ns, abs=2)
        assert end == start
    elif case == "half of each":
        assert row.num_descriptors == 56
        assert row.posting_ns == descriptors_ns / 2
        assert end - start == pytest.approx(bytes_ns, abs=2)
    else:
        assert row.posting_ns == 0
        assert end - start == pytest.approx(bytes_ns, abs=2)


def test_the_times_of_staged_and_layered_transfers_and_of_a_serial_engine():
    def transfers(**changes):
        return run(
            small(
                workload={"use": "random_lengths", "num_requests": 6, "input_tokens": 64, "output_tokens": 2},
                client={"use": "closed_loop", "concurrency": 6},
                **changes,
            )
        ).records.transfers

    staged = transfers(prefill__tp=2, network__staging={"ring": "8 MB"})
    assert {row.needs for row in staged if row.num_bytes} == {"ring"}
    assert min(row.setup_ns for row in staged if row.num_bytes) > 840_000
    assert {row.needs for row in transfers(prefill__layer_groups=4)} == {"", "layers"}
    serial = transfers(network__transport="nixl-cuda-ipc-sglang", cost={"use": "affine", "prefill_per_token": "1 us"})
    assert {row.worker for row in serial} == {0, 1, 2, 3}
    assert max(row.line_ns for row in serial) > 0
