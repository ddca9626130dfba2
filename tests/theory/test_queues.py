"""Closed forms of queueing theory."""

from pathlib import Path

import pytest

from pdsim.core.messages import StartTransfer, TransferUnit, UnitSent
from pdsim.core.transfer.send_planner import RankPairLayout
from pdsim.core.transfer.sender import Sender
from pdsim.metrics.explanation.usage import instance_usage
from pdsim.scenario.building.wiring import Interconnect
from pdsim.scenario.loading import load_scenario
from pdsim.sim.bus import Timeline
from pdsim.sim.links.network import Network
from pdsim.sim.simulation import Observation, simulate
from pdsim.system.transport import Topology, Transport
from tests.support import MILLISECOND, run, small


@pytest.mark.parametrize(("load", "num_requests"), [(0.3, 5_000), (0.7, 10_000), (0.9, 20_000)])
def test_prefill_is_an_m_d_1_queue(load, num_requests):
    """One prompt a forward, one forward at a time: the mean wait is load * service / (2 * (1 - load))."""
    service_s = 0.1
    scenario = small(
        workload={"use": "random_lengths", "num_requests": num_requests, "input_tokens": 100, "output_tokens": 1},
        client={"use": "open_loop", "arrivals": {"use": "poisson", "rate": f"{load / service_s}/s"}},
        prefill__max_prefill_tokens=100,
        prefill__chunked_prefill_tokens=0,
        prefill__radix_cache=False,
        prefill__pool_tokens=1_000_000,
        decode__pool_tokens=1_000_000,
        decode__max_running_requests=100_000,
        network__transfer_latency="1 us",
        network__message_latency="1 us",
        seed=3,
    )
    records = run(scenario).records
    assert {step.num_requests for step in records.steps} == {1}
    waits = [r.prefill_start_ns - r.admitted_ns for r in records.requests]
    expected_ns = load * service_s * 1e9 / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(expected_ns, rel=0.08)


def test_littles_law_holds_for_every_run():
    """Time-average number of requests in the system = throughput * mean latency, over the whole run."""
    scenario = small(
        workload={
            "use": "random_lengths",
            "num_requests": 200,
            "input_tokens": 40,
            "output_tokens": {"use": "uniform", "low": 1, "high": 30},
        },
        client={"use": "closed_loop", "concurrency": 7, "warm_up_requests": 0},
    )
    result = run(scenario).result
    summary, requests = result.summary(), result.records.requests
    changes = sorted([(r.arrival_ns, 1) for r in requests] + [(r.end_ns, -1) for r in requests])
    area = level = last = 0
    for at, change in changes:
        area += level * (at - last)
        level, last = level + change, at
    in_system = area / 1e9 / summary["duration"]
    assert in_system == pytest.approx(summary["concurrency"])
    assert in_system == pytest.approx(summary["request_throughput"] * summary["mean_e2e_latency_ms"] / 1e3)
    assert max(level for level in _levels(changes)) == 7


def _levels(changes):
    level = 0
    for _, change in sorted(changes, key=lambda c: (c[0], c[1])):
        level += change
        yield level


class Link:
    """Transfers by hand: sends units at given times, and remembers when each ended."""

    def __init__(self, bandwidth, latency_ns=0):
        self.timeline = Timeline()
        self.ended: dict[int, int] = {}
        engine = Transport(name="test", link="nic", batch_ns=latency_ns, sources={})
        topology = Topology(
            capacity={f"{i} {way}": rate for i, rate in bandwidth.items() for way in ("out", "in")},
            ways_out={i: ((f"{i} out", 1),) for i in bandwidth},
            ways_in={i: ((f"{i} in", 1),) for i in bandwidth},
        )
        wire = RankPairLayout(page_size=1, page_bytes=1, num_planes=1)
        links = Interconnect(wire=wire, transport=engine, topology=topology, staging=None, layer_groups=0)
        self.network = Network(self.timeline, links, on_done=self._on_done)

        self.senders = {f"{i}.sender": Sender(i, list(bandwidth), num_queues=9, staged=False) for i in bandwidth}

    def _on_done(self, transfer):
        self.ended[transfer.unit.request_id] = self.timeline.now_ns
        self._tell(UnitSent(transfer.unit), transfer.unit)

    def _tell(self, message, unit):
        for command in self.senders[f"{unit.source}.sender"].on_message(message, self.timeline.now_ns):
            if isinstance(command, StartTransfer):
                self.network.start(command)

    def send(self, at_ms, i, source, target, num_bytes):
        unit = TransferUnit(i, source, target, (), (), num_bytes, 1, 0, is_last=True)
        self.timeline.after(at_ms * MILLISECOND, lambda _: self._tell(unit, unit))

    def run(self):
        self.timeline.run_all()
        return {i: end / MILLISECOND for i, end in self.ended.items()}


GB = 1e9
MB = 1_000_000


def test_a_transfer_alone_takes_latency_plus_bytes_over_bandwidth():
    link = Link({"a": GB, "b": GB}, latency_ns=2 * MILLISECOND)
    link.send(0, 1, "a", "b", 10 * MB)
    assert link.run() == {1: 12}


def test_transfers_of_one_pair_follow_each_other():
    link = Link({"a": GB, "b": GB}, latency_ns=MILLISECOND)
    link.send(0, 1, "a", "b", 10 * MB)
    link.send(0, 2, "a", "b", 20 * MB)
    assert link.run() == {1: 11, 2: 32}


def test_transfers_into_one_instance_share_its_link():
    """The second joins when half of the first is through: 5 ms alone, then half speed for both."""
    link = Link({"a": GB, "b": GB, "d": GB})
    link.send(0, 1, "a", "d", 10 * MB)
    link.send(5, 2, "b", "d", 10 * MB)
    assert link.run() == pytest.approx({1: 15, 2: 20}, abs=1e-5)


def test_shares_are_max_min_fair():
    """a is held to 0.2 GB/s by its own way out, so b gets all the rest of d's way in."""
    link = Link({"a": 0.2 * GB, "b": GB, "d": GB})
    link.send(0, 1, "a", "d", 10 * MB)
    link.send(0, 2, "b", "d", 40 * MB)
    assert link.run() == pytest.approx({1: 50, 2: 50}, abs=1e-5)


def test_the_two_directions_of_a_link_do_not_share():
    link = Link({"a": GB, "b": GB})
    link.send(0, 1, "a", "b", 10 * MB)
    link.send(0, 2, "b", "a", 10 * MB)
    assert link.run() == {1: 10, 2: 10}


def test_a_link_is_work_conserving():
    """However transfers come, the last byte leaves no later than if they had come as one."""
    link = Link({f"p{i}": GB for i in range(5)} | {"d": GB})
    for i in range(5):
        link.send(i, i, f"p{i}", "d", (i + 1) * 7 * MB)
    assert max(link.run().values()) == pytest.approx(15 * 7, abs=1e-4)


def test_makespan_is_at_least_bytes_over_bandwidth():
    """An overloaded link: nothing is dropped, and prefill stalls on its own full pool."""
    scenario = small(
        workload={"use": "random_lengths", "num_requests": 60, "input_tokens": 64, "output_tokens": 2},
        client={"use": "open_loop", "arrivals": {"use": "constant", "rate": "100/s"}},
        cost={"use": "affine", "prefill_per_token": "1 us", "decode_base": "1 ms"},
        prefill__pool_tokens=300,
        prefill__radix_cache=False,
        network__bandwidth="100 MB/s",
    )
    traced = run(scenario, levels=True)
    summary = traced.result.summary()
    num_bytes = 60 * 64 * 114_688
    assert summary["completed"] == 60
    assert summary["pdsim"]["transfer_bytes"] == num_bytes
    assert summary["duration"] >= num_bytes / 100e6
    assert any(row.levels.blocked_by == "pages" for row in traced.records.levels if row.instance_id == "prefill-0")


def test_the_conformance_scenario_of_an_overloaded_link():
    path = Path(__file__).parents[2] / "experiments" / "conformance" / "overloaded-link.yaml"
    result = simulate(load_scenario(path), Observation(levels=True))
    summary = result.summary()
    num_bytes = 1000 * 94 * 16 * 131_072
    assert (summary["completed"], summary["pdsim"]["transfer_bytes"]) == (1000, num_bytes)
    assert num_bytes / 0.5e9 <= summary["duration"] < num_bytes / 0.5e9 + 10
    (prefill,) = (usage for usage in instance_usage(result.records) if usage.instance_id == "prefill-0")
    assert prefill.lacks_pages > 0.5
    assert prefill.link_busy > 0.99
