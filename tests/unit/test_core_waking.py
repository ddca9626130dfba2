"""Cores that have waited: in a simulation, and told by rows of forwards behind pauses."""

import numpy as np
import pytest

from pdsim.calibration.profile import calibrate, profile_of
from pdsim.calibration.waking import CoreWaking
from tests.made_rows import affine_decode_us, affine_prefill_us, decode_rows, measured, prefill_rows
from tests.support import MILLISECOND, request, run, small, small_aggregated

LINES = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
COST = {"prefill": LINES, "decode": LINES, "waking": {"most": "5 ms", "memory": "10 ms"}}


def waking_rows(most_us, memory_us, noise=0.01):
    random = np.random.default_rng(0)
    shapes = ((1, 64, 128), (1, 256, 0), (4, 256, 0))
    return [
        {"kind": "waking", "prompts": prompts, "new_tokens": n, "context_tokens": c, "idle_us": idle_us}
        | {"time_us": (20_000 + 50 * n + most_us * -np.expm1(-idle_us / memory_us)) * random.lognormal(0, noise)}
        for prompts, n, c in shapes
        for idle_us in (0, 1000, 3000, 6000, 12_000, 25_000, 50_000, 100_000)
        for _ in range(3)
    ]


def forward_ms(scenario):
    return [step.duration_ns / MILLISECOND for step in run(scenario).records.steps if step.kind == "prefill"]


def test_a_prompt_that_an_instance_waited_for_takes_longer_and_one_that_waited_for_it_does_not():
    """Chunks of 64 tokens: two for each prompt; the third prompt comes while the second is computed."""
    prompts = [request(i, 128, 2, arrival_ns=at_ms * MILLISECOND) for i, at_ms in enumerate((0, 2000, 2050))]
    assert forward_ms(small(*prompts, cost=COST)) == [69, 64, 69, 64, 64, 64]
    assert forward_ms(small(*prompts)) == 6 * [64]


def test_an_aggregated_instance_decodes_in_between_and_is_awake():
    prompts = [request(i, 64, 2, arrival_ns=2000 * i * MILLISECOND) for i in range(3)]
    assert forward_ms(small_aggregated(*prompts, cost=COST)) == 3 * [64]


@pytest.mark.parametrize(("most_us", "memory_us"), [(2500, 20_000), (6000, 4000), (0, 10_000)])
def test_forwards_behind_pauses_tell_how_much_longer_they_take(most_us, memory_us, tmp_path):
    found = CoreWaking.of(measured(tmp_path, waking_rows(most_us, memory_us)))
    assert found.most_ns == pytest.approx(1e3 * most_us, rel=0.1, abs=0.4e6)  # one forward scatters by 0.3 ms
    if most_us:
        assert found.memory_ns == pytest.approx(1e3 * memory_us, rel=0.3)


def test_it_is_part_of_a_profile_and_of_the_ranks_that_prefill(tmp_path):
    phases = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    of_two = [[{**row, "tp": 2} for row in rows] for rows in (phases[0], waking_rows(5000, 20_000, noise=0))]
    rows = measured(tmp_path, *phases, waking_rows(2500, 20_000, noise=0), *of_two)
    for tp, told in ((1, {"most": "2.5 ms", "memory": "20 ms"}), (2, {"most": "5 ms", "memory": "20 ms"})):
        assert profile_of(calibrate(rows.of_ranks(tp, 1)), "x", "y")["cost"]["waking"] == told
    assert "waking" not in profile_of(calibrate(measured(tmp_path, *phases)), "x", "y")["cost"]
