"""What `pdsim launch` writes, `pdsim import` reads back: the scenario read launches the same commands."""

import json

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from pdsim.cli import main
from pdsim.formats.deployments.importing import import_deployment
from pdsim.launch import ENGINES
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError

MOE, DENSE, LATENT = "qwen3-30b-a3b", "qwen3-8b", "moonlight-16b-a3b"
COUNTS = st.integers(1, 3)
SERVERS = {
    "mem_fraction": st.floats(0.85, 0.95).map(lambda share: round(share, 3)),
    "max_running_requests": st.integers(1, 64),
    "radix_cache": st.booleans(),
}
PREFILL = {**SERVERS, "chunked_prefill_tokens": st.sampled_from([2048, 8192])}
OF_SGLANG = {
    "prefill": {
        **PREFILL, "pool_tokens": st.integers(4000, 200_000), "eviction": st.sampled_from(["lru", "lfu"]),
        "max_prefill_tokens": st.integers(1000, 30_000), "overlap": st.booleans(),
        "optimistic_attempts": st.integers(0, 3),
    },
    "decode": {
        **SERVERS, "polling_interval": st.integers(1, 4), "extra_slots": st.integers(0, 9),
        "stream_interval": st.integers(1, 40),
        "admission": st.integers(0, 900).map(lambda tokens: {"reserved_tokens": tokens}),
    },
    "aggregated": {**PREFILL, "schedule_conservativeness": st.sampled_from([0.5, 1.0])},
}  # fmt: skip
OF_VLLM = {
    "prefill": {**PREFILL, "long_prefill_tokens": st.integers(100, 900)},
    "decode": {**SERVERS, "stream_interval": st.integers(1, 40)},
    "aggregated": {**PREFILL, "overlap": st.booleans()},
}
LOADS = st.sampled_from(
    [
        {"use": "random_lengths", "num_requests": 40, "input_tokens": 900, "output_tokens": 30},
        {
            "use": "shared_prefix_groups",
            "num_groups": 3,
            "prompts_per_group": 4,
            "system_prompt_tokens": 200,
            "question_tokens": 20,
            "output_tokens": 9,
        },
    ]
)
CLOSED = {"use": "closed_loop", "concurrency": 4, "warm_up_requests": 0}  # as the tools count
CLIENTS = st.sampled_from(
    [
        CLOSED,
        {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "3 /s"}},
    ]
)


@st.composite
def clusters(draw, fields, engine):
    model = draw(st.sampled_from([MOE, DENSE, LATENT]))
    data = {"name": "s", "model": model, "engine": engine, "page_size": draw(st.sampled_from([16, 64]))}
    data |= {"workload": draw(LOADS), "client": draw(CLIENTS)}
    roles = ("aggregated",) if draw(st.booleans()) else ("prefill", "decode")
    tp = draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, tp])) if model == MOE else 1
    for role in roles:
        given_fields = draw(st.fixed_dictionaries({}, optional=fields[role]))
        data[role] = {
            "instances": draw(COUNTS),
            "gpu": draw(st.sampled_from(["h100", "h200"])),
            "tp": tp,
            **given_fields,
        }
        data[role] |= {"dp": dp} if dp > 1 else {}
        if model == LATENT and role != "prefill" and not {"host_cache"} & given_fields.keys():
            data[role]["dcp"] = draw(st.sampled_from([1, tp]))
        if model == DENSE and engine == "sglang" and role != "decode" and not {"host_cache"} & given_fields.keys():
            data[role]["cp"] = draw(st.sampled_from([1, tp]))
        if model == MOE and draw(st.booleans()) and tp > 1:
            data[role]["ep"] = draw(st.sampled_from([1, tp]))
    if len(roles) > 1:
        transports = ["nixl-rdma"] if engine == "vllm" else ["mooncake-rdma", "nixl-rdma", "mooncake-tcp"]
        data["network"] = {"transport": draw(st.sampled_from(transports))}
    return data


def check(data, engine, tmp_path_factory):
    """Two ways through files: as commands or manifests, and back."""
    scenario = parse_scenario(data, base=tmp_path_factory.getbasetemp())
    try:
        made = ENGINES[engine](scenario, ["s.yaml"], scenario.model)
    except ConfigError:  # what does not fit, or what no such server can be
        reject()
    folder = tmp_path_factory.mktemp("launched")
    for name, command in made.commands.items():
        (folder / f"{name}.sh").write_text(f"{command}\n")
    for name, text in made.manifests.items():
        (folder / name).write_text(text)
    (folder / "notes.txt").write_text("".join(f"# {note}\n" for note in made.notes))
    found = import_deployment([folder])
    read = parse_scenario(found.data, base=folder)
    again = ENGINES[engine](read, ["s.yaml"], read.model)
    assert again.commands == made.commands
    assert again.manifests == made.manifests
    assert read.workload == scenario.workload
    assert read.client == scenario.client
    for role, servers in scenario.roles.items():
        back = read.roles[role]
        assert (back.instances, back.gpu, back.split, back.dp) == (
            servers.instances,
            servers.gpu,
            servers.split,
            servers.dp,
        )
    return read


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("engine", ["sglang", "dynamo", "kubernetes"])
@given(data=clusters(OF_SGLANG, "sglang"))
def test_of_sglang(engine, data, tmp_path_factory):
    check(data, engine, tmp_path_factory)


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
@given(data=clusters(OF_VLLM, "vllm"))
def test_of_vllm(engine, data, tmp_path_factory):
    read = check(data, engine, tmp_path_factory)
    assert isinstance(read, Scenario)


def test_a_ramp_of_aiperf_is_read(tmp_path):
    command = "aiperf profile --isl 9 --osl 9 --concurrency 4 --concurrency-ramp-duration 2.5 --num-prompts 5"
    (tmp_path / "server.sh").write_text(f"vllm serve {DENSE}\n")
    (tmp_path / "load.sh").write_text(f"{command}\n")
    assert import_deployment([tmp_path]).data["client"] == {**CLOSED, "ramp": "2.5 s"}


def test_the_commands_are_each_others_inverse(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = {"model": DENSE, "page_size": 16, "prefill": {"gpu": "h100"}, "decode": {"gpu": "h100"}}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    (tmp_path / "s.yaml").write_text(json.dumps({**data, "workload": load, "client": CLOSED}))
    for words in (
        ["launch", "s.yaml", "--out", "launched"],
        ["import", "launched", "--out", "read.yaml", "--json"],
        ["launch", "read.yaml", "--out", "again"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
    said = json.loads(capsys.readouterr().out.partition("\n")[2].rpartition("\n}")[0] + "\n}")
    assert (said["problem"], said["assumed"]) == ("", [])
    for path in (tmp_path / "launched").glob("prefill*"):
        assert path.read_text() == (tmp_path / "again" / path.name).read_text()


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
@pytest.mark.parametrize("connector", ["offloading", "lmcache"])
@pytest.mark.parametrize("role", ["prefill", "aggregated"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (4, 1), (4, 4)])
def test_host_memory_of_vllm_is_that_of_each_gpu(engine, connector, role, tp, dp, tmp_path_factory):
    """OffloadingConnector has the bytes of all ranks of an engine together, LMCache has GiB of each rank."""
    servers = {"gpu": "h100", "tp": tp, "dp": dp}
    host = {"host_cache": "80 GiB", "host_cache_connector": connector, "host_cache_chunk_tokens": 512}
    host["host_cache_layerwise"] = connector == "lmcache"
    if connector == "offloading":
        del host["host_cache_chunk_tokens"]
    data = {"model": MOE, "engine": "vllm", "page_size": 16, role: servers | host}
    data |= {"decode": servers, "network": {"transport": "nixl-rdma"}} if role == "prefill" else {}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    read = check({**data, "workload": load, "client": CLOSED}, engine, tmp_path_factory)
    assert read.roles[role].host_cache == 80 * 2**30
    name = {"offloading": "OffloadingConnector", "lmcache": "LMCacheConnectorV1"}[connector]
    (command,) = [one for one in ENGINES[engine](read, [], MOE).commands.values() if name in one]
    sizes = f'"cpu_bytes_to_use":{80 * 2**30 * tp // dp}'
    assert (
        '"lmcache.max_local_cpu_size":80.0,"lmcache.chunk_size":512,"lmcache.use_layerwise":true'
        if connector == "lmcache"
        else sizes
    ) in command
    assert ("MultiConnector" in command) == (role == "prefill")


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
@pytest.mark.parametrize("role", ["prefill", "aggregated"])
def test_kvbm_has_host_memory_of_all_gpus_of_a_server_and_ports_of_its_own(engine, role, tmp_path_factory):
    servers = {"gpu": "h100", "tp": 2}
    data = {"model": MOE, "engine": "vllm", "page_size": 16}
    data[role] = {**servers, "instances": 2, "host_cache": "80 GiB", "host_cache_connector": "kvbm"}
    data |= {"decode": servers, "network": {"transport": "nixl-rdma"}} if role == "prefill" else {}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    read = check({**data, "workload": load, "client": CLOSED}, engine, tmp_path_factory)
    assert (read.roles[role].host_cache, read.roles[role].host_cache_connector) == (80 * 2**30, "kvbm")
    launch = ENGINES[engine](read, [], MOE)
    commands = [one for one in launch.commands.values() if "DynamoConnector" in one]
    assert all("DYN_KVBM_CPU_CACHE_GB=171.79869184" in one for one in commands)
    assert [f"DYN_KVBM_LEADER_ZMQ_ACK_PORT={port}" in one for one, port in zip(commands, (56002, 56004), strict=True)]
    kinds = ["PdConnector", "DynamoConnector", "NixlConnector"] if role == "prefill" else ["DynamoConnector"]
    places = [commands[0].index(f'"kv_connector":"{kind}"') for kind in kinds]
    assert places == sorted(places)
    assert all("DYN_KVBM_CPU_CACHE_GB" in text for text in launch.manifests.values())


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
@pytest.mark.parametrize("shared", [False, True])
def test_storage_behind_lmcache_is_its_remote_store(engine, shared, tmp_path_factory):
    servers = {"gpu": "h100", "host_cache": "80 GiB", "host_cache_connector": "lmcache"}
    data = {"model": MOE, "engine": "vllm", "page_size": 16, "aggregated": servers, "storage": {"shared": shared}}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    read = check({**data, "workload": load, "client": CLOSED}, engine, tmp_path_factory)
    assert read.storage.shared == shared
    made = ENGINES[engine](read, [], MOE)
    url = "mooncakestore://" if shared else "fs://"
    stored = f'"lmcache.remote_url":"{url}localhost'
    assert any(stored in one and '"lmcache.enable_async_loading":true' in one for one in made.commands.values())
    assert any("give the store's address" in one for one in made.notes) == shared


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
def test_nixl_pushes_if_it_is_told(engine, tmp_path_factory):
    data = {"model": DENSE, "engine": "vllm", "page_size": 16, "prefill": {"gpu": "h100"}, "decode": {"gpu": "h100"}}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    network = {"transport": "nixl-rdma", "nixl_push": True}
    read = check({**data, "network": network, "workload": load, "client": CLOSED}, engine, tmp_path_factory)
    assert read.network.nixl_push
    commands = ENGINES[engine](read, [], DENSE).commands.values()
    assert sum('"kv_connector":"NixlPushConnector"' in one for one in commands) == 2


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
def test_an_interval_of_prompts_is_said_and_read(engine, tmp_path_factory):
    data = {"model": DENSE, "engine": "vllm", "aggregated": {"gpu": "h100", "prefill_schedule_interval": 4}}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    read = check({**data, "page_size": 16, "workload": load, "client": CLOSED}, engine, tmp_path_factory)
    assert read.aggregated.prefill_schedule_interval == 4


@pytest.mark.parametrize("engine", ["vllm", "dynamo-vllm"])
def test_unsplit_images_are_said_and_read(engine, tmp_path_factory):
    servers = {"gpu": "h100", "chunked_media": False}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    data = {"model": DENSE, "engine": "vllm", "prefill": servers, "decode": {"gpu": "h100"}, "page_size": 16}
    read = check({**data, "workload": load, "client": CLOSED}, engine, tmp_path_factory)
    assert not read.prefill.chunked_media


@pytest.mark.parametrize("engine", ["dynamo", "dynamo-vllm"])
def test_the_queue_of_dynamos_router_is_said_and_read(engine, tmp_path_factory):
    own = {"engine": "vllm", "network": {"transport": "nixl-rdma"}} if engine == "dynamo-vllm" else {}
    data = {"model": DENSE, "page_size": 16, "prefill": {"gpu": "h100", "instances": 2}, "decode": {"gpu": "h100"}}
    router = {"prefill": "dynamo_kv", "decode": "dynamo_kv", "queue": {"threshold": 2.5, "order": "wspt"}}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    read = check({**data, **own, "router": router, "workload": load, "client": CLOSED}, engine, tmp_path_factory)
    assert (read.router.queue.threshold, read.router.queue.order) == (2.5, "wspt")


@pytest.mark.parametrize("transport", ["nixl-rdma", "mooncake-rdma"])
def test_the_time_for_which_prefill_holds_kv_is_said_and_read(transport, tmp_path_factory):
    data = {"model": DENSE, "engine": "vllm", "page_size": 16, "decode": {"gpu": "h100"}}
    data |= {"prefill": {"gpu": "h100", "hold_timeout": "90 s"}, "network": {"transport": transport}}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    read = check({**data, "workload": load, "client": CLOSED}, "vllm", tmp_path_factory)
    assert read.prefill.hold_timeout == 90_000_000_000


@pytest.mark.parametrize("engine", ["sglang", "dynamo"])
@pytest.mark.parametrize("beside", [{"dp": 2, "tp": 2}, {"host_cache": "40 GB"}, {"dcp": 2, "tp": 2}])
def test_stages_beside_ranks_host_memory_and_divided_kv_are_said_and_read(engine, beside, tmp_path_factory):
    data = {"model": LATENT, "page_size": 64, "aggregated": {"gpu": "h200", "pp": 2, **beside}}
    load = {"use": "random_lengths", "num_requests": 5, "input_tokens": 9, "output_tokens": 9}
    read = check({**data, "workload": load, "client": CLOSED}, engine, tmp_path_factory)
    assert (read.aggregated.pp, read.aggregated.dp) == (2, beside.get("dp", 1))
    assert (read.aggregated.host_cache is None) == ("host_cache" not in beside)
