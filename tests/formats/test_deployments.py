"""Deployments as their projects write them: each becomes a scenario that runs, and nothing is guessed in silence."""

import json

import pytest

from pdsim.formats.deployments.importing import changed, import_deployment
from pdsim.formats.deployments.processes import read_processes
from pdsim.formats.deployments.routers import router_of
from pdsim.inputs import InputError
from pdsim.scenario.building.cluster import build
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.yaml_file import ConfigError, write_yaml


def imported(tmp_path, name, text, *, is_built=True, **given):
    path = tmp_path / name
    path.write_text(text)
    found = import_deployment([path], **given)
    scenario = parse_scenario(found.data, base=tmp_path)
    if is_built:
        build(scenario)
    return found


def saved(tmp_path, script):
    path = tmp_path / "run.sh"
    path.write_text(script)
    return path


def sizes(found):
    """Instances, tp and dp by role."""
    return {
        role: (servers["instances"], servers["tp"], servers.get("dp", 1))
        for role, servers in found.data.items()
        if role in ("prefill", "decode", "aggregated")
    }


GRAPH = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: demo-disagg}
spec:
  backendFramework: vllm
  services:
    Frontend: {componentType: frontend, replicas: 1, envs: [{name: DYN_ROUTER_MODE, value: kv}],
      extraPodSpec: {mainContainer: {image: "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.0"}}}
    VllmPrefillWorker:
      componentType: worker
      subComponentType: prefill
      replicas: 2
      resources: {limits: {gpu: "2"}}
      extraPodSpec: {mainContainer: {command: [/bin/sh, -c], args: ["exec python3 -m dynamo.vllm --model Qwen/Qwen3-32B
        --tensor-parallel-size 2 --is-prefill-worker --gpu-memory-utilization 0.95 --no-enable-prefix-caching
        --block-size 128"]}}
    VllmDecodeWorker:
      componentType: worker
      subComponentType: decode
      replicas: 1
      extraPodSpec:
        mainContainer:
          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.0
          args: [--model, Qwen/Qwen3-32B, --tensor-parallel-size, "4", --gpu-memory-utilization=0.90, --block-size=128]
"""


def test_a_graph_deployment(tmp_path):
    found = imported(tmp_path, "dgd.yaml", GRAPH, gpu="h200")
    assert sizes(found) == {"prefill": (2, 2, 1), "decode": (1, 4, 1)}
    prefill, decode = found.data["prefill"], found.data["decode"]
    assert (prefill["mem_fraction"], decode["mem_fraction"]) == (0.95, 0.9)
    assert prefill["radix_cache"] is False
    assert "radix_cache" not in decode
    assert (found.data["page_size"], found.data["engine"]) == (128, "vllm")
    assert found.data["network"] == {"transport": "nixl-rdma"}
    assert any("because no flag names another" in line for line in found.assumed)


COMPONENTS = """
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: sglang-disagg}
spec:
  components:
  - name: Frontend
    type: frontend
    podTemplate: {spec: {containers: [{name: main, command: [python3, -m, dynamo.frontend]}]}}
  - name: decode
    type: decode
    replicas: 1
    podTemplate:
      spec:
        containers:
        - name: main
          command: [python3, -m, dynamo.sglang]
          args: [--model-path, Qwen/Qwen3-8B, --page-size, "16", --tp, "2", --disaggregation-mode, decode,
            --disaggregation-transfer-backend, nixl, --skip-tokenizer-init]
  - name: prefill
    type: prefill
    replicas: 3
    podTemplate:
      spec:
        containers:
        - name: main
          command: [python3, -m, dynamo.sglang]
          args: [--model-path, Qwen/Qwen3-8B, --page-size, "16", --tp, "1", --disaggregation-mode, prefill,
            --disaggregation-transfer-backend, nixl]
"""


@pytest.mark.parametrize(
    ("flags", "router"),
    [
        (["--router-mode", "kv"], {"use": "dynamo_kv", "kv_events": True}),
        (["--router-mode", "kv", "--no-router-kv-events", ""], "dynamo_kv"),
        (
            ["--router-mode", "kv", "--router-temperature", "0.5"],
            {"use": "dynamo_kv", "router_temperature": 0.5, "kv_events": True},
        ),
        (
            ["--router-mode", "kv", "--router-host-cache-hit-weight", "0.5"],
            {"use": "dynamo_kv", "host_cache_hit_weight": 0.5, "kv_events": True},
        ),
        (
            ["--router-mode", "random", "--router-session-affinity-ttl-secs", "60"],
            {"use": "session_affinity", "ttl": "60 s", "otherwise": "random"},
        ),
    ],
)
def test_flags_of_a_frontend_are_a_policy_of_both_roles(flags, router):
    words = dict(zip([flag.removeprefix("--") for flag in flags[::2]], flags[1::2], strict=True))
    assert router_of("frontend", words, {}, is_pair=True) == ({"prefill": router, "decode": router}, [])


def test_a_weight_of_disks_is_said_to_change_nothing():
    flags = {"router-mode": "kv", "router-disk-cache-hit-weight": "0.1"}
    found, aside = router_of("frontend", flags, {}, is_pair=False)
    assert found == {"prefill": {"use": "dynamo_kv", "kv_events": True}}
    assert aside == [
        "--router-disk-cache-hit-weight: no server's KV events name blocks on disks, so this weight changes nothing"
    ]


def test_flags_of_a_gateway_are_a_policy_of_both_roles():
    flags = {"policy": "manual", "assignment-mode": "min_group", "max-idle-secs": "90", "eviction-interval-secs": "5"}
    manual = {"use": "manual", "assignment_mode": "min_group", "max_idle": "90 s", "eviction_interval": "5 s"}
    assert router_of("gateway", flags, {}, is_pair=True) == ({"prefill": manual, "decode": manual}, [])
    assert router_of("gateway", {**flags, "policy": "random"}, {}, is_pair=False)[1] == [
        "--assignment-mode",
        "--max-idle-secs",
        "--eviction-interval-secs",
    ]


def test_a_graph_of_components(tmp_path):
    found = imported(tmp_path, "dgd.yaml", COMPONENTS)
    assert sizes(found) == {"prefill": (3, 1, 1), "decode": (1, 2, 1)}
    assert found.data["network"] == {"transport": "nixl-rdma"}
    assert found.data["router"] == {"prefill": "round_robin", "decode": "round_robin"}


VALUES = """
modelArtifacts: {uri: "hf://RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"}
decode:
  create: true
  replicas: 1
  containers:
  - name: vllm
    image: ghcr.io/llm-d/llm-d:v0.2.0
    modelCommand: vllmServe
    args: [--tensor-parallel-size, "4", --block-size, "128", --kv-transfer-config,
      '{"kv_connector":"NixlConnector", "kv_role":"kv_both"}', --disable-log-requests, --max-model-len, "32000"]
    resources: {limits: {nvidia.com/gpu: "4"}}
prefill:
  create: true
  replicas: 4
  parallelism: {tensor: 2}
  containers:
  - name: vllm
    modelCommand: vllmServe
    args: [--block-size, "128", --kv-transfer-config, '{"kv_connector":"NixlConnector", "kv_role":"kv_both"}']
"""


def test_values_of_a_chart(tmp_path):
    found = imported(tmp_path, "values.yaml", VALUES)
    assert sizes(found) == {"prefill": (4, 2, 1), "decode": (1, 4, 1)}
    assert found.data["model"] == "llama-3.1-70b"
    assert found.data["weight_dtype"] == "fp8"
    assert any("has the sizes of llama-3.1-70b" in line for line in found.assumed)
    assert found.data["context_tokens"] == 32000
    alone = imported(tmp_path, "alone.yaml", VALUES.replace("prefill:\n  create: true", "prefill:\n  create: false"))
    assert sizes(alone) == {"aggregated": (1, 4, 1)}


GROUPS = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: sglang}
spec:
  replicas: 2
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec: &pod
        nodeSelector: {nvidia.com/gpu.product: NVIDIA-H200}
        containers:
        - name: sglang
          image: lmsysorg/sglang:latest
          command: [python3, -m, sglang.launch_server, --model-path, deepseek-ai/DeepSeek-V3, --tp, "16", --dp, "16",
            --enable-dp-attention, --dist-init-addr, "$(LWS_LEADER_ADDRESS):20000", --nnodes, $(LWS_GROUP_SIZE),
            --node-rank, $(LWS_WORKER_INDEX), --trust-remote-code, --max-running-requests, "2048"]
          resources: {limits: {nvidia.com/gpu: "8"}}
    workerTemplate: {spec: *pod}
"""


def test_groups_of_hosts(tmp_path):
    found = imported(tmp_path, "lws.yaml", GROUPS, is_built=False)
    assert sizes(found) == {"aggregated": (2, 16, 16)}
    assert found.data["aggregated"]["gpu"] == "h200"
    assert found.data["aggregated"]["max_running_requests"] == 2048


SCRIPT = """
#!/bin/bash
MODEL=${1:-meta-llama/Llama-3.1-8B-Instruct}
TP=2
export SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE=3
# python -m sglang.launch_server --model-path commented-out
CUDA_VISIBLE_DEVICES=0,1 python3 -m sglang.launch_server \\
  --model-path meta-llama/Llama-3.1-8B-Instruct --disaggregation-mode prefill --port 30000 \\
  --tp-size $TP --page-size 32 --disable-radix-cache --attention-backend fa3 &
docker run --gpus all lmsysorg/sglang:latest python3 -m sglang.launch_server --model-path ${MODEL:-x} \\
  --disaggregation-mode=decode --tp=${TP} --page-size 32 2>&1 | tee log &
python3 -m sglang_router.launch_router --pd-disaggregation --policy round_robin --prefill http://a:1 &
python3 -m sglang.bench_serving --dataset-name random --random-input-len 2000 --random-output-len 100 \\
  --random-range-ratio 0.5 --num-prompts 64 --request-rate 4
"""


PODS = """
spec:
  replicas: 2
  template: {{spec: {{containers: [{{name: c, command: [vllm, serve, Qwen/Qwen3-8B, -tp, "{tp}"]}}]}}}}
"""


@pytest.mark.parametrize(
    ("count", "tp", "differs"),
    [
        (2, 2, ""),
        (2, 4, "aggregated: --tensor-parallel-size 4 instead of --tensor-parallel-size 2"),
        (3, 2, "number of aggregated servers: 2 instead of 3"),
    ],
)
def test_a_graph_beside_scripts_starts_the_same_servers_or_is_refused(tmp_path, count, tp, differs):
    for i in range(count):
        (tmp_path / f"{i}.sh").write_text(
            f"CUDA_VISIBLE_DEVICES={i} vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2\n"
        )
    (tmp_path / "graph.yaml").write_text(PODS.format(tp=tp))
    if differs:
        with pytest.raises(ConfigError, match=rf"graph\.yaml: starts other .* beside it: {differs}; give the scripts"):
            import_deployment([tmp_path])
        return
    found = import_deployment([tmp_path])
    assert sizes(found) == {"aggregated": (2, 2, 1)}
    assert "graph.yaml: the same as the scripts beside it" in found.aside


def test_a_script_of_a_shell(tmp_path):
    found = imported(tmp_path, "run.sh", SCRIPT)
    assert sizes(found) == {"prefill": (1, 2, 1), "decode": (1, 2, 1)}
    assert found.data["health"] == {"heartbeat_failures": 3}
    assert found.data["workload"]["input_tokens"] == {"use": "uniform", "low": 1000, "high": 2000}
    assert found.data["client"] == {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "4 /s"}}
    assert any("--attention-backend fa3" in line for line in found.aside)


def test_servers_that_differ_are_told_in_both_directions(tmp_path):
    server = "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 1"
    options = ("--mem-fraction-static 0.8", "--max-running-requests 8", "--mem-fraction-static 0.8")
    found = imported(tmp_path, "run.sh", "".join(f"{server} {option} &\n" for option in options))
    (line,) = [one for one in found.aside if "first server" in one]
    assert line.endswith(
        "run.sh, line 2: --max-running-requests 8 ignored, and --mem-fraction-static 0.8 added, "
        "because the first server stands for all"
    )


@pytest.mark.parametrize("given", ['{"method": 5, "num_speculative_tokens": "x"}', '{"method": "mtp"}', "[]"])
def test_drafts_without_a_number_are_left_aside(tmp_path, given):
    found = imported(tmp_path, "run.sh", f"vllm serve Qwen/Qwen3-8B --speculative-config '{given}'\n")
    assert any("num_speculative_tokens" in line for line in found.aside)


def test_wide_experts_of_vllm(tmp_path):
    line = "vllm serve deepseek-ai/DeepSeek-R1 --data-parallel-size 16 --data-parallel-size-local 8"
    more = "--enable-expert-parallel --max-num-batched-tokens 4k"
    text = f"{line} {more}\n{line} --data-parallel-start-rank 8 --headless\n"
    found = imported(tmp_path, "run.sh", text, is_built=False, gpu="b200")
    assert sizes(found) == {"aggregated": (1, 16, 16)}
    assert found.data["aggregated"]["chunked_prefill_tokens"] == 16 * 4000
    assert found.data["aggregated"]["moe_a2a_backend"] == "none"


@pytest.mark.parametrize(
    ("program", "flags", "found_backend"),
    [
        ("sglang", "--enable-dp-attention --moe-a2a-backend deepep --deepep-mode auto", "deepep"),
        ("sglang", "--enable-dp-attention --ep-size 8 --moe-a2a-backend none", "none"),
        ("sglang", "--moe-a2a-backend deepep", "deepep"),  # in two copies without data-parallel attention
        ("sglang", "--enable-dp-attention --ep-size 8 --moe-a2a-backend mooncake", None),
        ("vllm", "--enable-expert-parallel --all2all-backend allgather_reducescatter", "none"),
        ("vllm", "--enable-expert-parallel --all2all-backend mori_low_latency", "mori"),
        ("vllm", "--all2all-backend deepep_high_throughput", None),  # divided experts
    ],
)
def test_the_library_that_sends_tokens_to_experts(tmp_path, program, flags, found_backend):
    sglang = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp-size 8 --dp-size 2"
    line = sglang if program == "sglang" else "vllm serve deepseek-ai/DeepSeek-R1 -tp 4 --data-parallel-size 2"
    found = imported(tmp_path, "run.sh", f"{line} {flags}\n", is_built=False, gpu="b200")
    assert found.data["aggregated"].get("moe_a2a_backend") == found_backend
    assert any("pdsim models none, deepep, mori" in line for line in found.aside) == ("mooncake" in flags)
    assert any("no whole experts" in line for line in found.aside) == ("deepep" in flags and found_backend is None)
    assert not any("deepep-mode" in line for line in found.aside)


LOOPS = """
MODEL=Qwen/Qwen3-8B
PREFILL_GPUS=0,1
DECODE_GPUS="2,3,4"
IFS=',' read -ra PREFILL_ARRAY <<< "$PREFILL_GPUS"
IFS=',' read -ra DECODE_ARRAY <<< "$DECODE_GPUS"
for i in "${!PREFILL_ARRAY[@]}"; do
  CUDA_VISIBLE_DEVICES=${PREFILL_ARRAY[$i]} vllm serve $MODEL --port $((20000 + i)) \\
    --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer"}' &
done
for i in "${!DECODE_ARRAY[@]}"; do
  vllm serve $MODEL --port 3 \\
    --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer"}' &
done
"""


def test_loops_of_a_shell_are_counted(tmp_path):
    assert sizes(imported(tmp_path, "run.sh", LOOPS)) == {"prefill": (2, 1, 1), "decode": (3, 1, 1)}


@pytest.mark.parametrize(
    ("loop", "instances"),
    [
        ("for i in $(seq 1 4); do", 4),
        ("for i in {0..2}; do", 3),
        ("for gpu in 0 1; do", 2),
        ("for ((i=0; i<5; i++)); do", 5),
        ("for i in $HOSTS; do", 1),
        ("for ((;;)); do", 1),
        ("for ((i=0; i<8; i+=2)); do", 4),
        ("for((i=0;i<8;i+=2)) do", 4),
        ("for ((i=1, j=9; i<=8; j++, i = i + 3)); do", 3),
        ("for ((i=0; i<8; i*=2)); do", 1),
        ("for i in $(seq 0 2 6); do", 4),
        ("for i in {0..6..2}; do", 4),
        ("for i in `seq 1 3`; do", 3),
        ("for i in 1 2 3 # prefill\ndo", 3),
        ('for c in "a b" "c d"; do', 2),
        ('echo "waiting time for nodes"; for i in 1 2 3; do', 3),
        ("(for i in 1 2 3; do sleep 1 & done); for i in 1 2; do", 2),
        ("for i in 1 2 3; do\n  for j in 1 2; do", 6),
        ("for node in 1 2\necho 'for nodes that wait'\nfor nodes (that wait\nfor i in 1 2 3; do", 3),
    ],
)
def test_turns_of_a_loop(tmp_path, loop, instances):
    text = f"{loop}\n  vllm serve Qwen/Qwen3-8B --tensor-parallel-size $((2 * 2)) &\ndone\n"
    assert sizes(imported(tmp_path, "run.sh", text)) == {"aggregated": (instances, 4, 1)}


@pytest.mark.parametrize(
    "inside",
    [
        "  while ! curl $HOST; do\n    sleep 1\n  done",
        "  until curl $HOST; do sleep 1; done",
        "  for name; do\n    echo $name\n  done",
        "  echo wait; for i in 1 2; do for j in 1 2; do sleep 1; done; done",
        "  PIDS=$(for j in 1 2; do echo $j; done)",
        "  (for j in 1 2; do sleep 1 & done)",
        "  case $1 in\n  prefill) for j in $GPUS; do sleep 1; done ;;\n  esac",
        '  case "$1" in a|"b c") for j in 1 2; do sleep 1; done ;; esac',
        "  f() { for j in 1 2; do sleep 1; done; }",
        "  f () {\n    for j in 1 2; do { sleep 1; } & done\n  }",
        "  function f { for j in 1 2; do sleep 1; done; }",
        "  curl -d '\n  {\n  }'",
        "  if true; then { sleep 1; }; fi; while { true; }; do { { break; }; }; done",
    ],
)
def test_a_loop_ends_with_its_own_done(tmp_path, inside):
    text = f"for i in 1 2 3; do\n{inside}\n  vllm serve Qwen/Qwen3-8B &\ndone\nvllm serve Qwen/Qwen3-8B\n"
    found = read_processes(saved(tmp_path, text))
    assert [one.replicas for one in found] == [3, 1]


@pytest.mark.parametrize(
    ("loop", "is_told"),
    [
        ("for h in $HOSTS; do", True),
        ("for ((i=0; i<N; i++)); do", True),
        ("for f in *.env", True),
        ("for i in 1", False),
        ("for i in {a..c}; do", True),
        ("for ((i=0; i<${#HOSTS[@]}; i++)); do", True),
        ("for h in $(cat hosts | head -3); do", True),
        ("while read host; do", True),
        ("until false", True),
    ],
)
def test_a_loop_of_unknown_length_is_told(tmp_path, loop, is_told):
    found = imported(tmp_path, "run.sh", f"{loop}\ndo\n  vllm serve Qwen/Qwen3-8B &\ndone\n")
    assert sizes(found) == {"aggregated": (1, 1, 1)}
    told = [line for line in found.assumed if "how many turns this loop has; one turn counts" in line]
    assert [f"line 3: {loop.removesuffix('; do')}: the file" in line for line in told] == [True] * is_told


@pytest.mark.parametrize(
    ("text", "instances"),
    [
        ("(for i in 1 2 3; do vllm serve Qwen/Qwen3-8B & done)", 3),
        ("if true; then (for i in 1 2; do (vllm serve Qwen/Qwen3-8B --port $((80 + i))) & done); fi", 2),
        ("(cd models && vllm serve Qwen/Qwen3-8B --tensor-parallel-size 1)", 1),
        ("for ((i=0; i<2; i++)) { vllm serve Qwen/Qwen3-8B & }; vllm serve Qwen/Qwen3-8B", 3),
        ("for i in 1 2\n{\n  vllm serve Qwen/Qwen3-8B &\n}\nvllm serve Qwen/Qwen3-8B", 3),
        ("for ((i=0;i<3;i++)) { { vllm serve Qwen/Qwen3-8B; }; vllm serve Qwen/Qwen3-8B; }", 6),
    ],
)
def test_subshells_and_braces_run_commands(tmp_path, text, instances):
    assert sizes(imported(tmp_path, "run.sh", f"{text}\n")) == {"aggregated": (instances, 1, 1)}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("vllm serve --name 'a > b' > $(date +%F).log 2>&1 &", "a > b"),
        ("vllm serve --name a > log_$((i+1)).txt", "a"),
        ("vllm serve --name a > >(tee log) 2> >(tee -a 'b c' >&2)", "a"),
        ('vllm serve --name ">=1"', ">=1"),
        ('vllm serve --name "<<0"', "<<0"),
        ('vllm serve --name "x)"', "x)"),
        (r"(cd models; vllm serve --name \(x\))", "(x)"),
        ("bash -c '(vllm serve --name \"x)\")'", "x)"),
        ("(cd models\nvllm serve --name x)", "x"),
    ],
)
def test_strings_are_no_redirections_and_no_subshells(tmp_path, command, name):
    (process,) = read_processes(saved(tmp_path, f"{command}\n"))
    assert process.words == ["--name", name]


def test_a_line_with_an_open_quote_is_no_program(tmp_path):
    text = 'docker run vllm/vllm-openai:latest bash -c "\nvllm serve Qwen/Qwen3-8B --tensor-parallel-size 4\n"\n'
    assert sizes(imported(tmp_path, "run.sh", text)) == {"aggregated": (1, 4, 1)}


@pytest.mark.parametrize(
    "command",
    [
        "pkill -f sglang.launch_server",
        "sudo killall -q trtllm-serve || true",
        "ssh -q host sudo /usr/bin/pkill -f sglang.launch_server",
        "docker exec server pkill -f 'vllm serve'",
        'echo "Starting: vllm serve MODEL"',
        "printf '%s' 'vllm serve MODEL'",
        'ps aux | grep "vllm serve" | xargs kill',
        'while ! pgrep -f "vllm serve"; do sleep 1; done',
        'if pgrep -f "vllm serve" > /dev/null; then echo runs; fi',
        'PID=$(pgrep -f "vllm serve")',
        "kill $(pgrep -f sglang.launch_server)",
        "bash -c 'pkill -f sglang.launch_server; sleep 1'",
    ],
)
def test_a_command_that_names_a_program_does_not_start_it(tmp_path, command):
    (process,) = read_processes(saved(tmp_path, f"{command}\nGPUS=$(echo 0) vllm serve Qwen/Qwen3-8B\n"))
    assert process.words == ["Qwen/Qwen3-8B"]


def test_variables_behind_do_and_then_are_read(tmp_path):
    text = """
    if true; then TP=4; fi
    for i in 1 2; do VLLM_NIXL_ABORT_REQUEST_TIMEOUT=77 vllm serve Qwen/Qwen3-8B -tp $TP; done
    """
    (process,) = read_processes(saved(tmp_path, text))
    assert process.variables == {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "77"}
    assert (process.words[-1], process.replicas) == ("4", 2)


@pytest.mark.parametrize(
    "command",
    [
        'if [ -z "$TP" ]; then TP=8; fi',
        'if [ -n "$TP" ]; then true; else TP=8; fi',
        'if [ -z "$TP" ]; then export TP=8; fi',
    ],
)
def test_a_condition_in_one_line_keeps_a_known_value(tmp_path, command):
    (process,) = read_processes(saved(tmp_path, f"TP=4\n{command}\nvllm serve Qwen/Qwen3-8B -tp $TP\n"))
    assert process.words[-1] == "4"
    assert process.variables == ({"TP": "4"} if "export" in command else {})


@pytest.mark.parametrize("rank", ["--node-rank $r", '--node-rank="${r}"', "--node_rank $((r + 1))"])
def test_a_loop_over_the_hosts_of_a_server_counts_once(tmp_path, rank):
    server = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --nnodes 2 --tp 16"
    text = f"for i in 1 2 3; do\nfor r in 0 1; do {server} {rank} & done\n{server} --node-rank 0 --port $r &\ndone\n"
    assert [one.replicas for one in read_processes(saved(tmp_path, text))] == [3, 3]


MANIFEST = """
kind: Deployment
spec:
  replicas: 3
  template:
    spec:
      containers:
      - {name: a, image: vllm/vllm-openai, command: [vllm, serve, Qwen/Qwen3-8B, -tp, "2"]}
"""


@pytest.mark.parametrize(
    ("command", "inside", "instances"),
    [
        ("cat <<EOF", "Usage: vllm serve MODEL\nDon't: vllm serve", 1),
        ("cat > notes.md <<'EOF'", "vllm serve MODEL", 1),
        ("python3 - <<EOF", "print('vllm serve MODEL')", 1),
        ("kubectl apply -f - <<EOF", MANIFEST, 4),
        ("cat <<EOF > deploy.yaml", MANIFEST, 4),
        ("bash <<EOF", "vllm serve Qwen/Qwen3-8B", 2),
        ("ssh host 'bash -s' <<EOF", "vllm serve Qwen/Qwen3-8B", 2),
        ("cat > start.sh <<EOF", "vllm serve Qwen/Qwen3-8B", 2),
        ("cat <<EOF | bash", "vllm serve Qwen/Qwen3-8B", 2),
        ("kubectl apply -f - <<EOF >/dev/null", MANIFEST, 4),
        ("cat <<EOF | kubectl apply -f - > log.txt 2>&1", MANIFEST, 4),
        ("kubectl delete -f - <<EOF", MANIFEST, 1),
        ("cat <<EOF | kubectl delete -f -", MANIFEST, 1),
        ("kubectl -n prod delete -f - <<EOF", MANIFEST, 1),
        ("docker compose -f - down <<EOF", MANIFEST, 1),
        ("kubectl apply -n diff -f - <<EOF", MANIFEST, 4),
        ("cat <<EOF | kubectl -n=x --context down apply -f -", MANIFEST, 4),
        ("python3 - <<EOF > start.sh", "print('vllm serve MODEL')", 1),
        ("for i in 1 2 3; do ssh $i bash <<EOF; done", "vllm serve Qwen/Qwen3-8B", 4),
    ],
)
def test_lines_of_a_here_document_are_commands_only_if_a_shell_reads_them(tmp_path, command, inside, instances):
    text = f"{command}\n{inside}\nEOF\nvllm serve Qwen/Qwen3-8B\n"
    found = read_processes(saved(tmp_path, text))
    assert sum(one.replicas for one in found) == instances
    assert any(one.where.endswith(f"line {text.count(chr(10))}") for one in found)


def test_two_here_documents_of_a_line_follow_each_other(tmp_path):
    text = f"cat > a.txt <<A; kubectl apply -f - <<'B'\nvllm serve MODEL\nA{MANIFEST}B\nvllm serve Qwen/Qwen3-8B\n"
    found = read_processes(saved(tmp_path, text))
    assert [one.replicas for one in found] == [3, 1]
    assert "run.sh, line 1, here-document: spec" in found[0].where


@pytest.mark.parametrize(("name", "inside"), [("pods.yaml", MANIFEST), ("go.sh", "vllm serve Qwen/Qwen3-8B\n")])
def test_a_file_that_a_script_writes_counts_once(tmp_path, name, inside):
    script = saved(tmp_path, f"cat > {name} <<EOF\n{inside}EOF\n")
    alone = import_deployment([tmp_path])
    (tmp_path / name).write_text(inside)
    assert sizes(import_deployment([tmp_path])) == sizes(alone) == sizes(import_deployment([script]))


@pytest.mark.parametrize(
    ("between", "sign", "counted"),
    [
        ("else", ">", [9]),
        ("else", ">>", [1, 9]),
        ("kubectl apply -f ./d.yaml", ">", [1, 9]),
        ("kubectl apply -f other.yaml", ">", [9]),
        ("cat > other.yaml <<EOF\nkind: Secret\nEOF", ">", [9]),
    ],
)
def test_a_manifest_that_replaces_another_counts_alone(tmp_path, between, sign, counted):
    first, second = (MANIFEST.replace("replicas: 3", f"replicas: {replicas}") for replicas in (1, 9))
    text = f"cat > d.yaml <<EOF{first}EOF\n{between}\ncat {sign} d.yaml <<EOF{second}EOF\n"
    assert [one.replicas for one in read_processes(saved(tmp_path, text))] == counted


@pytest.mark.parametrize(
    ("loop", "name", "instances", "told"),
    [
        ("i=0\nfor i in 1 2; do", "pods-$i", 6, ""),
        ("i=0\nfor ((i=1; i<=2; i++)); do", "pods-$i", 6, ""),
        ("for i in 1 2; do", "pods", 3, "for i in 1 2: each turn applies the same manifest, so its servers count once"),
        ("for i in 1 2; do", "pods-$i", 6, ""),
        ("for i in 1 2; do\nNAME=pods-$i", "$NAME", 6, ""),
        (
            "while read h; do",
            "pods-$h",
            3,
            "while read h: the file does not say how many turns this loop has; one turn",
        ),
    ],
)
def test_a_loop_applies_other_manifests_if_they_have_its_variable(tmp_path, loop, name, instances, told):
    manifest = f"metadata: {{name: {name}}}{MANIFEST}"
    found = imported(tmp_path, "run.sh", f"{loop}\nkubectl apply -f - <<EOF\n{manifest}EOF\ndone\n")
    assert sizes(found) == {"aggregated": (instances, 2, 1)}
    assert [line for line in found.assumed if " turn" in line] == [
        line for line in found.assumed if told and told in line
    ]
    assert any(told in line for line in found.assumed)


@pytest.mark.parametrize("named", ["--config c.yaml", "--config=c.yaml"])
def test_a_configuration_lies_beside(tmp_path, named):
    (tmp_path / "c.yaml").write_text("model: Qwen/Qwen3-8B\ntensor_parallel_size: 2\nenable-prefix-caching: false\n")
    found = imported(tmp_path, "run.sh", f"vllm serve {named} --max-num-seqs 64\n")
    assert (found.data["model"], sizes(found)) == ("qwen3-8b", {"aggregated": (1, 2, 1)})
    assert found.data["aggregated"]["radix_cache"] is False


SLICES = """
kind: DisaggregatedSet
spec:
  slices: 2
  roles:
  - replicas: 3
    template:
      spec:
        containers:
        - name: vllm
          command: [vllm, serve, /cache/qwen, --served-model-name, Qwen/Qwen3-8B, --tensor-parallel-size, $MINE]
          resources: {limits: {nvidia.com/gpu: "4"}}
"""


def test_what_a_file_does_not_set_is_left_aside(tmp_path):
    found = imported(tmp_path, "set.yaml", SLICES)
    assert found.data["model"] == "qwen3-8b"
    assert sizes(found) == {"aggregated": (6, 4, 1)}
    assert "aggregated.tp: the number of GPUs of its pods" in found.assumed
    assert any("--tensor-parallel-size $MINE: the file does not set it" in line for line in found.aside)


def test_counts_of_experts_may_be_words(tmp_path):
    line = "vllm serve deepseek-ai/DeepSeek-R1 --tensor-parallel-size 8 --enable-expert-parallel --enable-eplb "
    text = line + """--eplb-config '{"num_redundant_experts": "32"}'\n"""
    found = imported(tmp_path, "run.sh", text, is_built=False, gpu="b200")
    assert found.data["aggregated"]["redundant_experts"] == 32


COMPOSE = """
services:
  vllm:
    image: vllm/vllm-openai:v0.9
    command: --model Qwen/Qwen3-32B --tensor-parallel-size 4 --max-num-seqs 64
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 4, capabilities: [gpu]}]}}}
"""
STACK = """
servingEngineSpec:
  modelSpec:
  - {name: q, modelURL: Qwen/Qwen3-32B, replicaCount: 1, requestGPU: 4, vllmConfig: {tensorParallelSize: 4,
     enablePrefixCaching: true, extraArgs: [--max-num-seqs, "64"]}}
"""
RUN = "sudo docker run --gpus all -v /a/b:/c vllm/vllm-openai:latest --model Qwen/Qwen3-32B --tensor-parallel-size 4 "


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", COMPOSE),
        ("v.yaml", STACK),
        ("run.sh", f"{RUN}--max-num-seqs 64\n"),
        ("run.sh", f"docker pull vllm/vllm-openai:latest\n{RUN}--max-num-seqs 64\n"),
    ],
)
def test_an_image_starts_its_own_program(tmp_path, name, text):
    found = imported(tmp_path, name, text)
    assert (found.data["model"], sizes(found)) == ("qwen3-32b", {"aggregated": (1, 4, 1)})
    assert found.data["aggregated"]["max_running_requests"] == 64


RESULT = '{"completed": 40, "total_input_tokens": 40000, "total_output_tokens": 400, "max_concurrency": 8, '
RESULT += '"mean_ttft_ms": 30}'
TRACE = '{"timestamp": 0, "input_length": 900, "output_length": 40}'
PRINTED = """===== Serving Benchmark Result =====
Successful requests:  40
Benchmark duration (s):  10.0
Total input tokens:  40000
Total generated tokens:  400
Mean TTFT (ms):  30.1
"""
CASES = {
    "r.log": (PRINTED, ("random_lengths", "open_loop")),
    "r.json": (RESULT, ("random_lengths", "closed_loop")),
    "t.jsonl": (TRACE, ("mooncake_trace", "open_loop")),
    "t.csv": ("num_prefill_tokens,num_decode_tokens\n9,9\n", ("request_table", "closed_loop")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_load_may_lie_beside(tmp_path, name):
    text, uses = CASES[name]
    (tmp_path / name).write_text(text)
    (tmp_path / "run.sh").write_text("vllm serve Qwen/Qwen3-8B\n")
    found = import_deployment([tmp_path / "run.sh", tmp_path / name])
    assert (found.data["workload"]["use"], found.data["client"]["use"]) == uses


@pytest.mark.parametrize(
    ("flags", "num_requests", "said"),
    [
        ("--num-prompts $N --model $M", 1000, "--num-prompts $N: the file does not set it; the client's default"),
        ("--num-prompts 40 --request-rate $RATE", 40, "--request-rate $RATE: the file does not set it; the client's"),
        ("--dataset-name prefix_repetition --prefix-repetition-num-prefixes 0", None, "prefixes 0: expected a whole"),
    ],
)
def test_a_load_that_is_not_known_is_said(tmp_path, flags, num_requests, said):
    found = imported(tmp_path, "run.sh", f"vllm serve Qwen/Qwen3-8B\nvllm bench serve {flags}\n")
    assert [line for line in found.aside if said in line] == found.aside
    assert len(found.aside) == 1
    assert num_requests in (None, found.data["workload"]["num_requests"])
    assert any("those of `pdsim init`" in line for line in found.assumed) == (num_requests is None)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python -m sglang.bench_serving", "--dataset-name $NAME"),
        ("vllm bench serve", "--dataset-name $NAME"),
        ("aiperf profile", "--input-file $FILE"),
        ("aiperf profile", "--input-file $(ls data)"),
    ],
)
def test_a_data_set_that_the_file_does_not_set_is_said(tmp_path, command, option):
    text = f"sglang serve --model Qwen/Qwen3-8B\n{command} {option} --num-prompts 8\n"
    found = imported(tmp_path, "run.sh", text)
    (said,) = found.aside
    assert f"run.sh, line 2: load: {option}: the file does not set it" in said
    assert any("those of `pdsim init`" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: {{ .Values.x }}", "not YAML"),
        ("a.sh", "echo hello\n", "the files start no server of SGLang, vLLM or TensorRT-LLM"),
        ("a.sh", "vllm serve org/new-moe-9b-a1b\n", "model org/new-moe-9b-a1b: not in the catalog: give --model NAME"),
        ("a.sh", "vllm serve Qwen/Qwen3-8B --block-size many\n", "a.sh, line 1: --block-size many: expected"),
        (
            "a.sh",
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT=soon python -m sglang.launch_server --model Qwen/Qwen3-8B",
            "soon",
        ),
        ("a.sh", "vllm serve Qwen/Qwen3-8B --kv-transfer-config '{a}'", "--kv-transfer-config {a}: expected JSON"),
        ("a.sh", f"vllm serve Qwen/Qwen3-8B --kv-transfer-config {'[' * 10**4}", "[: expected JSON"),
        ("a.sh", """vllm serve Qwen/Qwen3-8B --kv-transfer-config '{"kv_role": []}'""", "expected another value"),
        ("a.sh", "vllm serve Qwen/Qwen3-8B --kv-offloading-size 1e300", "1e300: expected another value"),
        ("a.sh", "vllm serve Qwen/Qwen3-8B -tp 0", "--tensor-parallel-size 0: expected a whole number above 0"),
        ("a.sh", "vllm serve Qwen/Qwen3-8B --decode-context-parallel-size 0", "0: expected a whole number above 0"),
        ("a.sh", "sglang serve --model Qwen/Qwen3-30B-A3B --ep 0", "0: expected a whole number above 0"),
        ("a.sh", "vllm serve Qwen/Qwen3-8B --kv-transfer-config '{\n", "no line of a shell: No closing quotation"),
    ],
)
def test_what_cannot_be_read_says_where_and_why(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises((ConfigError, InputError)) as error:
        import_deployment([tmp_path / name])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("before", "extra", "host"),
    [
        ("LMCACHE_MAX_LOCAL_CPU_SIZE=20 LMCACHE_CHUNK_SIZE=128 ", {}, ("20 GiB", 128)),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE=20 ", {"lmcache.max_local_cpu_size": 7.5}, ("7.5 GiB", None)),
        ("", {}, ("5 GiB", None)),
        ("", 5, ("5 GiB", None)),
        ("LMCACHE_USE_LAYERWISE=True ", {}, ("5 GiB", None)),
        ("LMCACHE_LOCAL_CPU=False ", {}, (None, None)),
        ("OLD_LMCACHE_CHUNK_SIZE=7 ", {"old.lmcache.chunk_size": 9}, ("5 GiB", None)),
    ],
)
def test_lmcache_is_a_host_cache_of_each_gpu(tmp_path, before, extra, host):
    config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    text = f"{before}vllm serve Qwen/Qwen3-8B -tp 2 --kv-transfer-config '{json.dumps(config)}'\n"
    found = imported(tmp_path, "run.sh", text)
    servers = found.data["aggregated"]
    assert not any("old" in line for line in found.aside)
    assert (servers.get("host_cache"), servers.get("host_cache_chunk_tokens")) == host
    assert servers.get("host_cache_connector") == ("lmcache" if host[0] else None)
    assert servers.get("host_cache_layerwise") == ("LAYERWISE" in before or None)


@pytest.mark.parametrize(
    ("before", "host", "aside"),
    [
        ("DYN_KVBM_CPU_CACHE_GB=100 DYN_KVBM_METRICS=true ", "50 GB", []),
        ("DYN_KVBM_CPU_CACHE_GB=8 DYN_KVBM_DISK_CACHE_GB=9 ", "4 GB", ["DYN_KVBM_DISK_CACHE_GB: pdsim does not model"]),
        ("", None, ["without DYN_KVBM_CPU_CACHE_GB"]),
    ],
)
def test_kvbm_is_a_host_cache_that_the_gpus_of_a_server_share(tmp_path, before, host, aside):
    config = {"kv_connector": "DynamoConnector", "kv_role": "kv_both"}
    text = f"{before}vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 --kv-transfer-config '{json.dumps(config)}'\n"
    found = imported(tmp_path, "run.sh", text)
    servers = found.data["aggregated"]
    assert (servers.get("host_cache"), servers.get("host_cache_connector")) == (host, host and "kvbm")
    said = [one for one in found.aside if "KVBM" in one]
    assert len(said) == len(aside)
    assert all(words in one for words, one in zip(aside, said, strict=True))


def test_short_options_of_vllm_are_read(tmp_path):
    servers = imported(tmp_path, "run.sh", "vllm serve Qwen/Qwen3-30B-A3B -tp 2 -dp 2\n").data["aggregated"]
    assert (servers["tp"], servers["dp"]) == (4, 2)


@pytest.mark.parametrize(
    ("url", "loads", "shared"),
    [
        ("mooncakestore://10.0.0.1:50051/", True, True),
        ("fs://localhost:0/kv", "true", False),
        ("redis://a:1", False, None),
    ],
)
def test_a_remote_store_of_lmcache_is_storage_if_it_loads_asynchronously(tmp_path, url, loads, shared):
    extra = {"lmcache.remote_url": url, "lmcache.enable_async_loading": loads}
    config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    read = imported(tmp_path, "run.sh", f"vllm serve Qwen/Qwen3-8B --kv-transfer-config '{json.dumps(config)}'\n")
    assert read.data.get("storage", {}).get("shared") == shared
    assert any("LMCache's remote_url" in one for one in read.aside) == (shared is None)


def test_a_size_of_lmcache_that_is_no_number_is_refused(tmp_path):
    text = "LMCACHE_MAX_LOCAL_CPU_SIZE=nan vllm serve Qwen/Qwen3-8B --kv-transfer-config "
    with pytest.raises(ConfigError, match="max_local_cpu_size: nan: expected a number"):
        imported(tmp_path, "run.sh", text + """'{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'\n""")


def test_the_name_of_the_checkpoint_is_kept(tmp_path):
    data = imported(tmp_path, "run.sh", "python -m sglang.launch_server --model-path Qwen/Qwen3-8B\n").data
    assert (data["model"], data["checkpoint"]) == ("qwen3-8b", "Qwen/Qwen3-8B")


def test_what_pdsim_does_not_model_of_lmcache_is_left_aside(tmp_path):
    text = "LMCACHE_ENABLE_ASYNC_LOADING=True vllm serve Qwen/Qwen3-8B --kv-transfer-config "
    text += """'{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'\n"""
    assert any("LMCache's enable_async_loading" in one for one in imported(tmp_path, "run.sh", text).aside)


@pytest.mark.parametrize("replicas", ["many", "-3", "1.5", "true"])
def test_replicas_that_are_no_count_are_refused(tmp_path, replicas):
    container = {"name": "c", "image": "x", "command": ["vllm", "serve", "Qwen/Qwen3-8B"]}
    spec = {
        "replicas": replicas if replicas == "many" else json.loads(replicas),
        "template": {"spec": {"containers": [container]}},
    }
    path = tmp_path / "pods.yaml"
    write_yaml({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": spec}, path)
    with pytest.raises(InputError, match=r"pods\.yaml: replicas: expected a whole number of at least 0, found"):
        import_deployment([path])


def test_hisparse_waits_for_its_miss_rate(tmp_path):
    servers = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3.2 --tp 8 --disaggregation-mode"
    config = '--enable-hisparse --hisparse-config \'{"top_k": 2048, "host_to_device_ratio": 5}\''
    (tmp_path / "all.sh").write_text(f"{servers} prefill\n{servers} decode {config}\n")
    found = import_deployment([tmp_path], gpu="h200")
    assert "hisparse" not in changed(found, [])["decode"]
    assert any("set decode.hisparse.miss_rate" in line for line in found.aside)
    found = import_deployment([tmp_path], gpu="h200")
    given = changed(found, ["decode.hisparse.miss_rate=0.1"])["decode"]["hisparse"]
    assert not any("set decode.hisparse.miss_rate" in line for line in found.aside)
    assert given == {"miss_rate": 0.1, "device_buffer_tokens": 4096, "host_to_device_ratio": 5}
