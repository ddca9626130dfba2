"""`pdsim explain --tail` as a user calls it."""

import json
import re
import shlex

import pytest

from pdsim import Observation, load_scenario, simulate
from pdsim.cli import main
from tests.cli.test_explain_cases import SCENARIO

BURST = "client={use: open_loop, arrivals: {use: gamma, rate: 60/s, burstiness: 0.2}}"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words, code=0):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert (stop.value.code or 0) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return call


def test_groups_have_their_cause_their_relief_and_an_example_to_look_at(call, path):
    words = ("explain", path, "--tail", "ttft", "--tail-percent", "10", "--set", BURST, "--set", "seed=3")
    found = json.loads(call(*words, "--json"))
    assert found["num_requests"] == sum(group["num_requests"] for group in found["groups"]) == 16
    group = found["groups"][0]
    assert group["cause"] == "queued for prefill behind others"
    assert group["relief"] == "prefill.instances, prefill.tp, a faster prefill.gpu"
    assert group["median_ms"] > group["all_median_ms"]
    program, *words_of_example = shlex.split(group["explain"])
    assert program == "pdsim"
    one = json.loads(call(*words_of_example, "--json"))
    assert one["request_id"] == group["example"]
    assert (one["first_token_ns"] - one["arrival_ns"]) / 1e6 >= found["from_ms"]
    text = call(*words)
    assert group["explain"] in text
    assert "queued for prefill behind others" in text
    assert "relieved by prefill.instances, prefill.tp, a faster prefill.gpu" in text


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2e"])
@pytest.mark.parametrize("cluster", ["pair", "aggregated"])
def test_it_is_readable_at_80_columns(call, path, monkeypatch, metric, cluster):
    monkeypatch.chdir(path.parent)
    changes = ["prefill=null", "decode=null", "aggregated={gpu: h100}"] if cluster == "aggregated" else []
    sets = [word for change in changes for word in ("--set", change)]
    text = call("explain", path.name, "--tail", metric, "--tail-percent", "20", *sets)
    told = [line for line in text.splitlines() if "pdsim explain" not in line]
    assert max(map(len, told)) <= 80
    assert re.search(r"median of all: [\d.,]+ m?s", text)
    assert "…" not in text


def test_a_tornado_adds_what_limits_the_run(call, path):
    words = ("explain", path, "--tail", "tpot", "--tornado", "--set", "workload.num_requests=40")
    assert {"groups", "limits", "sensitivities"} <= json.loads(call(*words, "--json")).keys()
    assert "what limits TPOT p99" in call(*words)


def test_a_folder_and_python_say_the_same(call, path, tmp_path):
    call("run", path, "--out", tmp_path / "run")
    kept = json.loads(call("explain", tmp_path / "run", "--tail", "e2e", "--json"))["groups"]
    found = simulate(load_scenario(path), Observation(levels=True)).tail("e2e").groups
    assert [group["cause"] for group in kept] == [group.cause for group in found]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tail", "p99"], "--tail"),
        (["--tail", "ttft", "--tail-percent", "0"], "for --tail-percent. Must be > 0"),
        (["--tail", "ttft", "--tail-percent", "nan"], "for --tail-percent. Must be"),
        (["--tail", "ttft", "--request", "3"], "--request and --tail exclude each other"),
        (["--tail", "ttft", "--cost"], "--cost and --tail exclude each other"),
        (["--tail", "tpot", "--set", "workload.output_tokens=1"], "no request with two output tokens finished"),
    ],
    ids=str,
)
def test_what_cannot_be_asked(call, path, words, says):
    assert says in call("explain", path, *words, code=2)
