"""What was not measured is said wherever numbers are: in one line, and as `warnings` in JSON."""

import json
from pathlib import Path

import pytest

from tests.cli.test_calibrate import warnings_in
from tests.cli.test_commands import output, output_json

SCENARIO = """\
name: plain
model: llama-3.1-8b
prefill: {gpu: h100}
decode: {gpu: h100}
workload: {use: random_lengths, num_requests: 20, input_tokens: 200, output_tokens: 20}
client: {use: closed_loop, concurrency: 4}
"""
SWEEP = """\
name: sizes
scenario: plain.yaml
grid: {client.concurrency: [1, 16]}
"""
SAID = "cost: only kernels of h100 were measured, no server"
ON_CPUS = Path("experiments/validation-cpu/data/c8").absolute()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.yaml").write_text(SCENARIO)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path


def test_run_and_report_say_that_nothing_was_measured(capsys, folder):
    (warning,) = warnings_in(output(capsys, "run", "plain.yaml", "--details", "--out", "run"))
    assert warning.startswith(f"warning: plain: {SAID}")
    assert output_json(capsys, "run", "plain.yaml")["pdsim"]["warnings"][0].startswith(SAID)
    output(capsys, "report", "run", "-o", "page.html")
    assert SAID in (folder / "page.html").read_text()


def test_a_profile_that_does_not_say_what_it_was_measured_on(capsys, folder):
    (folder / "profile.yaml").write_text("cost: {use: roofline}\nprovenance: unknown\n")
    (warning,) = warnings_in(output(capsys, "run", "plain.yaml", "--set", "cost.profile=profile.yaml"))
    assert warning == "warning: plain: cost: profile does not say what it was measured on"


def test_ask_says_that_nothing_was_measured(capsys):
    asked = ("ask", "pd-or-not", "plain.yaml", "--seeds", 1, "--jobs", 1)
    assert output_json(capsys, *asked)["warnings"][0].startswith(SAID)
    assert f"Warning: {SAID}" in " ".join(output(capsys, *asked, "--details").split())


def test_a_sweep_says_how_many_points_lie_outside_and_its_report_too(capsys, folder):
    cost = "{use: affine, decode_base: 10 ms, measured: {model: llama-3.1-8b, decode_batch: [1, 4]}}"
    swept = ("sweep", "sweep.yaml", "--jobs", 1, "--out", "swept", "--set", f"cost={cost}")
    (warning,) = warnings_in(output(capsys, *swept))
    assert warning.startswith("warning: 1 of 2, such as client.concurrency=16")
    assert warning.endswith("batch 16 (measured 1 to 4): outside")
    told = output_json(capsys, *swept)
    assert [len(point["warnings"]) for point in told["points"]] == [0, 1]
    assert warning.removeprefix("warning: ") == told["warnings"][0]
    output(capsys, "report", "swept", "-o", "page.html")
    assert "measured 1 to 4" in (folder / "page.html").read_text()


def test_compare_says_that_a_cpu_is_no_gpu(capsys):
    (warning,) = warnings_in(output(capsys, "compare", ON_CPUS, "plain.yaml"))
    assert warning.startswith("warning: plain: different machines: times of h100, those of validation-cpu are of cpu")
    real, simulated = output_json(capsys, "compare", ON_CPUS, "plain.yaml")
    assert "warnings" not in real["pdsim"]
    assert len(simulated["pdsim"]["warnings"]) == 2
    assert json.dumps(simulated).count("different machines") == 1


def test_compare_of_two_gpus_is_a_question_that_one_may_ask(capsys):
    printed = output(capsys, "compare", "plain.yaml", "plain.yaml", "--set", "decode.gpu=h200")
    assert "different machines" not in printed


def test_a_release_that_dies_when_a_retracted_request_comes_back(capsys):
    dies = ("--set", "decode.radix_cache=true", "--set", "engine_version=0.5.12")
    (first,) = warnings_in(output(capsys, "run", "plain.yaml", *dies))
    assert first.startswith("warning: plain: decode.radix_cache: a server of SGLang 0.5.12 crashes")
    assert warnings_in(output(capsys, "run", "plain.yaml", "--set", "decode.radix_cache=true")) == []
