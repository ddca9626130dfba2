"""`pdsim validate MATRIX` as a user calls it, with a `pdreal` that simulates."""

import json
import os
import sys
from pathlib import Path

import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from pdsim.cli import main
from pdsim.cli import matrix as commands

SCENARIO = """\
name: little
model: tiny-qwen3
page_size: 16
prefill: {gpu: h100, pool_tokens: 4096}
decode: {gpu: h100, pool_tokens: 4096}
router: round_robin
network: {transport: mooncake-tcp}
workload: {use: random_lengths, num_requests: 8, input_tokens: 40, output_tokens: 6}
client: {use: closed_loop, concurrency: 4}
"""

MATRIX = """\
scenario: scenario.yaml
profile: profile.yaml
real: {device: cpu, dtype: float32}
within: {median: 5 %, winner: 95 %}
variants:
  c1: [client.concurrency=1]
  c4: []
"""

PROFILE = """\
name: little
cost:
  prefill: {use: affine, prefill_base: 1 ms}
  decode: {use: affine, decode_base: 2 ms}
network: {transports: {mooncake-tcp: {bandwidth: 1 GB/s, transfer_latency: 20 us, descriptor_latency: 1 us}}}
provenance: {measured: []}
"""

PDREAL = """\
import os, sys
words = sys.argv[1:]
from pdsim.cli import main
cut = words.index("--device")
if any(name in word for word in words for name in os.environ["FAILS"].split()):
    print("pdreal: no such device", file=sys.stderr)
    raise SystemExit(int(os.environ["CODE"]))
main([*words[:cut], *words[cut + 6:], "--set", "kv_dtype=fp32", "--set", "cost.profile=" + os.environ["PROFILE"]])
"""


@pytest.fixture
def matrix(tmp_path, monkeypatch) -> Path:
    for name, text in {"scenario": SCENARIO, "matrix": MATRIX, "profile": PROFILE}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "pdreal").mkdir()
    (tmp_path / "pdreal" / "__init__.py").touch()
    (tmp_path / "pdreal" / "__main__.py").write_text(PDREAL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("FAILS", "nothing")
    monkeypatch.setenv("PROFILE", str(tmp_path / "profile.yaml"))
    return tmp_path


def validate(capsys, *arguments) -> tuple[int, str, str]:
    code = 0
    try:
        main(["validate", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code or 0
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
def test_what_is_missing_is_run_for_real_and_what_is_there_is_not(capsys, matrix, monkeypatch):
    monkeypatch.setenv("FAILS", "c4")
    monkeypatch.setenv("CODE", "1")
    code, _, said = validate(capsys, matrix, "--real-only")
    assert code == 1
    assert "no real run of c4" in said
    assert "no such device" in (matrix / "runs" / ".c4.part" / "pdreal.log").read_text()
    assert not (matrix / "runs" / "c4").exists()
    monkeypatch.setenv("FAILS", "c1")
    code, out, said = validate(capsys, matrix, "--json")
    assert code == 0
    assert "c4 for real (1 of 1)" in said
    report = json.loads(out)
    assert [one["variant"] for one in report["variants"]] == ["c1", "c4"]
    assert report["equal"]
    assert sorted(path.name for path in (matrix / "runs").iterdir()) == ["c1", "c4"]
    assert not (matrix / "runs" / "c4" / "overview.png").exists()
    assert not (matrix / "runs" / "c4" / "journal.jsonl.zst").exists()
    code, out, _ = validate(capsys, matrix)
    assert (code, "NOT EQUAL" in out, "requests/s" in out) == (0, False, True)


def test_other_bytes_fail(capsys, matrix):
    assert validate(capsys, matrix, "--real-only")[0] == 0
    path = matrix / "runs" / "c4" / "transfers.parquet"
    table = parquet.read_table(path)
    place = table.column_names.index("num_bytes")
    parquet.write_table(table.set_column(place, "num_bytes", pc.add(table["num_bytes"], 1)), path)
    code, out, said = validate(capsys, matrix)
    assert code == 1
    assert "NOT EQUAL: requests 0, 1, 2" in out
    assert "c4: requests sent other bytes than in the simulation, or finished in only one" in said


def test_a_machine_that_cannot_is_one_message(capsys, matrix, monkeypatch):
    monkeypatch.setenv("FAILS", "c1")
    monkeypatch.setenv("CODE", "2")
    code, _, said = validate(capsys, matrix)
    assert code == 2
    assert "c1: pdreal: no such device" in said
    monkeypatch.setattr(commands, "find_spec", lambda _: None)
    code, _, said = validate(capsys, matrix)
    assert code == 2
    assert "lacks runs of c1, c4, and there is no pdreal" in said


def test_an_interrupted_matrix_keeps_what_has_finished(capsys, matrix, monkeypatch):
    run = commands._run

    def stops(matrix, variant):
        if variant.name == "c4":
            raise KeyboardInterrupt
        return run(matrix, variant)

    monkeypatch.setattr(commands, "_run", stops)
    code, _, said = validate(capsys, matrix)
    assert code == 130
    assert "the same command goes on" in said
    assert (matrix / "runs" / "c1" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["decode-radix-b200", "--real-only"], "need a matrix or --observed"),
        (["--profile", "nowhere.yaml"], "need a matrix"),
    ],
)
def test_flags_of_a_matrix(capsys, arguments, says):
    code, _, said = validate(capsys, *arguments)
    assert (code, says in said) == (2, True)


def test_a_matrix_is_validated_alone(capsys, matrix):
    code, _, said = validate(capsys, matrix, "decode-radix-b200")
    assert (code, "is a matrix: validate one matrix at a time" in said) == (2, True)


def test_a_profile_that_is_not_there_is_said_before_anything_runs(capsys, matrix):
    code, _, said = validate(capsys, matrix, "--profile", "nowhere.yaml")
    assert (code, "nowhere.yaml" in said, (matrix / "runs").exists()) == (2, True, False)
