"""When pages are granted, against when a prompt is computed: closed forms of one prompt behind a full decode pool."""

import pytest

from tests.support import MILLISECOND, request, run, small

MESSAGE = MILLISECOND
PROMPT = 40
OUTPUTS = 100


def second(**changes):
    """The first request takes the whole pool until it has ended."""
    scenario = small(
        request(0, PROMPT, OUTPUTS),
        request(1, PROMPT + 20, 2),
        decode__pool_tokens=PROMPT + OUTPUTS,
        decode__admission="reserve_max_output",
        **changes,
    )
    return run(scenario, checked=True).records.requests


def test_early_the_wait_for_decode_comes_before_prefill():
    first, late = second()
    assert late.admitted_ns == first.end_ns
    assert late.prefill_start_ns == late.admitted_ns + MESSAGE


@pytest.mark.parametrize(
    "changes", [{"prefill__optimistic_attempts": 1}, {"decode__allocation": "prefill_complete"}], ids=str
)
def test_computing_first_hides_prefill_behind_the_wait(changes):
    """From when the pool is free, the second saves its forward: the grant begins the transfer at once."""
    first, late = second(**changes)
    first_early, early = second()
    assert late.admitted_ns == first.end_ns
    assert late.prefill_end_ns < late.admitted_ns
    assert late.transfer_start_ns == late.admitted_ns + MESSAGE
    waits_ns = early.first_token_ns - first_early.end_ns, late.first_token_ns - first.end_ns
    assert waits_ns[0] - waits_ns[1] == early.prefill_end_ns - early.prefill_start_ns


def test_a_prompt_that_is_computed_last_holds_no_pages_meanwhile():
    """A long prompt would hold the pool for its forward: granted early it keeps the short one out."""
    load = request(0, 100, 2), request(1, 20, 2)
    changes = {"decode__pool_tokens": 104, "decode__admission": "reserve_max_output", "prefill__instances": 2}
    early = run(small(*load, **changes)).records.requests
    complete = run(small(*load, decode__allocation="prefill_complete", **changes)).records.requests
    assert early[1].prefill_start_ns > early[0].end_ns
    assert complete[1].end_ns < complete[0].prefill_end_ns
    assert complete[0].admitted_ns == complete[0].prefill_end_ns + MESSAGE


def test_granted_when_computed_costs_two_messages_on_an_empty_cluster():
    """There and back again; the message of the early grant is saved."""
    early, complete = (
        run(small(request(0, PROMPT, 5), decode__allocation=how)).records.requests[0]
        for how in ("early", "prefill_complete")
    )
    assert complete.prefill_start_ns == early.prefill_start_ns - MESSAGE
    assert complete.transfer_start_ns == complete.prefill_end_ns + 2 * MESSAGE
    assert complete.first_token_ns == early.first_token_ns + MESSAGE


def test_a_parked_prompt_does_not_lock_up_the_cluster():
    """The short one is computed first and takes the only slot; the long one was first on decode and takes its pool."""
    scenario = small(
        request(0, 60, 2),
        request(1, 8, 2),
        decode__pool_tokens=64,
        decode__admission="reserve_max_output",
        prefill__max_running_requests=1,
        prefill__policy="shortest_prompt_first",
        prefill__optimistic_attempts=1,
    )
    result = run(scenario, checked=True).result
    assert result.stall == []
    assert [r.outcome for r in result.records.requests] == ["finished"] * 2
