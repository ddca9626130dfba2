"""What rows of spells say of a core's pace, and what the other rows are then taken for."""

import numpy as np
import pytest

from pdsim.calibration.pace import CorePace
from pdsim.calibration.profile import calibrate, profile_of
from tests.made_rows import affine_decode_us, affine_prefill_us, decode_rows, measured, prefill_rows


def pace_rows(*spells):
    """Units of 500 us at full speed, 800 us in slow spells."""
    unit_us = {"full": 500.0, "slow": 800.0}
    return [{"kind": "pace", "what": what, "time_us": unit_us[what], "repeats": units} for what, units in spells]


def test_spells_of_a_core_tell_its_pace(tmp_path):
    spells = pace_rows(("full", 1800), ("slow", 100), ("full", 1000), ("slow", 150))
    phases = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    slow_ms = 0.8 * 250
    as_long_ms = (80**2 + 120**2) / slow_ms / 2
    told = {"slowdown": 0.6, "share": round(slow_ms / (slow_ms + 0.5 * 2800), 4), "spell": f"{as_long_ms:.0f} ms"}
    assert profile_of(calibrate(measured(tmp_path, *phases, spells)), "x", "y")["cost"]["pace"] == told | {
        "slows": "steps"
    }
    for steady in ([], pace_rows(("full", 1800)), pace_rows(("slow", 1800))):
        made = calibrate(measured(tmp_path, *phases, *([steady] if steady else [])))
        assert "pace" not in profile_of(made, "x", "y")["cost"]


def test_a_spell_is_as_long_as_those_in_which_slow_steps_find_themselves(tmp_path):
    """Of exponentially distributed ones the mean comes back, however many short ones there are."""
    spells = np.random.default_rng(0).exponential(200, 20_000).astype(int) + 1
    rows = measured(tmp_path, pace_rows(("full", 1800), *(("slow", int(units)) for units in spells)))
    assert CorePace.of(rows).spell_ns == pytest.approx(200 * 800e3, rel=0.03)


def test_on_a_gpu_the_pace_is_of_launches_and_the_rest_of_a_loop_has_it(tmp_path):
    """Of two ranks, each slow a quarter of time: the rest is longer by 0.6 in 0.4375 of it, and the step never."""
    graphs = [{**row, "tp": 2, "graph": row["batch"]} for row in decode_rows(affine_decode_us, 0)]
    loops = [
        {"kind": "loop", "batch": b, "context_tokens": 900 * b, "tp": 2, "graph": b}
        | {"time_us": affine_decode_us(b, 900 * b) + (1 + 0.6 * 0.4375) * (300 + 4 * b)}
        for b in (1, 4, 16, 64)
    ]
    rows = measured(tmp_path, prefill_rows(affine_prefill_us), graphs, loops, pace_rows(("full", 4800), ("slow", 1000)))
    cost = profile_of(calibrate(rows.of_ranks(1, 2)), "x", "y")["cost"]
    in_us = {name: float(time.removesuffix(" us")) for name, time in cost["rest"].items()}
    assert cost["pace"]["slows"] == "launches"
    assert in_us == pytest.approx({"step": 300, "request": 4}, rel=0.02)


@pytest.mark.parametrize(("tp", "mean_stretch"), [(1, 1 / (0.75 + 0.25 / 1.6)), (2, 1 / (0.5625 + 0.4375 / 1.6))])
def test_where_the_pace_is_told_rounds_are_of_full_speed_and_periods_are_means_over_spells(tp, mean_stretch, tmp_path):
    """Of two ranks, either slows both: of each core a quarter of time is slow."""
    at_full = [{**row, "tp": tp, "repeats": 20} for row in decode_rows(affine_decode_us, 0)]
    slowed = [{**row, "time_us": 1.6 * row["time_us"]} for row in at_full]
    loops = [
        {"kind": "loop", "batch": b, "context_tokens": 900 * b, "tp": tp}
        | {"time_us": mean_stretch * (affine_decode_us(b, 900 * b) + 300 + 4 * b)}
        for b in (1, 4, 16, 64)
    ]
    spells = pace_rows(("full", 4800), ("slow", 1000))
    rows = measured(tmp_path, prefill_rows(affine_prefill_us), at_full + slowed + at_full, loops, spells)
    cost = profile_of(calibrate(rows.of_ranks(1, tp)), "x", "y")["cost"]
    assert float(cost["decode"]["decode_base"].removesuffix(" ms")) == pytest.approx(5.2, rel=0.001)
    in_us = {name: float(time.removesuffix(" us")) for name, time in cost["rest"].items()}
    assert in_us == pytest.approx({"step": 300, "request": 4}, rel=0.02)
    assert cost["pace"]["share"] == 0.25
