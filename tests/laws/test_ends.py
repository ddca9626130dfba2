"""Ends of a range are those of whole runs: by another process or here, from a part only where the part tells."""

import os
import select
import signal

import pytest

from pdsim import load_scenario
from pdsim.metrics.summary_rows import ranges
from pdsim.scenario.building.cluster import build
from pdsim.sim.simulation import Observation, Simulation, simulate
from pdsim.sim.uncertainty import ends as ends_module
from pdsim.sim.uncertainty.ends import Ends
from pdsim.sim.uncertainty.part import numbers_of, part_size

SCENARIO = """
name: ends
seed: 3
model: llama-3.1-8b
page_size: 16
prefill: {gpu: h100}
decode: {gpu: h100}
workload:
  use: random_lengths
  num_requests: 1600
  input_tokens: {use: uniform, low: 200, high: 900}
  output_tokens: 20
client: {use: open_loop, arrivals: {use: poisson, rate: 8/s}}
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "ends.yaml"
    path.write_text(SCENARIO)
    return lambda *changes: load_scenario(path, changes)


def found(scenario, *, whole=False, then=lambda ends: None):
    cluster = build(scenario)
    ends = Ends(scenario, cluster.requests, whole=whole)
    with ends.started():
        then(ends)
        ends.watch.simulation = Simulation(cluster, Observation(ended=ends.watch))
        summary = ends.watch.simulation.run().summary()
        return summary, ends.numbers(summary), ends


WHOLE = {}
"""Numbers of whole runs at both ends, by the load's client and the kernels to compile: several tests ask."""


def of_whole_runs(scenario):
    load = repr((scenario.client, scenario.cost.cold_kernels))
    if load not in WHOLE:
        WHOLE[load] = [numbers_of(simulate(end).summary()) for end in scenario.ends]
    return WHOLE[load]


@pytest.fixture(params=[True, False], ids=["forked", "here"])
def place(request, monkeypatch):
    monkeypatch.setattr(ends_module, "_can_fork", lambda: request.param)


def test_all_requests_of_both_ends_can_be_simulated(scenario, place):
    _, numbers, ends = found(scenario(), whole=True)
    assert numbers == of_whole_runs(scenario())
    assert ends.part_requests is None


def test_a_part_tells_the_ends_of_a_steady_load(scenario, place):
    summary, numbers, ends = found(scenario())
    exact = of_whole_runs(scenario())
    assert ends.part_requests == part_size(1600) == 1000
    assert 0 < ends.error < 0.02
    for told, whole in zip(numbers, exact, strict=True):
        for field, value in whole.items():
            assert told[field] == pytest.approx(value, rel=0.1 if "p9" in field else 0.02), field
    low, high = ranges([summary, *numbers])["mean_ttft_ms"]
    assert low < summary["mean_ttft_ms"] < high


def test_it_does_not_matter_who_simulates(scenario, monkeypatch):
    both = []
    for can_fork in (True, False):
        monkeypatch.setattr(ends_module, "_can_fork", lambda answer=can_fork: answer)
        both.append(found(scenario())[1])
    assert both[0] == both[1]


LATER_CROWD = "client.arrivals={use: profile, rate: 60/s, levels: [1, 20], level: 200 s}"


COLD = "cost.cold_kernels.prefill=190 ms"


@pytest.mark.parametrize(
    "change", [LATER_CROWD, "client.arrivals.rate=60/s", COLD], ids=["later crowd", "falls behind", "cold"]
)
def test_a_part_that_does_not_tell_is_not_taken(scenario, place, change):
    """The first has its part before the crowd; of the second, the slowest end falls ever farther behind; the third
    compiles all its kernels in its part, whose p99 is then that of the compiles.
    """
    _, numbers, _ = found(scenario(change))
    assert numbers[1] == of_whole_runs(scenario(change))[1]


def test_the_end_of_a_process_that_died_is_simulated_here(scenario, monkeypatch):
    monkeypatch.setattr(ends_module, "_can_fork", lambda: True)
    _, numbers, _ = found(scenario(), then=lambda ends: os.kill(ends._ends[0]._pid, signal.SIGKILL))
    assert numbers == found(scenario())[1]


def test_processes_end_with_a_parent_that_was_killed(scenario, monkeypatch):
    """Nobody else has the pipe's end for writing as soon as all of them have ended."""
    monkeypatch.setattr(ends_module, "_can_fork", lambda: True)
    ends = Ends(scenario(), build(scenario()).requests)
    reading, writing = os.pipe()
    if not (parent := os.fork()):
        with ends.started():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    os.close(writing)
    assert select.select([reading], [], [], 20)[0], "a process waits for ever"
    os.close(reading)
