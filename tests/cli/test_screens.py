"""The first screens of run and compare at 80 columns: an answer, limits in their own units, confidence, chance."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdsim.metrics.summary_rows import SUMMARY_ROWS
from pdsim.scenario.loading import load_scenario
from pdsim.sim.simulation import simulate
from pdsim.study.repetition import change, repeat
from tests.cli.test_commands import output, output_json

SCENARIO = """\
name: NAME
model: qwen3-0.6b
prefill: {gpu: h100, instances: 2}
decode: {gpu: h100}
router: cache_aware
workload: {use: random_lengths, num_requests: 80, input_tokens: {use: uniform, low: 100, high: 900}, output_tokens: 20}
client: {use: open_loop, arrivals: {use: poisson, rate: 60/s}}
"""
VISIBLE = 0.005
"""Relative difference that a screen may tell."""
RATE = next(row for row in SUMMARY_ROWS if row.field == "request_throughput")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(SCENARIO.replace("NAME", name))
    return tmp_path


def test_a_run_answers_first_and_says_how_sure_it_is(capsys):
    text = output(capsys, "run", "one.yaml", "--slo", "ttft p99 < 1 s, tpot p99 < 90 ms")
    assert text.startswith("qwen3-0.6b on 3 x H100 (2P1D of TP1) meets your SLO\n")
    assert re.search(r"TTFT p99 +1 s +[\d.]+ ms +[\d.]+ ms to [\d.]+ ms", text)
    assert "Confidence: medium" in text
    assert "pdsim observe URL" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "decode_bootstrap" not in text
    assert "decode_bootstrap" in output(capsys, "run", "one.yaml", "--details")


def test_requests_without_times_are_said_to_be_sent_at_once(capsys):
    text = " ".join(output(capsys, "run", "one.yaml", "--no-ranges", "--set", "client=open_loop").split())
    assert "80 requests (mean 462 tokens in, 20 out), sent all at once." in text
    assert "sent 60 a second." in " ".join(output(capsys, "run", "one.yaml", "--no-ranges").split())


def test_without_a_range_no_sentence_speaks_of_its_ends(capsys):
    assert "The range goes from" in " ".join(output(capsys, "run", "one.yaml").split())
    text = output(capsys, "run", "one.yaml", "--no-ranges")
    assert "Confidence: low\n  Step times were not measured on a server, and there is no range." in text


def test_a_verdict_that_chance_turns_says_so(capsys):
    """The limit lies within the band of repeated runs."""
    runs = [
        output_json(capsys, "run", "one.yaml", "--no-ranges", "--set", f"network.message_latency={us} us")[
            "p99_ttft_ms"
        ]
        for us in (50, 45, 47.5, 52.5, 55)
    ]
    assert min(runs) < max(runs), "messages move TTFT"
    limit = (min(runs) + max(runs)) / 2
    text = output(capsys, "run", "one.yaml", "--slo", f"ttft p99 < {limit:.9f} ms")
    assert "Confidence: low\n  The verdict depends on chance." in text
    slo = output_json(capsys, "run", "one.yaml", "--slo", f"ttft p99 < {limit:.9f} ms")["pdsim"]["slo"]
    assert 0 < slo["runs_that_meet"] < slo["runs"] == 5


def test_runs_that_are_the_same_cannot_be_told_apart(capsys):
    text = output(capsys, "compare", "one.yaml", "two.yaml")
    assert text.startswith("two differs from one by no more than chance\n")
    assert "one and two: qwen3-0.6b on 3 x H100" in text
    assert max(map(len, text.splitlines())) <= 80


def test_runs_with_different_seeds_are_said_to_have_different_loads(capsys, folder):
    said = "The runs have different seeds (one 1, two 7), so each has another draw of the load."
    assert "different seeds" not in output(capsys, "compare", "one.yaml", "two.yaml", "--repeats", "1")
    (folder / "one.yaml").write_text(f"{SCENARIO.replace('NAME', 'one')}seed: 1\n")
    (folder / "two.yaml").write_text(f"{SCENARIO.replace('NAME', 'two')}seed: 7\n")
    for repeats in ("0", "1"):
        text = output(capsys, "compare", "one.yaml", "two.yaml", "--repeats", repeats)
        assert said in " ".join(text.split())


def test_a_long_name_is_broken_only_if_there_is_no_room(capsys, folder, monkeypatch):
    names = ("a_baseline_with_round_robin", "another_run_with_random_routing")
    for name in names:
        (folder / f"{name}.yaml").write_text(SCENARIO.replace("NAME", name))

    def heads(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = output(capsys, "compare", *(f"{name}.yaml" for name in names), "--repeats", "0")
        lines = text.splitlines()
        assert max(map(len, lines)) <= columns
        (end,) = [i for i, line in enumerate(lines) if line.startswith(" ──")]
        begin = max(i for i in range(end) if not lines[i].strip())
        return lines[begin + 1 : end]

    assert all(name in " ".join(heads(120)) for name in names)
    rows = [line.split()[:2] for line in heads(60)]
    assert "…" not in str(rows)
    assert len(rows) > 1


def test_a_difference_within_chance_is_no_cause(capsys, folder):
    """Of two routers, one has the shorter latency p99 with some draws of the load only."""
    for name, router in (("one", "random"), ("two", "power_of_two")):
        (folder / f"{name}.yaml").write_text(SCENARIO.replace("NAME", name).replace("cache_aware", router))
    _, told = output_json(capsys, "compare", "one.yaml", "two.yaml")
    differences = told["differences"]
    by_chance = [one for one in differences.values() if one["least"] < 0 < one["most"]]
    assert by_chance, "some differences change their sign"
    assert " chance " in output(capsys, "compare", "one.yaml", "two.yaml")
    headline = output(capsys, "compare", "one.yaml", "two.yaml").partition("\n  one")[0]
    assert "better: TTFT median" in headline
    for row in SUMMARY_ROWS:
        if row.field in differences and differences[row.field]["least"] < 0 < differences[row.field]["most"]:
            assert f"{row.title} " not in headline


def test_repetitions_are_kept_beside_a_run(capsys, folder, monkeypatch):
    for name in ("one", "two"):
        output(capsys, "run", f"{name}.yaml", "--no-ranges", "--out", folder / name)
    first = output(capsys, "compare", "one", "two")
    assert len(list((folder / "one" / "repeats" / "points").iterdir())) == 4
    monkeypatch.setattr(
        "pdsim.study.points.engine.Pool.run", lambda _self, tasks: iter(pytest.fail("again") if tasks else ())
    )
    assert output(capsys, "compare", "one", "two") == first
    assert "without repetitions (--repeats 4)" in output(capsys, "compare", "one", "two", "--repeats", "0")


def test_repetitions_leave_a_folder_alone_that_a_link_leads_to(capsys, folder):
    for name in ("one", "two"):
        output(capsys, "run", f"{name}.yaml", "--no-ranges", "--out", folder / name)
        (folder / "elsewhere" / name).mkdir(parents=True)
        (folder / name / "repeats").symlink_to(folder / "elsewhere" / name)
    assert "Each run was repeated" in output(capsys, "compare", "one", "two")
    assert [path for path in (folder / "elsewhere").rglob("*") if path.is_file()] == []


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=5))
@example([(1.0, 1.5), (1.0, 1.001)])
@example([(1.0, 1.001), (1.0, 1.5)])
def test_a_difference_counts_only_if_all_runs_agree(runs):
    found = change(RATE, runs)
    signs = {other > one for one, other in runs}
    assert found.least <= found.own <= found.most
    smallest = min(abs(other / one - 1) for one, other in runs)
    assert found.is_certain == (len(signs) == 1 and found.least * found.most > 0 and smallest >= VISIBLE)


def test_repetitions_have_seeds_of_their_own(folder):
    """None repeats the run itself, nor another repetition."""
    for index, seed in enumerate((0, 7)):
        (folder / "one.yaml").write_text(f"{SCENARIO}seed: {seed}\n")
        own = simulate(load_scenario(folder / "one.yaml")).summary()
        rows = repeat(folder / "one.yaml", (), 3, folder / f"kept{index}", None)
        assert len({own["mean_ttft_ms"], *(row["mean_ttft_ms"] for row in rows)}) == 4


def test_an_answer_says_what_it_reaches_and_how_sure_it_is(capsys):
    words = ("ask", "routing", "one.yaml", "--seeds", "2", "--jobs", "1")
    text = output(capsys, *words)
    assert re.search(r"TTFT p90 +2 s +[\d.]+ ms +[\d.]+ ms to [\d.]+ ms", text)
    assert re.search(r"^ \w+ .* the answer +$", text, re.MULTILINE)
    assert "\nConfidence: " in text
    assert "One request at a time" not in text
    assert "One request at a time" in output(capsys, *words, "--details")
    assert max(map(len, text.splitlines())) <= 80
