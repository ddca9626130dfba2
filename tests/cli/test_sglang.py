"""The commands that put a scenario on real GPUs say what the scenario says."""

import shlex

import pytest

from tests.cli.test_commands import output, output_json

SCENARIO = """\
name: pair
model: qwen3-8b
kv_dtype: fp8
page_size: 64
prefill: {gpu: h200, instances: 2, tp: 2}
decode: {gpu: h200, radix_cache: true, polling_interval: 3}
router: {prefill: cache_aware, decode: round_robin}
network: {transport: nixl-cuda-ipc, staging: {ring: 2 GiB}}
workload:
  use: random_lengths
  num_requests: 30
  input_tokens: {use: uniform, low: 500, high: 1000}
  output_tokens: {use: uniform, low: 50, high: 100}
client: {use: open_loop, arrivals: {use: poisson, rate: 4/s}}
"""


@pytest.fixture
def made(capsys, tmp_path):
    def launched(*changes):
        (tmp_path / "pair.yaml").write_text(SCENARIO)
        flags = [word for change in changes for word in ("--set", change)]
        return output_json(capsys, "launch", tmp_path / "pair.yaml", *flags)

    return launched


def flags(command):
    """By name, with what follows each; the words before the first flag under ''."""
    found = {"": []}
    last = ""
    for word in shlex.split(command):
        if word.startswith("--"):
            last = word[2:]
            found.setdefault(last, [])
        else:
            found[last].append(word)
    return {name: " ".join(words) for name, words in found.items()}


def test_each_server_has_gpus_and_a_port_of_its_own(made):
    commands = made()["commands"]
    assert list(commands) == ["prefill-0", "prefill-1", "decode-0", "gateway", "load"]
    servers = [flags(commands[name]) for name in ("prefill-0", "prefill-1", "decode-0")]
    assert [server["base-gpu-id"] for server in servers] == ["0", "2", "4"]
    assert [server["port"] for server in servers] == ["30000", "30001", "30002"]
    assert [server["disaggregation-mode"] for server in servers] == ["prefill", "prefill", "decode"]


def test_settings_become_flags(made):
    prefill, decode = (flags(made()["commands"][name]) for name in ("prefill-0", "decode-0"))
    shared = {"page-size": "64", "kv-cache-dtype": "fp8_e4m3", "disaggregation-transfer-backend": "nixl"}
    assert shared.items() <= prefill.items()
    assert shared.items() <= decode.items()
    assert {"tp-size": "2", "chunked-prefill-size": "8192", "schedule-policy": "fcfs"}.items() <= prefill.items()
    assert prefill["disaggregation-bootstrap-port"] == "8998"
    assert decode["disaggregation-decode-enable-radix-cache"] == ""
    assert decode["disaggregation-decode-polling-interval"] == "3"
    assert decode["num-reserved-decode-tokens"] == "512"
    assert "SGLANG_DISAGG_STAGING_BUFFER=1 SGLANG_DISAGG_STAGING_POOL_SIZE_MB=2048" in decode[""]
    assert "schedule-policy" not in decode


def test_the_gateway_knows_every_server_and_the_load_is_the_workload(made):
    commands = made()["commands"]
    assert (
        "--prefill http://127.0.0.1:30000 8998 --prefill http://127.0.0.1:30001 8999 "
        "--decode http://127.0.0.1:30002 --prefill-policy cache_aware --decode-policy round_robin"
    ) in commands["gateway"]
    load = flags(commands["load"])
    assert load[""] == "python -m sglang.bench_serving"
    wanted = {"num-prompts": "30", "random-input-len": "1000", "random-output-len": "100", "random-range-ratio": "0.5"}
    assert (wanted | {"request-rate": "4.0", "output-file": "pair.jsonl"}).items() <= load.items()


def test_closed_loop_and_shared_prefixes(made):
    workload = "workload={use: shared_prefix_groups, num_groups: 4, prompts_per_group: 8}"
    load = flags(made(workload, "client={use: closed_loop, concurrency: 16}")["commands"]["load"])
    assert {
        "dataset-name": "generated-shared-prefix",
        "gsp-num-groups": "4",
        "max-concurrency": "16",
    }.items() <= load.items()
    assert "request-rate" not in load


def test_an_aggregated_cluster_has_workers_and_one_policy(made):
    commands = made("prefill=null", "decode=null", "aggregated={gpu: h200, instances: 2, radix_cache: false}")[
        "commands"
    ]
    assert list(commands) == ["aggregated-0", "aggregated-1", "gateway", "load"]
    assert "disaggregation-mode" not in flags(commands["aggregated-0"])
    assert "--disable-radix-cache" in commands["aggregated-0"]
    assert "--worker-urls http://127.0.0.1:30000 http://127.0.0.1:30001 --policy cache_aware" in commands["gateway"]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (
            "decode={gpu: h200, speculative_draft_tokens: 4, speculative_accept_length: 2}",
            "speculative_algorithm EAGLE: the draft model is not in the scenario",
        ),
        ("network.staging.prefill_buffer=64 MiB", "network.staging.prefill_buffer: SGLang 0.5.12 reads it"),
    ],
)
def test_what_sglang_cannot_be_told_is_said(made, change, note):
    assert any(note in told for told in made(change)["notes"])


def test_the_notes_name_the_way_back(capsys, tmp_path):
    (tmp_path / "pair.yaml").write_text(SCENARIO)
    text = output(capsys, "launch", tmp_path / "pair.yaml", "--model-path", "models/Qwen3-8B")
    assert "--model-path models/Qwen3-8B" in text
    assert f"pdsim compare {tmp_path / 'pair.yaml'} pair.jsonl" in text
