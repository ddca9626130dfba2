"""Closed forms of what goes wrong: detection, retries, slow and dropped links, timeouts."""

from math import ceil, prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdsim.core.journal.calls import KILLED
from pdsim.core.messages import NewRequest, PeerDown
from tests.support import MILLISECOND, examples, request, run, small, small_aggregated

SECOND = 1000 * MILLISECOND
TOKEN_BYTES = 114_688
"""Qwen3-0.6B: 28 layers, 8 KV heads of 128, keys and values in bf16."""


def told_at(traced, kind, instance_id="router"):
    """When an instance took messages of this kind."""
    return [e.args[-1] for e in traced.journal if e.instance_id == instance_id and isinstance(e.args[0], kind)]


@pytest.mark.parametrize("failures", [1, 2, 4])
@pytest.mark.parametrize("killed_ms", [0, 1, 4_999, 5_000, 5_001, 12_000, 15_000])
def test_a_dead_instance_is_found_after_so_many_heartbeats(killed_ms, failures):
    """It misses the next heartbeat first, or the one that is due when it dies: interval x failures at most, and one
    interval less at least.
    """
    scenario = small(
        request(0, 8, 2, arrival_ns=60 * SECOND),
        prefill__instances=2,
        faults=[{"at": f"{killed_ms} ms", "kill": "prefill-0"}],
        health={"heartbeat_interval": "5 s", "heartbeat_failures": failures},
    )
    (found_ns,) = told_at(run(scenario), PeerDown)
    message_ns = MILLISECOND
    first_missed = max(1, ceil(killed_ms / 5_000))
    assert found_ns == (first_missed + failures - 1) * 5 * SECOND + message_ns
    assert (failures - 1) * 5 * SECOND <= found_ns - message_ns - killed_ms * MILLISECOND <= failures * 5 * SECOND


def test_a_retry_lands_on_the_other_instance():
    """prefill-0 dies in the forward; decode hears of it at 10 s and fails the request; 50 ms on it goes elsewhere."""
    scenario = small(
        request(0, 60, 5),
        prefill__instances=2,
        faults=[{"at": "30 ms", "kill": "prefill-0"}],
        health={"backoff_jitter": 0},
    )
    traced = run(scenario)
    (record,) = traced.records.requests
    assert (record.outcome, record.num_retries, record.prefill_id) == ("finished", 1, "prefill-1")
    assert record.routed_ns == 10 * SECOND + (1 + 50) * MILLISECOND
    assert told_at(traced, NewRequest, "prefill-1") == [record.routed_ns + MILLISECOND]
    alone = run(small(request(0, 60, 5), prefill__instances=2)).records.requests[0]
    assert record.end_ns - record.routed_ns == alone.end_ns
    assert traced.result.summary()["pdsim"]["retries"] == 1


def test_decode_dies_after_the_first_token_and_the_request_fails():
    scenario = small(request(0, 8, 100), decode__instances=2, faults=[{"at": "500 ms", "kill": "decode-0"}])
    (record,) = run(scenario).records.requests
    assert (record.outcome, record.reason, record.num_retries) == ("failed", "decode-0 was lost", 0)
    assert record.end_ns == 10 * SECOND + MILLISECOND


def test_decode_dies_before_the_first_token_and_the_request_is_tried_again():
    scenario = small(request(0, 60, 5), decode__instances=2, faults=[{"at": "40 ms", "kill": "decode-0"}])
    (record,) = run(scenario).records.requests
    assert (record.outcome, record.decode_id, record.num_retries) == ("finished", "decode-1", 1)


def test_a_killed_decode_instance_has_streamed_the_steps_that_ended():
    """Steps of 10 ms: what ended before the kill is recorded, as it would be step by step."""
    changes = {"faults": [{"at": "517 ms", "kill": "decode-0"}], "health": {"max_retries": 0}}
    traced = run(small(request(0, 8, 100), **changes))
    first_ns = traced.records.requests[0].streamed_ns
    (step,) = [step for step in traced.records.steps if step.kind == "decode"]
    assert step.num_steps == (517 * MILLISECOND - first_ns) // (10 * MILLISECOND)


def test_what_has_arrived_outlives_its_prefill_instance():
    scenario = small(request(0, 8, 50), faults=[{"at": "100 ms", "kill": "prefill-0"}])
    traced = run(scenario)
    alone = run(small(request(0, 8, 50)))
    assert traced.records.requests[0].end_ns == alone.records.requests[0].end_ns


def test_a_restart_between_two_heartbeats_costs_what_was_under_way():
    scenario = small(
        request(0, 60, 5),
        faults=[{"at": "30 ms", "kill": "prefill-0", "restart_after": "1 s"}],
        health={"backoff_jitter": 0},
    )
    traced = run(scenario)
    (record,) = traced.records.requests
    assert [entry.args for entry in traced.journal if entry.call == KILLED] == [(30 * MILLISECOND,)] * 2
    assert (record.outcome, record.num_retries) == ("finished", 1)
    assert record.routed_ns == 5 * SECOND + (1 + 50) * MILLISECOND


def test_a_cache_does_not_survive_a_restart():
    def cached_tokens(**changes):
        scenario = small(request(0, 64, 2), request(1, 64, 2, arrival_ns=20 * SECOND), **changes)
        first, second = scenario.workload.specs
        scenario.workload.__init__((first, second._replace(prompt=first.prompt)))
        return run(scenario).records.requests[1].num_prefill_cached_tokens

    assert cached_tokens() == 60
    assert cached_tokens(faults=[{"at": "2 s", "kill": "prefill-0", "restart_after": "1 s"}]) == 0


def transfer_ns(bandwidth="100 MB/s", **changes):
    scenario = small(
        request(0, 100, 2),
        page_size=1,
        prefill__chunked_prefill_tokens=0,
        network__bandwidth=bandwidth,
        network__transfer_latency="0 ns",
        **changes,
    )
    (row,) = run(scenario).records.transfers
    return row.end_ns - row.start_ns


@pytest.mark.parametrize("link", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("factor", [0.5, 0.1, 0.01])
def test_a_slow_link_takes_so_much_longer(link, factor):
    slow = transfer_ns(faults=[{"at": 0, "link": link, "bandwidth_factor": factor}])
    assert slow == pytest.approx(transfer_ns() / factor, rel=1e-9)


def test_slowness_on_one_link_multiplies():
    twice = [{"at": 0, "link": "prefill-0", "bandwidth_factor": 0.5}] * 2
    assert transfer_ns(faults=twice) == pytest.approx(4 * transfer_ns(), rel=1e-9)


def test_a_link_is_slow_as_long_as_it_lasts():
    """The transfer begins at 102 ms and takes 114.688 ms; 40 ms of it at a tenth of the rate, so 36 ms longer."""
    fault = {"at": "120 ms", "link": "prefill-0", "bandwidth_factor": 0.1, "lasts": "40 ms"}
    assert transfer_ns(faults=[fault]) == pytest.approx(transfer_ns() + 36 * MILLISECOND, abs=10)


SLOW = st.tuples(st.integers(0, 400), st.sampled_from([0.5, 0.25, 0.1]), st.integers(1, 400))


@given(st.lists(SLOW, max_size=3))
@example([(110, 0.5, 20), (120, 0.5, 60)])
@examples(15)
def test_each_slowness_lasts_as_long_as_its_own_fault(slow):
    """Begin in ms, factor and length in ms. The transfer begins at 102 ms; at full rate it takes 114.688 ms."""
    faults = [
        {"at": f"{at_ms} ms", "link": "prefill-0", "bandwidth_factor": factor, "lasts": f"{lasts_ms} ms"}
        for at_ms, factor, lasts_ms in slow
    ]
    now_ms, left_ms = 102, transfer_ns() / MILLISECOND
    while left_ms > (rate := prod(f for at_ms, f, lasts_ms in slow if at_ms <= now_ms < at_ms + lasts_ms)):
        now_ms, left_ms = now_ms + 1, left_ms - rate
    assert transfer_ns(faults=faults) / MILLISECOND == pytest.approx(now_ms + left_ms / rate - 102, rel=1e-6)


def test_a_dropped_link_stalls_for_as_long_as_it_is_down():
    fault = {"at": "120 ms", "link": "decode-0", "bandwidth_factor": 0, "lasts": "3 s"}
    assert transfer_ns(faults=[fault]) == pytest.approx(transfer_ns() + 3 * SECOND, abs=10)


def test_a_transfer_that_takes_too_long_fails_and_is_tried_again():
    fault = {"at": "120 ms", "link": "decode-0", "bandwidth_factor": 0, "lasts": "35 s"}
    scenario = small(
        request(0, 100, 2),
        page_size=1,
        prefill__chunked_prefill_tokens=0,
        network__bandwidth="100 MB/s",
        network__transfer_latency="0 ns",
        faults=[fault],
        health={"transfer_timeout": "30 s", "backoff_jitter": 0},
    )
    (record,) = run(scenario).records.requests
    begun_ns = 102 * MILLISECOND  # 100 tokens of 1 ms each, behind two messages
    assert (record.outcome, record.num_retries) == ("finished", 1)
    assert record.routed_ns == begun_ns + 30 * SECOND + (1 + 50) * MILLISECOND


def test_nothing_comes_back_from_a_link_that_stays_down():
    fault = {"at": 0, "link": "prefill-0", "bandwidth_factor": 0}
    (record,) = run(small(request(0, 8, 2), faults=[fault])).records.requests
    assert (record.outcome, record.num_retries) == ("failed", 5)
    assert record.reason == "no transfer from prefill-0 to decode-0 within transfer_timeout 30 s"


def test_a_transfer_into_a_dead_instance_holds_its_queue_until_it_times_out():
    """One worker: the transfer into decode-1 waits behind the one that gets nowhere."""
    scenario = small(
        request(0, 60, 2),
        request(1, 60, 2),
        decode__instances=2,
        network__transport="nixl-cma",
        network__bandwidth="10 MB/s",
        faults=[{"at": "100 ms", "kill": "decode-0"}],
        health={"transfer_timeout": "20 s", "max_retries": 0},
    )
    first, second = run(scenario).records.requests
    assert (first.outcome, second.outcome) == ("failed", "finished")


def test_an_aborted_client_waits_no_longer():
    scenario = small(request(0, 60, 50), request(1, 8, 2), faults=[{"at": "300 ms", "abort": 0}])
    first, second = run(scenario).records.requests
    assert (first.outcome, first.reason) == ("failed", "aborted by the client")
    assert first.end_ns == 300 * MILLISECOND
    assert second.outcome == "finished"


def test_an_abort_before_or_after_the_request_does_nothing():
    faults = [{"at": "1 ms", "abort": 0}, {"at": "50 s", "abort": 0}]
    (record,) = run(small(request(0, 8, 2, arrival_ns=SECOND), faults=faults)).records.requests
    assert record.outcome == "finished"


def test_a_fraction_of_the_clients_gives_up():
    specs = [request(i, 8, 100, arrival_ns=i * SECOND) for i in range(400)]
    records = run(small(*specs, faults=[{"abort_fraction": 0.25, "within": "500 ms"}])).records.requests
    aborted = [r for r in records if r.outcome == "failed"]
    assert len(aborted) == pytest.approx(100, abs=26)  # three standard deviations
    assert all(r.end_ns - r.arrival_ns <= 500 * MILLISECOND for r in aborted)


def test_decode_that_grants_nothing_fails_the_request_in_time():
    """Two prompts for a pool that holds one: the second waits for pages, 300 s from its arrival at prefill."""
    scenario = small(
        request(0, 60, 4),
        request(1, 60, 4),
        decode__pool_tokens=80,
        cost={"use": "affine", "prefill_per_token": "1 ms", "decode_base": "200 s"},
        health={"backoff_jitter": 0, "max_retries": 0},
    )
    first, second = run(scenario).records.requests
    assert first.outcome == "finished"
    reason = "decode-0 granted no pages within bootstrap_timeout 300 s: its KV pool was full"
    assert (second.outcome, second.reason) == ("failed", reason)
    at_prefill_ns, message_ns = MILLISECOND, MILLISECOND
    assert second.end_ns >= at_prefill_ns + 300 * SECOND + message_ns


def test_an_aggregated_instance_dies_and_the_other_serves_its_request():
    """It dies in the forward; the router hears of it at 10 s, and 50 ms on the prompt is computed from its start."""
    load = request(0, 60, 5)
    scenario = small_aggregated(
        load,
        aggregated__instances=2,
        faults=[{"at": "30 ms", "kill": "aggregated-0"}],
        health={"backoff_jitter": 0},
    )
    (record,) = run(scenario, checked=True).records.requests
    assert (record.outcome, record.num_retries, record.prefill_id) == ("finished", 1, "aggregated-1")
    assert record.routed_ns == 10 * SECOND + (1 + 50) * MILLISECOND
    assert record.end_ns - record.routed_ns == run(small_aggregated(load)).records.requests[0].end_ns


def test_an_aggregated_instance_dies_after_the_first_token_and_the_request_fails():
    scenario = small_aggregated(request(0, 8, 100), faults=[{"at": "500 ms", "kill": "aggregated-0"}])
    (record,) = run(scenario).records.requests
    assert (record.outcome, record.reason, record.num_retries) == ("failed", "aggregated-0 was lost", 0)
    assert record.end_ns == 10 * SECOND + MILLISECOND


def test_a_restarted_aggregated_instance_serves_with_an_empty_cache():
    first = request(0, 60, 2)
    load = first, request(1, first.prompt, 2, arrival_ns=60 * SECOND)
    restart = {"faults": [{"at": "1 s", "kill": "aggregated-0", "restart_after": "1 s"}]}
    runs = [run(small_aggregated(*load, **changes), checked=True) for changes in ({}, restart)]
    assert [traced.records.requests[1].num_prefill_cached_tokens for traced in runs] == [56, 0]


def test_a_killed_instance_serves_again_when_it_has_loaded():
    """Restart after 1 s and loading of 3 s are a restart after 4 s, for all requests."""
    load = [request(i, 8, 4, arrival_ns=i * SECOND) for i in range(30)]

    def runs(restart_s, loading_s):
        kill = {"at": "1500 ms", "kill": "aggregated-0", "restart_after": f"{restart_s} s"}
        steps = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
        cost = {"prefill": steps, "decode": steps, "host": {"loading": f"{loading_s} s"}}
        return run(small_aggregated(*load, faults=[kill], cost=cost)).records.requests

    assert runs(1, 3) == runs(4, 0) != runs(1, 0)


def test_a_prompt_that_an_aggregated_instance_does_not_begin_fails_in_time():
    """The first takes all slots until 108 + 990 ms; the second is given up a second after it came."""
    scenario = small_aggregated(
        request(0, 108, 200),
        request(1, 8, 2),
        aggregated__max_running_requests=1,
        health={"waiting_timeout": "1 s", "max_retries": 0},
    )
    first, second = run(scenario, checked=True).records.requests
    assert first.outcome == "finished"
    reason = "aggregated-0 did not begin the request within waiting_timeout 1 s: max_running_requests was reached"
    assert (second.outcome, second.reason) == ("failed", reason)
    at_instance_ns = MILLISECOND
    assert 0 <= second.end_ns - at_instance_ns - SECOND < 11 * MILLISECOND  # the step under way ends first


def test_a_client_gives_up_what_an_aggregated_instance_decodes():
    scenario = small_aggregated(request(0, 8, 200), request(1, 8, 4), faults=[{"at": "500 ms", "abort": 0}])
    first, second = run(scenario, checked=True).records.requests
    assert (first.outcome, first.end_ns, first.reason) == ("failed", 500 * MILLISECOND, "aborted by the client")
    assert second.outcome == "finished"
