"""What the page is answered is what a run says, and what it may not choose is an error in words."""

import json
import shlex
from contextlib import closing, contextmanager

import pytest

from pdsim.cli import main
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.base import AskOptions, base_of
from pdsim.study.points.engine import InProcessEngine, Work
from pdsim.study.points.store import Store
from pdsim.study.verdict.slo import DEFAULT_SLO, Slo
from pdsim.web.board import Board

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
    "weight_dtype": None,
    "kv_dtype": None,
    "trace": "",
    "first": 1,
    "count": 40,
    "slo": DEFAULT_SLO,
    "prices": {"h100": 2.5},
}


@contextmanager
def board_of(folder, scenario=SCENARIO, changes=(), starter=None, trace=None, prices=None):
    """A board of that scenario; without one, of a starter."""
    path = None if scenario is None else folder / "scenario.yaml"
    if path is not None:
        path.write_text(scenario)
    base = base_of(path, AskOptions(trace=trace), changes, folder=folder, starter=starter or {})
    with closing(InProcessEngine()) as engine:
        work = Work(Store(folder / "runs"), engine)
        yield Board(base, work, Slo.parse(DEFAULT_SLO), {"h100": 2.5} if prices is None else prices, 40)


@pytest.fixture
def board(tmp_path):
    with board_of(tmp_path) as made:
        yield made


def summary_of(command, capsys):
    """What the command prints as JSON."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(command)[1:], "--json"])
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def test_what_a_scenario_has_is_what_the_page_begins_with(board):
    controls = json.loads(json.dumps(board.controls()))
    own = {**CHOSEN, "prefill": ONE, "router": None, "load": None, "slo": str(Slo.parse(DEFAULT_SLO))}
    assert controls["now"] == own
    assert controls["own"]["router"] == "cache_aware"
    answer = board.answer(controls["now"])
    assert answer["requests"] == 40
    assert answer["load"]["now"] == 8


@pytest.mark.parametrize("kind", ["separate", "aggregated"])
def test_an_answer_is_what_a_run_says(board, kind, capsys):
    answer = json.loads(json.dumps(board.answer({**CHOSEN, "kind": kind})))
    summary = summary_of(answer["command"], capsys)
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


def test_the_command_names_only_what_differs(board, capsys):
    """The 60 requests, the model, the page size and decode stay as in the file."""
    command = board.answer({**CHOSEN, "router": None, "load": 8})["command"]
    changes = [word for word in shlex.split(command) if "=" in word]
    assert changes == ["prefill.instances=2", "workload.num_requests=40"]


def test_without_a_scenario_the_command_needs_no_file(tmp_path, monkeypatch, capsys):
    """Nothing of it depends on the server's own folder."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,in_tokens,out_tokens\n" + "".join(f"{i / 8},{700 + 9 * i},30\n" for i in range(50)))
    (tmp_path / "server").mkdir()
    (tmp_path / "user").mkdir()
    with board_of(tmp_path / "server", None, ["page_size=32"], {"seed": 4}, trace) as board:
        answer = board.answer({**CHOSEN, "load": 2})
    monkeypatch.chdir(tmp_path / "user")
    found = summary_of(answer["command"], capsys)
    assert answer["metrics"][0]["values"][0] == pytest.approx(found["mean_ttft_ms"])
    assert str(tmp_path / "server") not in answer["command"]
    assert answer["command"].count("workload") == 1


def test_a_trace_and_a_part_of_it_are_chosen(board, tmp_path, capsys):
    trace = tmp_path / "bursts.csv"
    rows = "".join(f"{i / 4},{700 + 9 * i},30\n" for i in range(50))
    trace.write_text(f"arrival_s,in_tokens,out_tokens\n{rows}")
    answer = board.answer({**CHOSEN, "load": None, "trace": str(trace), "first": 31, "count": 13})
    assert answer["part"] == "requests 31 to 43 of 50 in bursts.csv, which arrived within 3 s"
    assert answer["load"]["title"] == "speed-up of the trace"
    assert answer["requests"] == 13
    found = summary_of(answer["command"], capsys)
    assert answer["metrics"][0]["values"][0] == pytest.approx(found["mean_ttft_ms"])
    assert board.answer({**CHOSEN, "load": None})["part"] == "40 made-up requests"


def test_limits_prices_and_types_are_chosen(board, capsys):
    chosen = {**CHOSEN, "slo": "e2e p50 < 9 ms", "prices": {"h100": 4}, "weight_dtype": "fp8", "kv_dtype": "fp8"}
    usual, answer = board.answer(CHOSEN), board.answer(chosen)
    assert answer["price_per_h"] == 12
    assert [(term["goal"], term["met"][0]) for term in answer["slo"]] == [("E2E p50 < 9 ms", False)]
    assert answer["metrics"][1]["values"][0] < usual["metrics"][1]["values"][0]
    found = summary_of(answer["command"], capsys)
    assert answer["metrics"][0]["values"][0] == pytest.approx(found["mean_ttft_ms"])


def test_gaps_between_a_requests_tokens_may_be_limited_later(board, capsys):
    """Runs that are there already have no such gaps."""
    usual = board.answer(CHOSEN)
    answer = board.answer({**CHOSEN, "slo": "itl_p99 < 50 ms for 90 %"})
    assert [term["goal"] for term in answer["slo"]] == ["ITL_P99 < 50 ms for 90 %"]
    assert 0 < answer["slo"][0]["values"][0] <= 100
    assert board.answer(CHOSEN) == usual
    (limit,) = summary_of(answer["command"], capsys)["pdsim"]["slo"]["terms"]
    assert limit["value"] == pytest.approx(answer["slo"][0]["values"][0])


def test_a_page_that_is_opened_again_begins_with_the_scenarios_own_load(board, tmp_path):
    first = board.controls()
    trace = tmp_path / "bursts.csv"
    trace.write_text("arrival_s,in_tokens,out_tokens\n" + "".join(f"{i / 4},700,30\n" for i in range(20)))
    answer = board.answer({**CHOSEN, "load": None, "trace": str(trace), "count": 20})
    assert answer["load"] == {"title": "speed-up of the trace", "range": (0.1, 10), "now": 1}
    assert board.controls() == first
    answer = board.answer({**first["now"], "load": first["load"]["now"]})
    assert answer["load"] == first["load"]
    assert "speedup" not in answer["command"]


def test_a_verdict_that_chance_changes_is_called_so(board):
    (far,) = board.answer({**CHOSEN, "slo": "e2e p50 < 9 ms"})["slo"]
    at_limit = board.answer({**CHOSEN, "slo": f"e2e p50 < {far['values'][0] + 1e-6:.6f} ms"})
    assert at_limit["chance"].startswith("The verdict depends on chance. With messages up to 10% ")
    assert at_limit["chance"].endswith(" of 3 runs meet the SLO.")
    assert not board.answer({**CHOSEN, "slo": "e2e p50 < 9 ms"})["chance"]


def test_another_policy_leaves_the_limit_of_the_queue(tmp_path):
    shedding = "router: {shedding: {use: queue_limit, max_queued_requests: 1}}\n"
    with board_of(tmp_path, SCENARIO + shedding) as board:
        answers = [board.answer({**CHOSEN, "load": 100, "router": router}) for router in (None, "round_robin")]
    assert all(answer["lost"] for answer in answers)


def test_unequal_tensor_parallelism_is_staged(board, capsys):
    answer = board.answer({**CHOSEN, "decode": {**ONE, "tp": 2}})
    assert answer["cluster"] == "2P of TP1, 1D of TP2 on h100, staged"
    found = summary_of(answer["command"], capsys)
    assert answer["metrics"][0]["values"][0] == pytest.approx(found["mean_ttft_ms"])


def test_without_a_scenario_the_page_begins_with_gpus_that_have_a_price(tmp_path):
    shown = []
    for prices in ({}, {"b200": 6.0}):
        with board_of(tmp_path, None, prices=prices) as board:
            shown.append(board.controls()["now"]["prefill"]["gpu"])
    assert shown == ["h200", "b200"]


def test_a_load_moves_latencies(board):
    ttft = [board.answer({**CHOSEN, "load": load})["slo"][0]["values"][0] for load in (1, 100)]
    assert ttft[0] < ttft[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "llama-3.1-9b"}, "did you mean 'llama-3.1-8b'?"),
        ({"prefill": {**ONE, "instances": 99}}, "instances: expected 1 to 16"),
        ({"prefill": {**ONE, "gpu": "h1000"}}, "h1000"),
        ({"prefill": {}}, "no cluster: KeyError('gpu')"),
        ({"router": "nearest"}, "nearest"),
        ({"load": -1}, "load"),
        ({"slo": "ttft p99 < 2"}, "SLO"),
        ({"slo": "chat: ttft p99 < 2 s"}, "no request of class 'chat'"),
        ({"prices": {"h100": "2"}}, "price of h100"),
        ({"trace": "/nowhere.csv"}, "no trace file /nowhere.csv"),
        ({"first": 0}, "first: expected a whole number from 1 on"),
        ({"count": 2.5}, "count: expected a whole number from 1 on"),
        ({"weight_dtype": "fp7"}, "weight_dtype"),
        ({"model": "llama-3.1-405b"}, "memory"),
    ],
)
def test_what_cannot_be_is_said(board, wrong, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")):
        board.answer({**CHOSEN, **wrong})


@pytest.mark.parametrize("load", [float("nan"), float("inf"), 10**400, -1, 0, 1e9, True, "8", [8]])
def test_a_load_beyond_the_pages_range_is_refused(board, load):
    with pytest.raises(ConfigError, match=r"load: expected a number from 0\.1 to 200"):
        board.answer({**CHOSEN, "load": load})


def test_old_answers_are_forgotten(board, tmp_path, monkeypatch):
    monkeypatch.setattr("pdsim.web.board.MOST_KEPT", 5)
    first = board.answer(CHOSEN)
    for load in range(1, 40):
        board.answer({**CHOSEN, "load": load})
        assert len(list((tmp_path / "runs" / "points").iterdir())) <= 3 * 6  # a run, its fastest and its slowest
    assert board.answer(CHOSEN) == first
