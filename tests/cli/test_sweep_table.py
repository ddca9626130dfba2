"""The table of a sweep: what is best, missed, saturated, failed."""

import json

import pytest

from pdsim.cli import main
from tests.sweep_files import SCENARIO, write_sweep

SWEEP = """\
scenario: base.yaml
seeds: [1, 2]
points:
  - {client.arrivals.rate: 2/s}
  - {client.arrivals.rate: 1/s}
  - {client.arrivals.rate: 10000/s}
  - {prefill.tp: 5}
slos: {chat: ttft < 1 s and tpot < 1 ms for 50 %, loose: e2e < 1 h for 99 %}
"""
THREE_FIELDS = """\
scenario: base.yaml
seeds: [1, 2]
grid:
  prefill.instances, decode.instances: [[1, 2], [2, 1]]
  decode.radix_cache: [false, true]
slos: {chat: ttft < 1 s and tpot < 20 ms for 99 %}
"""
MANY_REQUESTS = SCENARIO.replace("num_requests: 20", "num_requests: 300")


def output(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    assert not stop.value.code
    return capsys.readouterr().out


def test_eighty_columns_hold_the_percentile_of_the_slo_and_what_misses_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ratios = """\
scenario: base.yaml
grid: {"prefill.instances, decode.instances": [[1, 2], [2, 1]]}
slos: {chat: ttft < 1 us for 90 %}
"""
    lines = output(capsys, "sweep", write_sweep(tmp_path, ratios), "--out", tmp_path / "out", "--jobs", 1).splitlines()
    table = "\n".join(lines[:-1])
    assert "…" not in table
    assert max(map(len, lines[:-1])) <= 80
    assert table.count("p90, ms") == table.count("missed") == 2
    assert "prefill." in table


def test_eighty_columns_name_the_points_that_ranges_are_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = write_sweep(tmp_path, THREE_FIELDS, SCENARIO.replace("cost: roofline\n", ""))
    table, ranges = output(capsys, "sweep", path, "--out", tmp_path / "out", "--jobs", 1).split("between the fastest")
    assert "…" not in table
    assert "Left out at this width (--json has all): requests/s per GPU" in table
    shown, ranged = (
        {line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.lstrip()[:1].isdigit()}
        for text in (table, ranges)
    )
    assert shown == {"1", "2", "3", "4"}
    assert len(ranged) == 3
    assert ranged < shown


def test_each_slo_has_a_table(tmp_path, capsys):
    path = write_sweep(tmp_path, SWEEP, MANY_REQUESTS)
    text = output(capsys, "sweep", path, "--out", tmp_path / "out", "--jobs", 1)
    chat, loose = text.split("loose: E2E < 3600 s for 99 %; 2 of 4 points meet it")
    assert "chat: TTFT < 1 s and TPOT < 1 ms for 50 %; 0 of 4 points meet it" in chat
    rows = [line.split() for line in loose.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows[:3]] == ["1", "2", "3"], "the higher rate first, what is saturated last"
    assert rows[2][-3:] == ["-", "-", "saturated"]
    assert "±" in loose
    assert chat.count("missed") == 2
    assert "1 failed: prefill: tp 5 does not divide the 16 query heads of qwen3-0.6b" in loose
    assert "8 runs computed, 0 kept from before" in loose

    found = json.loads(output(capsys, "sweep", path, "--out", tmp_path / "out", "--json"))
    assert (found["computed"], found["kept"], found["best"]["loose"]) == (0, 8, [1, 2, 3])
    assert found["points"][3] == {
        "point": 4,
        "fields": {"prefill.tp": 5},
        "error": "prefill: tp 5 does not divide the 16 query heads of qwen3-0.6b",
    }
    assert found["points"][0]["metrics"]["completed"] == {"mean": 300.0, "half_width": 0.0}
