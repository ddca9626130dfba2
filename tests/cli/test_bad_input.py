"""Wrong input: one clear message, exit code 2, no traceback."""

import sys
from pathlib import Path
from shutil import copytree

import pyarrow as pa
import pytest

from pdsim import load_scenario
from pdsim.cli import main
from pdsim.metrics.journal_blocks import to_block
from pdsim.metrics.journal_file import read_journal
from pdsim.metrics.run_folder import JOURNAL, read_summary
from pdsim.metrics.tables import TABLES
from pdsim.scenario.building import room
from pdsim.scenario.building.cluster import requests_of
from pdsim.sim.simulation import Simulation

GOOD = """\
model: qwen3-0.6b
page_size: 4
prefill: {gpu: h100}
decode: {gpu: h100}
workload: {use: random_lengths, num_requests: 3, input_tokens: 10, output_tokens: 5}
"""

SESSIONS = "workload={use: sessions, num_sessions: 1000000000, num_turns: 2, input_tokens: 9, output_tokens: 9}"

CHANGES = [
    (
        "decode.radix=true",
        "line 4: unknown field 'decode.radix' (did you mean 'radix_cache'?); here are instances, gpu",
    ),
    ("modle=x", "unknown field 'modle' (did you mean 'model'?)"),
    ("decode.pp=2", "decode.pp 2: SGLang's decode has as many pipeline stages as prefill, which has 1, or one"),
    ("decode.cp=2", "decode.cp: decode computes no prompts; to divide KV say decode.dcp"),
    ("prefill.dcp=2", "prefill.dcp: pdsim divides KV on decode and aggregated servers only"),
    ("network.bandwidth=3", "network.bandwidth: bare number 3: write a bandwidth with its unit, such as '50 GB/s'"),
    ("network.bandwidth=3 GiBs", "'GiBs' is no unit of a bandwidth; there are B/s"),
    (
        "faults=[{at: 1 s, kill: prefill-0, restart_after: 1e300 h}]",
        "kill.restart_after: a duration is 0 or from 1e-09 ns to 100000 h, found '1e300 h'",
    ),
    ("network.bandwidth=5 ms", "'ms' is no unit of a bandwidth"),
    ("network.message_latency=-1 ms", "a duration cannot be negative, found '-1 ms'"),
    ("network.message_latency=0", "network.message_latency: Input should be greater than or equal to 1"),
    ("network.gpus_per_nic=0", "network.gpus_per_nic: Input should be greater than or equal to 1"),
    ("network.transport=mooncake-rmda", "no transport 'mooncake-rmda' in the catalog"),
    ("prefill.layer_groups=99", "layer_groups 99 is more than the 28 layers of qwen3-0.6b"),
    ("network.staging.ring=4", "network.staging.ring: bare number 4: write a size with its unit"),
    ("model.kv_dtype=fp8", "weight_dtype, kv_dtype, state_dtype and context_tokens are fields beside model"),
    ("model=qwen3-32", "no model 'qwen3-32' in the catalog, which has deepseek-r1"),
    ("decode.gpu=h1000", "decode: no gpu 'h1000' in the catalog, which has a10, a100"),
    (
        "prefill.gpu=h1000",
        "rtx-4090, rtx-5090, rtx-pro-6000, tpu-v6e, tpu-v7, vr-nvl72; did",
    ),
    ("prefill.tp=5", "prefill: tp 5 does not divide the 16 query heads of qwen3-0.6b"),
    ("model=llama-3.1-70b", "needs 143.2 GB on each of 1 h100, which give 70.4 GB"),
    (
        "decode={gpu: h100, radix_cache: true, speculative_draft_tokens: 4, speculative_accept_length: 2, speculative_draft_layers: 0}",  # noqa: E501
        "decode: radix_cache: true and speculative_draft_layers: 0 exclude each other: with a radix cache SGLang's",
    ),
    ("decode.pool_tokens=12", "request 0 grows to 14 tokens; with decode.pool_tokens 12 an instance has room for 12"),
    (
        "prefill.pool_tokens=12",
        "request 0 has a prompt of 10 tokens; with prefill.pool_tokens 12 an instance has room for 7",
    ),
    ("decode.pool_tokens=3", "decode: pool_tokens 3 is less than a page of 4 tokens"),
    ("prefill.chunked_prefill_tokens=2", "chunked_prefill_tokens 2 is less than a page of 4 tokens"),
    ("kv_dtype=int4", "kv_dtype: Input should be 'fp32', 'bf16', 'fp8' or 'fp4', found 'int4'"),
    (
        "decode.host_cache={size: 120 GiB, write: write_back}",
        (
            "decode.host_cache: expected a size such as 64 GiB, or auto (twice the pool), found {'size': '120 GiB', "
            "'write': 'write_back'}: write host_cache: 120 GiB and host_cache_write: write_back"
        ),
    ),
    ("prefill.host_cache={}", "or auto (twice the pool), found {}: write host_cache: auto"),
    ("prefill.host_cache.size=8 GiB", "found {'size': '8 GiB'}: write host_cache: 8 GiB"),
    ("prefill.host_cache=atuo", "prefill.host_cache: expected a size such as '512 MiB', found 'atuo'; auto is twice"),
    ("prefill.host_cache=12", "prefill.host_cache: bare number 12: write a size with its unit"),
    ("prefill.host_cache_write=back", "prefill.host_cache_write: Input should be 'write_through', 'write_through_sel"),
    ("page_size=0", "line 2: page_size: Input should be greater than or equal to 1, found 0"),
    (
        "network={transport: push, staging: {}}",
        "network.staging: a push writes into decode's pages and needs no staging; leave it out",
    ),
    ("seed=soon", "seed: Input should be a valid integer"),
    ("seed=-1", "seed: Input should be greater than or equal to 0, found -1"),
    ("router={use: random, seed: -1}", "random.seed: Input should be greater than or equal to 0, found -1"),
    ("router=roundrobin", "no RoutingPolicy 'roundrobin' (did you mean 'round_robin'?)"),
    ("network.message_latency=1e400 ms", "a duration cannot be infinite, found '1e400 ms'"),
    (
        "cost={use: roofline, matrix_efficiency: .nan}",
        "roofline.matrix_efficiency: expected a finite number, found nan",
    ),
    (
        "workload.input_tokens=41000",
        "request 0 has a prompt of 41000 tokens and an output of 5; qwen3-0.6b has a context of",
    ),
    (
        "workload.input_tokens=40956",
        "context of 40960, and a server cuts off its answer there: leave such requests out",
    ),
    ("context_tokens=14", "a context of 14, and a server cuts off its answer there"),
    ("context_tokens=10", "a context of 10, and a server refuses its prompt"),
    ("prefill.tp=17", "prefill: tp 17 spans 3 hosts of 8 h100, which cannot each have equally many ranks"),
    ("prefill={gpu: gb200, tp: 145}", "prefill: tp 145 spans 3 NVLink domains of 72 gb200, which cannot each have"),
    (
        "prefill={gpu: gb300, tp: 216, dp: 2}",
        "72 on each: the 108 GPUs of an instance must fit into one NVLink domain or fill NVLink domains",
    ),
    ("prefill={gpu: h200, tp: 24, dp: 2}", "the 12 GPUs of an instance must fit into one host or fill hosts"),
    ("prefill={gpu: h100, tp: 16, cp: 2}", "hosts of 8 h100; pdsim does not model cp 2 with it: at most 8"),
    ("prefill={gpu: h100, tp: 16, pp: 2}", "hosts of 8 h100; pdsim does not model pp 2 with it: at most 8"),
    ("prefill.policy=./evil.py:Evil", "'./evil.py' in './evil.py:Evil' is no module's name; write module:Class"),
    ("prefill.policy.patience=5 s", "fcfs has no field 'patience'; it has none"),
    ("workload.num_requests=0", "RandomLengths needs num_requests >= 1, found 0"),
    (
        "workload={use: random_lengths, num_requests: 1, input_tokens: 1, output_tokens: 1, images: 99999, image_tokens: 1}",  # noqa: E501
        "workload: request 0 has 99,999 images; at most 10,000",
    ),
    ("workload.input_tokens=0", "workload: random_lengths.input_tokens: expected a number of at least 1, found 0"),
    ("workload.output_tokens=-3", "output_tokens: expected a number of at least 1, found -3"),
    ("workload={use: azure_trace, path: a.csv, speedup: 0}", "AzureTrace needs speedup > 0, found 0"),
    ("workload={use: mooncake_trace, path: a, block_tokens: 0}", "MooncakeTrace needs block_tokens >= 1, found 0"),
    ("workload={use: request_table, path: a, num_requests: -1}", "RequestTable needs num_requests >= 1, found -1"),
    ("cost={use: roofline, matrix_efficiency: 0}", "Roofline needs matrix_efficiency > 0, found 0"),
    ("decode.admission.reserved_tokens=-1", "needs reserved_tokens >= 0"),
    ("prefill.chunked_prefill_tokens=-7", "chunked_prefill_tokens: Input should be greater than or equal to -1"),
    ("name=a/b", "name: String should match pattern"),
    ("workload.num_requests=many", "random_lengths.num_requests: Input should be a valid integer"),
    ("workload.num_requests=true", "random_lengths.num_requests: expected a number, found true"),
    ("prefill.tp=true", "prefill: tp: expected a number, found true"),
    ("decode.mem_fraction=true", "decode: mem_fraction: expected a number, found true"),
    ("network.message_latency=true", "network.message_latency: expected a duration such as '5 ms', found True"),
    ("workload={use: random_lengths, num_requests: 3, 7: }", "random_lengths has no field 7"),
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
    (
        "aggregated={gpu: h100}",
        "s.yaml: a cluster has aggregated instances, or prefill and decode: leave out aggregated, or",
    ),
    ("decode=null", "s.yaml: no decode: a cluster has prefill and decode instances, or aggregated ones"),
    ("faults=[{at: 5 s, kill: prefil-0}]", "faults.0.kill: no instance 'prefil-0' (did you mean 'prefill-0'?)"),
    (
        "faults=[{at: 5 s, kil: prefill-0}]",
        "expected a name or a mapping with `use`, found {'at': '5 s', 'kil': 'prefill-0'}; there are kill, link, abort",
    ),
    (
        "faults=[{at: 5 s, kill: prefill-0, restart: 3 s}]",
        "faults.0: kill has no field 'restart' (did you mean 'restart_after'?)",
    ),
    ("faults=[{at: 5, kill: prefill-0}]", "faults.0: kill.at: bare number 5: write a duration with its unit"),
    ("faults=[{kill: prefill-0}]", "faults.0: kill needs at"),
    ("faults=[{at: 1 s, kill: decode-0, restart_after: 0}]", "faults.0: restart_after must be longer than 0"),
    ("faults=[{at: 0, link: shared, bandwidth_factor: 0}]", "no link of 'shared'; there are prefill-0, decode-0"),
    (
        "faults=[{at: 0, link: decode-0, bandwidth_factor: -1}]",
        "faults.0: a link needs bandwidth_factor >= 0",
    ),
    ("faults=[{at: 1 s, abort: 3}]", "faults.0.abort: no request 3; there are 0 to 2"),
    ("faults=[{abort_fraction: 2, within: 1 s}]", "faults.0: needs abort_fraction above 0, at most 1"),
    ("faults=[prefill-0]", "faults.0: no fault 'prefill-0'; there are kill, link, abort, abort_fraction"),
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
    found = message(capsys, "run", scenario, "--set", change)
    assert says in found
    assert str(scenario) in found or f"--set {change}" in found


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("nowhere:Policy", "cannot import 'nowhere:Policy': No module named 'nowhere'"),
        ("pdsim.policy.prefill:Fcfs", "module 'pdsim.policy.prefill' has no 'Fcfs'"),
        ("pdsim.policy.pages:LeastRecentlyUsed", "LeastRecentlyUsed is no PrefillPolicy: it has no method select"),
        ("pdsim.core.instance:instance_loop", "is no dataclass; fields of a dataclass are the settings"),
        ("broken:Policy", "cannot import 'broken:Policy': ZeroDivisionError: division by zero"),
    ],
)
def test_a_policy_that_cannot_be_imported(capsys, scenario, monkeypatch, policy, says):
    monkeypatch.chdir(scenario.parent)
    Path("broken.py").write_text("1 / 0\n")
    assert says in message(capsys, "run", scenario, "--trust", "--set", f"prefill.policy={policy}")


@pytest.fixture
def stranger(scenario, monkeypatch) -> Path:
    """A scenario whose policies are of a module beside it, which leaves a mark when it is imported."""
    monkeypatch.chdir(scenario.parent)
    monkeypatch.delenv("PDSIM_TRUST", raising=False)
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    Path("strange.py").write_text("""\
from pathlib import Path
from pdsim.policy.prefill import FirstComeFirstServed
from pdsim.workload.synthetic import RandomLengths
class Policy(FirstComeFirstServed): pass
class Load(RandomLengths): pass
Path("imported").touch()
""")
    text = GOOD.replace("prefill: {gpu: h100}", "prefill: {gpu: h100, policy: 'strange:Policy'}")
    scenario.write_text(text.replace("use: random_lengths", "use: 'strange:Load'"))
    Path("sweep.yaml").write_text(f"scenario: {scenario.name}\ngrid: {{page_size: [4]}}\n")
    return scenario


@pytest.mark.parametrize(
    "command",
    [
        ["run", "s.yaml"],
        ["run", "s.yaml", "--set", "prefill.policy=fcfs"],
        ["compare", "s.yaml", "s.yaml"],
        ["explain", "s.yaml"],
        ["report", "s.yaml"],
        ["export", "s.yaml", "--to", "sglang", "-o", "x.jsonl"],
        ["launch", "s.yaml"],
        ["sweep", "sweep.yaml", "--engine", "here"],
        ["ask", "routing", "s.yaml"],
        ["replay", "sent"],
        ["report", "sent"],
        ["explain", "sent", "--tornado"],
    ],
    ids=" ".join,
)
def test_what_a_file_names_is_imported_on_trust_alone(capsys, stranger, command):
    if "sent" in command:
        main_exit("run", stranger, "--trust", "--out", "sent")
        Path("imported").unlink()
        del sys.modules["strange"]
        capsys.readouterr()
    says = message(capsys, *command)
    assert "pdsim would import the module strange, from " in says
    assert f"{stranger.parent / 'strange.py'}, and run its code; if you trust" in says
    assert "give --trust or set PDSIM_TRUST=1" in says
    assert not Path("imported").exists()


def test_trust_is_a_flag_or_a_setting_of_the_users_own(stranger, monkeypatch):
    assert main_exit("run", stranger, "--trust", "--json") == 0
    assert Path("imported").exists()
    monkeypatch.setenv("PDSIM_TRUST", "1")
    assert main_exit("explain", stranger) == 0


def test_python_imports_what_it_loads(stranger, monkeypatch):
    monkeypatch.syspath_prepend(stranger.parent)
    assert type(load_scenario(stranger).workload).__name__ == "Load"


def main_exit(*arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code or 0


def test_prompts_are_computed_before_the_grant_or_layer_by_layer(capsys, scenario):
    says = message(capsys, "run", scenario, "--set", "prefill.optimistic_attempts=1", "--set", "prefill.layer_groups=2")
    assert "prefill.layer_groups: 2, but prefill.optimistic_attempts computes prompts before decode has pages" in says
    late = ("--set", "decode.allocation=prefill_complete", "--set", "prefill.optimistic_attempts=0")
    assert "prefill.optimistic_attempts: 0, but decode.allocation prefill_complete" in message(
        capsys, "run", scenario, *late
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["engine=vlm"], "engine: Input should be 'sglang' or 'vllm', found 'vlm'"),
        (
            ["prefill.hold_timeout=1 s"],
            "engine sglang: prefill.hold_timeout is a setting of vLLM; leave it out, or say engine: vllm",
        ),
        (
            ["engine=vllm", "decode.allocation=early"],
            "engine vllm: decode.allocation: early: decode allocates pages for",
        ),
        (
            ["engine=vllm", "decode.host_cache=0"],
            "engine vllm: decode.host_cache: one connector loads all KV of a request",
        ),
        (
            ["engine=vllm", "prefill=null", "decode=null", "aggregated={gpu: h100, schedule_conservativeness: 0.5}"],
            "engine vllm: aggregated.schedule_conservativeness is a setting of SGLang; leave it out",
        ),
        (
            ["engine=vllm", "prefill=null", "decode=null", "aggregated={gpu: h100, policy: lof}"],
            "engine vllm: aggregated.policy: lof is an order of SGLang. vLLM orders prompts by priority and arrival",
        ),
        (
            ["prefill.long_prefill_tokens=100"],
            "engine sglang: prefill.long_prefill_tokens is a setting of vLLM; leave it out",
        ),
        (
            ["engine=vllm", "model=deepseek-v3", "prefill={gpu: h200, tp: 8, ep: 8, moe_a2a_backend: deepep}"],
            "engine vllm: prefill.moe_a2a_backend: it needs dp > 1 in vLLM (0.33.0, config/parallel.py:788)",
        ),
        (["engine=vllm", "network.staging={}"], "engine vllm: network.staging is a setting of SGLang; leave it out"),
        (
            [
                "engine=vllm",
                "decode={gpu: h100, radix_cache: false, speculative_draft_tokens: 2, speculative_accept_length: 1}",
            ],
            "engine vllm: decode.speculative_draft_tokens: pdsim does not model vLLM's drafts",
        ),
        (["engine=vllm", "prefill.layer_groups=2"], "prefill.layer_groups: 2, but decode.allocation prefill_complete"),
    ],
)
def test_what_is_of_one_engine_only(capsys, scenario, changes, says):
    assert says in message(capsys, "run", scenario, *(word for change in changes for word in ("--set", change)))


AGGREGATED = GOOD.replace("prefill: {gpu: h100}\ndecode: {gpu: h100}\n", "aggregated: {gpu: h100}\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("faults=[{at: 1 s, kill: prefill-0}]", "no instance 'prefill-0'; there are aggregated-0"),
        (
            "faults=[{at: 1 s, link: aggregated-0, bandwidth_factor: 0}]",
            "faults.0.link: an aggregated cluster has no links, because it sends no KV",
        ),
        ("aggregated.radix=1", "line 3: unknown field 'aggregated.radix' (did you mean 'radix_cache'?); here are inst"),
        ("aggregated.tp=5", "aggregated: tp 5 does not divide the 16 query heads of qwen3-0.6b"),
        ("aggregated.chunked_prefill_tokens=2", "aggregated: chunked_prefill_tokens 2 is less than a page of 4 tokens"),
        ("aggregated.schedule_conservativeness=0", "aggregated.schedule_conservativeness: Input should be greater tha"),
        ("aggregated.preemption=fcfs", "aggregated.preemption: no PreemptionPolicy 'fcfs'"),
        ("workload.input_tokens=41000", "request 0 has a prompt of 41000 tokens and an output of 5; qwen3-0.6b has a"),
        (
            "aggregated.pool_tokens=20",
            "request 0 grows to 17 tokens; with aggregated.pool_tokens 20 an instance has room for 15",
        ),
        (
            "prefill={gpu: h100}",
            "a cluster has aggregated instances, or prefill and decode: leave out aggregated, or prefill",
        ),
    ],
)
def test_a_wrong_field_of_an_aggregated_cluster(capsys, tmp_path, change, says):
    path = tmp_path / "s.yaml"
    path.write_text(AGGREGATED)
    assert says in message(capsys, "run", path, "--set", change)


def test_a_server_of_several_ranks_leads_to_its_own_first_rank(capsys, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(AGGREGATED.replace("{gpu: h100}", "{gpu: h100, instances: 3, tp: 2, dp: 2}"))
    said = message(capsys, "run", path, "--set", "faults=[{at: 1 s, kill: aggregated-1}]")
    assert "no instance 'aggregated-1' (did you mean 'aggregated-1.dp0'?)" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a mapping of fields, found nothing"),
        ("- a\n- b\n", "expected a mapping of fields, found"),
        ("model: [qwen\n", "s.yaml, line 2, column 1: not YAML"),
        (GOOD.replace("model: qwen3-0.6b\n", ""), "s.yaml: model is missing"),
        (
            GOOD.replace("decode: {gpu: h100}\n", "").replace("prefill: {gpu: h100}\n", ""),
            "s.yaml: no prefill and decode: a",
        ),
        (GOOD + "model: qwen3-8b\n", "not YAML: found duplicate key"),
        ("model: \x01", "s.yaml: not YAML: unacceptable character"),
        ("[" * 1200, "s.yaml: nested too deeply"),
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
        (["rnu", "--help"], 'Did you mean "run"?'),
        (["run"], "the load is missing"),
        (["run", "x", "--jsn"], "Did you mean --json?"),
        (["run", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["run", "."], "is a folder, not a file"),
        (["serve", "--port", "99999"], "--port"),
        (["compare"], "compare needs scenarios, run folders or results"),
        (["explain", "."], "is no run folder: it has no summary.json"),
        (["replay", "."], "is no run folder"),
        (["validate", "decode-radix-b20"], "did you mean 'decode-radix-b200'?"),
    ],
)
def test_wrong_arguments(capsys, arguments, says):
    assert says in message(capsys, *arguments)


def test_outside_the_repository_a_case_has_no_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "names are those of experiments/ in a copy of pdsim's repository" in message(capsys, "validate", "a-case")


@pytest.mark.parametrize("skip", ["-1", "all", "1.5"])
def test_an_arm_that_skips_no_number_of_requests(capsys, tmp_path, skip):
    case = f"scenario: s.yaml\nsource: made up\narms: {{only: {{skip: {skip}, runs: [{{completed: 20}}]}}}}\n"
    (tmp_path / "measured.yaml").write_text(case)
    assert "arm 'only': skip is a number of requests, found" in message(capsys, "validate", tmp_path)


def test_a_request_that_the_run_does_not_have(capsys, scenario):
    assert "--request 7: the run has requests 0 to 2" in message(capsys, "explain", scenario, "--request", "7")


def test_a_file_that_cannot_be_read(capsys, scenario, monkeypatch):
    """Nobody is refused a file who tests as root."""

    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert f"{scenario}: cannot be read: Permission denied" in message(capsys, "run", scenario)


@pytest.mark.parametrize(
    "command", [["run", "s.yaml"], ["compare", "s.yaml", "s.yaml"], ["sweep", "sweep.yaml"], ["ask", "routing"]]
)
@pytest.mark.parametrize("out", ["s.yaml", "s.yaml/below"])
def test_nothing_is_simulated_for_a_folder_that_cannot_be(capsys, scenario, monkeypatch, command, out):
    monkeypatch.chdir(scenario.parent)
    monkeypatch.setattr(Simulation, "run", lambda _: pytest.fail("simulated"))
    Path("sweep.yaml").write_text("scenario: s.yaml\ngrid: {page_size: [4]}\n")
    jobs = ["--jobs", "1"] if command[0] == "ask" else []
    assert f"--out {out}: s.yaml is a file; expected a folder" in message(capsys, *command, *jobs, "--out", out)
    assert scenario.read_text() == GOOD


@pytest.mark.parametrize(
    "command",
    [
        ["report", "s.yaml"],
        ["export", "s.yaml", "--to", "vllm"],
        ["calibrate", "rows.csv"],
        ["scale", "p.yaml", "--from", "h100", "--to", "h200"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("folder", "is a folder; expected a file's name, such as folder/NAME"),
        ("s.yaml/x", "s.yaml is a file; expected a folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_found_first(capsys, scenario, monkeypatch, command, out, says):
    monkeypatch.chdir(scenario.parent)
    Path("folder").mkdir()
    assert f"--out {out}: {says}" in message(capsys, *command, "--out", out)


def test_a_run_takes_no_place_of_another_unless_forced(capsys, scenario, tmp_path):
    out = tmp_path / "runs" / "scenario"
    assert main_exit("run", scenario, "--out", out) == 0
    before = (out / "summary.json").read_bytes()
    assert f"--out {out}: has a run already (summary.json); --force overwrites it" in message(
        capsys, "run", scenario, "--seed", "1", "--out", out
    )
    assert "has a run already" in message(capsys, "compare", scenario, out, "--out", tmp_path / "runs")
    assert (out / "summary.json").read_bytes() == before
    changed = ("--set", "workload.num_requests=2")
    assert main_exit("run", scenario, *changed, "--out", out, "--force") == 0
    assert read_summary(out)["completed"] == 2


def test_a_run_cut_short_leaves_the_run_before_whole(scenario, tmp_path, monkeypatch):
    assert main_exit("run", scenario, "--out", tmp_path / "run") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}

    def killed(_):
        raise MemoryError

    monkeypatch.setattr(Simulation, "run", killed)
    with pytest.raises(MemoryError):
        main(["run", str(scenario), "--out", str(tmp_path / "run"), "--force"])
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_runs_of_one_name_have_no_room_in_one_folder(capsys, scenario, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(GOOD)
    says = message(capsys, "compare", scenario, other, "--out", tmp_path / "runs")
    assert "other.yaml: another run is named scenario too" in says


# Damaged run folders.


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    scenario = tmp_path_factory.mktemp("kept") / "s.yaml"
    scenario.write_text(GOOD)
    assert main_exit("run", scenario, "--set", "workload.num_requests=30", "--out", scenario.parent / "run") == 0
    return scenario.parent / "run"


@pytest.fixture
def folder(kept, tmp_path) -> Path:
    return Path(copytree(kept, tmp_path / "run"))


@pytest.mark.parametrize("command", ["explain", "report"])
@pytest.mark.parametrize("name", [*TABLES, "summary"])
def test_a_table_that_is_cut_short(capsys, folder, command, name):
    path = folder / ("summary.json" if name == "summary" else f"{name}.parquet")
    content = path.read_bytes()
    for length in (0, 4, len(content) // 2):
        path.write_bytes(content[:length])
        assert f"pdsim: {path}" in message(capsys, command, folder)


def test_a_table_of_something_else(capsys, folder):
    (folder / "requests.parquet").write_bytes((folder / "steps.parquet").read_bytes())
    assert "requests.parquet: damaged, or no table of a run" in message(capsys, "explain", folder)
    (folder / "summary.json").write_text("{}")
    assert "summary.json: no summary of a run" in message(capsys, "explain", folder)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_a_journal_that_is_cut_short(capsys, folder, share):
    """Whether its bytes are cut, or its lines."""
    path = folder / JOURNAL
    lines = [to_block([entry]) for entry in read_journal(folder)]
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert f"{path}: " in message(capsys, "replay", folder)
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(b"".join(lines[: int(share * len(lines))]))
    assert f"{path}: cut short: " in message(capsys, "replay", folder)
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(b"".join(lines[:-2]))
    assert "cut short: 29 requests finish in it, 30 in summary.json" in message(capsys, "replay", folder)


def test_a_journal_with_a_line_that_is_none(capsys, folder):
    with pa.output_stream(str(folder / JOURNAL), compression="zstd") as file:
        file.write(b'["router", "on_message", [{"Nothing": []}, 0], []]\n')
    said = f"{folder / JOURNAL}: damaged, or written by another version of pdsim, whose messages differ: 'Nothing'"
    assert said in message(capsys, "replay", folder)


def test_a_recorded_call_that_cannot_be_made_is_a_difference(capsys, folder):
    with pa.output_stream(str(folder / JOURNAL), compression="zstd") as file:
        file.write(b'["prefill-0", "on_step_done", [1, 2, 0], []]\n')
    assert main_exit("replay", folder) == 1
    assert "entry 0, prefill-0.on_step_done at 0 ns: raises " in capsys.readouterr().err


@pytest.mark.parametrize("out", ["a", "a/x", "gone/x"])
@pytest.mark.parametrize("command", [["run"], ["plan", "--slo", "ttft p99 < 1 s"]])
def test_a_link_that_leads_nowhere_is_no_place_for_results(capsys, scenario, monkeypatch, command, out):
    monkeypatch.chdir(scenario.parent)
    for link, target in {"a": "b", "b": "a", "gone": "nothing"}.items():
        Path(link).symlink_to(target)
    assert main_exit(*command, scenario, "--out", out) == 2
    assert f"--out {out}: {out.partition('/')[0]} is a symbolic link that leads nowhere" in capsys.readouterr().err


# What is taken, and what is too much.


def test_a_context_may_be_extended(scenario):
    longer = ("--set", "workload.input_tokens=41000", "--set", "workload.num_requests=1")
    assert main_exit("run", scenario, *longer, "--set", "context_tokens=41005") == 0


def test_a_rack_is_one_server(scenario):
    assert main_exit("run", scenario, "--set", "prefill={gpu: gb200, tp: 16}") == 0


@pytest.mark.parametrize(
    ("table", "says"), [("0,9,5\n2,9,5\n1,9,5", "t.csv: not in order of time"), ("0,9,5\n1,9,5", "")]
)
def test_a_trace_that_is_not_in_order_is_sorted_with_a_word(capsys, scenario, monkeypatch, table, says):
    monkeypatch.chdir(scenario.parent)
    Path("t.csv").write_text(f"arrival_s,in_tokens,out_tokens\n{table}\n")
    assert main_exit("run", scenario, "--set", "workload={use: request_table, path: t.csv}") == 0
    error = capsys.readouterr().err
    assert error.count("pdsim: warning: ") == bool(says)
    assert says in error


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            ["run", "s.yaml", "--set", "prefill.instances=100000000"],
            "100,000,001 instances, 3 requests: about 1,305.0 GB",
        ),
        (
            ["run", "s.yaml", "--set", "decode.instances=1000000", "--set", "prefill.instances=1000000"],
            "2,000,000 instances",
        ),
        (
            ["run", "s.yaml", "--set", "workload.num_requests=1000000000"],
            "2 instances, 1,000,000,000 requests: about 7,000.0 GB",
        ),
        (["explain", "s.yaml", "--set", SESSIONS], "1,000,000,000 requests"),
        (["sweep", "sweep.yaml"], "sweep.yaml: 2,000,000,000 runs: about 12,000.0 GB and 46.3 days at least"),
        (
            ["ask", "routing", "s.yaml", "--set", "workload.num_requests=1000000000"],
            "1,000,000,000 requests: about 7,000.0 GB",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_does_not_fit_this_machine_is_refused(capsys, scenario, monkeypatch, command, says):
    monkeypatch.chdir(scenario.parent)
    grid = "grid: {page_size: {from: 1, to: 100000000}, prefill.tp: [1, 2]}"
    random = "random: {count: 800000000, fields: {page_size: [4]}}"
    Path("sweep.yaml").write_text(f"scenario: s.yaml\n{grid}\n{random}\nseeds: [1, 2]\n")
    error = message(capsys, *command)
    assert says in error
    assert "; this machine has " in error
    assert "GB: --yes runs it anyway" in error


def test_what_takes_long_is_told_and_yes_begins_it(capsys, scenario, monkeypatch):
    monkeypatch.setattr(room, "_REQUEST_S", 3600.0)
    assert main_exit("run", scenario) == 0
    assert (
        "pdsim: warning: scenario: 2 instances, 3 requests: about 0.0 GB and 3.0 hours at least"
        in capsys.readouterr().err
    )
    monkeypatch.setattr(room, "_REQUEST_S", 7.0)
    assert main_exit("run", scenario) == 0
    assert "3 requests: about 0.0 GB and 21.0 seconds at least" in capsys.readouterr().err
    monkeypatch.setattr(room, "_REQUEST_BYTES", 1e15)
    assert "--yes runs it anyway" in message(capsys, "run", scenario)
    assert main_exit("run", scenario, "--yes") == 0
    assert load_scenario(scenario).workload.num_requests == len(requests_of(load_scenario(scenario)))  # Python's own
