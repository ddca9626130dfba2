"""What the page is answered is what a run says, and what it may not choose is an error in words."""

import json
import shlex
from contextlib import closing

import pytest

from pdsim.cli import main
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.engine import InProcessEngine, Work
from pdsim.study.planning.trials import Trials
from pdsim.study.questions.base import AskOptions, base_of
from pdsim.study.slo import DEFAULT_SLO, Slo
from pdsim.study.store import Store
from pdsim.web.board import Board, with_fewer

SCENARIO = """\
model: llama-3.1-8b
prefill: {gpu: h100}
decode: {gpu: h100}
workload: {use: random_lengths, num_requests: 60, input_tokens: 900, output_tokens: 30}
client: {use: open_loop, arrivals: {use: poisson, rate: 8/s}}
"""
ONE = {"gpu": "h100", "tp": 1, "instances": 1}
CHOSEN = {
    "model": "llama-3.1-8b",
    "kind": "separate",
    "prefill": {**ONE, "instances": 2},
    "decode": ONE,
    "aggregated": ONE,
    "radix": False,
    "router": "least_loaded",
    "load": 12,
}


@pytest.fixture
def board(tmp_path):
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    base = with_fewer(base_of(path, AskOptions(), (), folder=tmp_path, starter={}), 40)
    with closing(InProcessEngine()) as engine:
        store = Store(tmp_path / "runs")
        yield Board(Trials(base, Slo.parse(DEFAULT_SLO), 1, Work(store, engine)), {"h100": 2.5})


def test_what_a_scenario_has_is_what_the_page_begins_with(board):
    controls = json.loads(json.dumps(board.controls()))
    assert controls["now"] == {**CHOSEN, "prefill": ONE, "router": "cache_aware", "load": 8.0}
    assert board.answer(controls["now"])["requests"] == 40


@pytest.mark.parametrize("kind", ["separate", "aggregated"])
def test_an_answer_is_what_a_run_says(board, kind, capsys):
    answer = json.loads(json.dumps(board.answer({**CHOSEN, "kind": kind})))
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(answer["command"])[1:], "--json"])
    assert not ended.value.code
    summary = json.loads(capsys.readouterr().out)
    values = {metric["title"]: metric["values"] for metric in answer["metrics"]}
    assert values["TTFT mean"][0] == pytest.approx(summary["mean_ttft_ms"])
    assert values["requests/s"][0] == pytest.approx(summary["request_throughput"])
    fastest, slowest = values["TTFT mean"][1:]
    assert fastest < values["TTFT mean"][0] < slowest
    mean_ms = sum(stage["ms"] for stage in answer["stages"])
    assert mean_ms == pytest.approx(summary["mean_e2e_latency_ms"])
    num_gpus = 3 if kind == "separate" else 1
    assert answer["gpus"] == num_gpus
    assert answer["price_per_h"] == 2.5 * num_gpus
    assert answer["kw"] == pytest.approx(0.7 * num_gpus)


def test_without_a_scenario_the_command_writes_one(tmp_path, monkeypatch, capsys):
    """Nothing of it depends on the server's own folder."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,in_tokens,out_tokens\n" + "".join(f"{i / 8},{700 + 9 * i},30\n" for i in range(50)))
    (tmp_path / "server").mkdir()
    (tmp_path / "user").mkdir()
    base = base_of(None, AskOptions(trace=trace), ["page_size=32"], folder=tmp_path / "server", starter={"seed": 4})
    with closing(InProcessEngine()) as engine:
        store = Store(tmp_path / "runs")
        trials = Trials(with_fewer(base, 40), Slo.parse(DEFAULT_SLO), 1, Work(store, engine))
        answer = Board(trials, {}).answer({**CHOSEN, "load": 2})
    monkeypatch.chdir(tmp_path / "user")
    summaries = []
    for command in answer["command"].split("&&"):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(command)[1:], "--json"])
        assert not ended.value.code
        summaries.append(json.loads(capsys.readouterr().out))
    assert answer["metrics"][0]["values"][0] == pytest.approx(summaries[1]["mean_ttft_ms"])
    assert str(tmp_path / "server") not in answer["command"]


def test_unequal_tensor_parallelism_is_staged(board, capsys):
    answer = board.answer({**CHOSEN, "decode": {**ONE, "tp": 2}})
    assert answer["cluster"] == "2P of TP1, 1D of TP2 on h100, staged"
    with pytest.raises(SystemExit):
        main([*shlex.split(answer["command"])[1:], "--json"])
    assert answer["metrics"][0]["values"][0] == pytest.approx(json.loads(capsys.readouterr().out)["mean_ttft_ms"])


def test_without_a_scenario_the_page_begins_with_gpus_that_have_a_price(tmp_path):
    base = base_of(None, AskOptions(), (), folder=tmp_path, starter={})
    with closing(InProcessEngine()) as engine:
        store = Store(tmp_path / "runs")
        trials = Trials(base, Slo.parse(DEFAULT_SLO), 1, Work(store, engine))
        shown = [Board(trials, prices).controls()["now"]["prefill"]["gpu"] for prices in ({}, {"b200": 6.0})]
    assert shown == ["h200", "b200"]


def test_a_load_moves_latencies(board):
    ttft = [board.answer({**CHOSEN, "load": load})["slo"][0]["values"][0] for load in (1, 100)]
    assert ttft[0] < ttft[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "llama-3.1-9b"}, "did you mean 'llama-3.1-8b'?"),
        ({"prefill": {**ONE, "instances": 99}}, "from 1 to 16"),
        ({"prefill": {**ONE, "gpu": "h1000"}}, "h1000"),
        ({"prefill": {}}, "no cluster: KeyError('gpu')"),
        ({"router": "nearest"}, "nearest"),
        ({"load": -1}, "load"),
        ({"model": "llama-3.1-405b"}, "memory"),
    ],
)
def test_what_cannot_be_is_said(board, wrong, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")):
        board.answer({**CHOSEN, **wrong})


@pytest.mark.parametrize("load", [float("nan"), float("inf"), 10**400, -1, 0, 1e9, True, "8", [8]])
def test_a_load_beyond_the_pages_range_is_refused(board, load):
    with pytest.raises(ConfigError, match=r"load: a number from 0\.1 to 200"):
        board.answer({**CHOSEN, "load": load})


def test_old_answers_are_forgotten(board, tmp_path, monkeypatch):
    monkeypatch.setattr("pdsim.web.board.MOST_KEPT", 5)
    first = board.answer(CHOSEN)
    for load in range(1, 40):
        board.answer({**CHOSEN, "load": load})
        assert len(list((tmp_path / "runs" / "points").iterdir())) <= 3 * 6  # a run, its fastest and its slowest
    assert board.answer(CHOSEN) == first
