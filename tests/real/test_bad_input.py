"""Scenarios that pdreal refuses: one message, exit code 2, and no process is started."""

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
torch = pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.cli import main

SCENARIO = """\
model: tiny-qwen3
page_size: 16
prefill: {gpu: h100, pool_tokens: 4096}
decode: {gpu: h100, pool_tokens: 4096}
workload: {use: random_lengths, num_requests: 2, input_tokens: 16, output_tokens: 4}
"""


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("prefill.policy=strange:Policy", "pdsim would import the module strange, from "),
        (
            "context_tokens=5000",
            "context_tokens: at most the model's own 4096; extended in simulation only",
        ),
    ],
)
def test_a_scenario_that_is_refused(tmp_path, monkeypatch, capsys, command, change, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (tmp_path / "strange.py").write_text("raise SystemExit('imported')\n")
    with pytest.raises(SystemExit) as stop:
        main([command, "s.yaml", "--set", change])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_host_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    with pytest.raises(SystemExit) as stop:
        main(["run", "s.yaml", "--device", "cuda"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "did not start: --device cuda: torch sees no GPU here" in error
    assert "Traceback" not in error
