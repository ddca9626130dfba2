"""Tables, and what a run does outside the range that its profile was measured in."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.affine import AffineModel, Entries, TableModel
from pdsim.cost.model import FRACTION_BITS
from pdsim.cost.settings import Affine, AffineTable
from pdsim.scenario.sections.cost import Setup
from pdsim.sim.simulation import simulate
from tests.support import request, small

AFFINE = AffineModel(Affine(prefill_per_token_ns=1000, prefill_per_pair_ns=1, decode_per_request_ns=500))


def step(*chunks):
    return PrefillStep(0, tuple(PrefillChunk(i, context, n, True) for i, (context, n) in enumerate(chunks)))


def base_ns(model, batch):
    return model.decode_line(batch).base / (1 << FRACTION_BITS)


def test_a_table_is_flat_below_its_entries_and_straight_between_and_beyond_them():
    entries = Entries({10: 100.0, 20: 300.0})
    assert [entries.at(size) for size in (1, 10, 15, 20, 100)] == [100, 100, 200, 300, 1900]
    assert [Entries({10: 100.0}).at(size) for size in (1, 10, 99)] == [100, 100, 100]


@given(
    st.dictionaries(st.integers(1, 1000), st.integers(0, 10**9), min_size=1), st.integers(0, 1000), st.integers(0, 99)
)
def test_a_table_that_does_not_fall_gives_times_that_do_not_fall(entries, size, more):
    rising = dict(zip(sorted(entries), sorted(entries.values()), strict=True))
    assert Entries(rising).at(size) <= Entries(rising).at(size + more) + 1e-6


def test_a_falling_table_is_refused():
    with pytest.raises(ValueError, match="times that do not fall"):
        AffineTable(decode_ns={1: 5.0, 2: 4.0})


def test_a_table_of_an_affine_law_gives_its_times():
    table = TableModel(AffineTable(prefill_ns={0: 0, 4096: 4096e3}, prefill_per_pair_ns=1, decode_ns={0: 0, 64: 32e3}))
    for chunks in ([(0, 100)], [(500, 1000), (0, 24)], [(0, 8192)]):
        assert table.prefill_ns(step(*chunks), 0) == AFFINE.prefill_ns(step(*chunks), 0)
    assert [base_ns(table, batch) for batch in (7, 99)] == [base_ns(AFFINE, batch) for batch in (7, 99)]


def run(**measured):
    cost = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    scenario = small(
        *(request(i, 60, 5) for i in range(3)), cost={"prefill": cost, "decode": cost, "measured": measured}
    )
    return simulate(scenario)


ON = {"model": "qwen3-0.6b", "weight_dtype": "bf16", "kv_dtype": "bf16", "device": "h100"}


def test_a_run_names_each_field_once_with_its_farthest_value():
    (outside,) = run(**ON, prefill_new_tokens=[1, 32], decode_context_tokens=[0, 50]).warnings()
    assert re.fullmatch(
        r"cost: profile measured on qwen3-0.6b, bf16 weights, bf16 KV, TP1, h100; this run: "
        r"new tokens of a forward 64 \(measured 1 to 32\), "
        r"KV tokens of a batch \d+ \(measured 0 to 50\): outside",
        outside,
    )


def test_a_run_names_sizes_on_both_sides_of_the_range():
    (outside,) = run(**ON, prefill_new_tokens=[60, 62]).warnings()
    assert "this run: new tokens of a forward 52 and 64 (measured 60 to 62): outside" in outside


def test_a_run_within_says_nothing_and_none_takes_another_time_for_its_range():
    free, within, beyond = (
        run(**ON),
        run(**ON, prefill_new_tokens=[1, 64], decode_batch=[1, 3]),
        run(**ON, decode_batch=[1, 1]),
    )
    assert within.warnings() == free.warnings() == []
    assert "warnings" not in within.summary()["pdsim"]
    assert beyond.summary()["duration"] == free.summary()["duration"]


SETUPS = st.builds(
    Setup,
    model=st.sampled_from(("a", "b")),
    weight_dtype=st.sampled_from((None, "bf16", "fp8")),
    kv_dtype=st.sampled_from((None, "bf16", "fp8")),
    device=st.sampled_from((None, "h100", "h20")),
    tp=st.tuples(st.sampled_from((1, 8)), st.sampled_from((1, 8))),
    dp=st.tuples(st.sampled_from((1, 4)), st.sampled_from((1, 4))),
    ep=st.none() | st.tuples(st.sampled_from((1, 8)), st.sampled_from((1, 8))),
)


@given(SETUPS, SETUPS)
def test_a_setup_differs_in_as_many_parts_as_it_tells_and_are_not_equal(profile, run_of):
    told = {name: value for name, value in profile.model_dump().items() if value is not None}
    differing = [name for name, value in told.items() if getattr(run_of, name) != value]
    assert len(profile.differences(run_of)) == len(differing)
    assert profile.differences(profile) == []


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({}, "cost: profile does not say what it was measured on"),
        (
            {"prefill_new_tokens": [1, 32]},
            "what it was measured on; this run: new tokens of a forward 64 (measured 1 to 32",
        ),
        ({**ON, "tp": [8, 4], "dp": [4, 4]}, "TP8 to TP4, DP4, h100; this run: TP1, no dp: outside"),
        ({**ON, "tp": [2, 2], "ep": [2, 1]}, "TP2, EP2 to EP1, h100; this run: TP1, no ep: outside"),
        ({**ON, "scaled_from": "h200"}, "cost: profile scaled from h200 to qwen3-0.6b, bf16 weights"),
    ],
)
def test_what_a_profile_was_not_measured_on_is_said(measured, said):
    (warning,) = run(**measured).warnings()
    assert said in warning


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        ("roofline", "roofline, without measurements"),
        ({"use": "affine", "decode_base": "1 ms"}, "affine: the scenario does not say"),
    ],
)
def test_costs_without_a_profile_say_so(cost, said):
    (warning,) = simulate(small(request(0, 8, 2), cost=cost)).warnings()
    assert said in warning


@pytest.mark.parametrize(
    ("model", "servers", "backend"),
    [
        ("qwen3-235b-a22b", {"tp": 16, "dp": 16}, "deepep"),
        ("qwen3-235b-a22b", {"tp": 16, "dp": 16, "moe_a2a_backend": "none"}, "none"),
        ("qwen3-235b-a22b", {"tp": 8, "dp": 8}, "none"),
        ("qwen3-235b-a22b", {"tp": 8, "dp": 8, "moe_a2a_backend": "mori"}, "mori"),
        ("qwen3-8b", {"tp": 16, "dp": 16}, "none"),
    ],
)
def test_the_setup_of_a_run_names_the_all_to_all_that_servers_over_several_hosts_choose(model, servers, backend):
    settings = {f"decode__{name}": value for name, value in {"gpu": "h200", **servers}.items()}
    assert small(request(0, 9, 9), model=model, **settings).setup.moe_a2a_backend == ("none", backend)
