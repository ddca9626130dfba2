"""Launches of encode instances, and of loads with images."""

import pytest

from pdsim.launch import ENGINES
from pdsim.scenario.yaml_file import ConfigError
from tests.launch.sample import ENCODE, VLLM_ENCODE, scenario


def commands(*changes):
    return ENGINES["sglang"](scenario(*ENCODE, *changes), ["s.yaml"], "m").commands


def test_servers_know_the_encode_instances_and_decode_needs_none():
    made = commands()
    urls = [f"http://127.0.0.1:3000{number}" for number in (2, 3)]
    assert f"--encoder-urls {' '.join(urls)}" in made["prefill-0"]
    assert "--language-only" in made["prefill-0"]
    assert "encoder" not in made["decode-0"]
    for number in range(2):
        assert f"--port 3000{2 + number} --base-gpu-id {4 + number} --encoder-only" in made[f"encode-{number}"]
        assert "SGLANG_VLM_CACHE_SIZE_MB=1024" in made[f"encode-{number}"]
    assert all("--encoder-transfer-backend zmq_to_scheduler" in made[name] for name in ("prefill-0", "encode-0"))


def test_without_a_cache_nothing_is_kept_and_mooncake_sends_too():
    made = commands(("encode", "{gpu: h100, transport: mooncake-rdma}"))
    assert "prefix-mm-cache" not in made["encode-0"]
    assert "--encoder-transfer-backend mooncake" in made["encode-0"]


def test_images_of_the_load_have_the_workloads_tokens():
    load = commands()["load"]
    assert "--dataset-name image" in load
    assert "--image-count 2 --image-resolution 800x1280" in load  # 25 times 40 tokens of 32 pixels


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [("encode.transport", "nixl-rdma")],
            "encode.transport: nixl-rdma: SGLang sends embeddings by zmq or mooncake",
        ),
        ([("workload.distinct_images", "3")], "a fixed number of new images of one size"),
        ([("workload.images", "{use: uniform, low: 1, high: 2}")], "a fixed number of new images of one size"),
    ],
)
def test_what_sglang_cannot_do_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        commands(*changes)


@pytest.mark.parametrize("engine", ["kubernetes", "dynamo"])
def test_other_launches_have_no_encode_instances(engine):
    with pytest.raises(ConfigError, match="encode: given: only --engine sglang and vllm launch encode instances"):
        ENGINES[engine](scenario(*ENCODE), ["s.yaml"], "m")


def vllm_commands(*changes):
    return ENGINES["vllm"](scenario(*VLLM_ENCODE, *changes), ["s.yaml"], "m").commands


def test_vllms_servers_read_from_encode_instances_behind_a_proxy():
    made = vllm_commands()
    reading = '"ec_connector_extra_config":{"ec_cpu_bytes":1073741824,"ec_enable_nixl":true}'
    for name, role in (("prefill-0", "ec_consumer"), ("encode-0", "ec_producer"), ("encode-1", "ec_producer")):
        assert f'{{"ec_connector":"ECCPUConnector","ec_role":"{role}",{reading}}}' in made[name]
        assert "VLLM_USE_V2_MODEL_RUNNER=1" in made[name]
    assert "ec-transfer-config" not in made["decode-0"]
    assert "VLLM_EC_SIDE_CHANNEL_PORT=8903" in made["encode-1"]
    assert "--encode-servers-urls http://127.0.0.1:30002,http://127.0.0.1:30003" in made["gateway"]
    assert "--prefill-servers-urls http://127.0.0.1:30000" in made["gateway"]


def test_vllms_client_sends_images_of_the_workloads_tokens():
    load = vllm_commands()["load"]
    assert "--dataset-name random-mm --random-mm-base-items-per-request 2" in load
    assert "--random-mm-bucket-config '{(800, 1280, 1): 1}'" in load
    assert "--backend openai-chat --endpoint /v1/chat/completions" in load


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("encode.transport", "zmq-tcp")], "vLLM's servers read embeddings with NIXL"),
        ([("network.transport", "mooncake-rdma")], "has KV moved by NIXL only"),
        ([("encode.cache", None)], "vLLM needs the size of host memory for embeddings"),
        ([("encode.max_batch_size", "4")], "SGLang's encode instances alone have it"),
    ],
)
def test_what_vllm_cannot_do_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        vllm_commands(*changes)
