"""Runs in which requests fail, as a user sees them: the exit code is 1, and the reason stands in the first table."""

import json
import re

import pytest

from pdsim.cli import main

SCENARIO = """\
name: few slots
model: qwen3-8b
prefill: {gpu: h100}
decode: {gpu: h100, max_running_requests: 4, extra_slots: 0}
front_end: {}
cost: {use: roofline}
health: {bootstrap_timeout: 2 s, max_retries: 0}
workload: {use: random_lengths, num_requests: 24, input_tokens: 500, output_tokens: 200}
client: {use: closed_loop, concurrency: 16}
"""
REASON = "decode granted no pages within bootstrap_timeout 2 s: max_running_requests was reached"
RELIEF = "relieved by decode.max_running_requests"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words, code=0):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        printed = capsys.readouterr()
        assert (stop.value.code or 0) == code, printed.err
        return printed.out, printed.err

    return call


def unwrapped(text):
    return re.sub(r"\s+", " ", text)


def test_a_run_with_failed_requests_exits_with_1_and_says_why(call, path, tmp_path):
    shown, error = call("run", path, "--no-ranges", "--out", tmp_path / "run", code=1)
    assert "decode granted no pages within bootstrap_timeout" in unwrapped(shown.partition("where the time goes")[0])
    (count,) = re.findall(r"few slots: (\d+) of 24 requests failed", error)
    assert f"{REASON}; {RELIEF}" in error
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (failure,) = summary["pdsim"]["failures"]
    assert failure["num_requests"] == summary["pdsim"]["failed"] == int(count) > 0
    assert summary["completed"] == 24 - int(count)


@pytest.mark.parametrize("flags", [(), ("--tail", "ttft"), ("--tail", "e2e", "--tail-percent", "10")])
def test_explain_shows_failed_requests_and_an_example(call, path, flags):
    shown, _ = call("explain", path, *flags)
    assert f"{REASON}; {RELIEF}" in shown
    (example,) = re.findall(r"^  pdsim explain .*case\.yaml --request (\d+)$", shown.partition(REASON)[2], re.MULTILINE)
    assert "failed decode-0 granted no pages" in call("explain", path, "--request", example)[0]
    found = json.loads(call("explain", path, *flags, "--json")[0])
    assert [failure["reason"] for failure in found["failures"]] == [REASON]


def test_a_tail_of_failed_requests_alone_is_shown(call, path):
    changes = ("--set", "health.waiting_timeout=1 ms", "--set", "client.concurrency=1")
    shown, _ = call("explain", path, "--tail", "ttft", *changes)
    assert "24 of 24 requests failed" in shown
    shown, _ = call("run", path, "--no-ranges", *changes, code=1)
    assert re.findall(r"(?:TTFT|TPOT|ITL|latency) .*\d", shown.replace("p99", "")) == []


def test_compare_names_each_run_that_failed(call, path, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(SCENARIO.replace("few slots", "fewer slots").replace("requests: 4", "requests: 3"))
    shown, error = call("compare", path, other, code=1)
    assert error.count("requests failed") == 2
    assert "was reached" in shown


def test_failures_that_the_scenario_asks_for_are_no_failed_run(call, path):
    shown, _ = call("run", path, "--no-ranges", "--set", "faults=[{abort_fraction: 1, within: 1 ms}]")
    assert "aborted by the client" in unwrapped(shown)


def test_a_sweep_says_which_points_have_failed_requests(call, path, tmp_path):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("scenario: case.yaml\ngrid: {decode.max_running_requests: [4, 16]}\n")
    shown, _ = call("sweep", sweep, "--out", tmp_path / "points", "--jobs", "1", "--engine", "here")
    assert "1 of 2, such as decode.max_running_requests=4" in unwrapped(shown)
    assert REASON in unwrapped(shown)
    assert shown.count("requests failed") == 2  # its note, and the line above
    sweep.write_text("scenario: case.yaml\ngrid: {health.waiting_timeout: [1 ms]}\n")
    shown, _ = call("sweep", sweep, "--out", tmp_path / "none", "--jobs", "1", "--engine", "here", code=1)
    assert "every request failed: prefill sent no KV within waiting_timeout 0.001 s" in unwrapped(shown)


def test_an_answer_warns_of_failed_requests(call, path):
    shown, _ = call("ask", "pd-ratio", path, "--jobs", "1", "--seeds", "1")
    assert REASON in unwrapped(shown)
