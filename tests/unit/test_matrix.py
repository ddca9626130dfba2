"""A matrix of scenarios: its file, its runs, and what is said of the two sides."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdsim.calibration.validate.case import fit_arm, load_case
from pdsim.calibration.validate.comparison import METRICS, Side, Validation, compare_counts, compare_sides, rank
from pdsim.calibration.validate.suite import Tolerances, load_suite
from pdsim.metrics.explanation.explain import mean_stage_ms
from pdsim.scenario.building.cluster import build
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.show.terminal.measurements import print_validation
from pdsim.sim.simulation import simulate

SCENARIO = """\
name: little
model: tiny-qwen3
page_size: 16
prefill: {gpu: h100, pool_tokens: 4096, chunked_prefill_tokens: 256}
decode: {gpu: h100, pool_tokens: 4096}
router: round_robin
network: {transport: mooncake-tcp}
workload: {use: prefix_pool, num_requests: 24, num_prefixes: 2, prefix_tokens: 64, input_tokens: 40, output_tokens: 6}
client: {use: closed_loop, concurrency: 4}
"""


def side(path, *changes):
    result = simulate(load_scenario(path, changes))
    return Side(result.summary(), result.records)


EXACT = Tolerances(median="0 %", mean="0 %", p99="0 %")


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


# Order.


def test_pairs_that_are_almost_equal_have_no_winner():
    ranking = rank({"a": 100.0, "b": 104.0, "c": 200.0}, {"a": 2.0, "b": 1.0, "c": 1.5})
    assert (ranking.num_pairs, ranking.num_right, ranking.share) == (2, 1, 0.5)
    assert rank({"a": 1.0}, {"a": 2.0}).share is None


# A fit to one arm.


def test_a_fit_counts_its_simulations(tmp_path):
    """Where a step of the fit does not help, no derivatives are computed: overheads are whole ms, so some do not."""
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    arms = "arms: {slow: {runs: [{mean_ttft_ms: 40.0, mean_tpot_ms: 20.0}]}}"
    (tmp_path / "measured.yaml").write_text(f"scenario: scenario.yaml\nsource: test\nseeds: [1, 2]\n{arms}\n")
    case, simulated = load_case(tmp_path), []

    def summary(scenario):
        simulated.append(scenario)
        return simulate(scenario).summary()

    def settings(values):
        return (f"cost={{use: roofline, step_overhead: {round(values['overhead_ms'])} ms}}",)

    fit = fit_arm(case, case.arms[0], {"overhead_ms": 9.0}, settings, summary)
    assert fit.num_simulations == len(simulated)
    assert fit.values["overhead_ms"] > 5


# Two sides.


def test_a_run_beside_itself_has_no_error(scenario):
    one, again = side(scenario), side(scenario)
    found = compare_sides("same", EXACT, one, again)
    assert {error.error for error in (*found.metrics.values(), *found.stages_ms.values())} == {0.0}
    assert found.counts.are_equal
    assert not found.counts.other_prefix_cached
    validation = Validation("m", EXACT, (found,))
    assert all(spread.is_met and spread.median == 0 for spread in validation.spreads())
    assert [spread.metric for spread in validation.spreads()] == list(METRICS)
    json.dumps(validation.to_json(), allow_nan=False)


def test_stages_leave_out_warm_up_requests_as_metrics_do_and_counts_do_not(scenario, capsys):
    one = side(scenario, "client.warm_up_requests=8")
    found = compare_sides("same", EXACT, one, one)
    assert (found.num_requests, found.counts.num_requests) == (16, 24)
    of_judged = mean_stage_ms(one.records.without_first(8))
    assert {stage: error.measured for stage, error in found.stages_ms.items()} == of_judged
    assert of_judged != mean_stage_ms(one.records)
    print_validation(Validation("m", EXACT, (found,)))
    assert "they include warm-up requests" in " ".join(capsys.readouterr().out.split())


def test_one_token_has_no_time_per_token(scenario):
    """An undefined metric is neither a hit nor a miss."""
    two, one = (side(scenario, f"workload.output_tokens={tokens}") for tokens in (2, 1))
    slow = side(scenario, "workload.output_tokens=2", "cost={use: roofline, step_overhead: 9 ms}")
    found = Validation("m", EXACT, (compare_sides("a", EXACT, two, slow), compare_sides("b", EXACT, one, one)))
    assert "mean_ttft_ms" in found.comparisons[1].metrics
    assert not any("tpot" in metric or "itl" in metric for metric in found.comparisons[1].metrics)
    (tpot,) = (spread for spread in found.spreads() if spread.metric == "mean_tpot_ms")
    assert tpot.median == abs(found.comparisons[0].metrics["mean_tpot_ms"].error) > 0
    none = Validation("m", EXACT, found.comparisons[1:])
    assert {spread.metric for spread in none.spreads()} == found.comparisons[1].metrics.keys()
    assert none.rankings()["mean_tpot_ms"].share is None
    print_validation(found)


def test_one_request_at_a_time_sends_the_same_however_long_it_takes(scenario):
    one, slow = (
        side(scenario, "client.concurrency=1", f"cost={{use: roofline, step_overhead: {overhead}}}")
        for overhead in ("1 ms", "9 ms")
    )
    found = compare_sides("slow", Tolerances(mean="10 %"), one, slow)
    assert found.metrics["mean_tpot_ms"].error > 1
    assert not found.metrics["mean_tpot_ms"].is_met
    assert found.counts.are_equal
    assert not found.counts.other_prefix_cached


def test_other_bytes_are_found(scenario):
    one, other = side(scenario), side(scenario)
    row = other.records.transfers[5]
    other.records.transfers[5] = replace(row, num_bytes=row.num_bytes + 1)
    counts = compare_counts(one.records, other.records)
    assert counts.unequal == (row.request_id,)
    assert not counts.are_equal
    assert counts.to_json()["equal"] is False


def test_what_was_cached_otherwise_is_timing(scenario):
    one, other = side(scenario), side(scenario, "prefill.radix_cache=false")
    counts = compare_counts(one.records, other.records)
    assert len(counts.other_prefix_cached) > 10
    assert counts.are_equal


def test_a_request_of_one_side_alone_is_found(scenario):
    one, other = side(scenario), side(scenario)
    other.records.requests[0] = replace(other.records.requests[0], outcome="failed")
    assert compare_counts(one.records, other.records).unequal == (0,)


def test_descriptors_follow_from_how_pages_lie(scenario):
    """With few pages, free ones lie apart, and where depends on what ended when."""
    changes = (
        "prefill={gpu: h100, pool_tokens: 1024, radix_cache: false}",
        "workload={use: random_lengths, num_requests: 60, output_tokens: {use: uniform, low: 2, high: 40}}",
        "workload.input_tokens={use: uniform, low: 30, high: 90}",
    )
    one = side(scenario, *changes)
    other = side(scenario, *changes, "cost={use: roofline, step_overhead: 9 ms}")
    counts = compare_counts(one.records, other.records)
    assert counts.descriptors.measured != counts.descriptors.simulated
    assert counts.are_equal


# The file.

MATRIX = """\
scenario: scenario.yaml
real: {device: cpu, dtype: float32, timeout: 90 s}
within: {median: 10 %}
variants:
  c1: [client.concurrency=1]
  c4: []
"""


@pytest.fixture
def matrix(scenario, tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text(MATRIX)
    return path


def test_a_matrix_is_read(matrix, tmp_path):
    found = load_suite(str(tmp_path), tmp_path)
    assert [variant.name for variant in found.variants] == ["c1", "c4"]
    assert found.real.timeout == 90 * 10**9
    assert found.tolerances == Tolerances(median="10 %")
    assert found.runs == tmp_path / "runs"
    assert load_suite(str(matrix), tmp_path) == found


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("variants:", "variant:", r"unknown field 'variant' \(did you mean 'variants'\?\)"),
        ("scenario: scenario.yaml\n", "", "scenario is missing"),
        ("device: cpu", "device: gpu", "real.device: Input should be 'cpu' or 'cuda', found 'gpu'"),
        ("dtype: float32", "dtype: bf16", "real.dtype: Input should be 'float32' or 'bfloat16', found 'bf16'"),
        ("90 s", "ninety", "timeout"),
        (
            "device: cpu",
            "device: cpu, threads: 0",
            "line 2: real.threads: Input should be greater than or equal to 1, found 0",
        ),
        ("10 %", "10", "expected a percentage"),
        ("c4: []", "c4: radix", "variants.c4: .*found .radix"),
        ("c4: []", "c4: {change: []}", "unknown field 'variants.c4.change' .did you mean 'changes'"),
        ("c4: []", "a/b: []", "variants.a/b.* should match pattern"),
        ("median: 10 %", "medain: 10 %", "did you mean 'median'"),
    ],
)
def test_a_wrong_matrix_is_one_message(matrix, before, after, says):
    matrix.write_text(MATRIX.replace(before, after))
    with pytest.raises(ConfigError, match=says):
        load_suite(str(matrix), matrix.parent)


def test_a_simulation_needs_a_profile(matrix):
    found = load_suite(str(matrix), matrix.parent)
    with pytest.raises(ConfigError, match="give --profile"):
        found.scenario(found.variants[0])


def test_a_variant_has_a_profile_of_its_own_until_another_machine_brings_one(matrix, tmp_path):
    matrix.write_text(MATRIX.replace("c4: []", "c4: {changes: [decode.instances=2], profile: own.yaml}"))
    found = load_suite(str(matrix), tmp_path)
    assert [variant.profile for variant in found.variants] == [None, tmp_path / "own.yaml"]
    (tmp_path / "own.yaml").write_text("""\
cost: {use: roofline, step_overhead: 9 ms}
network: {transports: {mooncake-tcp: {bandwidth: 1 GB/s}}}
provenance: {}
""")
    simulated = found.scenario(found.variants[1])
    assert simulated.decode.instances == 2
    assert simulated.cost.prefill.step_overhead_ns == 9_000_000
    other = found.with_profile(tmp_path / "other.yaml")
    with pytest.raises(ConfigError, match=r"other\.yaml"):
        other.scenario(other.variants[1])


def test_the_folder_of_another_scenario_is_refused(matrix):
    found = load_suite(str(matrix), matrix.parent)
    one, other = found.variants
    ran = simulate(load_scenario(found.scenario_path, (*one.changes, "kv_dtype=fp32"))).scenario
    found.require_same(one, ran, found.runs / "c1")
    with pytest.raises(ConfigError, match=r"the run has client .*1.*, the variant .*4.*; delete the folder"):
        found.require_same(other, ran, found.runs / "c4")


@pytest.mark.parametrize(
    ("name", "num_variants"),
    [
        ("validation-h200", 13),
        ("validation-h200-aggregated", 7),
        ("push", 10),
        ("validation-h200-tp", 5),
        ("open-loops-h200", 7),
        ("open-loops-two-h200", 14),
        ("open-loops-h100", 5),
        ("sliding-windows", 6),
        ("four-h100", 26),
        ("moe-h200", 6),
        ("expert-parallel-h200", 6),
        ("expert-parallel-two-h200", 6),
        ("all-to-all-two-h200", 6),
        ("latent-experts-two-h200", 6),
        ("drafts-two-h200", 4),
        ("hybrid-h100", 3),
        ("hybrid-two-h200", 5),
        ("validation-cpu", 5),
    ],
)
def test_the_matrices_of_the_repository_can_run(name, num_variants):
    found = load_suite(name, Path("experiments"))
    assert len(found.variants) == num_variants
    for variant in found.variants:
        assert build(load_scenario(found.scenario_path, variant.changes)).requests
        if (found.runs / variant.name).is_dir():
            found.require_same(variant, load_scenario(found.runs / variant.name / "scenario.yaml"), found.runs)


def test_a_trace_is_the_same_whatever_folder_it_is_read_from(matrix, tmp_path, monkeypatch):
    (tmp_path / "trace.csv").write_text("arrival_s,in_tokens,out_tokens\n0,20,3\n")
    matrix.write_text(MATRIX.replace("c1: [", "c1: ['workload={use: request_table, path: trace.csv}', "))
    found = load_suite(str(matrix), tmp_path)
    ran = found.real_scenario(found.variants[0])
    monkeypatch.chdir(tmp_path)
    here = load_suite("matrix.yaml", Path())
    here.require_same(here.variants[0], build(ran).scenario, tmp_path / "runs" / "c1")
