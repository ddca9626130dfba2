"""The table of accuracy: a sample of it is what simulations say now, and has not become worse."""

from dataclasses import replace
from math import log
from statistics import fmean

import pytest

from docs.accuracy import (
    BLIND,
    EXPERIMENTS,
    KNOWN,
    METRICS,
    README,
    Number,
    coverage,
    in_few_rows,
    numbers,
    read,
)
from docs.coverage import ASKED_GROUP, LEAST_GROUP, coverage_by, light_loads, missed_groups, on_gpus
from docs.signs import RULES, counted, holds_at_both_ends, ranges_are_apart, signs
from docs.widths import HELD, STEP, chosen, halves, left_out, needed, widths
from pdsim.calibration.validate.case import find_cases
from pdsim.cost.settings import KERNELS_SPREAD

SAMPLE = {
    "accelmark-a100": ("online-5",),
    "mooncake-a10": ("case2-pd",),
    "inferencex-mi355x": ("c8",),
    "dynamo-gb200": ("536-c4",),
    "sglang-h200": ("c32", "agg_q16"),
    "sglang-llama": ("fp8_c32",),
    "vllm-rtx": ("llama-8b-4090",),
}
"""Arms by study: some of each kind, and quick."""
WORSE = 4 / 3
NEGLIGIBLE = 0.02
"""An error below this is none."""


def identity(number: Number) -> tuple[str, ...]:
    return (number.study, number.arm, number.known, number.metric)


@pytest.mark.parametrize("study", SAMPLE)
def test_no_number_of_the_sample_has_become_worse_or_left_its_range(study):
    stands = {identity(number): number for number in read()}
    (case,) = find_cases((study,), EXPERIMENTS)
    for arm in case.arms:
        if arm.name in SAMPLE[study]:
            for now in numbers(case, arm):
                before = stands[identity(now)]
                assert now.measured == pytest.approx(before.measured, rel=1e-4)
                assert abs(now.error) <= max(NEGLIGIBLE, WORSE * abs(before.error)), (
                    "worse: make accuracy, if on purpose"
                )
                assert now.is_inside or not before.is_inside, "outside its range: make accuracy, if on purpose"
                assert now.half_width == pytest.approx(before.half_width, rel=0.1), "another width: make accuracy"


def test_every_arm_has_numbers():
    """Else: make accuracy."""
    told = {(number.study, number.arm) for number in read()}
    for case in find_cases((), EXPERIMENTS):
        for arm in case.arms:
            if {"mean_ttft_ms", "mean_tpot_ms", "request_throughput"} & arm.measured.keys():
                assert (case.name, arm.name) in told or arm.name.endswith("-roofline")


def test_what_counts_has_all_states_of_knowledge():
    assert [row[0] for row in coverage(read())] == [known for known in KNOWN for _ in range(3)]


def test_coverage_of_groups_is_that_of_all_numbers():
    alone = [one for one in read() if one.known == KNOWN[-1]]
    for field in ("study", "gpu", "engine"):
        rows = coverage_by(read(), field)
        assert sum(int(row[2]) for row in rows) == len(alone)
        inside = sum(round(int(row[2]) * float(row[3].rstrip("%")) / 100) for row in rows)
        assert inside == pytest.approx(sum(one.is_inside for one in alone), abs=2)


def test_coverage_of_measured_and_unmeasured_gpus_is_that_of_all_numbers():
    found = read()
    rows = on_gpus(found)
    assert sum(int(row[2]) for row in rows) == sum(one.known in BLIND for one in found)
    assert [row[1:] for row in rows[3:]] == [row[1:] for row in coverage_by(found, "known")]


def ranged() -> list[Number]:
    return [one for one in read() if one.known in BLIND]


def test_a_value_inside_its_range_needs_at_most_the_present_width():
    assert all((needed(one) <= 1 + 1e-9) == one.is_inside for one in ranged())


def test_the_chosen_width_is_the_smallest_that_holds_enough():
    for metric in METRICS:
        group = [one for one in ranged() if one.metric == metric]
        held = [sum(needed(one) <= width for one in group) for width in (chosen(group) - STEP, chosen(group))]
        assert held[0] < HELD * len(group) <= held[1]


def test_halves_share_no_study():
    first, second = halves(ranged())
    assert sorted(map(identity, first + second)) == sorted(map(identity, ranged()))
    assert not {one.study for one in first} & {one.study for one in second}


def test_a_source_does_not_choose_the_width_that_judges_it():
    group = [one for one in ranged() if one.metric == "TTFT"]
    exact = [replace(one, study="exact", measured=one.predicted) for one in group]
    beyond = [replace(one, study="beyond", measured=2 * one.high) for one in group]
    assert left_out(exact + beyond, lambda one: one.study) == 0.5


def test_the_width_of_ranges_is_the_smallest_by_the_rule():
    """Else: another KERNELS_SPREAD and make accuracy."""
    asked = max(float(row[3]) for row in widths(read()))
    assert log(KERNELS_SPREAD - 0.05) / log(KERNELS_SPREAD) < asked <= 1


def test_missed_groups_are_large_and_have_few_values_inside():
    groups: dict[tuple[str, str, str], list[bool]] = {}
    for one in ranged():
        groups.setdefault((one.study, one.known, one.metric), []).append(one.is_inside)
    missed = {name for name, inside in groups.items() if len(inside) >= LEAST_GROUP and fmean(inside) < ASKED_GROUP}
    assert missed
    assert {tuple(row[:3]) for row in missed_groups(read()) if row[0] in {one.study for one in ranged()}} == missed


def test_light_loads_are_those_of_few_clients():
    found = [one for one in read() if one.metric == "TTFT"]
    light = [one for one in found if one.load in {f"{count} clients" for count in range(1, 9)} and not one.fitted]
    counts = [int(cell.split(" of ")[1].split(",")[0]) for row in light_loads(found) for cell in row[2:] if cell]
    assert sum(counts) == len(light)


def test_a_stricter_rule_says_fewer_signs_and_none_that_the_other_does_not_say():
    found = list(signs(read()))
    assert all(holds_at_both_ends(sign) for sign in found if ranges_are_apart(sign))
    rows = [[int(cell) for cell in row[1:]] for row in counted(read())]
    assert [sum(row) for row in rows] == [len(found)] * len(RULES)
    assert [row[2] for row in rows] == sorted(row[2] for row in rows)


def test_a_sign_is_judged_the_same_from_either_arm():
    for sign in signs(read()):
        turned = sign._replace(before=sign.after, after=sign.before)
        assert [turned.verdict(rule) for rule in RULES.values()] == [sign.verdict(rule) for rule in RULES.values()]


def test_the_readme_has_the_table():
    """Else: make accuracy."""
    assert in_few_rows(read()) in README.read_text(encoding="utf-8")


def test_the_page_of_the_default_cost_has_the_tables_of_widths_and_groups():
    """Else: python -m docs.accuracy --coverage."""
    page = (EXPERIMENTS / "default-cost" / "README.md").read_text(encoding="utf-8")
    found = read()
    rows = [*on_gpus(found), *widths(found), *missed_groups(found)]
    assert [row for row in rows if f"| {' | '.join(row)} |" not in page] == []
