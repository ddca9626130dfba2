"""Encode instances in deployments: what a launch writes is read back."""

import pytest

from pdsim.formats.deployments.importing import import_deployment
from pdsim.launch import ENGINES
from pdsim.scenario.yaml_file import ConfigError
from tests.launch.sample import ENCODE, VLLM_ENCODE, scenario


def imported(tmp_path, commands, notes=()):
    for name, command in commands.items():
        (tmp_path / f"{name}.sh").write_text(command)
    (tmp_path / "notes.txt").write_text("".join(f"# {note}\n" for note in notes))
    return import_deployment([tmp_path])


@pytest.mark.parametrize("transport", ["zmq-tcp", "mooncake-rdma"])
def test_what_a_launch_starts_is_read_back(tmp_path, transport):
    made_of = scenario(*ENCODE, ("encode.transport", transport), ("encode.gpu", "l40s"))
    made = ENGINES["sglang"](made_of, ["s.yaml"], "Qwen/Qwen3-VL-8B-Instruct")
    found = imported(tmp_path, made.commands, made.notes)
    expected = {"gpu": "l40s", "instances": 2, "max_batch_size": 8, "cache": "1024 MiB"}
    assert found.data["encode"] == expected | ({"transport": transport} if transport == "mooncake-rdma" else {})
    assert not any("encode" in line for line in [*found.aside, *found.assumed])
    assert found.data["prefill"].keys() & {"encode_urls", "encode_transport", "encode_cache"} == set()


def test_urls_stand_for_instances_that_no_file_starts(tmp_path):
    made = ENGINES["sglang"](scenario(*ENCODE), ["s.yaml"], "Qwen/Qwen3-VL-8B-Instruct")
    found = imported(tmp_path, {name: text for name, text in made.commands.items() if "encode" not in name})
    assert found.data["encode"] == {"gpu": "h100", "instances": 2}
    assert any("the number of --encoder-urls" in line for line in found.assumed)


def test_several_ranks_of_an_encode_server_are_instances_of_their_own(tmp_path):
    server = "python -m sglang.launch_server --model-path Qwen/Qwen3-VL-8B-Instruct"
    found = imported(
        tmp_path,
        {
            "a": f"{server} --language-only --encoder-urls http://x:1 --encoder-transfer-backend zmq_to_tokenizer",
            "b": f"{server} --encoder-only --dp-size 4",
        },
    )
    assert found.data["encode"] == {"gpu": "h100", "instances": 4}
    assert found.data["aggregated"]["instances"] == 1
    assert any("simulated as zmq_to_scheduler" in line for line in found.aside)


def test_what_a_launch_of_vllm_starts_is_read_back(tmp_path):
    made_of = scenario(*VLLM_ENCODE, ("engine", "vllm"), ("encode.step_tokens", "4000"))
    made = ENGINES["vllm"](made_of, ["s.yaml"], "Qwen/Qwen3-VL-8B-Instruct")
    found = imported(tmp_path, made.commands, made.notes)
    cache = f"{1 << 30} B"
    expected = {"gpu": "h100", "instances": 2, "cache": cache, "transport": "nixl-rdma", "step_tokens": 4000}
    assert found.data["encode"] == expected
    assert not any("encode" in line or "ec-transfer" in line for line in [*found.aside, *found.assumed])
    assert found.data["prefill"].keys() & {"encode_transport", "encode_cache"} == set()


def test_another_connector_of_vllm_is_simulated_as_the_one_that_reads(tmp_path):
    server = "vllm serve Qwen/Qwen3-VL-8B-Instruct --ec-transfer-config"
    roles = {"a": "ec_consumer", "b": "ec_producer"}
    config = '{"ec_connector": "ECExampleConnector", "ec_role": "ROLE"}'
    found = imported(tmp_path, {name: f"{server} '{config.replace('ROLE', role)}'" for name, role in roles.items()})
    assert found.data["encode"] == {"gpu": "h100", "instances": 1, "transport": "nixl-rdma"}
    assert any("simulated as ECCPUConnector with ec_enable_nixl" in line for line in found.aside)


@pytest.mark.parametrize("config", ["[1]", '{"ec_connector_extra_config": [1]}'])
def test_a_config_of_vllm_that_is_no_object_is_refused(tmp_path, config):
    with pytest.raises(ConfigError, match="JSON object"):
        imported(tmp_path, {"a": f"vllm serve Qwen/Qwen3-VL-8B-Instruct --ec-transfer-config '{config}'"})
