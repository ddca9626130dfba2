"""Scenarios that pdreal refuses: one message, exit code 2, and no process is started."""

import json
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
torch = pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.cli import main
from pdreal.clients import Tokens
from pdreal.reference import read_reference

from pdsim.core.journal.calls import Entry
from pdsim.core.messages import Arrival, DecodeStep, StepResult
from pdsim.core.sequence import Spans, TokenIds
from pdsim.metrics.journal_file import journal_writer
from pdsim.metrics.tables import RunFolderError
from tests.support import request

MATRIX = Path(__file__).parents[2] / "experiments" / "validation-cpu"
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
        ("router={use: dynamo_kv, kv_events: true}", "router.prefill: instances send KV events in simulation only"),
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


@pytest.mark.parametrize(("items", "what"), [("images", "images"), ("audio_clips", "audio clips")])
def test_a_load_of_more_than_text(tmp_path, monkeypatch, capsys, items, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    size = "image_tokens" if items == "images" else "audio_tokens"
    with pytest.raises(SystemExit) as stop:
        main(["run", "s.yaml", "--set", f"workload.{items}=1", "--set", f"workload.{size}=5"])
    assert stop.value.code == 2
    assert f"workload: request 0 has {what}; real mode takes text only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "changes", "says"),
    [
        ("run", ["algorithm=EAGLE3"], "decode.speculative_algorithm: real mode drafts with an EAGLE head of one layer"),
        ("run", ["eagle_topk=2", "draft_tokens=4"], "decode.speculative_eagle_topk: trees of drafts are verified in"),
        ("run", ["num_steps=70"], "decode.speculative_draft_tokens: real mode verifies up to 64 tokens in a step"),
        ("serve", [], "a server's drafts would be accepted whether they are right or not"),
    ],
)
def test_drafts_that_are_refused(tmp_path, monkeypatch, capsys, command, changes, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    given = ["num_steps=3", "accept_length=2", *changes]
    with pytest.raises(SystemExit) as stop:
        main([command, "s.yaml", *(word for change in given for word in ("--set", f"decode.speculative_{change}"))])
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "s.yaml", "--out", "theirs"], "theirs: has config.json, and no run of pdsim"),
        (["run", "s.yaml", "--force", "--out", "theirs"], "theirs: has config.json, and no run of pdsim"),
        (["tokenizer", "theirs"], "theirs: has config.json, and no tokenizer of pdsim"),
        (["measure", "--model", "tiny-qwen3", "--out", "s.yaml"], "s.yaml: is there and does not begin with 'kind,'"),
        (["campaign", str(MATRIX), "--out", "theirs"], "theirs: has config.json, and no campaign"),
    ],
)
def test_nothing_is_written_over_what_another_made(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"vocab_size": 512, "model_type": "llama"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_a_tokenizer_is_written_again(tmp_path):
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            main(["tokenizer", str(tmp_path / "new")])
        assert not stop.value.code


KEPT = {
    "accept_length": None,
    "completed": 0,
    "duration": 1,
    "total_input_tokens": 0,
    "total_output_tokens": 0,
    "pdsim": {},
}


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([request(0, 9, 4)], "request 0 has 9 prompt tokens, but 16 there"),
        ([request(0, Spans.of(7, 16), 4)], "request 0 has another prompt there"),
        ([request(0, 16, 6)], "request 0 has 6 output tokens, but 4 there"),
        ([request(0, 16, 4), request(1, 16, 4)], "request 1 is missing there"),
    ],
)
def test_a_reference_that_had_other_requests(tmp_path, requests, says):
    first = request(0, 16, 4)
    arrival = Arrival(0, Tokens(300).ids(first.prompt), 4)
    ended = StepResult(ended=((0, TokenIds([1, 2, 3, 4])),))
    with journal_writer(tmp_path) as write:
        write(Entry("router", "on_message", (arrival, 0), ()))
        write(Entry("decode-0", "on_step_done", (DecodeStep(0, (0,), (), 1, 0, 0, 1), ended, 0), ()))
    (tmp_path / "summary.json").write_text(json.dumps(KEPT))
    assert read_reference(tmp_path, [first], 300) == {0: [1, 2, 3, 4]}
    with pytest.raises(RunFolderError) as refused:
        read_reference(tmp_path, requests, 300)
    assert f"--reference {tmp_path}: {says}; give a complete run of the same workload" in str(refused.value)


def test_a_reference_whose_drafts_were_not_checked(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({**KEPT, "accept_length": 2.4}))
    with pytest.raises(RunFolderError, match="whose drafts were accepted unchecked; give a run without drafts"):
        read_reference(tmp_path, [], 300)
