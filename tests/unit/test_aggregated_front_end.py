"""What lies between client and an aggregated instance."""

from tests.support import MILLISECOND, request, run, small_aggregated


def test_the_answer_is_never_held_back_for_a_prefill_instance():
    """Arrival, 1 ms of service, 2 ms in, 1 ms to the instance, 10 tokens of 1 ms; 3 ms out."""
    scenario = small_aggregated(
        request(0, 10, 3),
        front_end={"service": "1 ms", "latency_in": "2 ms", "latency_out": "3 ms", "waits_for_prefill": True},
    )
    (r,) = run(scenario).records.requests
    assert r.routed_ns == 3 * MILLISECOND
    assert r.streamed_ns == (3 + 1 + 10) * MILLISECOND
    assert r.first_token_ns == r.streamed_ns + 3 * MILLISECOND
    assert r.end_ns == r.first_token_ns + 2 * 10 * MILLISECOND


def test_an_answer_of_one_token_ends_with_it():
    (r,) = run(small_aggregated(request(0, 10, 1), front_end={"latency_out": "3 ms"})).records.requests
    assert r.outcome == "finished"
    assert r.end_ns == r.first_token_ns == (1 + 10 + 3) * MILLISECOND
