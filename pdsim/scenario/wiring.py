"""From layouts and network settings to what the core and its driver need to know of transfers."""

from collections.abc import Mapping
from dataclasses import replace

from pdsim.core.wire import Wire
from pdsim.scenario.schema import NetworkSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import UnknownNameError, load_transport
from pdsim.system.memory import Layout
from pdsim.system.model import LatentAttention
from pdsim.system.topology import Path, Topology
from pdsim.system.transport import Transport


def transport(network: NetworkSettings) -> Transport:
    """The catalog's, with what the scenario changes of it."""
    try:
        found = load_transport(network.transport)
    except UnknownNameError as wrong:
        raise ConfigError(f"network: {wrong}") from None
    if network.transfer_latency is not None:
        found = replace(found, batch_ns=network.transfer_latency)
    if network.descriptor_latency is not None:
        found = replace(found, descriptor_ns=network.descriptor_latency)
    return found


def wire(prefill: Layout, decode: Layout, page_size: int, engine: Transport, *, deduplicate: bool = False) -> Wire:
    """Raises ConfigError where the ranks of the two sides do not divide."""
    small, large = sorted((prefill.tp, decode.tp))
    if large % small:
        raise ConfigError(f"prefill tp {prefill.tp} and decode tp {decode.tp}: one must be a multiple of the other")
    attention = prefill.model.attention
    if isinstance(attention, LatentAttention):
        writers, num_planes, slices = 1, attention.num_layers, False
        page_bytes = prefill.kv_token_bytes * page_size
    else:
        copies = max(1, prefill.tp // attention.num_kv_heads) if deduplicate else 1
        writers = max(1, prefill.tp // decode.tp // copies)
        num_planes, slices = 2 * attention.num_layers, prefill.tp != decode.tp
        page_bytes = min(prefill.kv_token_bytes, decode.kv_token_bytes) * page_size
    return Wire(
        page_size=page_size,
        page_bytes=page_bytes,
        num_planes=num_planes,
        num_writers=writers,
        num_targets=max(1, decode.tp // prefill.tp),
        num_pairs=decode.tp * writers,
        slices=slices,
        coalesces=engine.coalesces,
    )


def topology(
    network: NetworkSettings, engine: Transport, sides: Mapping[str, tuple[list[str], Layout]], num_writers: int
) -> Topology:
    """GPUs are numbered through, prefill first, and gpus_per_nic neighbours share a NIC; instances share those too."""
    gpus_per_link = network.gpus_per_nic if engine.link == "nic" else 1
    capacity: dict[str, float] = {}
    ways: dict[str, dict[str, Path]] = {"out": {}, "in": {}}
    ordinals: dict[str, int] = {}
    first_gpu = 0
    for role, (ids, layout) in sides.items():
        way, weight = ("out", 1) if role == "prefill" else ("in", num_writers)
        for ordinal, instance_id in enumerate(ids):
            link = f"{engine.link} {first_gpu // gpus_per_link} {way}"
            capacity[link] = link_bandwidth(network, engine, layout)
            path: Path = ((link, weight * min(layout.tp, gpus_per_link)),)
            if role == "prefill" and engine.max_bandwidth is not None:
                capacity[f"{instance_id} engine"] = engine.max_bandwidth
                path += ((f"{instance_id} engine", 1),)
            ways[way][instance_id] = path
            ordinals[instance_id] = ordinal
            first_gpu += layout.tp
    if network.shared_bandwidth is not None:
        capacity["shared"] = network.shared_bandwidth
        ranks = sides["prefill"][1].tp
        ways["out"] = {i: (*path, ("shared", ranks)) for i, path in ways["out"].items()}
    return Topology(capacity=capacity, ways_out=ways["out"], ways_in=ways["in"], ordinals=ordinals)


def link_bandwidth(network: NetworkSettings, engine: Transport, layout: Layout) -> float:
    """Bytes per second of one link, in one direction."""
    if network.bandwidth is not None:
        return network.bandwidth
    nominal = {
        "nic": layout.gpu.nic_bandwidth,
        "nvlink": layout.gpu.nvlink_bandwidth,
        "host": layout.gpu.memory_bandwidth,
    }
    return nominal[engine.link] * engine.efficiency
