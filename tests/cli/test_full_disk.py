"""A disk that is full ends a command with one message, and loses no file that was whole."""

import resource
import subprocess
import sys

import pytest

SCENARIO = """
name: s
model: llama-3.1-8b
prefill: {gpu: h100}
decode: {gpu: h100}
workload: {use: random_lengths, num_requests: 200, input_tokens: 640, output_tokens: 20}
client: {use: closed_loop, concurrency: 4}
"""
SWEEP = "scenario: s.yaml\ngrid: {client.concurrency: [1, 2]}\n"
COMMANDS = {
    "run": ["run", "s.yaml", "--no-ranges", "--force"],
    "sweep": ["sweep", "sweep.yaml", "--engine", "here"],
    "ask": ["ask", "pd-ratio", "s.yaml", "--jobs", "1"],
    "plan": ["plan", "s.yaml", "--slo", "ttft p99 < 1 s", "--max-gpus", "2", "--engine", "here"],
    "report": ["report", "s.yaml"],
    "export": ["export", "s.yaml", "--to", "perfetto"],
}
OLD_FILES = {"report": b"<!doctype html>" * 100, "export": b"\x1f\x8bold" * 300}
MOST_BYTES = 512
"""Of a file: no summary, point or page is as small."""


def is_small_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_message(name, tmp_path):
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    out = tmp_path / "out"
    if name in OLD_FILES:
        out.write_bytes(OLD_FILES[name])
    else:
        (out / "points").mkdir(parents=True)
        for own in ("summary.json", "journal.jsonl.zst", "owner.lock"):
            (out / own).write_text('{"completed": 1}')
    before = {path: path.read_bytes() for path in (out, *out.rglob("*")) if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-m", "pdsim", *COMMANDS[name], "--out", str(out)],
        cwd=tmp_path,
        preexec_fn=is_small_disk,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"pdsim: {out}")
    assert said.endswith("File too large; complete files are kept")
    assert {path: path.read_bytes() for path in before} == before
