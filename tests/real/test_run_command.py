"""pdreal run: the folder that it leaves, and mistakes in one message."""

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from multiprocessing import active_children, forkserver
from time import sleep

import pdreal
import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.cli import main
from pdreal.control.logbook import Logbook
from pdreal.control.logbook import read_records as read_logs
from pdreal.hosts.fleet import Fleet
from pdreal.run_folder import keep_run
from ruamel.yaml import YAML

from pdsim.cli import main as pdsim
from pdsim.files import own_lock
from pdsim.metrics.run_folder import read_records, read_summary
from tests.real import clusters


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "pair.yaml"
    YAML(typ="safe").dump(clusters.DEFAULT, path)
    return path


def exit_code(*arguments, program=main):
    with pytest.raises(SystemExit) as exit_:
        program([str(argument) for argument in arguments])
    return exit_.value.code


def test_a_run_leaves_what_every_tool_reads(scenario, tmp_path, capsys):
    out = tmp_path / "run"
    assert exit_code("run", scenario, "--out", out, "--json", "--seed", "3") == 0
    summary, kept = json.loads(capsys.readouterr().out), read_summary(out)
    assert kept["pdsim"].pop("journal")["calls"] > 0
    assert kept == summary
    assert summary["backend"] == "pdreal"
    assert summary["completed"] == 20
    assert summary["pdsim"]["device"] == "cpu"
    records = read_records(out)
    assert all(0 < r.admitted_ns < r.prefill_end_ns < r.transfer_end_ns <= r.streamed_ns for r in records.requests)
    assert {step.kind for step in records.steps} == {"prefill", "decode"}
    assert {level.instance_id for level in records.levels} == {"prefill-0", "decode-0"}
    assert exit_code("replay", out, "--json", program=pdsim) == 0
    assert json.loads(capsys.readouterr().out)["identical"]
    assert exit_code("explain", out, program=pdsim) == 0
    assert "where the time goes" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_has_finished(scenario, tmp_path, monkeypatch, capsys):
    @contextmanager
    def interrupting(*_, **__):
        yield lambda num_done: os.kill(os.getpid(), signal.SIGINT) if num_done == 3 else None

    monkeypatch.setattr("pdreal.run.progress_over", interrupting)
    out = tmp_path / "run"
    assert exit_code("run", scenario, "--out", out) == 130
    said = capsys.readouterr().err
    assert "interrupted; finished requests are kept" in said
    assert "Traceback" not in said
    outcomes = [request.outcome for request in read_records(out).requests]
    assert 3 <= outcomes.count("finished") < 20
    assert exit_code("replay", out, "--json", program=pdsim) == 0
    assert json.loads(capsys.readouterr().out)["identical"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "model=qwen3.5-35b-a3b"], "cannot be run for real"),
        (["--set", "prefill.dp=2", "--set", "prefill.tp=2"], "prefill.dp: 2: data-parallel attention"),
        (["--set", "prefill.moe_a2a_backend=mori"], "prefill.moe_a2a_backend: mori runs in simulation only"),
        (
            ["--set", "model=tiny-windows", "--set", "decode.radix_cache=true"],
            "decode.radix_cache: decode gets only the last tokens of layers with a sliding window",
        ),
        (
            ["--set", "model=tiny-windows", "--set", "prefill.layer_groups=2"],
            "prefill.layer_groups: real mode sends sliding windows after all layers",
        ),
        (["--set", "model=tiny-hybrid", "--set", "prefill.tp=2"], "states of linear attention between equal"),
        (["--set", "model=tiny-hybrid", "--set", "prefill.layer_groups=2"], "sends states after all layers"),
        (["--set", "model=tiny-hybrid", "--set", "prefill.host_cache=auto"], "prefill.host_cache: states of linear"),
        (["--set", "model=tiny-hybrid", "--dtype", "bfloat16"], "keeps 3072 bytes, and 6144 in the catalog entry"),
        (["--set", "model=tiny-hybrid", "--quantization", "fp8"], "linear attention run with unquantised weights"),
        (["--set", "engine=vllm"], "engine: vllm: instances of vllm run in simulation only"),
        (["--set", "prefill.host_cache=auto", "--set", "storage={}"], "storage.shared: real mode has Mooncake's"),
        (["--set", "faults=[{at: 1 s, link: prefill-0, bandwidth_factor: 0}]"], "faults.0: links"),
        (["--set", "network.transport=mooncake-tpc"], "did you mean 'mooncake-tcp'?"),
        (["--weights", "seed:x"], "a seed is a whole number"),
        (["--weights", "nowhere"], "nowhere"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_a_mistake_is_one_message(scenario, arguments, message, capsys):
    assert exit_code("run", scenario, *arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert said.startswith("pdreal: ")


@pytest.mark.parametrize("missing", ["aiohttp", "zmq"])
def test_a_library_that_is_missing_is_named(missing, scenario, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("pdreal.") and name != "pdreal.cli"]:
        _, *inner = name.split(".")
        if len(inner) == 1:
            monkeypatch.setattr(pdreal, inner[0], sys.modules[name])  # to be there again, when it was imported anew
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert exit_code("serve", scenario) == 2
    assert capsys.readouterr().err == f"pdreal: {missing} is not installed: pip install 'pdsim[real]'\n"


def test_a_terminated_run_keeps_what_has_finished(scenario, tmp_path, monkeypatch, capsys):
    """`timeout` and others tell every process of the group; the launcher alone listens."""

    def terminate(num_done):
        if num_done == 3:
            for process in [forkserver._forkserver._forkserver_pid, *(child.pid for child in active_children())]:
                os.kill(process, signal.SIGTERM)
        if num_done == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def terminating(*_, **__):
        yield terminate

    monkeypatch.setattr("pdreal.run.progress_over", terminating)
    out = tmp_path / "run"
    assert exit_code("run", scenario, "--out", out) == 130
    assert "interrupted; finished requests are kept" in capsys.readouterr().err
    assert 6 <= read_summary(out)["completed"] < 20
    assert not (out / "logs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_can_be_stopped_while_it_starts(scenario, tmp_path, monkeypatch, capsys, number):
    spawn = Fleet.spawn

    def spawn_and_stop(self, instance_id):
        spawn(self, instance_id)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Fleet, "spawn", spawn_and_stop)
    monkeypatch.setattr("pdreal.run.Clients.serve", lambda *_: pytest.fail("its start went on"))
    out = tmp_path / "run"
    assert exit_code("run", scenario, "--out", out) == 130
    assert "interrupted" in capsys.readouterr().err
    assert read_summary(out)["completed"] == 0
    assert not [child for child in active_children() if child.is_alive()]


def test_a_run_that_has_ended_is_kept_whole(scenario, tmp_path, monkeypatch):
    def keep_and_stop(*args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        keep_run(*args, **options)

    monkeypatch.setattr("pdreal.run.keep_run", keep_and_stop)
    out = tmp_path / "run"
    assert exit_code("run", scenario, "--out", out, "--json") == 0
    assert read_summary(out)["completed"] == 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_out_that_cannot_be_written_is_told_before_anything_starts(scenario, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pdreal.run.run_scenario", pytest.fail)
    (tmp_path / "file").touch()
    assert exit_code("run", scenario, "--out", tmp_path / "file" / "run") == 2
    assert "is a file; expected a folder" in capsys.readouterr().err
    assert exit_code("run", scenario, "--out", tmp_path) == 2
    assert "no run of pdsim; name a new folder" in capsys.readouterr().err
    (tmp_path / "journal.jsonl.zst").touch()
    assert exit_code("run", scenario, "--out", tmp_path) == 2
    assert "--force overwrites it" in capsys.readouterr().err


def full_after(monkeypatch, method, num_calls):
    """The launcher's logbook meets a full disk."""
    written = getattr(Logbook, method)
    calls = iter(range(num_calls))

    def write(self, *args):
        if self.is_kept and next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(self, *args)

    monkeypatch.setattr(Logbook, method, write)


@pytest.mark.parametrize("method", ["row", "entry", "flush"])
def test_a_full_disk_ends_the_run_with_a_message(scenario, tmp_path, monkeypatch, capsys, method):
    full_after(monkeypatch, method, 30)
    out = tmp_path / "run"
    assert exit_code("run", scenario, "--out", out) == 1
    said = capsys.readouterr().err
    assert f"the launcher failed: [Errno 28] No space left on device; it writes to {out / 'logs'}" in said
    assert "Traceback" not in said
    assert read_summary(out)["completed"] < 20


def test_logs_stay_where_results_cannot_be_written(scenario, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pdreal.run_folder.write_run", full)
    out = tmp_path / "run"
    assert exit_code("run", scenario, "--out", out, "--json") == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["completed"] == 20
    assert f"No space left on device; the run's logs are in {out / 'logs'}" in said.err
    assert len(read_logs(out / "logs").requests) == 20
    assert exit_code("run", scenario, "--out", out) == 2
    assert "has a run already" in capsys.readouterr().err
    monkeypatch.undo()
    recover(out, capsys, 20)
    assert exit_code("recover", out) == 2
    assert "has no logs/run.json: no interrupted run left logs here" in capsys.readouterr().err


def recover(out, capsys, num_completed):
    with own_lock(out / "logs"):
        assert exit_code("recover", out) == 2
        assert "another pdreal process writes to this folder" in capsys.readouterr().err
    assert exit_code("recover", out, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completed"] == num_completed
    assert summary["pdsim"]["interrupted"] == (num_completed < 20)
    assert not (out / "logs").exists()
    assert exit_code("replay", out, "--json", program=pdsim) == 0
    assert json.loads(capsys.readouterr().out)["complete"]


def test_a_killed_run_is_recovered(scenario, tmp_path, capsys):
    """All but the last requests had not come when it was killed."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "pdreal", "run", str(scenario), "--out", str(out)]
    rates = ["--set", "client={use: open_loop, arrivals: {use: poisson, rate: 2/s}}"]
    process = subprocess.Popen([*command, *rates], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    rows = out / "logs" / "launcher.0.rows"
    while not (rows.exists() and rows.read_text().count("on_end") > 1):
        assert process.poll() is None
        sleep(0.05)
    process.kill()
    process.wait()
    recover(out, capsys, sum(request.outcome == "finished" for request in read_logs(out / "logs").requests))
