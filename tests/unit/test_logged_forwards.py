"""The log of a server's forwards shows how much a busy GPU slows down, and the tiles of its kernels."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.calibration.fit.clock import utilisations
from pdsim.calibration.fit.profile import calibrate, profile_of
from pdsim.calibration.fit.rows import Rows
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.affine import AffineModel, GpuClock
from pdsim.cost.model import tiled
from pdsim.cost.settings import Affine
from tests.made_rows import affine_decode_us, affine_prefill_us, decode_rows, measured, prefill_rows
from tests.support import examples

MEMORY_NS = 1e8
TINY = 1e-9
times = st.lists(st.tuples(st.integers(0, 10**9), st.integers(10**5, 10**9)), min_size=1, max_size=20)
"""Pause in ns before each forward, and the forward's time in ns."""


@given(times)
@examples(50)
def test_a_log_has_the_utilisation_that_the_clock_of_the_simulator_sees(forwards):
    """A clock that hardly slows down shows the mean utilisation in what it adds."""
    clock, now_ns, ends_s, expected = GpuClock(TINY, MEMORY_NS), 10**9, [], []
    for pause_ns, time_ns in forwards:
        now_ns += pause_ns
        expected.append((clock.stretch(now_ns, time_ns) / time_ns - 1) / TINY)
        now_ns += time_ns
        ends_s.append(now_ns / 1e9)
    rows = Rows("prefill", "", {"end_s": np.array(ends_s), "time_ns": np.array([float(ns) for _, ns in forwards])})
    assert utilisations(rows, MEMORY_NS) == pytest.approx(expected, abs=1e-5)


def log(slowdown, least_pause_ms, most_pause_ms, tile_tokens=1):
    """300 forwards of one to three equal prompts, as the simulator times them. A third begins behind a pause."""
    random, now_ns = Random(0), 0
    times = {"prefill_base_ns": 1e6, "prefill_per_token_ns": 19_450, "prefill_per_pair_ns": 0.85}
    times |= {"prefill_per_prompt_ns": 5e5, "prefill_least_ns": 11.8e6}
    model = AffineModel(Affine(**times, prefill_slowdown=slowdown, prefill_tile_tokens=tile_tokens))
    for _ in range(300):
        tokens, prompts = random.randint(200, 4000), random.randint(1, 3)
        now_ns += round(1e6 * random.uniform(least_pause_ms, most_pause_ms)) if random.random() < 1 / 3 else 0
        duration_ns = model.prefill_ns(PrefillStep(0, (PrefillChunk(0, 0, tokens, True),) * prompts), now_ns)
        now_ns += duration_ns
        sizes = {"new_tokens": tokens * prompts, "context_tokens": 0, "prompts": prompts}
        yield {"kind": "prefill", **sizes, "time_us": duration_ns / 1e3, "end_s": now_ns / 1e9}


@pytest.mark.parametrize("slowdown", [0.0, 0.15])
def test_a_slowdown_and_the_times_of_a_rested_gpu_are_found_in_a_log(tmp_path, slowdown):
    made = calibrate(measured(tmp_path, log(slowdown, 10, 500), decode_rows(affine_decode_us)))
    assert made.clock.slowdown == pytest.approx(slowdown, abs=0.01)
    fitted = made.fits["prefill"]
    found = {"per_token": 19_450, "per_pair": 0.85, "least": 11.8e6}
    assert {name: fitted.values[name] for name in found} == pytest.approx(found, rel=0.03)
    assert fitted.error < 0.01


def test_forwards_that_are_all_equally_busy_show_no_slowdown(tmp_path):
    busy = [*log(0.15, 0, 0)][30:]
    assert calibrate(measured(tmp_path, busy, decode_rows(affine_decode_us))).clock.slowdown == 0


def test_one_missing_end_leaves_no_log(tmp_path):
    rows = [*log(0.15, 10, 500)]
    rows[3]["end_s"] = ""
    assert calibrate(measured(tmp_path, rows, decode_rows(affine_decode_us))).clock is None


def test_the_shortest_forward_of_several_prompts_is_not_guessed_from_single_prompts(tmp_path):
    """Only single prompts are as short as a launch here, so nothing shows that more prompts take a longer one."""
    sizes = [(p, n) for p in (1, 2, 4) for n in (128, 512, 2048, 4096) if p == 1 or n > 512]
    rows = [
        {
            "kind": "prefill",
            "prompts": p,
            "new_tokens": p * n,
            "context_tokens": 0,
            "time_us": affine_prefill_us(p * n, 0),
        }
        for p, n in sizes
    ]
    values = calibrate(measured(tmp_path, rows, decode_rows(affine_decode_us))).fits["prefill"].values
    assert values["least"] == pytest.approx(11.8e6, rel=0.02)
    assert "least_per_prompt" not in values


@given(st.integers(1, 10_000), st.sampled_from([1, 64, 256]))
def test_tiles_are_whole_and_never_fewer_than_the_tokens(num_tokens, tile_tokens):
    computed = tiled(num_tokens, tile_tokens)
    assert num_tokens <= computed < num_tokens + tile_tokens
    assert computed % tile_tokens == 0 or computed == num_tokens <= 4 * tile_tokens
    assert tiled(computed, tile_tokens) == computed


@pytest.mark.parametrize("tile_tokens", [1, 128, 256])
def test_tiles_show_in_a_log_of_uneven_forwards(tmp_path, tile_tokens):
    made = calibrate(measured(tmp_path, log(0.15, 10, 500, tile_tokens), decode_rows(affine_decode_us)))
    assert made.fits["prefill"].form.tile_tokens == tile_tokens
    assert made.fits["prefill"].values["per_token"] == pytest.approx(19_450, rel=0.03)
    assert profile_of(made, "", "")["cost"]["prefill"].get("prefill_tile_tokens", 1) == tile_tokens


@pytest.mark.parametrize(
    ("dtype", "model", "tile_tokens"),
    [("fp8", "qwen3-8b", 256), ("bfloat16", "qwen3-8b", 1), ("fp8", "deepseek-v3", 1)],
)
def test_round_forwards_have_the_tiles_of_the_catalog(tmp_path, dtype, model, tile_tokens):
    rows = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    made = calibrate(measured(tmp_path, *rows, dtype=dtype, model=model))
    assert made.fits["prefill"].form.tile_tokens == tile_tokens
    assert not any("Kernels are fastest" in note for note in made.notes)


def launched_log(launch_ms, seed=0):
    """300 prompts: a forward that finds an idle GPU ends with its launch or later, and one that is launched in time
    takes as long as its kernels. Half begin behind a pause.
    """
    random, now_ns = Random(seed), 0
    for _ in range(300):
        tokens, finds_idle = random.randint(100, 3000), random.random() < 1 / 2
        time_ns = round(2e6 + 19_450 * tokens)
        if finds_idle:
            now_ns += round(1e6 * random.uniform(2, 100))
            time_ns = max(time_ns, round(1e6 * launch_ms))
        now_ns += time_ns
        sizes = {"new_tokens": tokens, "context_tokens": 0, "prompts": 1}
        yield {"kind": "prefill", **sizes, "time_us": time_ns / 1e3, "end_s": now_ns / 1e9}


@pytest.mark.parametrize("launch_ms", [15, 30])
def test_a_log_shows_the_launch_by_forwards_that_found_an_idle_gpu(tmp_path, launch_ms):
    start = [{"kind": "host", "what": "start", "time_us": 2500.0}]
    rows = decode_rows(affine_decode_us)
    made = calibrate(measured(tmp_path, launched_log(launch_ms), rows, start))
    cost = profile_of(made, "made", "")["cost"]
    assert made.fits["prefill"].values["per_token"] == pytest.approx(19_450, rel=0.01)
    assert milliseconds(cost["host"]["launch"]) == pytest.approx(launch_ms + 2.5, rel=0.01)
    assert milliseconds(cost["prefill"].get("prefill_least", "0 ms")) < 5
    assert "prefill_launch" not in cost["prefill"]
    assert not made.notes


def test_a_launch_without_the_loops_other_work_is_noted(tmp_path):
    made = calibrate(measured(tmp_path, launched_log(30), decode_rows(affine_decode_us)))
    assert [note for note in made.notes if note.startswith("a launch holds the loop for 30.0 ms")]


def test_a_log_of_forwards_that_their_kernels_bound_shows_no_launch(tmp_path):
    made = calibrate(measured(tmp_path, launched_log(0), decode_rows(affine_decode_us)))
    assert "host" not in profile_of(made, "made", "")["cost"]


def milliseconds(time):
    value, unit = time.split()
    return float(value) * {"ms": 1, "us": 1e-3, "ns": 1e-6}[unit]
