"""Fits find what rows were made of, tables what lines miss, and held-out errors are those of other shapes."""

import csv
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from pdsim.calibration.fit import regression
from pdsim.calibration.fit.machine import front_end_ns
from pdsim.calibration.fit.profile import calibrate, profile_of
from pdsim.calibration.fit.regression import fit
from pdsim.calibration.fit.rows import PREFILL_GRAPHS, Measurements, Ranks, Rows, read_rows, write_rows
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.affine import AffineModel, GpuClock
from pdsim.cost.model import FRACTION_BITS
from pdsim.cost.settings import Affine
from pdsim.scenario.building.cluster import build
from pdsim.scenario.yaml_file import ConfigError
from tests.made_rows import (
    BATCHES,
    PROVENANCE,
    affine_decode_us,
    affine_prefill_us,
    decode_rows,
    measured,
    prefill_rows,
)
from tests.support import examples, request, small


def test_the_coefficients_of_the_rows_are_found(tmp_path):
    made = calibrate(measured(tmp_path, prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)))
    prefill, decode = made.fits["prefill"], made.fits["decode"]
    assert (prefill.form.name, decode.form.name) == ("affine", "affine")
    found = {"per_token": 19_450, "per_pair": 0.85, "least": 11.8e6}
    assert {name: prefill.values[name] for name in found} == pytest.approx(found, rel=0.03)
    assert decode.values["per_context_token"] == pytest.approx(37, rel=0.03)
    assert max(prefill.error, decode.error) < 0.02


@pytest.mark.parametrize(("longer_tokens", "is_noted"), [(0, True), (5, False)])
def test_round_lengths_are_noted(tmp_path, longer_tokens, is_noted):
    rows = [{**row, "new_tokens": row["new_tokens"] + longer_tokens} for row in prefill_rows(affine_prefill_us)]
    made = calibrate(measured(tmp_path, rows, decode_rows(affine_decode_us), dtype=""))
    assert any("Kernels are fastest at such lengths" in note for note in made.notes) == is_noted


@pytest.mark.parametrize(("model", "num_rows"), [("qwen3-8b", 24), ("qwen3-30b-a3b", 16)])
def test_short_contexts_do_not_tell_what_a_model_of_experts_reads(tmp_path, model, num_rows):
    """Steps behind 500 tokens a request are 2 ms shorter here. The range of the profile stays that of all rows."""
    rows = decode_rows(lambda b, context: affine_decode_us(b, context) - 2000 * (context < 1000 * b))
    made = calibrate(measured(tmp_path, prefill_rows(affine_prefill_us), rows, model=model), gpu="h200")
    assert len(made.fits["decode"].rows) == num_rows
    assert any("8 of 24 rows of decode are left out" in note for note in made.notes) == (num_rows == 16)
    if num_rows == 16:
        assert made.fits["decode"].values["base"] == pytest.approx(5.2e6, rel=0.02)
    assert profile_of(made, "made", "")["cost"]["measured"]["decode_context_tokens"][0] == 500


def test_short_chunks_behind_a_context_take_as_long_as_their_launch(tmp_path):
    """Two slopes and two floors, for prompts alone and for those behind a context."""

    def time_us(prompts, new, context):
        pair = 0.0017 if context else 0.001
        work = 500 + 22 * new * prompts + prompts * (0.25 * context + pair * new * (context + new / 2))
        return max(work, 8000 + prompts * (1500 + 2500 * (context > 0)))

    rows = [
        {"kind": "prefill", "prompts": p, "new_tokens": p * n, "context_tokens": p * c, "time_us": time_us(p, n, c)}
        for p in (1, 2, 4, 8)
        for n in (16, 64, 256, 1024, 4096)
        for c in (0, 1024, 2048, 8192)
    ]
    fitted = calibrate(measured(tmp_path, rows, decode_rows(affine_decode_us))).fits["prefill"]
    found = {"per_pair": 1, "per_continued_pair": 0.7, "per_context_token": 250}
    found |= {"least": 8e6, "least_per_prompt": 1.5e6, "least_per_continued_prompt": 2.5e6}
    assert {name: fitted.values[name] for name in found} == pytest.approx(found, rel=0.05)
    assert fitted.error < 0.02


def test_a_clock_that_falls_is_found_and_taken_out_of_the_rows(tmp_path):
    """Bursts, and forwards after a pause, of the simulator's own clock."""

    def burst(num_tokens):
        clock, busy_ns = GpuClock(0.12, 80e6), 0
        while busy_ns < 8e8:
            time_ns = clock.stretch(busy_ns, 22_000 * num_tokens)
            sizes = {"new_tokens": num_tokens, "context_tokens": 0}
            yield {"kind": "clock", **sizes, "busy_us": busy_ns / 1e3, "time_us": time_ns / 1e3}
            busy_ns += round(time_ns)

    def slowed_us(n, c):
        return GpuClock(0.12, 80e6).stretch(0, 1e3 * affine_prefill_us(n, c)) / 1e3

    prefill = [{**row, "busy_us": 0} for row in prefill_rows(slowed_us)]
    bursts = [*burst(1024), *burst(4096)]
    made = calibrate(measured(tmp_path, prefill, bursts, decode_rows(affine_decode_us)))
    assert (made.clock.slowdown, made.clock.memory_ns) == pytest.approx((0.12, 80e6), rel=0.02)
    found = {"per_token": 19_450, "per_pair": 0.85, "least": 11.8e6}
    assert {name: made.fits["prefill"].values[name] for name in found} == pytest.approx(found, rel=0.03)
    profile = profile_of(made, "x", "y")["cost"]["prefill"]
    assert profile["prefill_slowdown"] == pytest.approx(0.12, rel=0.02)


def test_the_interval_holds_the_truth_and_rows_that_stood_still_do_not_pull(tmp_path):
    rows = decode_rows(affine_decode_us)
    rows[5]["time_us"] *= 8
    values = calibrate(measured(tmp_path, prefill_rows(affine_prefill_us), rows)).fits["decode"]
    low, high = values.intervals["per_context_token"]
    assert low < 37 < high
    assert values.values["base"] == pytest.approx(5.2e6, rel=0.05)


def stairs_us(b, context):
    return (5000 if b <= 8 else 9000 if b <= 32 else 20_000) + 0.01 * context


def test_a_table_is_taken_where_lines_miss(tmp_path):
    tables = prefill_rows(affine_prefill_us), decode_rows(stairs_us)
    decode = calibrate(measured(tmp_path, *tables)).fits["decode"]
    lines = calibrate(measured(tmp_path, *tables), table_above=1).fits["decode"]
    assert (decode.form.name, lines.form.name) == ("table", "affine")
    assert decode.error < lines.error / 2
    settings = profile_of(calibrate(measured(tmp_path, *tables)), "x", "y")["cost"]["decode"]
    assert settings["use"] == "table"
    assert list(settings["decode"]) == list(BATCHES)


@given(st.lists(st.floats(100, 1e6), min_size=8, max_size=8))
@examples(4)
def test_a_fitted_table_never_falls(times):
    batches, contexts = np.repeat(np.array(BATCHES, float), 2), np.tile([0.0, 1000], 8)
    rows = Rows("decode", "", {"batch": batches, "context_tokens": contexts, "time_ns": np.repeat(times, 2)})
    assert all(value >= 0 for value in fit(regression.decode_table, rows).values.values())


def test_a_shape_is_held_out_with_all_its_repeats():
    """Repeats of one shape agree with each other and with nothing else: only other shapes can be wrong about them."""
    shapes = np.repeat(np.array(BATCHES, float), 5)
    times = 1e6 + 1e4 * shapes
    times[shapes == 16] *= 2
    rows = Rows("decode", "", {"batch": shapes, "context_tokens": 100 * shapes, "time_ns": times})
    held_out = fit(regression.decode_form, rows).held_out
    assert held_out[shapes == 16] == pytest.approx(-0.5, abs=0.02)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_a_transfer_is_batch_descriptors_and_bytes_as_its_engine_overlaps_them(overlap):
    size, count = (axis.ravel() for axis in np.meshgrid([4096.0, 65536, 2**20, 2**26], [1.0, 16, 64, 1024]))
    posting, moving = 11e3 * count, size / 6
    times = 20e3 + (1 - overlap) * posting + np.maximum(overlap * posting, moving)
    rows = Rows("transfer", "x", {"payload_bytes": size, "num_descriptors": count, "time_ns": times})
    found = fit(partial(regression.transfer_form, overlap), rows).values
    assert found == pytest.approx({"batch": 20e3, "per_descriptor": 11e3, "per_byte": 1 / 6}, rel=0.05)


def test_what_a_push_takes_besides_its_bytes_is_its_batch():
    """Each has one descriptor, whose time no row tells from the batch's."""
    size = np.array([2.0**20, 2**24, 2**26, 2**28])
    columns = {"payload_bytes": size, "num_descriptors": np.ones(4), "time_ns": 50e3 + size / 370}
    rows = Rows("transfer", "push", columns)
    found = fit(partial(regression.transfer_form, 0.0), rows).values
    assert found == pytest.approx({"batch": 50e3, "per_descriptor": 0, "per_byte": 1 / 370}, rel=0.01)


def test_rows_of_the_kernel_and_transfer_benches_are_read_as_they_are(tmp_path):
    kernels = [
        {
            "kernel": kernel,
            "variant": variant,
            "model": "m",
            "payload_bytes": size,
            "time_us": slow * (10 + 2 * size / 2.4e6),
            "submit_us": 30,
        }
        for kernel in ("gather", "scatter", "push")
        for variant, slow in (("fused", 1), ("sglang", 3))
        for size in (2**20, 2**22, 2**24, 2**26)
    ]
    transfers = [
        {
            "transport": name,
            "payload_bytes": s,
            "num_descriptors": n,
            "block_bytes": s // n,
            "time_us": 20 + 11 * n + s / 6e3,
        }
        for name in ("mooncake-tcp", "copy")
        for s in (2**16, 2**20, 2**26)
        for n in (1, 16, 64)
    ]
    host = [{"kind": "host", "what": what, "time_us": 100.0} for what in ("launch", "message")]
    phases = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    made = calibrate(measured(tmp_path, *phases, kernels, transfers, host))
    assert made.fits.keys() == {"prefill", "decode", "gather", "scatter", "mooncake-tcp"}
    network = profile_of(made, "x", "y")["network"]
    assert network["transports"] == {
        "mooncake-tcp": {"bandwidth": "6 GB/s", "transfer_latency": "20 us", "descriptor_latency": "11 us"}
    }
    assert network["staging"]["gather_host"] == "40 us"
    assert network["staging"]["gather_efficiency"] == pytest.approx(0.5, abs=0.01)
    assert network["message_latency"] == "100 us"
    assert profile_of(made, "x", "y")["cost"]["host"] == {"launch": "100 us"}


def test_what_a_pair_at_work_takes_beyond_forwards_and_transfers_is_the_hosts(tmp_path):
    medians_us = {"message": 70.0, "route": 500.0, "admit": 1070.0, "grant": 570.0, "result": 430.0, "answer": 180.0}
    medians_us["loading"] = 8.1e6
    stages = [{"kind": "host", "what": what, "time_us": time_us} for what, time_us in medians_us.items()]
    loops = [
        {"kind": "loop", "batch": b, "context_tokens": 900 * b, "time_us": affine_decode_us(b, 900 * b) + 300 + 4 * b}
        for b in (1, 4, 16, 64)
    ]
    transfers = [
        {
            "kind": kind,
            "transport": "x",
            "payload_bytes": size,
            "num_descriptors": n,
            "time_us": 20 + 2 * n + size / 6e3 + us,
        }
        for kind, sizes, us in (
            ("transfer", (2**16, 2**20, 2**26), 0),
            ("sending", (2**24, 2**27), 900),
            ("handover", (2**24,), 1650),
        )
        for size in sizes
        for n in (1, 16, 64)
    ]
    phases = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us, noise=0)
    told = profile_of(calibrate(measured(tmp_path, *phases, stages, loops, transfers)), "x", "y")
    host = told["cost"]["host"]
    assert (host["result"], host["start"], host["loading"]) == ("430 us", "500 us", "8100 ms")
    assert host["decode_prefill"] == "930 us"
    assert told["front_end"] == {"service": "500 us", "latency_in": "1 ms", "latency_out": "180 us"}
    assert rest_us(told) == pytest.approx((300, 4), rel=0.02)
    link = told["network"]["transports"]["x"]
    assert float(link["handover"].removesuffix(" us")) == pytest.approx(1650 - 900 - 70, rel=0.02)
    assert float(link["transfer_latency"].removesuffix(" us")) == pytest.approx(20 + 900, rel=0.02)


def test_rows_may_name_the_pauses_around_a_forward_between_decode_steps(tmp_path):
    phases = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    pauses = [{"kind": "host", "what": "decode_prefill", "time_us": time_us} for time_us in (900, 1500, 1700)]
    parts = [{"kind": "host", "what": what, "time_us": 400} for what in ("message", "grant", "result")]
    for stages in (pauses, [*parts, *pauses]):
        host = profile_of(calibrate(measured(tmp_path, *phases, stages)), "x", "y")["cost"]["host"]
        assert host["decode_prefill"] == "1.5 ms"


def rest_us(profile):
    """Host time of a decode loop: of a step, and of each request."""
    host = profile["cost"]["host"]
    return tuple(float(host[name].removesuffix(" us")) for name in ("decode_step", "decode_request"))


def test_what_lies_between_steps_is_told_by_loops_and_not_by_what_steps_take_alone(tmp_path):
    """Steps that took a fifth longer in the loop than alone."""
    loops = [
        {"kind": "loop", "batch": b, "context_tokens": 900 * b, "rest_us": 300 + 4 * b}
        | {"time_us": 1.2 * affine_decode_us(b, 900 * b) + 300 + 4 * b}
        for b in (1, 4, 16, 64)
    ]
    rows = measured(tmp_path, prefill_rows(affine_prefill_us), decode_rows(affine_decode_us), loops)
    assert rest_us(profile_of(calibrate(rows), "x", "y")) == (300, 4)


def sending_rows(transport, time_us):
    """Of an engine that takes 20 us, 2 us a descriptor and 1 us for 6 kB; and of transfers beside each other."""

    def row(kind, size, n, us):
        shape = {"transport": transport, "payload_bytes": size, "num_descriptors": n}
        return {"kind": kind, **shape, "time_us": us}

    alone_us = {(size, n): 20 + 2 * n + size / 6e3 for size in (2**16, 2**20, 2**26) for n in (1, 16, 64)}
    alone = [row("transfer", *shape, us) for shape, us in alone_us.items()]
    return [*alone, *[row("sending", size, 64, time_us(20 + 128 + size / 6e3, size)) for size in (2**24, 2**27)]]


@pytest.mark.parametrize(
    ("transport", "time_us", "expected"),
    [
        ("mooncake-tcp", lambda alone_us, size: alone_us + 900 + size / 3e3, {"bandwidth": 2, "transfer_latency": 920}),
        ("nixl-cma", lambda alone_us, size: alone_us + 900, {"bandwidth": 6, "transfer_latency": 920}),
        ("nixl-cma", lambda alone_us, size: 4 * alone_us, {"bandwidth": 6, "transfer_latency": 20, "serial": True}),
    ],
)
def test_transfers_beside_each_other_tell_what_they_take_and_whether_they_wait(transport, time_us, expected, tmp_path):
    """NIXL has four workers, and Mooncake one for each decode instance."""
    phases = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    made = calibrate(measured(tmp_path, *phases, sending_rows(transport, time_us)))
    link = profile_of(made, "x", "y")["network"]["transports"][transport]
    assert link.get("serial", False) == expected.get("serial", False)
    assert float(link["bandwidth"].removesuffix(" GB/s")) == pytest.approx(expected["bandwidth"], rel=0.05)
    assert float(link["transfer_latency"].removesuffix(" us")) == pytest.approx(expected["transfer_latency"], rel=0.1)


def test_of_rounds_the_mean_counts_and_single_forwards_stay_single(tmp_path):
    fast, slow = ([{**row, "repeats": 20} for row in decode_rows(lambda b, c: 1000 + b + c, 0)] for _ in range(2))
    for row in slow:
        row["time_us"] *= 1.6
    single = [{k: v for k, v in row.items() if k != "repeats"} for row in (*fast, *slow)]
    (rounds,) = measured(tmp_path, fast + slow).of("decode")
    assert len(rounds) == len(fast)
    assert rounds.columns["time_ns"] == pytest.approx([1.3e3 * row["time_us"] for row in fast])
    assert len(measured(tmp_path, single).of("decode")[0]) == 2 * len(fast)


def test_rows_of_so_many_ranks_are_chosen(tmp_path):
    """What depends on the ranks of one side follows its; all else is of one."""
    of_two = [{**row, "tp": 2, "time_us": row["time_us"] / 2} for row in decode_rows(affine_decode_us)]
    message = [{"kind": "host", "what": "message", "time_us": us, "tp": tp} for tp, us in ((1, 70.0), (2, 90.0))]
    rows = measured(tmp_path, prefill_rows(affine_prefill_us), decode_rows(affine_decode_us), of_two, message)
    one, two = (profile_of(calibrate(rows.of_ranks(Ranks(), Ranks(tp))), "x", "y") for tp in (1, 2))
    assert one["cost"]["prefill"] == two["cost"]["prefill"]
    bases = [float(profile["cost"]["decode"]["decode_base"].removesuffix(" ms")) for profile in (one, two)]
    assert bases == pytest.approx([5.2, 2.6], rel=0.02)
    assert two["network"]["message_latency"] == "70 us"
    assert rows.of_ranks(Ranks(), Ranks(2)).notes == ()
    loops = [{"kind": "loop", "batch": b, "context_tokens": 900 * b, "time_us": 6000 + b} for b in (1, 4, 16)]
    with_loops = measured(tmp_path, prefill_rows(affine_prefill_us), of_two, loops).of_ranks(Ranks(), Ranks(2))
    assert calibrate(with_loops).notes[0] == "loop is left out: no rows with tp 2"
    with pytest.raises(
        ConfigError, match="no rows of prefill with tp 2; the rows have tp 1: --prefill-tp, --prefill-ep"
    ):
        rows.of_ranks(Ranks(2), Ranks())


def test_no_row_is_left_out_in_silence(tmp_path):
    """One rank measures copies and transfers. Rows of two ranks are left out, whatever is asked for."""
    forwards = [{**row, "tp": tp} for tp in (1, 2) for row in decode_rows(affine_decode_us)]
    gather = [{"kind": "gather", "payload_bytes": 1e6, "time_us": 9.0, "tp": tp} for tp in (1, 2)]
    sent = {"kind": "transfer", "payload_bytes": 4e6, "num_descriptors": 72, "time_us": 90.0}
    transfers = [{**sent, "transport": "push", "tp": 1}, {**sent, "transport": "nixl", "tp": 2}]
    store = {"kind": "storage", "what": "read", "payload_bytes": 1e6, "num_descriptors": 1, "time_us": 9.0, "tp": 2}
    host = [
        {"kind": "host", "what": what, "time_us": 9.0, "tp": tp}
        for what, tp in (("admit", 4), ("message", 2), ("route", 1), ("route", 2))
    ]
    rows = measured(tmp_path, prefill_rows(affine_prefill_us), forwards, gather, transfers, [store], host)
    assert rows.of_ranks(Ranks(), Ranks(2)).notes == (
        "host (message) is left out: no rows with tp 1",
        "host (admit) is left out: no rows with tp 2",
        "storage (read) is left out: no rows with tp 1",
        "transfer (nixl) is left out: no rows with tp 1",
        "gather: rows with tp 2 are left out, those with tp 1 are used",
    )


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_host_work_of_a_pair_has_the_ranks_of_the_role_that_does_it(tmp_path, prefill_tp, decode_tp):
    """Stages of prefill have its ranks, those of decode its; what nobody measured with two ranks is of one."""
    of_prefill, of_decode, of_neither = ("grant", "result"), ("admit", "answer"), ("message", "end")
    host = [
        {"kind": "host", "what": what, "time_us": 100.0 * tp, "tp": tp}
        for what in of_prefill + of_decode + of_neither
        for tp in (1, 2)
    ]
    route = {"kind": "host", "what": "route", "time_us": 7.0}
    sent = {"transport": "cuda-ipc", "payload_bytes": 4e6, "num_descriptors": 72}
    handovers = [{"kind": "handover", **sent, "num_descriptors": 72 * tp, "time_us": tp, "tp": tp} for tp in (1, 2)]
    forwards = prefill_rows(affine_prefill_us), decode_rows(affine_decode_us)
    of_ranks = [[{**row, "tp": tp} for row in rows] for rows in forwards for tp in (1, 2)]
    rows = measured(tmp_path, *of_ranks, host, [route], handovers).of_ranks(Ranks(prefill_tp), Ranks(decode_tp))
    found_us = {one.name: one.columns["time_ns"].tolist() for one in rows.of("host")}
    expected_us = dict.fromkeys(of_prefill, prefill_tp) | dict.fromkeys(of_decode, decode_tp)
    assert found_us == {
        "route": [7e3],
        **{what: [1e5 * tp] for what, tp in {**expected_us, **dict.fromkeys(of_neither, 1)}.items()},
    }
    (handover,) = rows.of("handover")
    of_a_rank = {"time_ns": [1e3 * decode_tp], "payload_bytes": [4e6 / decode_tp], "num_descriptors": [72]}
    assert {name: handover.columns[name].tolist() for name in of_a_rank} == of_a_rank


def test_rows_of_whole_experts_are_others(tmp_path):
    """Two ranks that hold whole experts take other times than two that divide each."""
    divided = [{**row, "tp": 2, "ep": 1} for row in decode_rows(affine_decode_us)]
    whole = [{**row, "tp": 2, "ep": 2, "time_us": row["time_us"] / 2} for row in divided]
    rows = measured(tmp_path, [{**row, "ep": 1} for row in prefill_rows(affine_prefill_us)], divided, whole)
    profiles = [profile_of(calibrate(rows.of_ranks(Ranks(), Ranks(2, ep))), "x", "y") for ep in (1, 2)]
    bases = [float(profile["cost"]["decode"]["decode_base"].removesuffix(" ms")) for profile in profiles]
    assert bases == pytest.approx([5.2, 2.6], rel=0.02)
    assert [profile["cost"]["measured"]["ep"] for profile in profiles] == [[1, 1], [1, 2]]
    with pytest.raises(ConfigError, match="no rows of decode with tp 4 and ep 4; the rows have tp 2, tp 2 and ep 2: "):
        rows.of_ranks(Ranks(), Ranks(4, 4))


def test_requests_that_are_submitted_together_tell_what_the_launcher_takes_for_each():
    """One of 500 tokens alone takes 500 + 1070 - 70 us until decode has taken it in: 300 of these are in the line."""
    host_us = {"message": 70.0, "route": 500.0, "admit": 1070.0, "answer": 180.0, "end": 90.0}
    rows = [
        Rows("host", what, {"time_ns": np.array([us * 1e3]), "new_tokens": np.array([500.0])})
        for what, us in host_us.items()
    ]
    spacings = {"time_ns": np.array([220e3, 600e3]), "new_tokens": np.array([100.0, 2000.0])}
    measurements = Measurements((*rows, Rows("host", "submit", spacings)), ())
    told = front_end_ns(measurements, {what: us * 1e3 for what, us in host_us.items()})
    assert told == pytest.approx(
        {"service": 200e3, "service_per_token": 200, "ending": 90e3, "latency_in": 1200e3, "latency_out": 180e3}
    )


def test_a_graph_is_a_program_of_its_own_and_empty_rows_cost_a_share_of_their_kv(tmp_path):
    graph_us = {1: 5000, 2: 5050, 4: 5060, 8: 5200, 16: 5210}

    def time_us(batch, context):
        graph = next(size for size in graph_us if size >= batch)
        return graph_us[graph] + 0.03 * (context + 0.4 * context * (graph / batch - 1))

    decode = [
        {"kind": "decode", "batch": b, "graph": next(size for size in graph_us if size >= b), "context_tokens": n * b}
        | {"time_us": time_us(b, n * b)}
        for b in (1, 2, 3, 4, 6, 8, 12, 16)
        for n in (300, 1100, 4200, 16200)
    ]
    cost = profile_of(calibrate(measured(tmp_path, prefill_rows(affine_prefill_us), decode)), "x", "y")["cost"]
    assert cost["graph_sizes"] == list(graph_us)
    assert cost["graph_empty_row_kv"] == pytest.approx(0.4, abs=0.02)
    assert cost["decode"]["decode"].keys() == graph_us.keys()
    assert float(cost["decode"]["decode"][8].removesuffix(" ms")) == pytest.approx(5.2, rel=0.002)


def test_steps_that_verify_drafts_take_what_was_measured(tmp_path):
    """Four tokens of each row of a graph, and the KV of a request once. Drafting is part of the measured time."""
    graphs = {1: 1, 2: 2, 3: 4, 4: 4, 6: 8, 8: 8}
    decode = [
        {"kind": "decode", "batch": b, "graph": graph, "verified": 4, "context_tokens": n * b}
        | {"time_us": 7000 + 20 * 4 * graph + 0.03 * n * b}
        for b, graph in graphs.items()
        for n in (1100, 4200, 16200)
    ]
    made = calibrate(measured(tmp_path, prefill_rows(affine_prefill_us), decode))
    cost = profile_of(made, "x", "y")["cost"]
    drafts = {"decode__speculative_draft_tokens": 4, "decode__speculative_accept_length": 2}
    scenario = small(request(0, 9, 9), model="qwen3-8b", cost=cost, decode__gpu="h200", prefill__gpu="h200", **drafts)
    line = build(scenario).costs["decode-0"].decode_line(3)
    assert line.base / 2**FRACTION_BITS == pytest.approx(1e3 * (7000 + 20 * 16), rel=0.002)
    kv_ns = (line.per_context_token + line.per_distinct_token) / 2**FRACTION_BITS
    assert kv_ns == pytest.approx(30, rel=0.02)
    fewer = small(request(0, 9, 9), model="qwen3-8b", cost=cost, **{**drafts, "decode__speculative_draft_tokens": 3})
    assert "3 draft tokens" in fewer.foreign_setup


def test_rows_of_several_numbers_of_drafts_are_refused(tmp_path):
    decode = [{"verified": count, **row} for row, count in zip(decode_rows(affine_decode_us), (1, 4) * 12, strict=True)]
    with pytest.raises(ConfigError, match="decode rows verify 1 and 4 tokens"):
        measured(tmp_path, decode)


@pytest.mark.parametrize(("model", "is_free"), [("qwen3-8b", False), ("qwen3-30b-a3b", True)])
def test_empty_rows_of_a_model_with_experts_are_free(tmp_path, model, is_free):
    sizes = {1: 1, 2: 2, 3: 4, 4: 4, 6: 8, 8: 8, 12: 16, 16: 16}
    decode = [
        {"kind": "decode", "batch": b, "graph": graph, "context_tokens": n * b}
        | {"time_us": 5000 + 300 * (b if is_free else graph) + 0.03 * n * b}
        for b, graph in sizes.items()
        for n in (1100, 4200, 16200)
    ]
    made = calibrate(measured(tmp_path, prefill_rows(affine_prefill_us), decode, model=model), gpu="h200")
    cost = profile_of(made, "x", "y")["cost"]
    assert cost.get("graph_empty_rows_free", False) is is_free
    assert made.fits["decode"].error < 0.01


@pytest.mark.parametrize("graph", [832, 1664])
def test_one_slow_graph_of_many_is_found(graph):
    """Libraries choose kernels for each size. No other size tells of it, so each measured graph has its own time."""
    graphs, contexts = (axis.ravel() for axis in np.meshgrid(np.arange(64.0, 2049, 64), [0, 2048]))
    times_ns = 1e6 + 20e3 * graphs * np.where(graphs == graph, 1.1, 1) + contexts
    columns = {"new_tokens": graphs - 16, "graph": graphs, "context_tokens": contexts, "prompts": np.ones(64)}
    rows = Rows("prefill", "", columns | {"time_ns": np.maximum.accumulate(times_ns.reshape(2, -1), axis=1).ravel()})
    fitted = fit(regression.prefill_table, rows)
    assert fitted.form.knots == tuple(np.unique(graphs))
    assert fitted.times_ns(rows.columns) == pytest.approx(rows.columns["time_ns"], rel=0.01)


def test_forwards_in_graphs_take_what_their_padding_does_and_their_attention_goes_in_waves(tmp_path):
    truth = Affine(
        prefill_base_ns=1e6,
        prefill_per_token_ns=19_000,
        prefill_per_pair_ns=1,
        prefill_graph_per_pair_ns=1.5,
        prefill_graph_sizes=tuple(range(128, 2049, 128)),
        prefill_wave_tokens=512,
        prefill_least_ns=5e6,
    )
    model = AffineModel(truth)

    def row(new, context):
        chunk = PrefillChunk(0, context, new, is_last=True)
        sizes = {
            "new_tokens": new,
            "context_tokens": context,
            PREFILL_GRAPHS: " ".join(map(str, range(128, 2049, 128))),
        }
        return {"kind": "prefill", **sizes, "time_us": model.prefill_ns(PrefillStep(0, (chunk,)), 0) / 1e3}

    rows = [row(new, c) for new in (60, 190, 330, 700, 1180, 1730, 2048, 2350, 4096, 8192) for c in (0, 2048, 8192)]
    made = calibrate(measured(tmp_path, rows, decode_rows(affine_decode_us)))
    told = profile_of(made, "x", "y")["cost"]["prefill"]
    assert (told["prefill_wave_tokens"], told["prefill_graph_sizes"]) == (512, list(truth.prefill_graph_sizes))
    assert made.fits["prefill"].values["graph_per_pair"] == pytest.approx(1.5, rel=0.02)
    assert made.fits["prefill"].values["per_pair"] == pytest.approx(1, rel=0.02)
    assert made.fits["prefill"].typical_error < 0.02


def test_rows_of_several_engines_graphs_are_refused(tmp_path):
    one, other, *_ = prefill_rows(affine_prefill_us)
    rows = [one | {PREFILL_GRAPHS: "64"}, other | {PREFILL_GRAPHS: "64 128"}]
    with pytest.raises(ConfigError, match="prefill_graphs of rows differ: 64 and 64 128"):
        measured(tmp_path, rows)


@pytest.mark.parametrize("us_per_token", [-0.01, -0.001])
def test_where_context_takes_no_time_empty_rows_have_no_share_of_it(us_per_token, tmp_path):
    decode = [
        {"kind": "decode", "batch": b, "graph": 8, "context_tokens": n * b, "time_us": 5000 + us_per_token * n * b}
        for b in (2, 3, 4, 6, 8)
        for n in (300, 1100, 4200, 16200)
    ]
    cost = profile_of(calibrate(measured(tmp_path, prefill_rows(affine_prefill_us), decode)), "x", "y")["cost"]
    assert cost["decode"]["decode_per_context_token"] == "0 ns"
    assert "graph_empty_row_kv" not in cost


def test_parquet_reads_as_csv_does(tmp_path):
    write_rows(tmp_path / "rows.csv", decode_rows(affine_decode_us), PROVENANCE)
    parquet.write_table(arrow_csv.read_csv(tmp_path / "rows.csv"), tmp_path / "rows.parquet")
    (plain,), (packed,) = (read_rows([tmp_path / f"rows.{kind}"]).rows for kind in ("csv", "parquet"))
    assert packed.columns["time_ns"] == pytest.approx(plain.columns["time_ns"])


def test_rows_that_begin_with_a_byte_order_mark_are_read(tmp_path):
    write_rows(tmp_path / "rows.csv", decode_rows(affine_decode_us), PROVENANCE)
    text = (tmp_path / "rows.csv").read_text()
    (tmp_path / "marked.csv").write_text(text, encoding="utf-8-sig")
    plain, marked = (read_rows([tmp_path / f"{name}.csv"]) for name in ("rows", "marked"))
    assert (marked.rows[0].columns["time_ns"] == plain.rows[0].columns["time_ns"]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "prefil"}, "line 2: no kind 'prefil' (did you mean 'prefill'?)"),
        ({"batch": "many"}, "line 2: batch: expected a number, found 'many'"),
        ({"time_us": 0}, "line 2: time_us: expected a time above 0, found '0'"),
        ({"batch": "1e300"}, "line 2: batch: expected a number from 0 to 1e+18, found '1e300'"),
        (
            {"kind": "prefill", "new_tokens": 5, "prompts": 0},
            "line 2: prompts: expected a number from 1 to 1e+18, found '0'",
        ),
        ({"date": ""}, "does not say where its rows come from: no date"),
        ({"device": ""}, "does not say where its rows come from: no device"),
        ({"kind": "transfer"}, "line 2: transfer needs transport"),
        (
            {"kind": "prefill", "new_tokens": 5, PREFILL_GRAPHS: "64 32"},
            "line 2: prefill_graphs: expected rising numbers of tokens, found '64 32'",
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path, change, message):
    row = {"kind": "decode", "batch": 1, "context_tokens": 5, "time_us": 3.0, "transport": ""} | PROVENANCE | change
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    with pytest.raises(ConfigError) as wrong:
        read_rows([tmp_path / "rows.csv"])
    assert message in str(wrong.value)


def test_too_few_shapes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="prefill is left out: 1 shape, of which some are held out, are too few"):
        calibrate(measured(tmp_path, prefill_rows(affine_prefill_us)[:3], decode_rows(affine_decode_us)))
