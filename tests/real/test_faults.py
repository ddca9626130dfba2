"""Processes die at random moments under load: every request ends, nothing leaks, and who comes back serves again."""

import asyncio
from functools import partial
from random import Random

import pytest
from pdreal.control.logbook import read_journal, read_records
from pdreal.launcher import Launcher
from pdreal.settings.options import Options
from pdreal.settings.scenario import real_scenario

from pdsim.core.journal.replay import replay
from pdsim.scenario.building.machines import restarted, state_machines
from tests.real import clusters

HEALTH = {
    "heartbeat_interval": "500 ms",
    "heartbeat_failures": 2,
    "bootstrap_timeout": "5 s",
    "waiting_timeout": "20 s",
    "release_timeout": "2 s",
    "transfer_timeout": "3 s",
}
NUM_LAST = 10
"""Requests that are sent when who was killed is back, however long that takes."""


def survive(seed, role, tmp_path):
    draw = Random(seed)
    kill = {
        "at": f"{draw.uniform(0.1, 1.5):.3f} s",
        "kill": f"{role}-0",
        "restart_after": f"{draw.choice([0.01, 0.3, 1.0])} s",
    }
    scenario = clusters.scenario(
        seed=seed,
        prefill__instances=2,
        decode__instances=2,
        health=HEALTH,
        faults=[kill],
        router="round_robin",
        workload__num_requests=60 + NUM_LAST,
        workload__output_tokens=20,
        client__concurrency=8,
    )
    real, resolved = clusters.run_restarting(scenario, f"{role}-0", NUM_LAST, logs=tmp_path)
    assert real.failure is None
    assert not real.leaks
    assert len(real.outputs) == 60 + NUM_LAST
    requests = read_records(tmp_path).requests
    finished = [request for request in requests if request.outcome == "finished"]
    assert all(request.reason for request in requests if request not in finished)
    assert len(finished) > 50
    assert not clusters.wrong_outputs(resolved, {r.request_id: real.outputs[r.request_id] for r in finished})
    assert replay(read_journal(tmp_path), state_machines(resolved), partial(restarted, resolved)) > 60
    last = requests[-NUM_LAST:]
    assert not [request for request in last if request not in finished]
    assert f"{role}-0" in {request.prefill_id if role == "prefill" else request.decode_id for request in last}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_process_is_killed(role, tmp_path):
    survive(1, role, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_processes_are_killed_at_many_moments(seed, tmp_path):
    role = "prefill" if seed % 2 else "decode"
    survive(100 + seed, role, tmp_path)


def test_an_instance_that_is_killed_at_the_end_leaves_nothing():
    """Others are asked what they hold; what it held died with it, before its end is heard of or behind that."""
    resolved, _ = real_scenario(clusters.scenario(health=HEALTH), Options())

    async def play():
        launcher = Launcher(resolved, Options())
        await launcher.start()
        launcher.kill("decode-0")
        stopping = asyncio.create_task(launcher.stop())
        await asyncio.sleep(0)
        launcher.kill("prefill-0")
        return await stopping, launcher.failure

    assert asyncio.run(play()) == ([], None)


def test_without_health_a_lost_instance_ends_the_run(tmp_path):
    """One follower is enough."""
    real, _ = clusters.run_killing(clusters.scenario(decode__tp=2), "decode-0", rank=1, logs=tmp_path)
    assert "decode-0 was lost" in real.failure
    reasons = {request.reason for request in read_records(tmp_path).requests if request.outcome == "failed"}
    assert reasons == {real.failure}


def test_damaged_kv_is_found(tmp_path):
    """Somebody else writes into decode's cache."""
    failure = clusters.run_scribbling(clusters.scenario(workload__num_requests=200))
    assert "is damaged: KV heads" in failure


@pytest.mark.parametrize("model", ["tiny-qwen3", pytest.param("tiny-hybrid", marks=pytest.mark.nightly)])
def test_clients_of_an_aggregated_cluster_give_up(model, tmp_path):
    """At any moment of a request's life."""
    server = {"gpu": "h100", "pool_tokens": 2048, "max_running_requests": 8, "chunked_prefill_tokens": 64}
    scenario = clusters.scenario(
        model=model,
        prefill=None,
        decode=None,
        aggregated=server,
        faults=[{"abort_fraction": 0.5, "within": "500 ms"}],
        workload__num_requests=60,
        workload__output_tokens=60,
        client__concurrency=12,
    )
    real, resolved = clusters.run(scenario, logs=tmp_path)
    assert real.failure is None
    assert not real.leaks
    by_outcome = {outcome: set() for outcome in ("finished", "failed")}
    for request in read_records(tmp_path).requests:
        by_outcome[request.outcome].add(request.request_id)
    assert min(map(len, by_outcome.values())) > 5
    assert any(real.outputs[request_id] for request_id in by_outcome["failed"]), "some give up in the middle"
    assert not clusters.wrong_outputs(resolved, {i: real.outputs[i] for i in by_outcome["finished"]})
    assert replay(read_journal(tmp_path), state_machines(resolved)) > 60
