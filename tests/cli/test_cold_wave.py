"""A measured run of cold servers beside a simulation of warm ones: `compare` says so and proposes cold_start."""

import json

import pytest

from pdsim import load_scenario, simulate
from pdsim.study.verdict.cold import cold_wave
from tests.cli.test_commands import output

SCENARIO = """\
name: wave
model: qwen3-8b
page_size: 16
prefill: {gpu: h200}
decode: {gpu: h200}
workload: {use: random_lengths, num_requests: 40, input_tokens: {use: uniform, low: 200, high: 900}, output_tokens: 64}
client: {use: closed_loop, concurrency: 8, warm_up_requests: 0}
"""
COLD = "cost.cold_start={1: 200 ms}"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "wave.yaml"
    path.write_text(SCENARIO)
    return path


def test_a_stall_of_a_cold_server_is_found_in_the_first_wave(path):
    warm, cold = (simulate(load_scenario(path, changes)).records for changes in ((), (COLD,)))
    found = cold_wave(cold, warm)
    assert found is not None
    assert found.num_requests == 8
    assert found.late_ns == pytest.approx(200e6, rel=0.1)
    assert cold_wave(warm, warm) is None
    assert cold_wave(cold, cold) is None


def test_compare_proposes_a_cold_start_for_a_measured_run(path, tmp_path, capsys):
    real = tmp_path / "real"
    output(capsys, "run", str(path), "--set", COLD, "--out", str(real))
    summary = json.loads((real / "summary.json").read_text())
    (real / "summary.json").write_text(json.dumps({**summary, "backend": "pdreal"}))
    shown = " ".join(output(capsys, "compare", str(path), str(real)).split())
    assert "the first 8 requests of" in shown
    assert "send the load twice, or try --set 'cost.cold_start={1: 200 ms}'" in shown
    assert "may have been cold" not in output(capsys, "compare", str(path), str(path), "--repeats", "0")
