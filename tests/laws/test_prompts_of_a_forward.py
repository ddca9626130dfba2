"""Laws of prefill_max_requests: no forward has more prompts, and one by one each pays for a forward of its own."""

import pytest

from pdsim.core.messages import PrefillStep
from pdsim.scenario.yaml_file import ConfigError
from tests.support import request, run, small, small_aggregated

MS = 1_000_000


def sizes_of_forwards(traced):
    """Numbers of prompts."""
    steps = [entry.args[0] for entry in traced.journal if entry.call == "on_step_done"]
    return [len(step.chunks) for step in steps if isinstance(step, PrefillStep)]


@pytest.mark.parametrize(("made", "role"), [(small, "prefill"), (small_aggregated, "aggregated")])
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_forward_has_more_prompts(made, role, limit):
    specs = [request(i, 10 + i % 7, 1) for i in range(23)]
    changes = {f"{role}__prefill_max_requests": limit, f"{role}__chunked_prefill_tokens": 4096}
    sizes = sizes_of_forwards(run(made(*specs, **changes)))
    assert max(sizes) == limit
    assert sum(sizes) == 23


def test_a_prompt_that_ends_in_a_forward_counts():
    """64 of 70 tokens, then the last 6 and as many other prompts as are allowed."""
    specs = [request(0, 70, 1), *(request(i, 5, 1) for i in range(1, 4))]
    assert sizes_of_forwards(run(small(*specs, prefill__prefill_max_requests=2))) == [1, 2, 2]


def test_prompts_one_by_one_pay_the_base_of_a_forward_each():
    """10 prompts of 40 tokens: 1 ms a token, and 7 ms a forward."""
    cost = {"use": "affine", "prefill_base": "7 ms", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    specs = [request(i, 40, 1) for i in range(10)]
    ends = {}
    for limit in (1, None):
        changes = {"prefill__prefill_max_requests": limit, "prefill__chunked_prefill_tokens": 4096, "cost": cost}
        records = run(small(*specs, **changes)).records.requests
        ends[limit] = max(one.prefill_end_ns for one in records) - min(one.prefill_start_ns for one in records)
    assert ends[1] == 10 * (7 + 40) * MS
    assert ends[None] < 10 * 40 * MS + 3 * 7 * MS


def test_vllm_has_no_such_limit():
    with pytest.raises(ConfigError, match="prefill_max_requests is a setting of SGLang"):
        small(request(0, 5, 1), engine="vllm", prefill__prefill_max_requests=1)
