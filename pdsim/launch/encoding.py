"""Flags of encode instances, and of the servers that wait for their embeddings.

Source: SGLang 0.5.23, arg_groups/fields/disagg.py and arg_groups/pd_disaggregation_hook.py,
handle_encoder_disaggregation. vLLM 0.33.0, config/ec_transfer.py and ec_connector/cpu; its proxy is an example of its
repository, examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py (0134b93).
"""

import json
from collections.abc import Mapping, Sequence

from pdsim.launch.bench_serving import only_equal_images
from pdsim.launch.commands import GATEWAY_PORT, HOST, Launch, Place, Rule
from pdsim.launch.words import Expanded, Flags
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.encoding import EncodeSettings

BACKENDS = {"zmq": "zmq_to_scheduler", "mooncake": "mooncake"}
"""Values of --encoder-transfer-backend, by the first word of a transport."""
FIRST_ENCODER_PORT = 8900
"""Base of ports. The port of a server or encode instance is higher by its number in the cluster (Place.number).

SGLang: servers have these ports (--encoder-bootstrap-port) for encode instances that register. In a launch none does,
because servers get the URLs of encode instances. vLLM: encode instances have these ports; servers fetch embeddings
from them.
"""
PROXY = "disagg_epd_proxy.py"


def refused_by_sglang(value: str, _: Scenario) -> str | None:
    """Says why SGLang's servers cannot have this value of encode.transport. None: they can."""
    return None if value.partition("-")[0] in BACKENDS else f"SGLang sends embeddings by {' or '.join(BACKENDS)}"


ENCODE_RULES: dict[str, Rule] = {
    "encode": None,
    "encode.step_tokens": "vLLM's encode instances alone have it; leave it out",
    "encode.transport": refused_by_sglang,
    "workload.images": only_equal_images,
}
"""Says what `pdsim launch --engine sglang` does with the scenario's fields on encode instances and images. None:
commands express the field. Text: any value but the default is refused, for this reason. Function of the value and the
scenario: returns None if commands express the value, otherwise the reason why it is refused."""


def refused_by_vllm(value: str, scenario: Scenario) -> str | None:
    """Says why vLLM's servers cannot have this value of encode.transport, or cannot have the scenario's
    network.transport together with encode instances. None: they can.
    """
    if not value.startswith("nixl"):
        return "vLLM's servers read embeddings with NIXL"
    if scenario.prefill is not None and not scenario.network.transport.startswith("nixl"):
        return "vLLM's proxy of encode instances has KV moved by NIXL only; give network.transport nixl-rdma"
    return None


VLLM_ENCODE_RULES: dict[str, Rule] = {
    "encode": None,
    "encode.max_batch_size": "SGLang's encode instances alone have it; leave it out",
    "encode.cache": lambda value, _: (
        "vLLM needs the size of host memory for embeddings (ec_cpu_bytes); give it" if value is None else None
    ),
    "encode.transport": refused_by_vllm,
    "workload.images": only_equal_images,
}
"""Says what `pdsim launch --engine vllm` does with the scenario's fields on encode instances and images. None: commands
express the field. Text: any value but the default is refused, for this reason. Function of the value and the scenario:
returns None if commands express the value, otherwise the reason why it is refused."""


def add_encode_instances(
    made: Launch, program: Sequence[str], scenario: Scenario, at: Sequence[Place], model: str
) -> None:
    """Adds to `made` a command for each of SGLang's encode instances. program: words that start a server. at: where the
    encode instances run. model: name or path of the model.
    """
    if (encode := scenario.encode) is None:
        return
    variables: dict[str, object] = {"SGLANG_ENCODER_MAX_BATCH_SIZE": encode.max_batch_size}
    if encode.cache is not None:
        variables["SGLANG_VLM_CACHE_SIZE_MB"] = max(1, encode.cache >> 20)
    for index, place in enumerate(at):
        flags: Flags = [
            ("model-path", model),
            ("host", place.host),
            ("port", place.port),
            ("base-gpu-id", place.first_gpu),
            ("encoder-only", True),
            ("encoder-transfer-backend", _backend(encode)),
            ("enable-prefix-mm-cache", encode.cache is not None),
        ]
        made.add(f"encode-{index}", program, flags, **variables)


def language_flags(scenario: Scenario, role: str, place: Place, at: Mapping[str, list[Place]]) -> Flags:
    """Flags of an SGLang server that waits for embeddings. Empty for decode servers, and without encode instances.
    place: where this server runs. at: where all servers and encode instances run, by role.
    """
    if scenario.encode is None or role == "decode":
        return []
    return [
        ("language-only", True),
        ("encoder-urls", [one.url for one in at["encode"]]),
        ("encoder-transfer-backend", _backend(scenario.encode)),
        ("encoder-bootstrap-port", FIRST_ENCODER_PORT + place.number),
    ]


def _backend(encode: EncodeSettings) -> str:
    return BACKENDS[encode.transport.partition("-")[0]]


def add_vllm_encode_instances(made: Launch, scenario: Scenario, at: Sequence[Place], model: str) -> None:
    """Adds a command to `made` for each of vLLM's encode instances. at: where the encode instances run. model: name or
    path of the model.
    """
    if (encode := scenario.encode) is None:
        return
    for index, place in enumerate(at):
        flags: Flags = [
            ("host", place.host),
            ("port", place.port),
            ("max-num-batched-tokens", encode.step_tokens),
            ("ec-transfer-config", _transfer_config(encode, "ec_producer")),
        ]
        variables: dict[str, object] = {
            "CUDA_VISIBLE_DEVICES": place.first_gpu,
            "VLLM_USE_V2_MODEL_RUNNER": 1,
            "VLLM_EC_SIDE_CHANNEL_HOST": place.host,
            "VLLM_EC_SIDE_CHANNEL_PORT": FIRST_ENCODER_PORT + place.number,
        }
        made.add(f"encode-{index}", ["vllm", "serve", model], flags, **variables)


def reader_settings(scenario: Scenario, role: str) -> tuple[Flags, dict[str, object]]:
    """Flags and environment variables with which a vLLM server reads embeddings that encode instances made. Empty for
    decode servers, and if the scenario has no encode instances.
    """
    if scenario.encode is None or role == "decode":
        return [], {}
    return [("ec-transfer-config", _transfer_config(scenario.encode, "ec_consumer"))], {"VLLM_USE_V2_MODEL_RUNNER": 1}


def add_proxy(made: Launch, scenario: Scenario, at: Mapping[str, Sequence[Place]]) -> None:
    """Adds the command of vLLM's proxy of encode instances, which takes the place of a router, and notes on the proxy
    and on the cache of embeddings. at: where servers and encode instances run, by role.
    """

    def urls(role: str) -> Expanded:
        return Expanded(",".join(place.url for place in at[role]))

    is_pair = scenario.aggregated is None
    flags: Flags = [
        ("host", HOST),
        ("port", GATEWAY_PORT),
        ("no-rewrite", True),
        ("encode-servers-urls", urls("encode")),
        ("prefill-servers-urls", urls("prefill") if is_pair else "disable"),
        ("decode-servers-urls", urls("decode" if is_pair else "aggregated")),
    ]
    made.add("gateway", ["python", PROXY], flags)
    made.notes.append(f"gateway: {PROXY} is an example of vLLM's repository; it picks servers at random")
    made.notes.append("encode.cache: the simulator evicts no embeddings from it")


def _transfer_config(encode: EncodeSettings, role: str) -> str:
    """The JSON of --ec-transfer-config, which encode instances need to send embeddings, and language servers to read
    them. role: vLLM's ec_role: ec_producer for encode instances, ec_consumer for language servers.
    """
    extra = {"ec_cpu_bytes": encode.cache, "ec_enable_nixl": True}
    found = {"ec_connector": "ECCPUConnector", "ec_role": role, "ec_connector_extra_config": extra}
    return json.dumps(found, separators=(",", ":"))
