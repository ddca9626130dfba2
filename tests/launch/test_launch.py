"""A launch says every field of a scenario, names it as left aside, or refuses it."""

import re
from dataclasses import replace
from itertools import chain
from typing import get_args

import pytest
from pydantic import BaseModel

from pdsim.cli import main
from pdsim.launch import ENGINES, sglang
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.faults import HealthSettings
from pdsim.scenario.sections.servers import AggregatedSettings
from pdsim.scenario.yaml_file import ConfigError, parse_yaml
from pdsim.system.catalog import load_transport
from tests.cli.test_commands import output, output_json
from tests.launch.sample import (
    AGGREGATED,
    ALONE,
    DRAFTS,
    FAMILIES,
    HISPARSE,
    OTHER,
    PAIR,
    WHOLE,
    WIDE,
    WIDE_SERVERS,
    WITHOUT,
    sample,
    scenario,
    text,
)


def fields(section: type[BaseModel], path=""):
    for name, info in section.model_fields.items():
        inner = [
            one
            for one in chain([info.annotation], get_args(info.annotation))
            if isinstance(one, type) and issubclass(one, BaseModel)
        ]
        where = f"{path}.{name}".lstrip(".")
        yield from fields(inner[0], where) if inner else [where]


def test_the_cases_are_all_fields_of_the_schema():
    leaves = [leaf for leaf in fields(Scenario) if leaf == "cost.graph_sizes" or leaf.partition(".")[0] not in WHOLE]
    assert [leaf for leaf in leaves if leaf not in OTHER and leaf.removeprefix("decode.") not in DRAFTS] == []


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("sglang", "--ep-size 8 --enable-eplb --ep-num-redundant-experts 16"),
        ("vllm", """--enable-eplb --eplb-config '{"num_redundant_experts": 16}'"""),
    ],
)
def test_redundant_experts_are_said_and_their_skew_is_left_aside(engine, flags):
    experts = "{gpu: h200, tp: 8, dp: 8, expert_skew: 1, redundant_experts: 16}"
    changes = [("model", "qwen3-30b-a3b"), ("cost", "kernels"), ("prefill", experts), ("decode", experts)]
    without = [(section, None) for section in WITHOUT[engine] if section.partition(".")[0] not in ("prefill", "decode")]
    commands, notes = text(engine, scenario(*without, *changes))
    assert sum(flags in command.replace(" \\\n ", "") for command in commands) == 2
    assert any("expert_skew" in note for note in notes)


@pytest.mark.parametrize(("engine", "flag"), [("sglang", "--ep-size 8"), ("vllm", "--enable-expert-parallel")])
@pytest.mark.parametrize(("ranks", "is_whole"), [("dp: 8", 1), ("dp: 8, ep: 1", 0), ("ep: 8", 1), ("ep: 1", 0)])
def test_an_engine_is_told_that_experts_are_whole(engine, flag, ranks, is_whole):
    servers = f"{{gpu: h200, tp: 8, {ranks}}}"
    changes = [("model", "deepseek-v3"), ("prefill", servers), ("decode", servers)]
    without = [(section, None) for section in WITHOUT[engine] if section.partition(".")[0] not in ("prefill", "decode")]
    commands, _ = text(engine, scenario(*without, *changes))
    assert sum(flag in command.replace(" \\\n ", "") for command in commands) == 2 * is_whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("values", [OTHER, AGGREGATED])
def test_the_sample_has_every_value_for_each_family(family, values):
    tried = {change for engine in family for change in sample(values, engine)}
    assert tried == {(path, value) for path, others in values.items() for value in others}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_field_is_said_or_left_aside_or_refused(engine):
    without = [(section, None) for section in WITHOUT[engine]]
    said, notes = text(engine, scenario(*without))
    for path, value in sample(OTHER, engine):
        if not path.startswith(WITHOUT[engine]):
            check_difference(engine, path, value, scenario(*without, (path, value)), said, notes)


@pytest.mark.parametrize(("engine", "section"), [(engine, one) for engine in ENGINES for one in WITHOUT[engine]])
def test_a_section_that_an_engine_has_not_is_refused_whole(engine, section):
    without = [(other, None) for other in WITHOUT[engine] if other != section]
    with pytest.raises(ConfigError, match=section):
        text(engine, scenario(*without))


def check_difference(engine, path, value, made_of, said, notes):
    """Another value gives other commands, a note that names it, or a refusal that does."""
    try:
        other_said, other_notes = text(engine, made_of)
    except ConfigError as wrong:
        refused = str(wrong)
    else:
        refused = path if other_said != said or notes_differ(path, other_notes, notes) else "nothing"
    assert path in refused, (path, value)


def notes_differ(path, found, before):
    field = path.rpartition(".")[2]
    return any(field in note for note in {*found} ^ {*before})


@pytest.mark.parametrize("engine", ENGINES)
def test_an_aggregated_cluster(engine):
    changes = [("prefill", None), ("decode", None), ("network", None), ("health", None)]
    made_of = scenario(*changes, ("aggregated", "{gpu: h100, instances: 2, radix_cache: false}"))
    said, notes = text(engine, made_of)
    assert "aggregated: instances 2, tp 1, gpu h100" in notes
    assert not any("disaggregation" in one or "kv-transfer" in one for one in said)


def test_the_cases_are_all_fields_of_aggregated_servers():
    assert AGGREGATED.keys() == AggregatedSettings.model_fields.keys()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_field_of_aggregated_servers(engine):
    said, notes = text(engine, scenario(*ALONE))
    for name, value in sample(AGGREGATED, engine):
        path = f"aggregated.{name}"
        check_difference(engine, path, value, scenario(*ALONE, (path, value)), said, notes)


def test_what_holds_for_both_roles_is_noted_once():
    _, notes = text("sglang", scenario(("router", "least_loaded")))
    assert sum("least_loaded" in note for note in notes) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("section", ["cost", "front_end"])
def test_times_are_left_aside(engine, section):
    changes = {"cost": ("cost.host", "{launch: 7 us}"), "front_end": ("front_end", "{service: 7 us}")}
    without = [(one, None) for one in WITHOUT[engine]]
    _, notes = text(engine, scenario(*without, changes[section]))
    assert any(section in note and "its own times" in note for note in notes)


def test_a_component_that_is_left_aside_is_named_without_its_fields():
    _, notes = text("sglang", scenario(("cost", "{use: affine, prefill_per_token: 1 us, decode_base: 1 ms}")))
    assert [note.partition(":")[0] for note in notes if "its own times" in note] == ["cost.prefill, cost.decode"]


@pytest.mark.parametrize("engine", ENGINES)
def test_host_memory_behind_decode(engine):
    without = [(one, None) for one in WITHOUT[engine]]
    said, notes = text(engine, scenario(*without, ("decode.radix_cache", "true")))
    changes = [("decode.radix_cache", "true"), ("decode.host_cache", "auto")]
    check_difference(engine, "decode.host_cache", "", scenario(*without, *changes), said, notes)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_the_rule_of_copying_is_said_where_there_is_host_memory(write):
    rule = ("prefill.host_cache_write", write)
    said, _ = text("sglang", scenario(("prefill.host_cache", "auto"), rule))
    assert sum(f"--hicache-write-policy {write}" in command for command in said) == 1
    said, _ = text("sglang", scenario(rule))
    assert not any("--hicache" in command for command in said)


@pytest.mark.parametrize("shared", [True, False])
def test_storage_behind_host_memory(shared):
    storage = f"{{shared: {str(shared).lower()}, prefetch: best_effort, prefetch_threshold: 99}}"
    commands, _ = text("sglang", scenario(("prefill.host_cache", "auto"), ("storage", storage)))
    flags = [
        f"--hicache-storage-backend {'mooncake' if shared else 'file'}",
        "--hicache-storage-prefetch-policy best_effort",
        """--hicache-storage-backend-extra-config '{"prefetch_threshold": 99}'""",
    ]
    (prefill,) = [one for one in commands if "--hicache-storage" in one]
    assert all(flag in prefill for flag in flags)


@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_are_told_to_give_a_model(engine):
    without = [(one, None) for one in WITHOUT[engine]]
    drafts = [(f"decode.{name}", str(value)) for name, value in DRAFTS.items()]
    _, notes = text(engine, scenario(*without, *drafts))
    assert any("the draft model is not in the scenario" in note for note in notes)
    assert any(
        all(f"decode.speculative_{name}" in note for name in ("accept_length", "draft_layers", "drafting"))
        for note in notes
    )


VLLM = (*((section, None) for section in WITHOUT["vllm"]), ("engine", "vllm"))


def test_a_scenario_of_vllm_is_launched_as_it_is():
    said, notes = text(
        "vllm",
        scenario(*VLLM, ("prefill.hold_timeout", "90 s"), ("prefill.long_prefill_tokens", "512"), ("page_size", "16")),
    )
    assert any("--long-prefill-token-threshold 512" in one for one in said)
    prefill, decode, *_ = said
    assert '"kv_connector_extra_config":{"kv_lease_duration":90}' in prefill
    assert "kv_lease_duration" not in decode
    assert [note.partition(":")[0] for note in notes] == ["prefill", "decode", "prefill.hold_timeout"]


@pytest.mark.parametrize("engine", ["sglang", "kubernetes", "dynamo"])
def test_a_scenario_of_vllm_is_no_other_engines(engine):
    with pytest.raises(ConfigError, match="engine: vllm: launch a scenario of vLLM with --engine vllm"):
        text(engine, scenario(*VLLM))


def test_the_engine_is_the_scenarios_unless_it_is_given(capsys, tmp_path):
    plain = PAIR.replace(", staging: {ring: 1 GiB}", "").replace("health: {}\n", "")
    for name, command in (("sglang", "sglang.launch_server"), ("vllm", "vllm serve")):
        (tmp_path / f"{name}.yaml").write_text(f"{plain}engine: {name}\n")
        assert command in output(capsys, "launch", tmp_path / f"{name}.yaml")


def test_all_refusals_come_in_one_message():
    made_of = scenario(("prefill.layer_groups", "4"), ("decode.preemption", "last_arrived_first"))
    with pytest.raises(ConfigError) as refused:
        text("sglang", made_of)
    assert str(refused.value).splitlines() == [
        "--engine sglang cannot launch pair:",
        "  prefill.layer_groups: 4: SGLang sends KV when a forward is done; give 0",
        "  decode.preemption: last_arrived_first: SGLang has fewest_outputs_first",
    ]


def test_servers_lie_on_hosts_with_enough_gpus():
    without = [(section, None) for section in WITHOUT["vllm"]]
    (first, second, third, decode, router, _), _ = text(
        "vllm", scenario(*without, ("prefill.instances", "3"), ("prefill.tp", "4"))
    )
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7" in second
    assert "$HOST0" in first
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in third
    assert "CUDA_VISIBLE_DEVICES=4,5" in decode
    assert "$HOST1" in decode
    urls = '--prefill "http://$HOST0:30001" --prefill "http://$HOST1:30002" --decode "http://$HOST1:30003"'
    assert urls in router


TRACE = """\
arrival_s,in_tokens,out_tokens
0,100,10
1,200,20
"""


@pytest.mark.parametrize(
    ("client", "pace"),
    [
        ("open_loop", "--fixed-schedule --fixed-schedule-auto-offset"),
        ("{use: closed_loop, concurrency: 2}", "--concurrency 2 --request-count 2"),
        (
            "{use: closed_loop, concurrency: 2, ramp: 1500 ms}",
            "--concurrency 2 --concurrency-ramp-duration 1.5 --request-count 2",
        ),
    ],
)
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "kubernetes"])
def test_a_trace_is_replayed_at_its_times(engine, client, pace, tmp_path):
    (tmp_path / "trace.csv").write_text(TRACE)
    without = [(section, None) for section in WITHOUT[engine]]
    workload = f"{{use: request_table, path: {tmp_path / 'trace.csv'}}}"
    made_of = scenario(*without, ("workload", workload), ("client", client))
    made = ENGINES[engine](made_of, ["a.yaml", "--set", "seed=1"], "m")
    assert made.commands["trace"] == "pdsim export a.yaml --set seed=1 --to mooncake --out load.jsonl"
    assert pace in made.commands["load"]


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm", "dynamo"])
def test_the_health_checks_that_faults_bring_are_not_refused(engine):
    """The scenario of a run folder has them, though its author wrote faults alone."""
    without = [(section, None) for section in WITHOUT[engine]]
    given = resolve(scenario(*without, ("faults", "[{kill: decode-0, at: 5 s}]")))
    assert given.health == HealthSettings()
    assert "faults: simulated failures have no flags" in text(engine, given)[1]
    for other in (given.model_copy(update={"faults": ()}), resolve(scenario(*without, ("health.max_retries", "7")))):
        with pytest.raises(ConfigError, match="health: given: only SGLang has these settings; leave them out"):
            ENGINES[engine](other, ["s.yaml"], "m")


def test_a_load_that_bench_serving_has_not_is_left_to_aiperf(tmp_path):
    (tmp_path / "trace.csv").write_text(TRACE)
    workload = f"{{use: request_table, path: {tmp_path / 'trace.csv'}}}"
    made = ENGINES["kubernetes"](scenario(("workload", workload)), ["a.yaml"], "m")
    assert list(made.manifests) == ["cluster.yaml"]
    assert list(made.commands) == ["trace", "load"]
    assert any("kubectl port-forward service/pair-gateway 8000" in note for note in made.notes)


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
def test_the_scenario_of_a_vllm_run_folder_is_launched(engine):
    given = scenario(*VLLM, ("decode.max_running_requests", "8"))
    resolved = resolve(given)
    assert (resolved.prefill.optimistic_attempts, resolved.decode.extra_slots) == (1, 16)
    assert "--max-num-seqs 8 " in " ".join(text(engine, resolved)[0])
    with pytest.raises(ConfigError, match=r"decode\.extra_slots: 9: only SGLang has this setting"):
        ENGINES[engine](resolve(scenario(*VLLM, ("decode.extra_slots", "9"))), ["s.yaml"], "m")


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
def test_vllm_takes_what_is_nearest(engine):
    without = [(section, None) for section in WITHOUT[engine]]
    changes = [("router", "least_loaded"), ("network.transport", "mooncake-rdma")]
    commands, notes = text(engine, scenario(*without, *changes))
    if engine == "vllm":
        assert "--prefill-policy power_of_two --decode-policy power_of_two" in commands[2]
        assert any("least_loaded: vLLM's nearest is power_of_two" in note for note in notes)
    else:
        assert "NixlConnector" in commands[1]
        assert any("--set network.transport=nixl-rdma simulates that" in note for note in notes)


def test_queues_of_transfers_are_told_where_they_are_not_sglangs(monkeypatch):
    made_of = scenario()
    assert "QUEUE_SIZE" not in text("sglang", made_of)[0][0]
    monkeypatch.setattr(sglang, "load_transport", lambda name: replace(load_transport(name), num_queues=8))
    prefill, decode, *_ = text("sglang", made_of)[0]
    assert "SGLANG_DISAGGREGATION_QUEUE_SIZE=8 " in prefill
    assert "QUEUE_SIZE" not in decode


@pytest.mark.parametrize(
    ("engine", "change", "says"),
    [
        ("vllm", ("decode.host_cache", "auto"), "decode.host_cache: auto: vLLM's decode reads all KV from prefill"),
        ("sglang", ("elastic", "{}"), "elastic: given: servers change their roles in simulation only"),
        ("vllm", ("decode.returns_kv", "true"), "decode.returns_kv: True: KV is returned in simulation only"),
    ],
)
def test_what_engines_have_in_their_own_way_is_not_said_to_be_missing(engine, change, says):
    changes = [("network.staging", None), ("health", None), ("decode.radix_cache", "true"), change]
    with pytest.raises(ConfigError, match=re.escape(says)):
        text(engine, scenario(*changes))


def test_recipe_flags_without_a_field_are_told():
    experts = "{gpu: h200, tp: 8, dp: 8}"
    changes = [("model", "deepseek-v3"), ("prefill", experts), ("decode", experts), ("network.transport", "nixl-rdma")]
    _, notes = text("sglang", scenario(*changes, ("network.staging", None)))
    assert any("--disaggregation-ib-device" in note for note in notes)
    _, notes = text("sglang", scenario(("model", "qwen3-next-80b-a3b"), ("prefill.tp", "4"), ("decode.tp", "4")))
    assert any("--mamba-scheduler-strategy" in note for note in notes)


def test_a_servers_balance_of_ranks_is_said_unless_the_router_picks():
    def servers(method):
        return scenario(("prefill", f"{{gpu: h200, tp: 4, dp: 4, load_balance_method: {method}}}"))

    assert "--load-balance-method" not in "".join(text("sglang", servers("auto"))[0])
    assert "--load-balance-method total_tokens" in "".join(text("sglang", servers("total_tokens"))[0])
    said, notes = text("sglang", servers("router"))
    assert "--load-balance-method" not in "".join(said)
    assert any("load_balance_method: router" in note for note in notes)


def test_a_refusal_is_a_message_with_exit_code_2(capsys, tmp_path):
    (tmp_path / "pair.yaml").write_text(PAIR)
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(tmp_path / "pair.yaml"), "--engine", "vllm"])
    assert ended.value.code == 2
    assert "network.staging: given: only SGLang has a staging buffer; leave it out" in capsys.readouterr().err


def test_a_manifest_is_yaml_with_a_deployment_for_each_role():
    said, _ = text("kubernetes", scenario())
    kinds = [parse_yaml(one, "manifest")["kind"] for manifest in said for one in manifest.split("---\n")]
    assert kinds == [
        "Deployment", "Deployment", "ServiceAccount", "Role", "RoleBinding", "Deployment", "Service", "Job",
    ]  # fmt: skip


RACK = (("prefill", "{gpu: gb200, tp: 4}"), ("decode", "{gpu: gb200, tp: 8, instances: 2}"))
"""Servers of hosts with four GPUs each."""


def test_a_server_that_spans_hosts_is_started_on_each():
    made_of = scenario(*RACK)
    commands = ENGINES["sglang"](made_of, ["pair.yaml"], made_of.model).commands
    decode = {name: command for name, command in commands.items() if name.startswith("decode")}
    assert list(decode) == ["decode-0-host-0", "decode-0-host-1", "decode-1-host-0", "decode-1-host-1"]
    for host, command in enumerate(decode.values(), start=1):
        leader, rank = (1, host - 1) if host < 3 else (3, host - 3)
        assert f'--host "$HOST{host}" ' in command
        assert command.endswith(f'--dist-init-addr "$HOST{leader}:20000" --nnodes 2 --node-rank {rank}')
    assert "nnodes" not in commands["prefill-0"]
    assert commands["gateway"].count('--decode "http://') == 2


def test_a_server_that_spans_hosts_is_a_leader_worker_set():
    """Its leaders alone are found by the gateway, and its pods have the server's GPUs."""
    (cluster, _), _ = text("kubernetes", scenario(*RACK))
    manifests = [parse_yaml(one, "manifest") for one in cluster.split("---\n")]
    (group,) = [one for one in manifests if one["kind"] == "LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    assert (group["spec"]["replicas"], template["size"]) == (2, 2)
    assert leader["metadata"]["labels"] == {"app": "pair", "role": "decode"}
    assert "metadata" not in worker
    pods = [one["spec"]["containers"][0] for one in (leader, worker)]
    assert [pod["resources"]["limits"]["nvidia.com/gpu"] for pod in pods] == [4, 4]
    assert pods[0]["command"] == pods[1]["command"]
    assert pods[0]["command"][-6:] == [
        "--dist-init-addr", "$(LWS_LEADER_ADDRESS):20000", "--nnodes", "$(LWS_GROUP_SIZE)", "--node-rank",
        "$(LWS_WORKER_INDEX)",
    ]  # fmt: skip
    assert "readinessProbe" not in pods[1]


def test_a_server_over_nvlink_domains_exchanges_by_deepep():
    wide = scenario(*WIDE)
    commands = ENGINES["sglang"](wide, ["pair.yaml"], wide.model).commands
    for role, mode in (("prefill", "normal"), ("decode", "low_latency")):
        for rank in range(2):
            command = commands[f"{role}-0-host-{rank}"]
            assert f"--ep-size 16 --enable-two-batch-overlap --moe-a2a-backend deepep --deepep-mode {mode} " in command
            assert command.endswith(f"--nnodes 2 --node-rank {rank}")


@pytest.mark.parametrize("backend", ["none", "deepep", "mori"])
def test_a_server_on_one_host_is_told_its_all_to_all_library(backend):
    servers = f"{{gpu: h200, tp: 8, dp: 8, moe_a2a_backend: {backend}}}"
    changes = [("model", "deepseek-v3"), ("prefill", servers), ("decode", servers), ("network.staging", None)]
    made_of = scenario(*changes, ("health", None))
    sglang, vllm = ("".join(text(engine, made_of)[0]) for engine in ("sglang", "vllm"))
    if backend == "none":
        assert "a2a" not in sglang
        assert "all2all" not in vllm
    else:
        assert sglang.count(f"--moe-a2a-backend {backend}") == 2
        assert f"--all2all-backend {backend}_high_throughput" in vllm
        assert f"--all2all-backend {backend}_low_latency" in vllm


def test_an_instance_that_divides_its_tokens_is_told_its_library_too():
    servers = "{gpu: h200, tp: 8, ep: 8, moe_a2a_backend: deepep}"
    changes = [("model", "deepseek-v3"), ("prefill", servers), ("decode", servers), ("network.staging", None)]
    sglang = "".join(text("sglang", scenario(*changes, ("health", None)))[0])
    assert sglang.count("--ep-size 8 --moe-a2a-backend deepep --deepep-mode") == 2
    assert "dp-attention" not in sglang


def test_vllm_is_started_on_each_host_and_answers_on_the_first():
    wide = [change for change in WIDE if change[0] not in ("prefill", "decode")]
    servers = WIDE_SERVERS.replace(", two_batch_overlap: true", "")
    made_of = scenario(*wide, ("prefill", servers), ("decode", servers), ("health", None))
    commands = ENGINES["vllm"](made_of, ["pair.yaml"], made_of.model).commands
    first, second = (commands[f"decode-0-host-{rank}"] for rank in range(2))
    assert 'SIDE_CHANNEL_HOST="$HOST3"' in second
    assert (
        'vllm serve deepseek-v3 --host "$HOST2" --port 30001 --tensor-parallel-size 2 --data-parallel-size 8' in first
    )
    assert "vllm serve deepseek-v3 --headless --tensor-parallel-size 2" in second
    for rank, command in enumerate((first, second)):
        assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 " in command
        assert " --all2all-backend deepep_low_latency " in command
        assert command.endswith(f'--nnodes 2 --node-rank {rank} --master-addr "$HOST2"')


STAGES = (("network.staging", None), ("prefill.pp", "2"))


@pytest.mark.parametrize(("tp", "num_processes"), [(2, 1), (8, 2)])
def test_a_server_of_stages_has_the_gpus_of_all(tp, num_processes):
    made_of = scenario(*STAGES, ("prefill.tp", str(tp)), ("prefill.instances", "2"), ("decode.tp", str(tp)))
    commands = ENGINES["sglang"](made_of, ["pair.yaml"], made_of.model).commands
    prefill = [command for name, command in commands.items() if name.startswith("prefill")]
    assert len(prefill) == 2 * num_processes
    assert all(f"--tp-size {tp} --pp-size 2 " in command for command in prefill)
    assert "--pp-size" not in commands["decode-0"]
    assert not any("--enable-dynamic-chunking" in command for command in prefill)
    if num_processes == 1:
        assert "--base-gpu-id 4 " in prefill[1]
    else:
        assert "--nnodes 2 --node-rank 1" in prefill[1]


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
def test_vllm_has_stages_but_of_hybrid_layouts(engine):
    without = [(section, None) for section in WITHOUT[engine] if section != "network.staging"]
    prefill = text(engine, scenario(*without, *STAGES))[0][0 if engine == "vllm" else 1]
    assert "--pipeline-parallel-size 2" in prefill
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in prefill
    with pytest.raises(ConfigError, match=r"prefill\.pp: 2: NixlConnector pulls no hybrid layouts"):
        text(engine, scenario(*without, *STAGES, ("model", "gpt-oss-120b")))


def test_sglang_grants_pages_late_where_its_servers_take_that():
    late = [
        ("decode.allocation", "prefill_complete"),
        ("network.transport", "mooncake-rdma"),
        ("network.staging", None),
    ]
    commands, _ = text("sglang", scenario(*late, ("prefill.tp", "1"), ("decode.tp", "1")))
    assert "--disaggregation-decode-allocation-policy prefill_complete" in commands[1]
    with pytest.raises(
        ConfigError, match=r"decode.allocation: prefill_complete: SGLang refuses it with tp above dp \("
    ):
        text("sglang", scenario(*late))


@pytest.mark.parametrize(
    ("transport", "backend", "variables"),
    [
        ("nixl-libfabric", "nixl", ["SGLANG_DISAGGREGATION_NIXL_BACKEND=LIBFABRIC"]),
        ("mooncake-efa", "mooncake", ["MOONCAKE_PROTOCOL=efa"]),
        ("mooncake-ascend", "mooncake", ["ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE=true"]),
        ("mori-rdma", "mori", []),
        ("ascend-sdma", "ascend", ["ASCEND_MF_TRANSFER_PROTOCOL=sdma", "ASCEND_MF_STORE_URL=tcp://127.0.0.1:24666"]),
        ("ascend-rdma", "ascend", ["ASCEND_MF_TRANSFER_PROTOCOL=device_rdma"]),
    ],
)
def test_sglang_is_told_backend_and_variables_of_a_transport(transport, backend, variables):
    commands, _ = text("sglang", scenario(("network.transport", transport)))
    for command in commands[:2]:
        assert f"--disaggregation-transfer-backend {backend} " in command
        assert [variable for variable in variables if f"{variable} " not in command] == []
        assert "QUEUE_SIZE" not in command


@pytest.mark.parametrize("engine", ["kubernetes", "dynamo"])
def test_the_address_of_memfabrics_store_is_left_to_the_user_where_hosts_are_not_known(engine):
    without = [(section, None) for section in WITHOUT[engine]]
    _, notes = text(engine, scenario(*without, ("network.transport", "ascend-sdma")))
    assert any("ASCEND_MF_STORE_URL: set it" in note for note in notes)
    _, notes = text(engine, scenario(*without))
    assert not any("ASCEND_MF_STORE_URL" in note for note in notes)


def test_vllm_is_told_of_libfabric():
    without = [(section, None) for section in WITHOUT["vllm"]]
    commands, _ = text("vllm", scenario(*without, ("network.transport", "nixl-libfabric")))
    assert all('"backends":["LIBFABRIC"]' in command for command in commands[:2])


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
def test_vllm_schedules_by_priority(engine):
    without = [(section, None) for section in WITHOUT[engine]]
    commands, notes = text(engine, scenario(*without, ("priorities", "{chat: 1}")))
    assert sum("--scheduling-policy priority" in command for command in commands) == 1
    assert any("send negated priorities" in note for note in notes)


def test_sglang_sorts_prompts_by_what_is_not_cached():
    shortest = ("prefill.policy", "shortest_prompt_first")
    commands, notes = text("sglang", scenario(shortest))
    assert "--schedule-policy shortest-prefill-first" in commands[0]
    assert any("shortest_prompt_first: SGLang sorts by uncached tokens" in note for note in notes)
    with pytest.raises(ConfigError, match="needs radix_cache: true"):
        text("sglang", scenario(shortest, ("prefill.radix_cache", "false")))


@pytest.mark.parametrize(
    ("ours", "sglangs"), [("lof", "lof"), ("hrrn", "hrrn"), ("dfs_weight", "dfs-weight"), ("random", "random")]
)
def test_sglang_has_these_orders_of_prompts(ours, sglangs):
    commands, _ = text("sglang", scenario(("prefill.policy", ours)))
    assert f"--schedule-policy {sglangs}" in commands[0]


def test_priorities_go_with_few_orders():
    changes = ("prefill.policy", "hrrn"), ("priorities", "{chat: 1}")
    with pytest.raises(ConfigError, match="priorities with fcfs and lof only"):
        text("sglang", scenario(*changes))


@pytest.mark.parametrize("engine", ["dynamo", "dynamo-vllm"])
def test_other_engines_refuse_a_server_that_spans_hosts(engine):
    with pytest.raises(ConfigError, match=r"decode\.tp: 8: a server on 2 hosts is launched by --engine sglang"):
        text(engine, scenario(*((section, None) for section in WITHOUT[engine]), *RACK))


def test_the_command_writes_a_file_for_each_command(capsys, tmp_path):
    (tmp_path / "pair.yaml").write_text(PAIR)
    arguments = ("launch", tmp_path / "pair.yaml", "--model-path", "Qwen/Qwen3-8B")
    made = output_json(capsys, *arguments)
    assert output(capsys, *arguments, "--out", tmp_path / "out").startswith("prefill-0.sh, decode-0.sh, gateway.sh")
    assert (tmp_path / "out" / "decode-0.sh").read_text().endswith(made["commands"]["decode-0"] + "\n")
    assert "--model-path Qwen/Qwen3-8B" in made["commands"]["prefill-0"]


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("sglang", "--dcp-size 8"),
        ("dynamo", "--dcp-size 8"),
        ("vllm", "--decode-context-parallel-size 8"),
    ],
)
def test_decode_divides_kv(engine, flags):
    """The pool is that of one GPU, in SGLang's tokens or vLLM's blocks of 16."""
    decode = "{gpu: h200, tp: 8, dcp: 8, pool_tokens: 1048576}"
    changes = [("model", "deepseek-v3"), ("prefill", "{gpu: h200, tp: 8}"), ("decode", decode)]
    changes += [("page_size", "16"), ("network", "{transport: nixl-rdma}")]
    without = [(section, None) for section in WITHOUT[engine] if section.partition(".")[0] not in ("prefill", "decode")]
    commands, _ = text(engine, scenario(*without, *changes))
    (server,) = [one for one in commands if flags in one.replace(" \\\n ", "")]
    pool = "--num-gpu-blocks-override 8192" if engine == "vllm" else "--max-total-tokens 131072"
    assert pool in server.replace(" \\\n ", "")
    assert (engine == "vllm") != ("--attention-backend flashinfer" in server.replace(" \\\n ", ""))


@pytest.mark.parametrize("engine", ["sglang", "dynamo", "kubernetes"])
def test_hisparse(engine):
    """Decode alone gets its flags. Retracted requests fail, because their KV is kept nowhere else."""
    commands, notes = text(engine, scenario(*((one, None) for one in WITHOUT[engine]), *HISPARSE))
    servers = [" ".join(one.replace("\\\n", "").split()) for one in commands if "enable-hisparse" in one]
    config = '{"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": 5}'
    assert any(config in one for one in servers)
    for one in servers:
        assert "disaggregation-decode-retraction-backup" in one
        assert "disable-radix-cache" in one
    assert any("decode.hisparse.miss_rate: a property of model and load" in note for note in notes)


MANUAL = "{use: manual, assignment_mode: min_group, max_idle: 90 s}"


@pytest.mark.parametrize("has_events", [True, False])
def test_only_a_router_without_events_remembers_prompts(has_events):
    _, notes = text("dynamo", scenario(("router", f"{{use: dynamo_kv, kv_events: {has_events}}}"), ("health", "null")))
    assert has_events != any("Dynamo's frontend forgets a prompt after a time" in note for note in notes)


def test_the_policy_manual_of_the_gateway():
    commands, notes = text("sglang", scenario(("router", f"{{prefill: {MANUAL}, decode: {MANUAL}}}")))
    assert any(
        "--prefill-policy manual --decode-policy manual --assignment-mode min_group --max-idle-secs 90"
        in command.replace(" \\\n ", "")
        for command in commands
    )
    assert any("X-SMG-Routing-Key" in note for note in notes)
    with pytest.raises(ConfigError, match="one set of settings of manual"):
        text("sglang", scenario(("router", f"{{prefill: {MANUAL}, decode: manual}}")))
    with pytest.raises(ConfigError, match=r"router\.prefill\.max_idle: 1500 ms: the gateway takes whole seconds"):
        text("sglang", scenario(("router", "{use: manual, max_idle: 1.5 s}")))
