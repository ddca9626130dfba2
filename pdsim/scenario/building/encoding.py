"""Builds encode instances and the links on which embeddings move. For servers that encode images and audio themselves,
gives the times of encoding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from pdsim.core.encode.embedding_cache import EmbeddingCache
from pdsim.core.encode.encode_instance import EncodeInstance
from pdsim.core.encode.media_item import MediaItem
from pdsim.core.encode.own_media import OwnMedia
from pdsim.core.vllm.embedding_reads import EmbeddingReads
from pdsim.core.vllm.vllm_encode_instance import VllmEncodeInstance
from pdsim.cost.encoding import EmbeddingLoads, EncoderTimes, EncodingStepTimes
from pdsim.cost.step_times import StepTimes
from pdsim.dataclass import dataclass
from pdsim.scenario.building.sizing import encode_ids, layout_of, roles
from pdsim.scenario.building.wiring import copies_over_host_link, link_bandwidth, placed, transport_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.encoding import EncodeSettings
from pdsim.scenario.sections.servers import ComputingSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import CatalogError, GpuSpec, load_gpu, load_model
from pdsim.system.encoder import Encoder
from pdsim.system.memory import Role
from pdsim.system.transport import Path, Topology, Transport
from pdsim.workload.request_spec import RequestSpec

EMBEDDING_CACHE_BYTES = 100 << 20
"""Memory in bytes for embeddings of a server that encodes images and audio itself (SGLang 0.5.23, environ.py:1598,
SGLANG_VLM_CACHE_SIZE_MB). SGLang takes 0 for Qwen3-VL on Hopper GPUs with large memory
(arg_groups/model_overrides/qwen3_vl.py:92), which pdsim does not model."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Encode instances, and how their embeddings reach the servers that compute prompts."""

    instances: Sequence[EncodeInstance | VllmEncodeInstance]
    times: Mapping[str, EncoderTimes]
    """Times of the encoder on an encode instance, by modality, such as image."""
    transport: Transport
    """Transfer engine that sends the embeddings, with its times."""
    topology: Topology
    """Links from encode instances to the servers that compute prompts. A transfer over these links has as many bytes as
    one rank of the server receives.
    """


def encoding(scenario: Scenario) -> Encoding | None:
    """The encode instances of a scenario. None: the scenario has none. Raises ConfigError if GPU, transport or encoder
    are unknown.
    """
    if (settings := scenario.encode) is None:
        return None
    transport = transport_of("encode", settings.transport)
    return Encoding(
        instances=encode_instances(scenario),
        times=_times(_encoders(scenario), _gpu(settings), scenario),
        transport=transport,
        topology=_topology(scenario, transport),
    )


def encode_instances(scenario: Scenario) -> list[EncodeInstance | VllmEncodeInstance]:
    """New encode instances. Empty: the cluster has none."""
    if (settings := scenario.encode) is None:
        return []
    if scenario.engine == "vllm":
        sizes = {"step_tokens": settings.step_tokens, "encoder_tokens": _encoder_tokens(scenario, settings.step_tokens)}
        return [VllmEncodeInstance(name, **sizes) for name in encode_ids(scenario)]
    return [
        EncodeInstance(
            name,
            max_batch_size=settings.max_batch_size,
            embedding_bytes=_embedding_bytes(_encoders(scenario)),
            cache=None if settings.cache is None else EmbeddingCache(settings.cache),
        )
        for name in encode_ids(scenario)
    ]


def embedding_reads(scenario: Scenario, language_id: str) -> EmbeddingReads | None:
    """How a vLLM server reads embeddings from encode instances. None: the cluster has no encode instances, or
    language_id is no prefill or aggregated instance. language_id: name of the instance that reads.
    """
    if scenario.encode is None or language_id not in language_ids(scenario):
        return None
    return EmbeddingReads(language_id, _embedding_bytes(_encoders(scenario)))


def language_ids(scenario: Scenario) -> list[str]:
    """Returns the names of the prefill instances, or of the aggregated instances if the cluster has no prefill."""
    return roles(scenario)["prefill" if scenario.aggregated is None else "aggregated"]


def encoded_modalities(scenario: Scenario) -> tuple[str, ...]:
    """Modalities (such as image) of the media items that requests bring to the schedulers: all for which the model has
    an encoder. Empty: the model has no encoder, or servers of SGLang run without encode instances, so that their
    schedulers do not see media items.
    """
    if scenario.encode is None and scenario.engine == "sglang":
        return ()
    return tuple(load_model(scenario.model).encoders)


def encoder_tokens(scenario: Scenario, settings: ComputingSettings) -> int:
    """Maximum number of tokens of images and audio clips in a vLLM server's encoder cache. 0: the model has no encoder.

    Raises ConfigError if vLLM would not start, because the settings forbid splitting an image and the largest image has
    more tokens than a step takes.
    """
    found, step = _encoder_tokens(scenario, settings.rank_chunk_tokens), settings.rank_chunk_tokens
    if not settings.chunked_media and found > (step or found):
        raise ConfigError(
            f"chunked_media: false: vLLM does not start if the model's largest image of {found} tokens exceeds a "
            f"step (0.33.0, v1/core/encoder_cache_manager.py:363): raise chunked_prefill_tokens to {found} or more"
        )
    return found


def _encoder_tokens(scenario: Scenario, step_tokens: int) -> int:
    """Returns the size in tokens of an encoder cache: the tokens of a step, but at least those of the largest image
    (vLLM 0.33.0, v1/core/encoder_cache_manager.py:376). 0: the model has no encoder. step_tokens: maximum number of
    tokens of a step; 0: no maximum, so the model's context takes its place.
    """
    model = load_model(scenario.model)
    if not model.encoders:
        return 0
    largest = 0 if model.encoder is None else model.encoder.max_image_tokens
    return max(step_tokens or model.max_context_tokens, largest)


def _encoders(scenario: Scenario) -> Mapping[str, Encoder]:
    encoders = load_model(scenario.model).encoders
    if not encoders:
        raise ConfigError(f"encode: the catalog's entry of {scenario.model} has no encoder of images or audio")
    return encoders


def _times(
    encoders: Mapping[str, Encoder], gpu: GpuSpec, scenario: Scenario, num_gpus: int = 1
) -> dict[str, EncoderTimes]:
    return {
        modality: EncoderTimes(encoder, gpu, num_gpus=num_gpus, factor=scenario.cost.encode_factor)
        for modality, encoder in encoders.items()
    }


def _embedding_bytes(encoders: Mapping[str, Encoder]) -> dict[str, int]:
    return {modality: encoder.embedding_bytes for modality, encoder in encoders.items()}


def _gpu(settings: EncodeSettings) -> GpuSpec:
    try:
        return load_gpu(settings.gpu)
    except CatalogError as wrong:
        raise ConfigError(f"encode: {wrong}") from None


def _topology(scenario: Scenario, engine: Transport) -> Topology:
    """Links from encode instances to the servers that compute prompts. engine: the transport of embeddings. Each rank
    of a server of SGLang asks for all embeddings of a request, and gets them (0.5.23,
    disaggregation/encoder/receiver.py:2352: receive_count). The ranks of a vLLM server share one copy in host memory
    (0.33.0, ec_connector/cpu/common.py: create_ec_shared_region).
    """
    network, first_gpus = scenario.network, placed(scenario)
    assert scenario.encode is not None
    gpus_per_link = network.gpus_per_nic if engine.link == "nic" else 1
    capacity: dict[str, float] = {}
    ways: dict[str, dict[str, Path]] = {"out": {}, "in": {}}
    layout = layout_of(scenario, "prefill" if scenario.aggregated is None else "aggregated")
    num_copies = 1 if scenario.engine == "vllm" else layout.num_gpus
    senders, receivers = encode_ids(scenario), language_ids(scenario)
    ends = [("out", name, _gpu(scenario.encode), num_copies) for name in senders]
    ends += [("in", name, layout.gpu, min(num_copies, gpus_per_link)) for name in receivers]
    for way, name, gpu, weight in ends:
        link = f"{engine.link} {first_gpus[name] // gpus_per_link} {way}"
        capacity[link] = link_bandwidth(network, engine, gpu)
        ways[way][name] = ((link, weight),)
        if way == "out" and engine.max_bandwidth is not None:
            capacity[f"{name} engine"] = engine.max_bandwidth
            ways[way][name] += ((f"{name} engine", weight),)
    if network.shared_bandwidth is not None:
        capacity["shared"] = network.shared_bandwidth
        ways["out"] = {name: (*path, ("shared", num_copies)) for name, path in ways["out"].items()}
    return Topology(capacity=capacity, ways_out=ways["out"], ways_in=ways["in"])


def with_own_media(
    scenario: Scenario, requests: Sequence[RequestSpec], costs: Mapping[str, StepTimes]
) -> dict[str, StepTimes]:
    """Adds the time of encoding media to the step times of servers that encode media within their forwards. Servers of
    vLLM that read embeddings from encode instances get the time of loading embeddings instead. requests: all requests
    of the load. costs: step times by instance. Raises ConfigError if these servers have pp or cp above 1, or if vLLM
    refuses an item.
    """
    encoders = load_model(scenario.model).encoders
    media = {spec.request_id: spec.media for spec in requests if spec.media}
    if not media or not encoders or (scenario.encode is not None and scenario.engine == "sglang"):
        return dict(costs)
    if scenario.engine == "vllm":
        _require_room(
            scenario, [item.num_tokens for items in media.values() for item in items if item.modality in encoders]
        )
    found = dict(costs)
    readers = [] if scenario.encode is None else language_ids(scenario)
    for role, names in _encoding_ids(scenario).items():
        layout = layout_of(scenario, role)
        if layout.pp > 1 or layout.cp > 1:
            instead = ", or use encode instances" if scenario.engine == "sglang" else ""
            raise ConfigError(f"{role}: pdsim does not model media with pp or cp; leave them out{instead}")
        for name in names:
            given = {field.name: getattr(costs[name], field.name) for field in fields(StepTimes) if field.init}
            times: Mapping[str, EncoderTimes | EmbeddingLoads]
            times = _times(encoders, layout.gpu, scenario, layout.num_gpus)
            if name in readers:
                rate = copies_over_host_link(scenario, role).load_bandwidth
                times = {modality: EmbeddingLoads(one.embedding_bytes, rate) for modality, one in encoders.items()}
            found[name] = EncodingStepTimes(
                **given,
                encoders=times,
                own=None if scenario.engine == "vllm" else _own_media(media, encoders),
            )
    return found


def _own_media(media: Mapping[int, Sequence[MediaItem]], encoders: Mapping[str, Encoder]) -> OwnMedia:
    return OwnMedia(media, _embedding_bytes(encoders), EmbeddingCache(EMBEDDING_CACHE_BYTES))


def _require_room(scenario: Scenario, item_tokens: Sequence[int]) -> None:
    """Raises ConfigError if vLLM refuses an item (an image or an audio clip), because the item exceeds the encoder
    cache. item_tokens: number of tokens of each item of the load.
    """
    servers = scenario.aggregated or scenario.pair.prefill
    largest, most = max(item_tokens, default=0), encoder_tokens(scenario, servers)
    if scenario.encode is not None and largest > (kept := _encoder_tokens(scenario, scenario.encode.step_tokens)):
        raise ConfigError(
            f"an image or audio clip of {largest} tokens exceeds an encode instance's encoder cache of {kept} tokens: "
            f"raise encode.step_tokens to {largest} or more"
        )
    if largest > most:
        raise ConfigError(
            f"an image or audio clip of {largest} tokens exceeds vLLM's encoder cache of {most} tokens (0.33.0, "
            f"v1/engine/input_processor.py:635): raise chunked_prefill_tokens to {largest} or more"
        )


def _encoding_ids(scenario: Scenario) -> dict[Role, list[str]]:
    """Names of the language servers' instances that may encode images and audio themselves, by role. With vLLM, decode
    instances encode those of prompts that they compute, such as prompts of preempted requests.
    """
    ids = roles(scenario)
    if scenario.engine == "sglang":
        ids.pop("decode", None)
    return ids
