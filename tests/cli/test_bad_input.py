"""Wrong input: one clear message, exit code 2, no traceback."""

from pathlib import Path

import pytest

from pdsim.cli import main

GOOD = """\
model: qwen3-0.6b
page_size: 4
prefill: {gpu: h100}
decode: {gpu: h100}
workload: {use: random_lengths, num_requests: 3, input_tokens: 10, output_tokens: 5}
"""

CHANGES = [
    (
        "decode.radix=true",
        "line 4: unknown field 'decode.radix' (did you mean 'radix_cache'?); here are instances, gpu",
    ),
    ("modle=x", "unknown field 'modle' (did you mean 'model'?)"),
    ("network.bandwidth=3", "network.bandwidth: bare number 3: write a bandwidth with its unit, such as '50 GB/s'"),
    ("network.bandwidth=3 GiBs", "'GiBs' is no unit of a bandwidth; there are B/s"),
    ("network.bandwidth=5 ms", "'ms' is no unit of a bandwidth"),
    ("network.message_latency=-1 ms", "a duration cannot be negative, found '-1 ms'"),
    ("network.message_latency=0", "network.message_latency: Input should be greater than or equal to 1"),
    ("network.gpus_per_nic=0", "network.gpus_per_nic: Input should be greater than or equal to 1"),
    ("network.transport=mooncake-rmda", "no transport 'mooncake-rmda' in the catalog"),
    ("prefill.layer_groups=99", "99 layer_groups for the 28 layers of qwen3-0.6b"),
    ("network.staging.ring=4", "network.staging.ring: bare number 4: write a size with its unit"),
    ("network.staging.oversized=drop", "network.staging.oversized: Input should be 'fail' or 'slices', found 'drop'"),
    ("model=qwen3-32", "no model 'qwen3-32' in the catalog, which has deepseek-r1"),
    (
        "prefill.gpu=h1000",
        "prefill: no gpu 'h1000' in the catalog, which has b200, gb200, h100, h20, h200, rtx-4090, rtx-pro-6000; did",
    ),
    ("prefill.tp=5", "prefill: tp 5 does not divide the 16 query heads of qwen3-0.6b"),
    ("model=llama-3.1-70b", "needs 143.2 GB on each of 1 h100, which give 70.4 GB"),
    (
        "decode={gpu: h100, radix_cache: true, speculative: {draft_tokens: 4, accept_length: 2}}",
        "decode: radix_cache: true and speculative exclude each other: SGLang's servers refuse the pair",
    ),
    ("decode.pool_tokens=12", "request 0 grows to 14 tokens; a decode instance holds 12"),
    ("prefill.pool_tokens=12", "request 0 has a prompt of 10 tokens; a prefill instance has room for 7"),
    ("decode.pool_tokens=3", "decode: pool_tokens 3 is less than a page of 4 tokens"),
    ("prefill.chunked_prefill_tokens=2", "chunked_prefill_tokens 2 is less than a page of 4 tokens"),
    ("model.kv_dtype=int4", "model.kv_dtype: Input should be 'fp32', 'bf16', 'fp8' or 'fp4', found 'int4'"),
    ("page_size=0", "line 2: page_size: Input should be greater than or equal to 1, found 0"),
    ("seed=soon", "seed: Input should be a valid integer"),
    ("router=roundrobin", "no RoutingPolicy 'roundrobin' (did you mean 'round_robin'?)"),
    ("prefill.policy=nowhere:Policy", "cannot import 'nowhere:Policy': No module named 'nowhere'"),
    ("prefill.policy=pdsim.policy.prefill:Fcfs", "module 'pdsim.policy.prefill' has no 'Fcfs'"),
    (
        "prefill.policy=pdsim.policy.eviction:LeastRecentlyUsed",
        "LeastRecentlyUsed is no PrefillPolicy: it has no method select",
    ),
    ("prefill.policy=pdsim.core.loop:instance_loop", "is no dataclass: its fields would be its settings"),
    ("prefill.policy.patience=5 s", "fcfs has no field 'patience'; it has none"),
    ("workload.num_requests=0", "RandomLengths needs num_requests >= 1, found 0"),
    ("workload.input_tokens=0", "Fixed needs tokens >= 1, found 0"),
    ("workload.output_tokens=-3", "Fixed needs tokens >= 1, found -3"),
    ("workload={use: azure_trace, path: a.csv, speedup: 0}", "AzureTrace needs speedup > 0, found 0"),
    ("workload={use: mooncake_trace, path: a, block_tokens: 0}", "MooncakeTrace needs block_tokens >= 1, found 0"),
    ("workload={use: request_table, path: a, num_requests: -1}", "RequestTable needs num_requests >= 1, found -1"),
    ("cost={use: roofline, matrix_efficiency: 0}", "Roofline needs matrix_efficiency > 0, found 0"),
    ("decode.admission.reserved_tokens=-1", "needs reserved_tokens >= 0"),
    ("prefill.chunked_prefill_tokens=-7", "chunked_prefill_tokens: Input should be greater than or equal to -1"),
    ("name=a/b", "name: String should match pattern"),
    ("workload.num_requests=many", "random_lengths.num_requests: Input should be a valid integer"),
    (
        "workload.input_tokens={use: uniform, low: 5, high: 3}",
        "uniform lengths need 1 <= low <= high, found low 5, high 3",
    ),
    ("workload.output_tokens={use: normal, mean: 5}", "normal needs stddev"),
    ("workload={use: mooncake_trace, path: no.jsonl}", "workload: no trace file"),
    ("client={use: closed_loop, concurrency: 0}", "a closed loop needs concurrency >= 1, found 0"),
    ("client={use: open_loop, arrivals: {use: poisson, rate: 0/s}}", "Poisson arrivals need a rate above 0"),
    ("cost={profile: nowhere.yaml}", "nowhere.yaml does not exist"),
    ("cost={use: roofline, matrix_eficiency: 1}", "did you mean 'matrix_efficiency'?"),
    ("decode.gpu.name=x", "decode.gpu: Input should be a valid string"),
    ("aggregated={gpu: h100}", "s.yaml: aggregated stands beside prefill and decode: a cluster has one or the other"),
    ("decode=null", "s.yaml: no decode: a cluster has prefill and decode instances, or aggregated ones"),
    ("faults=[{at: 5 s, kill: prefil-0}]", "faults.0.kill: no instance 'prefil-0' (did you mean 'prefill-0'?)"),
    (
        "faults=[{at: 5 s, kil: prefill-0}]",
        "link, abort, abort_fraction (did you mean 'kill'?), found at, kil",
    ),
    ("faults=[{at: 5 s, kill: prefill-0, restart: 3 s}]", "'faults.0.restart' (did you mean 'restart_after'?)"),
    ("faults=[{at: 5, kill: prefill-0}]", "faults.0.at: bare number 5: write a duration with its unit"),
    ("faults=[{kill: prefill-0}]", "faults.0.at is missing"),
    ("faults=[{at: 1 s, kill: decode-0, restart_after: 0}]", "faults.0.restart_after: Input should be greater than 0"),
    ("faults=[{at: 0, link: shared, bandwidth_factor: 0}]", "no link of 'shared'; there are prefill-0, decode-0"),
    (
        "faults=[{at: 0, link: decode-0, bandwidth_factor: -1}]",
        "bandwidth_factor: Input should be greater than",
    ),
    ("faults=[{at: 1 s, abort: 3}]", "faults.0.abort: no request 3; there are 0 to 2"),
    ("faults=[{abort_fraction: 2, within: 1 s}]", "faults.0.abort_fraction: Input should be less than or equal to 1"),
    ("faults=[prefill-0]", "faults.0: expected a mapping such as {at: 5 s, kill: prefill-0}, found 'prefill-0'"),
    ("health.heartbeat=5 s", "unknown field 'health.heartbeat' (did you mean 'heartbeat_interval'?)"),
    ("health.heartbeat_failures=0", "health.heartbeat_failures: Input should be greater than or equal to 1, found 0"),
    ("health.waiting_timeout=0", "health.waiting_timeout: Input should be greater than 0"),
    ("health.backoff_jitter=1", "health.backoff_jitter: Input should be less than 1, found 1"),
    ("decode", "--set decode: expected path=value"),
    ("decode.tp=[1", "--set decode.tp=[1, line 1, column"),
]


def message(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2, error
    assert "Traceback" not in error
    assert error.startswith("pdsim: ")
    return error


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(("change", "says"), CHANGES, ids=[change for change, _ in CHANGES])
def test_a_wrong_field(capsys, scenario, change, says):
    assert says in message(capsys, "run", scenario, "--set", change)


def test_prompts_are_computed_before_the_grant_or_layer_by_layer(capsys, scenario):
    says = message(capsys, "run", scenario, "--set", "prefill.optimistic_attempts=1", "--set", "prefill.layer_groups=2")
    assert "prefill.layer_groups: 2, but prefill.optimistic_attempts computes prompts before it is known where" in says
    late = ("--set", "decode.allocation=prefill_complete", "--set", "prefill.optimistic_attempts=0")
    assert "prefill.optimistic_attempts: 0, but decode.allocation prefill_complete" in message(
        capsys, "run", scenario, *late
    )


AGGREGATED = GOOD.replace("prefill: {gpu: h100}\ndecode: {gpu: h100}\n", "aggregated: {gpu: h100}\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("faults=[{at: 1 s, kill: prefill-0}]", "no instance 'prefill-0'; there are aggregated-0"),
        (
            "faults=[{at: 1 s, link: aggregated-0, bandwidth_factor: 0}]",
            "faults.0.link: an aggregated cluster sends no KV; it has no links",
        ),
        ("aggregated.radix=1", "line 3: unknown field 'aggregated.radix' (did you mean 'radix_cache'?); here are inst"),
        ("aggregated.tp=5", "aggregated: tp 5 does not divide the 16 query heads of qwen3-0.6b"),
        ("aggregated.chunked_prefill_tokens=2", "aggregated: chunked_prefill_tokens 2 is less than a page of 4 tokens"),
        ("aggregated.schedule_conservativeness=0", "aggregated.schedule_conservativeness: Input should be greater tha"),
        ("aggregated.preemption=fcfs", "aggregated.preemption: no PreemptionPolicy 'fcfs'"),
        ("aggregated.pool_tokens=20", "request 0 grows to 17 tokens; an aggregated instance has room for 15"),
        ("prefill={gpu: h100}", "aggregated stands beside prefill: a cluster has one or the other; leave one out"),
    ],
)
def test_a_wrong_field_of_an_aggregated_cluster(capsys, tmp_path, change, says):
    path = tmp_path / "s.yaml"
    path.write_text(AGGREGATED)
    assert says in message(capsys, "run", path, "--set", change)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a mapping of fields, found NoneType"),
        ("- a\n- b\n", "expected a mapping of fields, found"),
        ("model: [qwen\n", "s.yaml, line 2, column 1: not YAML"),
        (GOOD.replace("model: qwen3-0.6b\n", ""), "s.yaml: model is missing"),
        (
            GOOD.replace("decode: {gpu: h100}\n", "").replace("prefill: {gpu: h100}\n", ""),
            "s.yaml: no prefill and decode: a",
        ),
        (GOOD + "model: qwen3-8b\n", "not YAML: found duplicate key"),
        ("model: \x01", "s.yaml: not YAML: unacceptable character"),
    ],
)
def test_a_broken_file(capsys, tmp_path, text, says):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    assert says in message(capsys, "run", path)


@pytest.mark.parametrize(
    ("command", "name", "says"),
    [
        (["run"], "s.yaml", "s.yaml: not YAML: 'utf-8'"),
        (["ask", "routing", "--trace"], "t.jsonl", "t.jsonl: cannot be read as text"),
        (["calibrate", "-o", "p.yaml"], "rows.csv", "rows.csv cannot be read as rows"),
        (["calibrate", "-o", "p.yaml"], "rows.csv.gz", "rows.csv.gz cannot be read as rows"),
        (["calibrate", "-o", "p.yaml"], "rows.parquet", "rows.parquet cannot be read as rows"),
        (["compare", "result.json"], "result.json", "result.json: not JSON"),
        (["explain"], "summary.json", "summary.json: not JSON"),
    ],
)
def test_a_file_that_is_no_text(capsys, tmp_path, monkeypatch, command, name, says):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"\xe5\x00 no text")
    assert says in message(capsys, *command, "." if name == "summary.json" else name)


def test_every_mistake_is_named_at_once(capsys, scenario):
    error = message(capsys, "run", scenario, "--set", "page_size=0", "--set", "seed=x", "--set", "decode.radix=1")
    assert all(name in error for name in ("page_size", "seed", "decode.radix"))


def test_a_broken_trace_line(capsys, scenario, tmp_path):
    (tmp_path / "t.jsonl").write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n{"time\n'
    )
    error = message(capsys, "run", scenario, "--set", "workload={use: mooncake_trace, path: t.jsonl}")
    assert "t.jsonl, line 2: not JSON" in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rnu", "x"], 'Did you mean "run"?'),
        (["run"], "requires an argument"),
        (["run", "x", "--jsn"], "Did you mean --json?"),
        (["run", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["run", "."], "is a folder, not a file"),
        (["compare", "one"], "compare needs two or more"),
        (["explain", "."], "is no run folder: it has no summary.json"),
        (["replay", "."], "is no run folder"),
        (["validate", "decode-radix-b20"], "did you mean 'decode-radix-b200'?"),
        (["validate", "--experiments", "docs"], "no case in docs/"),
    ],
)
def test_wrong_arguments(capsys, arguments, says):
    assert says in message(capsys, *arguments)


def test_a_request_that_the_run_does_not_have(capsys, scenario):
    assert "--request 7: the run has requests 0 to 2" in message(capsys, "explain", scenario, "--request", "7")
