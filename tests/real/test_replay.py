"""Whatever the cluster and its load: the journal of a real run replays to identical decisions."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
from pdreal.control.logbook import read_journal, read_records

from pdsim.core.journal.replay import ReplayError, replay
from pdsim.core.messages import Send
from pdsim.scenario.building.machines import restarted, state_machines
from tests.real import clusters


def random_changes(draw):
    """Pools from tight to ample, any policies, one rank or two on each side, radix caches, host memory behind them."""
    prefill_tp, decode_tp = draw.choice([(1, 1), (1, 1), (1, 1), (2, 2), (2, 1), (1, 2)])
    page_size = draw.choice([1, 4, 16])
    closed = {"use": "closed_loop", "concurrency": draw.randint(1, 12)}
    opened = {"use": "open_loop", "arrivals": {"use": "poisson", "rate": draw.choice(["5/s", "20/s", "100/s"])}}
    changes = {
        "seed": draw.randrange(1000),
        "page_size": page_size,
        "prefill__instances": draw.choice([1, 2]) if prefill_tp == 1 else 1,
        "decode__instances": draw.choice([1, 2]) if decode_tp == 1 else 1,
        "prefill__tp": prefill_tp,
        "decode__tp": decode_tp,
        "prefill__pool_tokens": draw.choice([320, 640, 4096]),
        "decode__pool_tokens": draw.choice([320, 640, 4096]),
        "prefill__radix_cache": draw.random() < 0.7,
        "decode__radix_cache": draw.random() < 0.5,
        "prefill__overlap": draw.random() < 0.5,
        "prefill__policy": draw.choice(["fcfs", "shortest_prompt_first", "lpm"]),
        "prefill__transfer": draw.choice(["every_chunk", "whole_prompt"]),
        "prefill__chunked_prefill_tokens": draw.choice([0, 32, 64]),
        "prefill__max_running_requests": draw.randint(1, 6),
        "decode__max_running_requests": draw.randint(1, 6),
        "decode__admission": {"use": "reserve_decode_tokens", "reserved_tokens": draw.choice([2, 16])},
        "decode__preemption": draw.choice(["fewest_outputs_first", "last_arrived_first"]),
        "router": draw.choice(["round_robin", "random", "power_of_two", "least_loaded", "cache_aware"]),
        "workload__output_tokens": {"use": "uniform", "low": 1, "high": draw.choice([4, 24])},
        "client": draw.choice([closed, opened]),
    }
    for role in ("prefill", "decode"):
        if changes[f"{role}__radix_cache"] and draw.random() < 0.5:
            write = draw.choice(["write_through", "write_through_selective", "write_back"])
            changes[f"{role}__host_cache"] = draw.choice(["0.2 MB", "2 MB"])
            changes[f"{role}__host_cache_write"] = write
    if prefill_tp == decode_tp:
        changes["prefill__layer_groups"] = draw.choice([0, 0, 1, 4])
    elif (chosen := draw.random()) > 0.8:
        changes["network__transport"] = "push"
    elif chosen < 0.5:
        changes["network__staging"] = {"ring": draw.choice(["400 kB", "2 MB"])}
    return changes


def check(seed, logs):
    scenario = clusters.scenario(**random_changes(Random(seed)))
    real, resolved = clusters.run(scenario, logs=logs)
    assert real.failure is None
    assert not real.leaks
    failed = {request.request_id for request in read_records(logs).requests if request.outcome == "failed"}
    finished = {i: tokens for i, tokens in real.outputs.items() if i not in failed}
    assert len(real.outputs) == clusters.DEFAULT["workload"]["num_requests"]
    assert len(finished) > len(failed)
    assert not clusters.wrong_outputs(resolved, finished)
    assert replay(read_journal(logs), state_machines(resolved), partial(restarted, resolved)) > 0
    return resolved


@pytest.mark.parametrize("seed", range(5))
def test_random_runs_replay(seed, tmp_path):
    check(seed, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 150))
def test_many_random_runs_replay(seed, tmp_path):
    check(seed, tmp_path)


def test_a_fault_in_a_journal_is_found_where_it_is(tmp_path):
    """One page of one grant is another: the replay stops at that entry, and names it."""
    resolved = check(0, tmp_path)
    entries = list(read_journal(tmp_path))
    found = ((i, j) for i, e in enumerate(entries) if e.call == "next_step" for j, c in enumerate(e.returned[1]))
    at, which = next((i, j) for i, j in found if isinstance(entries[i].returned[1][j], Send))
    step, commands = entries[at].returned
    grant = commands[which].message
    wrong = replace(grant, pages=(*grant.pages[:-1], grant.pages[-1] + 1))
    changed = [*commands[:which], replace(commands[which], message=wrong), *commands[which + 1 :]]
    entries[at] = entries[at]._replace(returned=(step, tuple(changed)))
    with pytest.raises(ReplayError, match=f"entry {at}, {entries[at].instance_id}.next_step"):
        replay(entries, state_machines(resolved))
