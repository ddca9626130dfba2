"""Rows in, profile out, and a scenario that runs on it."""

import pytest

from pdsim.calibration.fit.rows import write_rows
from tests.cli.test_commands import exit_code, output, output_json
from tests.unit.test_calibration import (
    PROVENANCE,
    affine_decode_us,
    affine_prefill_us,
    decode_rows,
    prefill_rows,
)

SCENARIO = """\
model: qwen3-8b
page_size: 64
prefill: {gpu: h200}
decode: {gpu: h200}
cost: {profile: profile.yaml}
network: {profile: profile.yaml, message_latency: 20 us}
workload: {use: random_lengths, num_requests: 8, input_tokens: 2000, output_tokens: 20}
client: {use: closed_loop, concurrency: 4}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.csv", prefill_rows(affine_prefill_us), PROVENANCE)
    write_rows(tmp_path / "more.csv.gz", decode_rows(affine_decode_us), PROVENANCE)
    times = [
        {
            "kind": "transfer",
            "transport": "mooncake-tcp",
            "payload_bytes": s,
            "num_descriptors": n,
            "time_us": 20 + 11 * n + s / 6e3,
        }
        for s in (2**16, 2**20, 2**26)
        for n in (1, 16, 64)
    ]
    write_rows(tmp_path / "transfer.csv", times, PROVENANCE)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    return tmp_path


def warnings_in(printed):
    return [line for line in printed.splitlines() if line.startswith("warning: ")]


FILES = ("rows.csv", "more.csv.gz", "transfer.csv")


def test_rows_become_a_profile_that_a_scenario_runs_on(capsys, folder):
    assert "held out" in output(capsys, "calibrate", *FILES, "-o", "profile.yaml")
    assert output_json(capsys, "run", "scenario.yaml")["completed"] == 4, "four of eight warm up"
    output(capsys, "run", "scenario.yaml", "--out", "run")
    resolved = (folder / "run" / "scenario.yaml").read_text()
    assert "bandwidth: 6 GB/s" in resolved
    assert "message_latency: 20 us" in resolved
    assert output_json(capsys, "run", "run/scenario.yaml") == output_json(capsys, "run", "run/scenario.yaml")


def test_what_rows_tell_of_the_host_is_printed_as_the_profile_has_it(capsys, folder):
    assert "of the host" not in output(capsys, "calibrate", *FILES, "-o", "profile.yaml")
    printed = output(capsys, "calibrate", *FILES, "--host-slowdown", "1.25", "-o", "profile.yaml")
    assert "of the host" in printed
    assert "cost.host slowdown 1.25" in " ".join(printed.split())
    assert "--host-slowdown 1.25" in (folder / "profile.yaml").read_text()


def test_a_profile_says_where_it_comes_from(capsys, folder):
    provenance = output_json(capsys, "calibrate", *FILES, "-o", "made/profile.yaml")["provenance"]
    assert [file["rows"] for file in provenance["measured"]] == list(FILES)
    assert provenance["measured"][0]["device"] == "NVIDIA H200"
    assert provenance["fitted"]["decode"]["held_out_error"].endswith("at the 90th percentile")
    assert (folder / "made" / "profile.yaml").is_file()


def test_a_run_outside_the_measured_range_warns_once(capsys, folder):
    output(capsys, "calibrate", *FILES, "-o", "profile.yaml")
    changes = ("--set", "workload.input_tokens=9000", "--set", "prefill.chunked_prefill_tokens=16384")
    (warning,) = warnings_in(output(capsys, "run", "scenario.yaml", *changes))
    assert warning == (
        "warning: scenario: cost: profile measured on qwen3-8b, bf16 weights, bf16 KV, TP1, h200; "
        "this run: new tokens of a forward 16,360 (measured 16 to 8,192): outside"
    )
    assert warnings_in(output(capsys, "run", "scenario.yaml")) == []


def test_a_profile_of_another_setup_is_said_by_every_run_of_it(capsys, folder):
    output(capsys, "calibrate", *FILES, "-o", "profile.yaml")
    other = ("--set", "model=llama-3.1-8b", "--set", "prefill.tp=2", "--set", "decode.tp=8", "--set", "decode.gpu=b200")
    (warning,) = warnings_in(output(capsys, "run", "scenario.yaml", *other))
    assert warning.endswith("; this run: llama-3.1-8b, TP2 to TP8, h200 and b200: outside")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rows.csv",), "a profile needs rows of decode in enough shapes"),
        ((), "calibrate needs files of rows"),
        ((*FILES, "--host-slowdown", "0"), "for --host-slowdown. Must be > 0"),
        (("nowhere.csv",), "nowhere.csv does not exist"),
        ((*FILES, "--gpu", "h2000"), "no GPU 'h2000' in the catalog (did you mean 'h200'?)"),
    ],
)
def test_wrong_rows_are_one_message(capsys, folder, arguments, message):
    assert exit_code("calibrate", *arguments, "-o", "profile.yaml") == 2
    assert message in capsys.readouterr().err
    assert not (folder / "profile.yaml").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("network.transport=mooncake-rdma", "has no transport 'mooncake-rdma'"),
        (
            "cost.eager_layer=0",
            "profile cannot be combined with eager_layer, only with host, cold_start and cold_kernels",
        ),
        ("cost.host=2", "host: expected a section, {name: value}, found 2"),
    ],
)
def test_wrong_use_of_a_profile_is_one_message(capsys, folder, change, message):
    output(capsys, "calibrate", *FILES, "-o", "profile.yaml")
    assert exit_code("run", "scenario.yaml", "--set", change) == 2
    assert message in capsys.readouterr().err
