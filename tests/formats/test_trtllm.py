"""Commands and files of TensorRT-LLM become scenarios, with what was understood, left aside and assumed."""

import pytest

from pdsim.formats.deployments.importing import import_deployment
from pdsim.inputs import InputError
from pdsim.scenario.schema import Scenario

SCRIPT = """
trtllm-serve Qwen/Qwen3-32B --port 8001 --tp_size 2 --max_batch_size 64 --extra_llm_api_options ./ctx.yaml &> log &
trtllm-serve serve Qwen/Qwen3-32B --port 8002 --tp_size 2 --max_batch_size 64 --config ctx.yaml &
trtllm-serve Qwen/Qwen3-32B --port 8003 --tp_size 4 --max_batch_size 256 --extra_llm_api_options gen.yaml &
trtllm-serve disaggregated -c disagg.yaml -t 1800
"""
FILES = {
    "run.sh": SCRIPT,
    "ctx.yaml": """
kv_cache_config: {enable_block_reuse: false, free_gpu_memory_fraction: 0.8, dtype: fp8, tokens_per_block: 64}
cache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 8192}
max_batch_size: 32
""",
    "gen.yaml": """
kv_cache_config: {free_gpu_memory_fraction: 0.9, dtype: fp8, tokens_per_block: 64}
cuda_graph_config: {enable_padding: true, batch_sizes: [1, 2, 4]}
cache_transceiver_config: {backend: UCX}
stream_interval: 20
""",
    "disagg.yaml": """
port: 8000
context_servers: {num_instances: 2, router: {type: kv_cache_aware}, urls: ["localhost:8001", "localhost:8002"]}
generation_servers: {num_instances: 1, router: {type: load_balancing}, urls: ["localhost:8003"]}
conditional_disagg_config: {max_local_prefill_length: 100}
""",
}
ALL = """
model: deepseek-ai/DeepSeek-R1
port: 8000
context_servers:
  num_instances: 2
  tensor_parallel_size: 8
  moe_expert_parallel_size: 8
  enable_attention_dp: true
  enable_chunked_prefill: true
  max_num_tokens: 16384
  kv_cache_config: {max_tokens: 200000, host_cache_size: 100000000000}
generation_servers:
  tensor_parallel_size: 16
  moe_expert_parallel_size: 16
  enable_attention_dp: true
  max_batch_size: 128
  max_num_tokens: 128
  kv_cache_config: {max_tokens: 200000}
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("is_whole", [False, True])
def test_roles_are_those_of_the_orchestrators_urls(folder, is_whole):
    found = import_deployment([folder if is_whole else folder / "run.sh"])
    Scenario.model_validate(found.data)
    prefill, decode = found.data["prefill"], found.data["decode"]
    assert (prefill["instances"], prefill["tp"], prefill["max_running_requests"]) == (2, 2, 32)  # the file overwrites
    assert (decode["instances"], decode["tp"], decode["max_running_requests"]) == (1, 4, 256)
    assert (prefill["radix_cache"], prefill["chunked_prefill_tokens"]) == (False, 8192)
    assert (found.data["page_size"], found.data["kv_dtype"], found.data["engine"]) == (64, "fp8", "vllm")
    assert found.data["router"] == {"prefill": "cache_aware", "decode": "least_loaded"}
    assert found.data["cost"] == {"graph_sizes": [1, 2, 4]}
    assert any(line.endswith("conditional_disagg_config") for line in found.aside)
    assert any("--cache-transceiver-config.max-tokens-in-buffer 8192" in line for line in found.aside)


def test_kv_takes_a_share_of_what_the_weights_leave(folder):
    """65.5 GB of bf16 weights on two GPUs of 85 GB, and on four."""
    found = import_deployment([folder / "run.sh"])
    shares = [found.data[role]["mem_fraction"] for role in ("prefill", "decode")]
    assert shares == pytest.approx([1 - 0.2 * (1 - 32.8 / 85), 1 - 0.1 * (1 - 16.4 / 85)], abs=0.01)
    assert "prefill.mem_fraction: 0.8 of the memory that the weights leave free" in found.assumed


def test_an_orchestrators_file_may_have_all_settings(tmp_path):
    (tmp_path / "all.yaml").write_text(ALL)
    found = import_deployment([tmp_path / "all.yaml"], gpu="b200")
    Scenario.model_validate(found.data)
    prefill, decode = found.data["prefill"], found.data["decode"]
    assert [(one["instances"], one["tp"], one["dp"]) for one in (prefill, decode)] == [(2, 8, 8), (1, 16, 16)]
    assert (prefill["chunked_prefill_tokens"], prefill["host_cache"]) == (8 * 16384, "100 GB")
    assert (decode["max_running_requests"], decode["pool_tokens"]) == (16 * 128, 200_000)
    assert (found.data["model"], found.data["page_size"]) == ("deepseek-r1", 32)
    assert not any("computed in chunks" in line for line in found.assumed)


def test_settings_outside_the_sections_start_no_server_of_their_own(folder):
    text = f"model: Qwen/Qwen3-32B\nbackend: pytorch\nmax_batch_size: 8\n{FILES['disagg.yaml']}"
    (folder / "disagg.yaml").write_text(text)
    found = import_deployment([folder / "run.sh"]).data
    assert (found["prefill"]["instances"], found["decode"]["instances"]) == (2, 1), "those that the commands start"
    (folder / "run.sh").write_text("mpirun -n 3 trtllm-serve disaggregated_mpi_worker -c disagg.yaml\n")
    found = import_deployment([folder / "run.sh"]).data
    assert [(found[role]["instances"], found[role]["max_running_requests"]) for role in ("prefill", "decode")] == [
        (2, 8),
        (1, 8),
    ], "those that the file starts"


PAIR = """
context_servers: {num_instances: 1, urls: ["localhost:8001"], tensor_parallel_size: 2}
generation_servers: {num_instances: 2, urls: ["localhost:8002", "localhost:8003"], tensor_parallel_size: 2}
"""
SERVER = "trtllm-serve Qwen/Qwen3-32B --tp_size 2 --port"
MPI = "mpirun -n 6 trtllm-serve disaggregated_mpi_worker"


@pytest.mark.parametrize(
    "commands",
    [
        [f"{SERVER} 8001", f"{SERVER}=8002", f"{SERVER} 8003", "trtllm-serve disaggregated -c pair.yaml"],
        [f"{SERVER} 8001", f"{SERVER} 8002", "trtllm-serve disaggregated -c pair.yaml"],
        ["trtllm-serve disaggregated --config_file=pair.yaml"],
        ["trtllm-serve disaggregated --config-file=pair.yaml"],
        [f"{MPI} -c pair.yaml", "trtllm-serve disaggregated -c ./pair.yaml"],
        ["trtllm-serve disaggregated -c pair.yaml", f"{MPI} --config_file pair.yaml"],
    ],
)
def test_a_server_of_an_orchestrators_file_counts_once(tmp_path, commands):
    (tmp_path / "pair.yaml").write_text(f"model: Qwen/Qwen3-32B\n{PAIR}")
    (tmp_path / "run.sh").write_text(" &\n".join(commands))
    found = import_deployment([tmp_path]).data
    assert [(found[role]["instances"], found[role]["tp"]) for role in ("prefill", "decode")] == [(1, 2), (2, 2)]


def test_servers_at_ports_that_are_not_known_stand_for_the_orchestrators(tmp_path):
    (tmp_path / "pair.yaml").write_text(f"model: Qwen/Qwen3-32B\n{PAIR}")
    text = f"for i in 1 2 3; do {SERVER} $((8000 + i)) & done\ntrtllm-serve disaggregated -c pair.yaml\n"
    (tmp_path / "run.sh").write_text(text)
    assert import_deployment([tmp_path]).data["aggregated"]["instances"] == 3


def test_an_orchestrator_without_a_file_is_told(folder):
    (folder / "run.sh").write_text(SCRIPT.replace("-c disagg.yaml ", ""))
    told = "line 5: the command names no file by -c FILE, so roles of servers are not known"
    assert any(line.endswith(told) for line in import_deployment([folder / "run.sh"]).aside)


@pytest.mark.parametrize(
    ("kinds", "router"),
    [(("conversation", "load_balancing"), None), (("kv_cache_aware", "load_balancing"), {"prefill": "cache_aware"})],
)
def test_an_absent_section_has_no_servers(tmp_path, kinds, router):
    context, generation = (f"router: {{type: {kind}}}" for kind in kinds)
    (tmp_path / "all.yaml").write_text(
        f"model: Qwen/Qwen3-32B\ncontext_servers: {{num_instances: 0, {context}}}\n"
        f"generation_servers: {{tensor_parallel_size: 2, {generation}}}\n"
    )
    found = import_deployment([tmp_path / "all.yaml"])
    assert (found.data["aggregated"]["instances"], found.data.get("router")) == (1, router)
    assert any("router of prefill: conversation" in line for line in found.aside) == (router is None)
    (tmp_path / "all.yaml").write_text("model: Qwen/Qwen3-32B\ngeneration_servers: {tensor_parallel_size: 2}\n")
    assert import_deployment([tmp_path / "all.yaml"]).data.keys() & {"prefill", "aggregated"} == {"aggregated"}


@pytest.mark.parametrize("option", ["--extra-engine-args", "--extra_engine_args", "--extra_engine_args="])
def test_a_worker_of_dynamo(folder, option):
    text = f"python3 -m dynamo.trtllm --model-path Qwen/Qwen3-32B {option} ctx.yaml --disaggregation-mode "
    text = text.replace("= ", "=")
    (folder / "run.sh").write_text(f"{text}prefill\n{text}decode\n")
    found = import_deployment([folder / "run.sh"])
    assert (found.data["prefill"]["tp"], found.data["decode"]["tp"], found.data["page_size"]) == (1, 1, 64)


HERE = """
EXTRA=/tmp/extra.yml
TP=4
cat > $EXTRA << EOF
kv_cache_config:
    dtype: fp8
    free_gpu_memory_fraction: 0.85
enable_attention_dp: true
cuda_graph_config: {max_batch_size: $CONC}
EOF
mpirun -n 1 trtllm-serve Qwen/Qwen3-32B --port=$PORT --tp_size=$TP --max_num_tokens=$MOST --extra_llm_api_options=$EXTRA
"""


def test_a_script_may_write_the_options_itself(tmp_path):
    (tmp_path / "run.sh").write_text(HERE)
    found = import_deployment([tmp_path / "run.sh"])
    aggregated = found.data["aggregated"]
    assert (aggregated["tp"], aggregated["dp"], found.data["kv_dtype"]) == (4, 4, "fp8")
    assert "aggregated.mem_fraction: 0.85 of the memory that the weights leave free" in found.assumed
    assert any("--max-num-tokens $MOST: the file does not set it" in line for line in found.aside)


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("disagg.yaml", "context_servers: 3", "disagg.yaml: context_servers: expected fields such as num_instances"),
        ("disagg.yaml", "context_servers: {num_instances: two}", "num_instances: expected a whole number, found 'two'"),
        ("disagg.yaml", "context_servers: {num_instances: 2, urls: [a:1]}", "expected as many urls as num_instances 2"),
        ("ctx.yaml", "max_num_tokens: 0", "ctx.yaml: --max-num-tokens 0: expected a whole number above 0"),
        ("ctx.yaml", "tensor_parallel_size: 1000", "tp 1000 does not divide the 64 query heads"),
        ("ctx.yaml", "max_batch_size: many", "ctx.yaml: --max-batch-size many: expected a whole number"),
    ],
)
def test_a_wrong_file_is_named(folder, file, text, complaint):
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=complaint):
        import_deployment([folder / "run.sh"])


@pytest.mark.parametrize("share", ["0", "1.7", "nan"])
def test_a_share_of_memory_is_at_most_one(folder, share):
    (folder / "gen.yaml").write_text(f"kv_cache_config: {{free_gpu_memory_fraction: {share}}}\n")
    with pytest.raises(InputError, match=r"free-gpu-memory-fraction .*: expected a number"):
        import_deployment([folder / "run.sh"])


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("disagg.yaml", "", "disagg.yaml: there is no such file beside the command, so roles of servers are not known"),
        ("gen.yaml", "", "decode: options of gen.yaml: there is no such file beside the command; defaults count"),
        (
            "disagg.yaml",
            'context_servers: {num_instances: 2, urls: ["a:8001", "a:8009"]}',
            "prefill at port 8009: the files do not start it",
        ),
    ],
)
def test_what_is_missing_is_told(folder, file, text, told):
    (folder / file).unlink()
    if text:
        (folder / file).write_text(text)
    assert any(line.endswith(told) for line in import_deployment([folder / "run.sh"]).aside)
