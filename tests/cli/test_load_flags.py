"""One command without a file: the flags of a model and a load."""

import json
import shlex

import pytest

from pdsim.cli import main
from pdsim.scenario.load_options import LoadOptions
from pdsim.scenario.loading import load_scenario
from pdsim.study.sweeping.sweep import read_sweep
from pdsim.workload.client import ClosedLoop, Poisson
from pdsim.workload.lengths import Lognormal
from tests.sweep_files import write_sweep

FLAGS = ("--model", "llama-3.1-8b", "--isl", "300", "--osl", "20", "--rate", "40/s", "--requests", "30")
SCENARIO = """\
model: qwen3-0.6b
prefill: {gpu: h100}
decode: {gpu: h100}
workload: {use: random_lengths, num_requests: 20, input_tokens: 200, output_tokens: 5}
client: {use: open_loop, arrivals: {use: poisson, rate: 60/s}}
"""


def said(capsys, *words, code=0):
    with pytest.raises(SystemExit) as exited:
        main(list(words))
    assert exited.value.code == code
    told = capsys.readouterr()
    return told.err if code else told.out


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_run_needs_no_file(capsys, tmp_path):
    made = json.loads(said(capsys, "run", *FLAGS, "--no-ranges", "--out", "kept", "--json"))
    assert made["completed"] == 30
    kept = load_scenario(tmp_path / "kept" / "scenario.yaml")
    assert kept.client.arrivals == Poisson(40)
    assert kept.workload.input_tokens == Lognormal(300, 150, 1200)


def test_the_command_that_explains_a_run_has_the_runs_load(capsys, tmp_path):
    (tmp_path / "one.yaml").write_text(SCENARIO)
    out = said(capsys, "run", "one.yaml", "--concurrency", "3", "--isl", "300", "--set", "page_size=16", "--no-ranges")
    (line,) = [line for line in out.splitlines() if line.startswith("What limits it:")]
    words = shlex.split(line.partition(":")[2])
    assert words[:3] == ["pdsim", "explain", "one.yaml"]
    explained = load_scenario(tmp_path / "one.yaml", [word for word in words[3:] if "=" in word])
    assert explained.client == ClosedLoop(3)
    assert explained.workload.input_tokens == Lognormal(300, 150, 1200)
    assert explained.page_size == 16


def test_plan_needs_no_file(capsys):
    found = json.loads(said(capsys, "plan", *FLAGS, "--max-gpus", "2", "--seeds", "1", "--engine", "here", "--json"))
    assert "llama-3.1-8b" in json.dumps(found)


def test_plan_answers_for_other_loads_without_further_flags(capsys):
    words = ("--max-gpus", "2", "--seeds", "1", "--engine", "here", "--speedup", "0.5")
    assert "At 0.5 times this load: " in said(capsys, "plan", *FLAGS, *words)


def test_ask_needs_no_file(capsys):
    found = json.loads(said(capsys, "ask", "explain-ttft", *FLAGS, "--seeds", "1", "--jobs", "1", "--json"))
    assert "llama-3.1-8b" in found["load"]
    assert "30 requests" in found["load"]
    assert "40 a second" in found["load"]


def test_sweep_changes_the_load_of_its_scenario(capsys, tmp_path):
    path = write_sweep(tmp_path)
    words = ("--isl", "50", "--osl", "3", "--rate", "40/s", "--requests", "6")
    said(capsys, "sweep", str(path), *words, "--jobs", "1", "--ranges", "0", "--out", "kept", "--json")
    runs = [run for point in read_sweep(tmp_path / "kept").points for run in point.replications]
    assert {run.row["completed"] for run in runs} == {6}
    assert {run.scenario["client"]["arrivals"]["rate"] for run in runs} == {"40/s"}


@pytest.mark.parametrize(
    "words", [(), ("--model", "llama-3.1-8b"), ("--rate", "4/s"), ("--isl", "9", "--rate", "4/s")], ids=str
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_missing_load_is_asked_for(capsys, command, words):
    told = said(capsys, command, *words, code=2)
    assert "the load is missing" in told
    assert "--isl 6000 --osl 250 --rate 3.5/s" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rate", "4/s", "--concurrency", "3"), "exclude each other"),
        (("--isl", "0", "--osl", "4", "--rate", "4/s"), "from 1 to 100,000,000 tokens"),
        (("--isl", "9", "--osl", "4", "--rate", "4"), "bare number 4"),
    ],
)
def test_wrong_flags_are_named(capsys, words, says):
    assert says in said(capsys, "plan", *words, code=2)


def test_flags_change_a_file(capsys, tmp_path):
    said(capsys, "init", "own.yaml", *FLAGS)
    assert load_scenario(tmp_path / "own.yaml").workload.output_tokens == Lognormal(20, 10, 80)
    words = ("--concurrency", "2", "--no-ranges", "--out", "kept", "--json")
    assert json.loads(said(capsys, "run", "own.yaml", *words))["completed"] == 28, "two warm up"
    assert isinstance(load_scenario(tmp_path / "kept" / "scenario.yaml").client, ClosedLoop)


def test_a_file_keeps_its_number_of_requests():
    assert not any("num_requests" in change for change in LoadOptions(rate="4/s").changes(has_own_load=True))
