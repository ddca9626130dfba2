"""Each command as a user calls it."""

import ast
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdsim.cli import main
from pdsim.cli.finished import saying
from pdsim.metrics.explanation.stages import AGGREGATED_STAGES
from pdsim.metrics.run_folder import read_records, read_summary
from pdsim.sim.simulation import Simulation

SCENARIO = """\
name: little
model: qwen3-0.6b
page_size: 4
prefill: {gpu: h100, pool_tokens: 4096}
decode: {gpu: h100, pool_tokens: 4096, radix_cache: true}
router: round_robin
workload:
  use: sessions
  num_sessions: 12
  num_turns: 2
  input_tokens: 40
  output_tokens: {use: uniform, low: 2, high: 20}
client: {use: open_loop, arrivals: {use: poisson, rate: 50/s}}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "little.yaml"
    path.write_text(SCENARIO)
    return path


def exit_code(*arguments) -> int:
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return stop.code or 0
    return 0


def output(capsys, *arguments) -> str:
    assert exit_code(*arguments) == 0
    return capsys.readouterr().out


def output_json(capsys, *arguments):
    return json.loads(output(capsys, *arguments, "--json"))


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_each_command_says_what_it_does(capsys, words):
    listed = re.findall(r"^│ ([a-z]+)(?: {2,}(\w+))?", output(capsys, *words), re.MULTILINE)
    assert {"run", "plan", "ask"} <= {name for name, _ in listed}
    assert [name for name, about in listed if not about] == []


def test_run_prints_the_summary(capsys, scenario):
    summary = output_json(capsys, "run", scenario)
    assert summary["completed"] == 24
    assert {"request_throughput", "mean_ttft_ms", "median_e2e_latency_ms", "p99_itl_ms"} <= summary.keys()
    assert summary["pdsim"]["transfer_bytes"] > 0
    assert "requests/s" in output(capsys, "run", scenario)


def test_set_and_seed_change_the_run(capsys, scenario):
    base = output_json(capsys, "run", scenario)
    assert output_json(capsys, "run", scenario, "--seed", 0) == base
    assert output_json(capsys, "run", scenario, "--seed", 7)["duration"] != base["duration"]
    without = output_json(capsys, "run", scenario, "--set", "decode.radix_cache=false")
    assert without["pdsim"]["decode_cache_hit_rate"] == 0 < base["pdsim"]["decode_cache_hit_rate"]


def test_a_run_folder_has_everything_and_reads_back(capsys, scenario, tmp_path):
    out = tmp_path / "run"
    output(capsys, "run", scenario, "--out", out)
    names = {path.name for path in out.iterdir()}
    tables = {f"{name}.parquet" for name in ("requests", "steps", "transfers", "levels")}
    assert names == tables | {"scenario.yaml", "summary.json", "journal.jsonl.zst"}
    assert read_summary(out)["completed"] == len(read_records(out).requests) == 24


def test_a_timeline_is_kept_on_demand_and_is_made_of_the_tables_later(capsys, scenario, tmp_path):
    out = tmp_path / "run"
    output(capsys, "run", scenario, "--out", out, "--keep", "timeline", "--keep", "figure")
    assert (out / "overview.png").is_file()
    output(capsys, "export", out, "--to", "perfetto", "--out", tmp_path / "later.json.gz")
    assert (tmp_path / "later.json.gz").read_bytes() == (out / "timeline.json.gz").read_bytes()
    assert json.loads(gzip.decompress((out / "timeline.json.gz").read_bytes()))["traceEvents"]
    assert exit_code("run", scenario, "--keep", "timeline") == 2
    assert "give --out" in capsys.readouterr().err


def test_replay_of_a_run_folder(capsys, scenario, tmp_path):
    output(capsys, "run", scenario, "--out", tmp_path / "run")
    report = output_json(capsys, "replay", tmp_path / "run")
    assert report["identical"]
    assert report["calls"] > 100


def test_replay_against_another_policy_names_the_first_difference(capsys, scenario, tmp_path):
    run = tmp_path / "run"
    output(capsys, "run", scenario, "--out", run)
    text = (run / "scenario.yaml").read_text()
    (run / "scenario.yaml").write_text(text.replace("reserved_tokens: 512", "reserved_tokens: 4000"))
    assert exit_code("replay", run) == 1
    said = capsys.readouterr().err
    assert "decode-0.next_step" in said
    assert "another release of pdsim made the run" in said


def test_the_resolved_scenario_runs_to_the_same_result(capsys, scenario, tmp_path):
    first = output_json(capsys, "run", scenario, "--out", tmp_path / "a")
    assert output_json(capsys, "run", tmp_path / "a" / "scenario.yaml") == first


def test_compare_takes_scenarios_and_folders(capsys, scenario, tmp_path):
    output(capsys, "run", scenario, "--out", tmp_path / "a", "--set", "name=a")
    rows = output_json(capsys, "compare", tmp_path / "a", scenario, "--out", tmp_path / "both")
    assert [row["run"] for row in rows] == ["a", "little"]
    assert (tmp_path / "both" / "compare.png").stat().st_size > 10_000
    assert (tmp_path / "both" / "little" / "summary.json").is_file()
    assert "Where a request's time goes" in output(capsys, "compare", tmp_path / "a", tmp_path / "both" / "little")


def test_explain_a_run_and_one_request(capsys, scenario, tmp_path):
    output(capsys, "run", scenario, "--out", tmp_path / "run")
    report = output_json(capsys, "explain", tmp_path / "run")
    assert sum(stage["share"] for stage in report["stages"]) == pytest.approx(1)
    assert [limit["instance_id"] for limit in report["instances"]] == ["decode-0", "prefill-0"]
    one = output_json(capsys, "explain", tmp_path / "run", "--request", 3)
    assert sum(one["stages_ms"].values()) == pytest.approx((one["end_ns"] - one["arrival_ns"]) / 1e6)
    assert "decode_forward" in output(capsys, "explain", scenario, "--request", 3)


def test_explain_the_cost_of_a_step(capsys, scenario, monkeypatch):
    """Nothing is simulated; the terms are those of the cost model, and fit a terminal of 80 columns."""
    monkeypatch.setattr(Simulation, "run", lambda _: pytest.fail("simulated"))
    monkeypatch.setenv("COLUMNS", "80")
    closed = ("--set", "client={use: closed_loop, concurrency: 3}")
    forward, step = output_json(capsys, "explain", scenario, "--cost", *closed)["steps"]
    assert (forward["instance_id"], forward["num_requests"], forward["context_tokens"]) == ("prefill-0", 1, 0)
    assert (step["instance_id"], step["num_requests"], step["new_tokens"]) == ("decode-0", 3, 3)
    for one in (forward, step):
        assert sum(one["terms_ms"].values()) == pytest.approx(one["ms"])
    launching = output_json(capsys, "explain", scenario, "--cost", "--set", "cost.host.launch=500 ms")["steps"]
    assert launching[0]["ms"] == forward["ms"] < 500, "launches hold up forwards of aggregated instances only"
    text = output(capsys, "explain", scenario, "--cost", *closed)
    assert "decode step of decode-0: 3 requests, 3 new tokens, " in text
    assert "reading KV" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.fixture
def aggregated(tmp_path: Path) -> Path:
    path = tmp_path / "aggregated.yaml"
    pair = "prefill: {gpu: h100, pool_tokens: 4096}\ndecode: {gpu: h100, pool_tokens: 4096, radix_cache: true}\n"
    path.write_text(SCENARIO.replace(pair, "aggregated: {gpu: h100, pool_tokens: 4096}\n").replace("little", "one"))
    return path


def test_every_command_takes_an_aggregated_cluster(capsys, aggregated, scenario, tmp_path):
    run = tmp_path / "run"
    first = output_json(capsys, "run", aggregated, "--out", run)
    assert first["completed"] == 24
    assert first["pdsim"]["transfers"] == 0
    assert output_json(capsys, "run", run / "scenario.yaml") == first
    assert output_json(capsys, "replay", run)["identical"]
    steps = output_json(capsys, "explain", run, "--cost")["steps"]
    assert [step["instance_id"] for step in steps] == ["aggregated-0", "aggregated-0"]
    launching = output_json(capsys, "explain", aggregated, "--cost", "--set", "cost.host.launch=500 ms")["steps"]
    assert launching[0]["ms"] == 500
    report = output_json(capsys, "explain", run)
    assert [stage["stage"] for stage in report["stages"]] == list(AGGREGATED_STAGES)
    assert [limit["instance_id"] for limit in report["instances"]] == ["aggregated-0"]
    one = output_json(capsys, "explain", run, "--request", 3)
    assert sum(one["stages_ms"].values()) == pytest.approx((one["end_ns"] - one["arrival_ns"]) / 1e6)
    assert "aggregated-0, finished" in output(capsys, "explain", run, "--request", 3)
    assert "decode_bootstrap" in output(capsys, "compare", run, scenario, "--details")
    (tmp_path / "measured.yaml").write_text(
        "scenario: aggregated.yaml\nsource: made up\narms: {only: {runs: [{completed: 24}]}}\n"
    )
    (arm,) = output_json(capsys, "validate", tmp_path)
    assert arm["metrics"]["completed"]["error"] == 0


def test_a_cluster_becomes_aggregated_on_the_command_line(capsys, scenario):
    changes = ["prefill=null", "decode=null", "aggregated={gpu: h100}"]
    arguments = [word for change in changes for word in ("--set", change)]
    assert output_json(capsys, "run", scenario, *arguments)["pdsim"]["transfers"] == 0


def test_validate_prints_the_errors_of_a_case(capsys, scenario, tmp_path):
    (tmp_path / "measured.yaml").write_text(
        "scenario: little.yaml\nsource: made up\narms:\n  only:\n    set: [page_size=8]\n    runs: [{completed: 20}]\n"
        "    within: {completed: 10 %}\n"
    )
    (arm,) = output_json(capsys, "validate", tmp_path)
    assert arm["metrics"] == {"completed": {"measured": 20, "simulated": 24, "error": pytest.approx(0.2)}}
    assert "10% missed" in output(capsys, "validate", tmp_path)


@pytest.mark.parametrize("skip", [4, 30])
def test_an_arm_leaves_its_first_requests_out(capsys, scenario, tmp_path, skip):
    case = f"scenario: little.yaml\nsource: made up\narms: {{only: {{skip: {skip}, runs: [{{completed: 20}}]}}}}\n"
    (tmp_path / "measured.yaml").write_text(case)
    (arm,) = output_json(capsys, "validate", tmp_path)
    assert arm["metrics"]["completed"]["simulated"] == max(0, 24 - skip)


def test_one_of_a_kind_is_no_plural(capsys, aggregated, scenario, tmp_path):
    one = ["--set", "workload={use: random_lengths, num_requests: 1, input_tokens: 40, output_tokens: 4}"]
    run, page, sweep = tmp_path / "run", tmp_path / "page.html", tmp_path / "sweep.yaml"
    sweep.write_text("scenario: little.yaml\npoints: [{page_size: 1}]\nslos: {chat: e2e < 1 h for 99 %}\n")
    shown = [
        output(capsys, "run", scenario, *one, "--out", run),
        output(capsys, "explain", run, "--request", 0),
        output(capsys, "report", run, "-o", page),
        output(capsys, "report", aggregated, *one, "-o", page) + page.read_text(),
        output(capsys, "sweep", sweep, *one, "--out", tmp_path / "points", "--jobs", 1),
    ]
    texts = [re.sub(r"<(style|script|svg).*?</\1>", "", text, flags=re.DOTALL) for text in shown]
    assert [found for text in texts for found in re.findall(r"\b1 (?!ms\b)[a-z]+s\b(?!/)", text)] == []


def test_catalog_and_schema(capsys):
    assert "qwen3-32b" in output(capsys, "catalog")
    assert json.loads(output(capsys, "schema"))["title"] == "Scenario"


def test_the_committed_schema_is_current(capsys):
    assert Path("pdsim.schema.json").read_text() == output(capsys, "schema"), "make schema"


def loaded_by(scenario, *options):
    """What `pdsim run` prints, and the modules that it imports."""
    code = (
        "import sys\n"
        "from pdsim.cli import main\n"
        "try:\n"
        f"    main(['run', {str(scenario)!r}, *{options!r}])\n"
        "except SystemExit:\n"
        "    print(set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout, ast.literal_eval(done.stderr.splitlines()[-1])


def test_tables_are_printed_without_numpy(scenario):
    shown, loaded = loaded_by(scenario)
    assert "TTFT p99" in shown
    assert not loaded & {"matplotlib", "numpy", "pyarrow", "scipy", "multiprocessing"}


def test_json_starts_without_what_only_tables_and_files_need(scenario):
    shown, loaded = loaded_by(scenario, "--json")
    assert json.loads(shown)["completed"] == 24
    assert "simpy" in loaded
    assert not loaded & {"rich", "matplotlib", "numpy", "pyarrow", "scipy", "multiprocessing", "subprocess"}
    own = [name.split(".")[1] for name in loaded if name.startswith("pdsim.")]
    simulator = {"core", "cost", "metrics", "policy", "scenario", "sim", "system", "workload"}
    assert set(own) == {"cli", "dataclass", "files", "garbage", "inputs", "signals"} | simulator
    assert len(own) <= 197, "a module more takes about a millisecond of each start"


def test_libraries_start_no_threads_and_the_users_own_choice_stays(capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", {"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"})
    output(capsys, "--version")
    assert os.environ == {"ARROW_DEFAULT_MEMORY_POOL": "mimalloc", "OPENBLAS_NUM_THREADS": "1"}


def test_a_terminal_is_told_what_is_being_written(capsys, monkeypatch):
    with saying("writing runs/a ...", quiet=False):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with saying("writing runs/a ...", quiet=True):
        pass
    assert capsys.readouterr().err == ""
    with saying("writing runs/a ...", quiet=False):
        assert capsys.readouterr().err == "writing runs/a ..."
    assert capsys.readouterr().err == "\r\033[K"


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_run_keeps_what_it_finished(scenario, tmp_path, kind):
    """Ctrl-C, SIGTERM or SIGHUP in the middle: exit code 130, and a folder with the requests that had ended."""
    out = tmp_path / "run"
    code = (
        "import signal, sys\n"
        "from pdsim.cli import main\n"
        "from pdsim.workload.client import ClientDriver\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it\n"
        "send = ClientDriver.on_end\n"
        "def on_end(self, request_id):\n"
        "    if request_id == 9: signal.raise_signal(signal.%s)\n"
        "    send(self, request_id)\n"
        "ClientDriver.on_end = on_end\n"
    )
    code = code % kind + f"main(['run', {str(scenario)!r}, '--out', {str(out)!r}, '--json'])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr
    summary = read_summary(out)
    assert summary["pdsim"]["interrupted"]
    assert 0 < summary["completed"] < 24
    assert summary["completed"] + summary["pdsim"]["unfinished"] == len(read_records(out).requests)


def test_a_run_whose_terminal_closes_keeps_what_it_finished(scenario, tmp_path):
    """The bar of progress and the summary would be written to a terminal that is gone."""
    command = [str(Path(sys.executable).with_name("pdsim")), "run", str(scenario), "--out", str(tmp_path / "run")]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(command[0], [*command, "--set", "workload.num_sessions=50000", "--yes"])
    shown = b""
    while not re.search(rb"[1-9]/100000", shown):
        shown += os.read(terminal, 1 << 16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    assert read_summary(tmp_path / "run")["pdsim"]["interrupted"]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_command_ends_with_one_line_when_interrupted(capsys, scenario, tmp_path, monkeypatch, kind):
    """Also commands that keep nothing; SIGINT is ignored where a shell started the tests in the background."""

    def interrupted(*_):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(kind)

    monkeypatch.setattr("pdsim.cli.obtaining.scenario_of", interrupted)
    assert exit_code("export", scenario, "--to", "perfetto", "--out", tmp_path / "t.json.gz") == 130
    assert capsys.readouterr().err == "pdsim: interrupted\n"


def test_a_stalled_run_says_who_waits_for_what(capsys, scenario, tmp_path, monkeypatch):
    """A policy that admits nothing."""
    (tmp_path / "closed.py").write_text(
        "from dataclasses import dataclass\n"
        "from pdsim.policy.protocols import Deferred\n"
        "@dataclass\n"
        "class Closed:\n"
        "    def admit(self, candidate, view):\n"
        "        return Deferred(ask_again_steps=None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    change = "decode.admission={use: 'closed:Closed'}"
    assert exit_code("run", scenario, "--json", "--trust", "--set", change) == 1
    error = capsys.readouterr().err
    assert "stalled" in error
    assert "decode-0: request 0 (40 tokens) waits for admission, 1024 of 1024 pages available" in error


FAULTS = """\
health: {heartbeat_interval: 20 ms, waiting_timeout: 300 ms}
faults:
  - {at: 60 ms, kill: prefill-0, restart_after: 100 ms}
  - {at: 100 ms, kill: decode-0, restart_after: 1 ms}
"""


def test_a_run_with_faults_replays_and_says_what_was_tried_again(capsys, tmp_path):
    path = tmp_path / "faulty.yaml"
    path.write_text(SCENARIO.replace("name: little", "name: faulty") + FAULTS)
    shown = output(capsys, "run", path, "--out", tmp_path / "run")
    summary = read_summary(tmp_path / "run")["pdsim"]
    assert summary["retries"] > 0
    assert "retries" in shown
    assert ("requests failed" in shown) == (summary["failed"] > 0)
    assert output_json(capsys, "replay", tmp_path / "run")["identical"]
    retried = next(r for r in read_records(tmp_path / "run").requests if r.num_retries)
    assert "retried" in output(capsys, "explain", tmp_path / "run", "--request", str(retried.request_id))


def test_a_run_without_faults_does_not_speak_of_them(capsys, scenario):
    assert "retries" not in output(capsys, "run", scenario)
