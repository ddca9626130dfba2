"""Flags of SGLang's encode instances, and of the servers that wait for their embeddings.

Source: SGLang 0.5.23, arg_groups/fields/disagg.py and arg_groups/pd_disaggregation_hook.py,
handle_encoder_disaggregation.
"""

from collections.abc import Mapping, Sequence

from pdsim.launch.bench_serving import only_equal_images
from pdsim.launch.commands import Launch, Place, Rule
from pdsim.launch.words import Flags
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.encoding import EncodeSettings

BACKENDS = {"zmq": "zmq_to_scheduler", "mooncake": "mooncake"}
"""Values of --encoder-transfer-backend, by the first word of a transport."""
FIRST_ENCODER_PORT = 8900
"""Port at which encode instances of the first server register. All servers get their URLs, and use no registration."""


def transfers(value: str, _: Scenario) -> str | None:
    """Check of encode.transport: the reason for a refusal, or None."""
    return None if value.partition("-")[0] in BACKENDS else f"SGLang sends embeddings by {' or '.join(BACKENDS)}"


ENCODE_RULES: dict[str, Rule] = {
    "encode": None,
    "encode.transport": transfers,
    "workload.images": only_equal_images,
}
"""Rules of fields that --engine sglang alone expresses."""


def add_encode_instances(
    made: Launch, program: Sequence[str], scenario: Scenario, at: Sequence[Place], model: str
) -> None:
    """Adds a command for each encode instance. program: starts a server. at: where the encode instances run."""
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
    """Flags of a server that waits for embeddings. Empty for decode servers, and without encode instances."""
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
