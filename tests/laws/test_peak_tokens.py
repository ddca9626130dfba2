"""The most output tokens in one second, of many steps in one row."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdsim.metrics.records import RequestRecord, RunRecords, StepRecord
from pdsim.metrics.summary import summarize

SECOND = 10**9


@given(
    st.integers(0, 3 * SECOND),
    st.lists(st.tuples(st.integers(1, 900_000_000), st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_each_token_counts_in_the_second_in_which_its_step_ends(start_ns, runs):
    """A row of so many steps as those steps one by one. A step that ends with a second is of that second."""
    records, tokens, now_ns = RunRecords(requests=[RequestRecord(0, 1, 1, 0)]), Counter(), start_ns
    for step_ns, num_steps, num_requests in runs:
        times = {"start_ns": now_ns, "duration_ns": num_steps * step_ns, "first_ns": step_ns, "growth_ns": 0.0}
        sizes = {"num_steps": num_steps, "num_requests": num_requests, "num_tokens": num_steps * num_requests}
        records.steps.append(StepRecord("decode-0", "decode", num_context_tokens=0, **times, **sizes))
        for _ in range(num_steps):
            now_ns += step_ns
            tokens[(now_ns - 1) // SECOND] += num_requests
    assert summarize(records)["max_output_tokens_per_s"] == max(tokens.values())
