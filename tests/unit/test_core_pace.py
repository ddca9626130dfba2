"""What rows of spells say of a core's pace, and what the other rows are then taken for."""

import numpy as np
import pytest

from pdsim.calibration.pace import CorePace
from pdsim.calibration.profile import calibrate, profile_of
from tests.made_rows import affine_decode_us, affine_prefill_us, decode_rows, measured, prefill_rows


def pace_rows(*spells, full=500.0, slow=800.0, **sizes):
    """How often some work was done in each, of so many us."""
    work_us = {"full": full, "slow": slow}
    return [{"kind": "pace", "what": what, "time_us": work_us[what], "repeats": n, **sizes} for what, n in spells]


def test_spells_of_a_core_tell_its_pace(tmp_path):
    spells = pace_rows(("full", 1800), ("slow", 100), ("full", 1000), ("slow", 150))
    phases = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    slow_ms = 0.8 * 250
    as_long_ms = (80**2 + 120**2) / slow_ms / 2
    told = {"slowdown": 0.6, "share": round(slow_ms / (slow_ms + 0.5 * 2800), 4), "spell": f"{as_long_ms:.0f} ms"}
    assert profile_of(calibrate(measured(tmp_path, *phases, spells)), "x", "y")["cost"]["pace"] == told | {
        "slows": "steps",
        "prefill_slowdown": 0.6,
        "decode_slowdown": 0.6,
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


@pytest.mark.parametrize(("graph", "mean_stretch"), [(0, 1 / (0.75 + 0.25 / 1.6)), (64, 1 + 0.25 * 0.6)])
def test_a_rest_that_loops_tell_is_a_mean_over_spells_too(graph, mean_stretch, tmp_path):
    """In slow spells there are fewer steps if cores compute them, and as many of a GPU's."""
    at_full = [{**row, "graph": graph and row["batch"]} for row in decode_rows(affine_decode_us, 0)]
    loops = [
        {"kind": "loop", "batch": b, "context_tokens": 900 * b, "graph": graph and b, "time_us": 9000}
        | {"rest_us": mean_stretch * (300 + 4 * b)}
        for b in (1, 4, 16, 64)
    ]
    spells = pace_rows(("full", 4800), ("slow", 1000))
    rest = profile_of(calibrate(measured(tmp_path, prefill_rows(affine_prefill_us), at_full, loops, spells)), "x", "y")
    in_us = {name: float(time.removesuffix(" us")) for name, time in rest["cost"]["rest"].items()}
    assert in_us == pytest.approx({"step": 300, "request": 4}, rel=0.001)


def test_forwards_beside_loops_tell_how_slow_cores_slow_them_and_rests_belong_to_spells(tmp_path):
    """A core is slow for a fifth of its time whatever it does: 40 ms in each turn of 200, rests with them."""

    def turns(stretch, us, **sizes):
        spells = ("slow", 40_000 / (stretch * us + 200)), ("full", 160_000 / (us + 200))
        return pace_rows(*spells, full=us, slow=stretch * us, rest_us=200, **sizes)

    spells = turns(1.8, 300), turns(1.3, 1800, new_tokens=64), turns(1.5, 4800, batch=8)
    found = CorePace.of(measured(tmp_path, *spells))
    assert (found.slowdown, found.prefill, found.decode) == pytest.approx((0.8, 0.3, 0.5))
    assert (found.share, found.spell_ns) == pytest.approx((0.2, 40e6 / 2))
    phases = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    pace = profile_of(calibrate(measured(tmp_path, *phases, *spells)), "x", "y")["cost"]["pace"]
    assert (pace["prefill_slowdown"], pace["decode_slowdown"]) == (0.3, 0.5)


def test_who_was_slow_for_a_whole_turn_shows_beside_others(tmp_path):
    """It takes itself for one at full speed; of other work it says nothing."""
    unaware = pace_rows(("full", 300), full=800.0)
    rows = pace_rows(("full", 1500), ("slow", 100)), unaware, pace_rows(("full", 100), full=5000.0, batch=8)
    found = CorePace.of(measured(tmp_path, *rows))
    slow_ms, full_ms = 0.8 * 400, 0.5 * 1500 + 5 * 100
    assert found.slowdown == pytest.approx(0.6)
    assert found.share == pytest.approx(slow_ms / (slow_ms + full_ms))


def test_forwards_of_two_sizes_are_not_taken_for_slow_ones(tmp_path):
    sizes = (
        pace_rows(("full", 900), ("slow", 100), batch=size, full=500.0 * size, slow=800.0 * size) for size in (1, 8)
    )
    found = CorePace.of(measured(tmp_path, *sizes))
    assert (found.decode, found.share) == pytest.approx((0.6, 80 / (80 + 450)))
