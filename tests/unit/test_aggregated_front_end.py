"""What lies between client and an aggregated instance."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

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


def test_the_loop_takes_its_time_around_a_forward_and_decode_steps_do_not():
    """Of 100 tokens in chunks of 64 there are two forwards; of three outputs, two decode steps of 10 + 1 ms."""
    steps = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    host = {"decode_prefill": "5 ms", "decode_step": "1 ms"}
    (r,) = run(
        small_aggregated(request(0, 100, 3), cost={"prefill": steps, "decode": steps, "host": host})
    ).records.requests
    assert r.streamed_ns == (1 + 100 + 2 * 5) * MILLISECOND
    assert r.end_ns == r.first_token_ns + 2 * 11 * MILLISECOND


def test_a_forward_ends_no_earlier_than_its_launch():
    """Of 164 tokens in chunks of 64 the forwards take 64, 64 and 36 ms. With overlap the launches follow each other."""
    steps = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    ends_ms = {True: {0: 164, 50: 164, 60: 180, 100: 300}, False: {0: 164, 50: 178, 60: 188, 100: 300}}
    for overlap, ends in ends_ms.items():
        for launch_ms, end_ms in ends.items():
            cost = {"prefill": steps, "decode": steps, "host": {"launch": f"{launch_ms} ms"}}
            scenario = small_aggregated(request(0, 164, 3), cost=cost, aggregated__overlap=overlap)
            assert run(scenario).records.requests[0].streamed_ns == (1 + end_ms) * MILLISECOND


def test_behind_a_decode_step_the_launch_begins_with_the_forward():
    """The second prompt of 10 tokens waits for a step of 30 ms, and its forward takes its launch of 25 ms."""
    steps = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "30 ms"}
    cost = {"prefill": steps, "decode": steps, "host": {"launch": "25 ms"}}
    second = request(1, 10, 3, arrival_ns=30 * MILLISECOND)
    rows = run(small_aggregated(request(0, 10, 9), second, cost=cost)).records.requests
    assert [row.streamed_ns // MILLISECOND for row in rows] == [1 + 25, 1 + 25 + 30 + 25]


def test_an_answer_of_one_token_ends_with_it():
    (r,) = run(small_aggregated(request(0, 10, 1), front_end={"latency_out": "3 ms"})).records.requests
    assert r.outcome == "finished"
    assert r.end_ns == r.first_token_ns == (1 + 10 + 3) * MILLISECOND


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 60), st.integers(1, 3))
def test_no_answer_ends_before_its_first_token(outputs: list[int], stall_ms: int, concurrency: int):
    """Even where the first token stalls on a connection that was used before, and the rest is there meanwhile."""
    requests = [request(i, 8, output) for i, output in enumerate(outputs)]
    front_end = {"latency_out": "1 ms", "stall": f"{stall_ms} ms"}
    client = {"use": "closed_loop", "concurrency": concurrency}
    rows = run(small_aggregated(*requests, client=client, front_end=front_end)).records.requests
    assert all(row.first_token_ns <= row.end_ns for row in rows)


HELD = {"service": "4 ms", "ending": "2 ms", "holds_client": True}
CLOSED = {"use": "closed_loop", "concurrency": 2}


def test_a_client_in_the_thread_that_serves_sends_when_it_is_free():
    """Both prompts are computed by one forward that begins behind the second, and both answers end with one step."""
    requests = [request(i, 10, 5) for i in range(4)]
    rows = run(small_aggregated(*requests, client=CLOSED, front_end=HELD)).records.requests
    assert [row.arrival_ns for row in rows[:2]] == [0, 4 * MILLISECOND]
    assert [row.routed_ns for row in rows[:2]] == [4 * MILLISECOND, 8 * MILLISECOND]
    assert rows[2].arrival_ns == rows[0].end_ns
    assert rows[3].arrival_ns == rows[1].end_ns
    assert rows[2].routed_ns - rows[2].arrival_ns == 6 * MILLISECOND


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 6))
def test_one_thread_serves_one_after_another(outputs: list[int], concurrency: int):
    """Requests are routed no closer than their service, and each arrives as the thread turns to it."""
    requests = [request(i, 8, output) for i, output in enumerate(outputs)]
    client = CLOSED | {"concurrency": concurrency}
    rows = run(small_aggregated(*requests, client=client, front_end=HELD | {"ending": "0 ms"})).records.requests
    assert all(row.outcome == "finished" for row in rows)
    routed = sorted(row.routed_ns for row in rows)
    assert all(later - earlier >= 4 * MILLISECOND for earlier, later in pairwise(routed))
    assert all(row.routed_ns - row.arrival_ns == 4 * MILLISECOND for row in rows)
