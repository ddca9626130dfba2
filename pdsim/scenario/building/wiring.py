"""Makes the network of a cluster: links, transport, layout of KV between ranks, and the planners of transfers. Also
makes the times of copies between GPUs, host memory and storage.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from math import inf
from typing import Any

from pdsim.core.transfer.send_planner import RankPairLayout, SendPlanner
from pdsim.core.transfer.staging_ring import StagingPlan
from pdsim.cost.copies import HostCopies, StagingCost, StorageCosts
from pdsim.cost.host_traffic import HostTraffic, host_traffic
from pdsim.cost.swaps import SwapCosts
from pdsim.dataclass import dataclass
from pdsim.scenario.building.caches import stored_page_tokens
from pdsim.scenario.building.sizing import encode_ids, host_caches, layout_of, roles, whole_layout
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.network import NetworkSettings, StagingSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import CatalogError, GpuSpec, load_transport
from pdsim.system.memory import Layout, Role
from pdsim.system.model import LatentAttention, ModelSpec
from pdsim.system.transport import Path, Topology, Transport


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """The network between prefill and decode instances."""

    wire: RankPairLayout
    """How KV is laid out between the ranks of a prefill and a decode instance."""
    transport: Transport
    """Transfer engine that sends the KV, with its times per transfer and descriptor."""
    topology: Topology
    """Links between the instances, with their bandwidths."""
    staging: StagingCost | None
    """Times of gathering KV in staging memory and of scattering it. None: KV is sent without staging."""
    layer_groups: int
    """Number of groups of layers whose KV is sent while a forward computes. 0: KV is sent when the forward has
    ended.
    """


def interconnect(scenario: Scenario) -> Interconnect:
    wire, staging = wire_of(scenario), scenario.network.staging
    return Interconnect(
        wire=wire,
        transport=transport(scenario),
        topology=topology(scenario, wire),
        staging=None if staging is None else staging_cost(scenario, staging, wire),
        layer_groups=scenario.pair.prefill.layer_groups,
    )


def transport(scenario: Scenario) -> Transport:
    """Returns the catalog's transport. Values that the scenario's network settings give replace those of the catalog,
    and cost.host.slowdown multiplies the times. Raises ConfigError if the catalog has no such transport.
    """
    network, slowdown = scenario.network, scenario.cost.host.slowdown
    found = transport_of("network", network.transport)
    changes: dict[str, Any] = {
        "batch_ns": network.transfer_latency,
        "staged_batch_ns": None if network.staging is None else network.staging.transfer_latency,
        "descriptor_ns": network.descriptor_latency,
        "serial": network.serial,
    }
    found = replace(found, **{field: value for field, value in changes.items() if value is not None})
    if slowdown != 1:
        staged_ns = found.staged_batch_ns
        found = replace(
            found,
            batch_ns=round(slowdown * found.batch_ns),
            staged_batch_ns=None if staged_ns is None else round(slowdown * staged_ns),
            descriptor_ns=slowdown * found.descriptor_ns,
        )
    return found


def transport_of(section: str, name: str) -> Transport:
    """The catalog's entry of the transport `name`. section: the scenario's section that has the name. Raises
    ConfigError, which names the section, if the catalog has no such transport.
    """
    try:
        return load_transport(name)
    except CatalogError as wrong:
        raise ConfigError(f"{section}: {wrong}") from None


NO_HYBRID_STAGES = (
    "NixlConnector pulls no hybrid layouts from pipeline stages (0.33.0, nixl/base_worker.py:871); give 1"
)


def is_hybrid(model: ModelSpec) -> bool:
    """True if some layers of a model keep the KV of all tokens, and others keep a window's KV or a state instead."""
    return model.state is not None or model.attention.kept_window_tokens > 0


def wire_of(scenario: Scenario) -> RankPairLayout:
    """Returns how KV is laid out between the ranks of prefill and decode. Raises ConfigError if neither role's TP size
    of an instance, tp / (dp x cp), is a multiple of the other's, or if prefill's pipeline stages with vLLM cannot send
    the KV of a hybrid model.
    """
    settings, engine = scenario.pair.decode, transport(scenario)
    # Decode's stages receive one to one, as one decode stage receives from prefill's stages.
    prefill, decode = layout_of(scenario, "prefill"), whole_layout(scenario, "decode")
    if scenario.engine == "vllm" and prefill.pp > 1 and is_hybrid(prefill.model):
        pulls = scenario.network.transport.startswith("nixl") and not scenario.network.nixl_push
        other = "pdsim does not model hybrid layouts of vLLM's pipeline stages; give 1"
        raise ConfigError(f"prefill.pp: {prefill.pp}: {NO_HYBRID_STAGES if pulls else other}")
    found = wire(prefill, decode, scenario.page_size, engine.coalesces, scenario.engine)
    found = replace(found, pushes=engine.pushes, num_writers=found.num_writers // settings.pp)
    if scenario.engine == "vllm" and found.slices:
        # Heads stand before tokens in its blocks: those of one rank are one piece of a block, which ends there.
        return replace(found, slices=False, coalesces=False)
    return found


def wire(prefill: Layout, decode: Layout, page_size: int, coalesces: bool, engine: str = "sglang") -> RankPairLayout:
    """How KV is laid out between the ranks of a prefill and a decode instance. Raises ConfigError if neither TP size is
    a multiple of the other.

    coalesces: True: the transport joins contiguous pages into one descriptor. page_size: number of tokens of a page.
    engine: sglang or vllm, which keep different bytes for a token.
    """
    small, large = sorted((prefill.tp, decode.tp))
    if large % small:
        raise ConfigError(f"prefill tp {prefill.tp} and decode tp {decode.tp}: one must be a multiple of the other")
    attention = prefill.model.attention
    received = replace(decode, model=prefill.model)  # prefill's layers, as decode has them
    sent, decode_kept = prefill if decode.dcp == 1 else received, decode.token_bytes(engine).whole
    kept, window = sent.token_bytes(engine)
    num_windows = attention.num_window_layers if window else 0
    num_layers, num_decode_layers = prefill.num_kv_layers, decode.num_kv_layers
    if isinstance(attention, LatentAttention):
        writers, planes_per_layer, slices = 1, 2 if attention.index_token_bytes else 1, False
    else:
        writers = max(1, prefill.tp // decode.tp)
        planes_per_layer, slices = 2, prefill.tp != decode.tp
        num_layers -= num_windows
        num_decode_layers -= decode.model.attention.num_window_layers if window else 0
        kept = min(kept, decode_kept * num_layers // num_decode_layers)
        window = min(window, received.token_bytes(engine).window)
    num_stage_pairs = decode.tp * writers
    return RankPairLayout(
        page_size=page_size,
        page_bytes=kept * page_size,
        num_planes=planes_per_layer * num_layers,
        planes_per_layer=planes_per_layer,
        num_writers=writers * prefill.pp,
        num_targets=max(1, decode.tp // prefill.tp),
        num_pairs=num_stage_pairs * prefill.pp,
        num_absent_layers=num_stage_pairs * (prefill.pp * num_layers - num_decode_layers),
        slices=slices,
        coalesces=engine == "sglang" if decode.dcp > 1 else coalesces,
        num_shares=decode.dcp,
        state_bytes=min(prefill.state_bytes, received.state_bytes),
        window_tokens=attention.kept_window_tokens if window else 0,
        window_page_bytes=window * page_size,
        num_window_planes=planes_per_layer * num_windows,
        num_state_planes=0 if prefill.model.state is None else 2 * prefill.model.state.num_layers,
    )


def planner(scenario: Scenario, prefill_id: str) -> SendPlanner:
    """Plans the transfers of one prefill instance. Raises ConfigError for more layer groups than layers, for layer
    groups if KV is sent as slices (unequal TP), and for staging if the transport pushes KV into decode's pages.
    """
    groups, staging = scenario.pair.prefill.layer_groups, scenario.network.staging
    model, wire = layout_of(scenario, "prefill").model, wire_of(scenario)
    if groups > model.num_layers:
        raise ConfigError(f"prefill: layer_groups {groups} is more than the {model.num_layers} layers of {model.name}")
    if groups and wire.slices:
        raise ConfigError("prefill: layer_groups need equal tensor-parallel sizes on prefill and decode")
    if wire.pushes and staging is not None:
        raise ConfigError("network.staging: a push writes into decode's pages and needs no staging; leave it out")
    policy = deepcopy(scenario.pair.prefill.transfer)
    return SendPlanner(prefill_id, wire, policy, staging=staging_plan(scenario), layer_groups=groups)


PUSH_POLL_NS = 1_000_000
"""Period in ns at which the sending side of vLLM's NixlPushConnector checks for decode's registrations of pages (vLLM
0.33.0, nixl/push_worker.py:78). A registration waits half a period on average.
"""


def grant_wait_ns(scenario: Scenario) -> int | None:
    """Returns the mean time in ns from the arrival of decode's grant at prefill until prefill may send KV. 0: prefill
    may send at once (SGLang, or vLLM without NIXL). None: prefill needs no grant, because decode reads the KV itself
    (vLLM 0.33.0, nixl/pull_worker.py:554).
    """
    network = scenario.network
    if scenario.engine == "sglang" or not network.transport.startswith("nixl"):
        return 0
    return PUSH_POLL_NS // 2 if network.nixl_push else None


def staging_plan(scenario: Scenario) -> StagingPlan | None:
    """Sizes of staging: maximum number of pages of a cell (the KV of a prompt's part that is staged together), and
    memory in bytes of a prefill worker and of a decode rank. None: KV is not staged.
    """
    if (staging := scenario.network.staging) is None:
        return None
    chunk = scenario.pair.prefill.rank_chunk_tokens or 8192
    return StagingPlan(
        cell_pages=max(1, chunk // scenario.page_size),
        buffer_bytes=staging.prefill_buffer,
        ring_bytes=staging.ring,
    )


def staging_cost(scenario: Scenario, staging: StagingSettings, wire: RankPairLayout) -> StagingCost:
    prefill, decode = layout_of(scenario, "prefill"), layout_of(scenario, "decode")
    return StagingCost(
        gather_host_ns=staging.gather_host,
        scatter_host_ns=staging.scatter_host,
        gather_bandwidth=prefill.gpu.memory_bandwidth * staging.gather_efficiency,
        scatter_bandwidth=decode.gpu.memory_bandwidth * staging.scatter_efficiency,
        num_writers=wire.num_writers,
    )


def host_copies(scenario: Scenario) -> HostCopies | None:
    """Times of copying retracted KV to host memory and back. None: these copies take no time."""
    return copies_over_host_link(scenario, "decode") if scenario.pair.decode.retraction_backup else None


def copies_over_host_link(scenario: Scenario, role: Role) -> HostCopies:
    """Times of copies between the GPUs of a role and their host memory. All pipeline stages copy their layers at the
    same time.

    Measured on one H200 with PyTorch 2.11: KV of Qwen3-8B in bf16, 64 to 64,000 tokens in pages of 64. Copies into
    memory that the process had pinned before reached 51 of the link's 64 GB/s to the host, and 47 GB/s from it.
    """
    layout = layout_of(scenario, role)
    attention = layout.model.attention
    planes_per_layer = 1 if isinstance(attention, LatentAttention) else 2
    return HostCopies(
        page_bytes=layout.kv_token_bytes * scenario.page_tokens(role),
        all_page_bytes=layout.tp * whole_layout(scenario, role).kv_token_bytes * scenario.page_tokens(role),
        num_planes=planes_per_layer * layout.num_kv_layers,
        copy_ns=39_000,
        save_bandwidth=0.79 * layout.gpu.host_bandwidth,
        load_bandwidth=0.74 * layout.gpu.host_bandwidth,
        pinning_bandwidth=1.4e9,
    )


def swaps(scenario: Scenario, role: Role) -> SwapCosts | None:
    """Costs of copying KV from host memory during decode steps with HiSparse. None: all KV is on the GPU. Raises
    ConfigError if the transport writes into GPU memory only.
    """
    if role != "decode" or (hisparse := scenario.pair.decode.hisparse) is None:
        return None
    if (engine := transport(scenario)).link == "nvlink":
        raise ConfigError(
            f"network.transport: {engine.name} writes into GPU memory only, and decode.hisparse has KV sent to host "
            "memory; give mooncake-rdma"
        )
    assert hisparse.device_buffer_tokens is not None, "the scenario is not resolved"
    layout, copies = layout_of(scenario, role), copies_over_host_link(scenario, role)
    attention = layout.model.attention
    assert isinstance(attention, LatentAttention)
    return SwapCosts(
        num_layers=attention.num_layers,
        num_index_layers=attention.num_index_layers,
        token_bytes=layout.read_token_bytes,
        buffer_tokens=hisparse.device_buffer_tokens,
        chosen_tokens=attention.window_tokens,
        miss_rate=hisparse.miss_rate,
        load_bandwidth=copies.load_bandwidth,
        save_bandwidth=copies.save_bandwidth,
    )


def storage_costs(scenario: Scenario) -> StorageCosts | None:
    """Capacity and times of storage. None: there is no storage. Raises ConfigError if two roles share a store and have
    different pp, or different tp for a model without latent KV: neither could read the other's pages (SGLang 0.5.23,
    mem_cache/storage/mooncake_store/mooncake_store.py:630).

    If ranks hold the same KV, only one of them writes it (SGLang 0.5.23, mem_cache/hicache_storage.py:69). In SGLang
    all of these ranks read it. In LMCache the first of them reads it for all (0.5.6, cache_engine.py:881).
    """
    if (storage := scenario.storage) is None:
        return None
    layouts = {role: whole_layout(scenario, role) for role, _ in host_caches(scenario)}
    role, layout = next(iter(layouts.items()))
    is_latent, num_stages = isinstance(layout.model.attention, LatentAttention), scenario.roles[role].split.pp
    for other, found in layouts.items():
        why = "each rank stores its own part of the KV, which does not fit ranks of another"
        if storage.shared and not is_latent and found.tp != layout.tp:
            raise ConfigError(f"storage.shared: {role} has tp {layout.tp} and {other} tp {found.tp}: {why} tp")
        if storage.shared and (stages := scenario.roles[other].split.pp) != num_stages:
            raise ConfigError(f"storage.shared: {role} has pp {num_stages} and {other} pp {stages}: {why} pp")
    page_bytes = layout.kv_token_bytes * stored_page_tokens(scenario)
    num_writers = 1 if is_latent else layout.tp
    num_readers = num_writers if scenario.engine == "vllm" else layout.tp
    return StorageCosts(
        num_pages=storage.drives * storage.size // (page_bytes * num_writers),
        read_page_bytes=page_bytes * num_readers,
        write_page_bytes=page_bytes * num_writers,
        read_page_objects=num_readers * num_stages,
        write_page_objects=num_writers * num_stages,
        read_bandwidth=storage.drives * storage.read_bandwidth,
        write_bandwidth=storage.drives * storage.write_bandwidth,
        objects_per_s=storage.drives * storage.io_limit,
        client_bandwidth=storage.client_bandwidth or inf,
        latency_ns=storage.latency,
    )


@dataclass(frozen=True, kw_only=True)
class HostNics:
    """The NICs through which the hosts of one server exchange activations. Only servers on several hosts are listed."""

    traffic: Mapping[str, HostTraffic]
    """Sizes and times of the exchanges between a server's hosts, by the name of each instance."""
    paths: Mapping[str, tuple[Path, Path]]
    """By instance: the path out of the first GPU's NIC to other hosts, and the path into that NIC."""
    capacity: Mapping[str, float]
    """Bandwidth in bytes per second of each NIC and direction, by the link's name in `paths`."""


def host_nics(scenario: Scenario) -> HostNics:
    """The NICs between the hosts of servers. Exchanges of activations share these NICs with transfers of KV if the
    transport uses NICs.

    An exchange that has a NIC for itself reaches network.bandwidth. If the scenario does not give network.bandwidth,
    the exchange reaches the share NIC_SHARE of the NIC's nominal bandwidth.
    """
    network, engine, first_gpus = scenario.network, transport(scenario), placed(scenario)
    traffic: dict[str, HostTraffic] = {}
    paths: dict[str, tuple[Path, Path]] = {}
    capacity: dict[str, float] = {}
    for role, ids in roles(scenario).items():
        layout = layout_of(scenario, role)
        if (of_role := host_traffic(layout)) is None:
            continue
        reached = network.bandwidth or of_role.prefill.bandwidth
        whole = link_bandwidth(network, engine, layout.gpu) if engine.link == "nic" else reached
        weight = whole / reached * min(layout.tp, network.gpus_per_nic)
        for instance_id in ids:
            out, into = (f"nic {first_gpus[instance_id] // network.gpus_per_nic} {way}" for way in ("out", "in"))
            capacity |= {out: whole, into: whole}
            traffic[instance_id], paths[instance_id] = of_role, (((out, weight),), ((into, weight),))
    return HostNics(traffic=traffic, paths=paths, capacity=capacity)


def placed(scenario: Scenario) -> dict[str, int]:
    """Index of the first GPU of each instance, by the instance's name. GPUs are numbered from 0 over the whole cluster.
    If a server needs several hosts, no other server uses these hosts. Encode instances have the last GPUs.
    """
    found: dict[str, int] = {}
    next_gpu = 0
    for role, ids in roles(scenario).items():
        layout = layout_of(scenario, role)
        on_host, num_gpus = layout.gpu.gpus_per_server, layout.dp * layout.num_gpus
        for first in range(0, len(ids), layout.dp):
            if layout.num_domains > 1:
                next_gpu, num_gpus = -(-next_gpu // on_host) * on_host, layout.num_domains * on_host
            for rank, instance_id in enumerate(ids[first : first + layout.dp]):
                host, gpu = divmod(rank * layout.num_gpus, layout.gpus_per_domain)
                found[instance_id] = next_gpu + host * on_host + gpu
            next_gpu += num_gpus
    return found | {name: next_gpu + i for i, name in enumerate(encode_ids(scenario))}


def topology(scenario: Scenario, wire: RankPairLayout) -> Topology:
    """The links between prefill and decode instances, with their bandwidths. GPUs are numbered in order, those of
    prefill first. Each gpus_per_nic GPUs with consecutive numbers share a NIC, even if they belong to different
    instances. wire: how KV is laid out between prefill and decode ranks.

    If decode returns KV to prefill, the decode ranks that receive KV also send it.
    """
    network, engine = scenario.network, transport(scenario)
    gpus_per_link = network.gpus_per_nic if engine.link == "nic" else 1
    capacity: dict[str, float] = {}
    ways: dict[str, dict[str, Path]] = {"out": {}, "in": {}}
    num_senders = wire.num_pairs // wire.num_targets
    share = wire.total(wire.num_layers) / (wire.num_pairs * wire.num_layers)  # of the largest stage, of a mean one
    first_gpus, nics = placed(scenario), host_nics(scenario)
    for role, ids in roles(scenario).items():
        layout = layout_of(scenario, role)
        num_holders = layout.tp * layout.pp  # of groups that share prompts, one sends
        own, weight = ("out", num_senders / num_holders) if role == "prefill" else ("in", wire.num_writers * share)
        for instance_id in ids:
            for way in ("out", "in") if scenario.pair.decode.returns_kv else (own,):
                link = f"{engine.link} {first_gpus[instance_id] // gpus_per_link} {way}"
                capacity[link] = link_bandwidth(network, engine, layout.gpu)
                path: Path = ((link, weight * min(num_holders, gpus_per_link)),)
                if way == "out" and engine.max_bandwidth is not None:
                    capacity[f"{instance_id} engine"] = engine.max_bandwidth
                    path += ((f"{instance_id} engine", 1),)
                ways[way][instance_id] = path
    capacity = {**nics.capacity, **capacity}
    if network.shared_bandwidth is not None:
        capacity["shared"] = network.shared_bandwidth
        ways["out"] = {i: (*path, ("shared", num_senders * share)) for i, path in ways["out"].items()}
    return Topology(capacity=capacity, ways_out=ways["out"], ways_in=ways["in"])


def link_bandwidth(network: NetworkSettings, engine: Transport, gpu: GpuSpec) -> float:
    """Bandwidth in bytes per second of one link, in one direction."""
    if network.bandwidth is not None:
        return network.bandwidth
    nominal = {
        "nic": gpu.nic_bandwidth,
        "nvlink": gpu.nvlink_bandwidth,
        "host": gpu.memory_bandwidth,
    }
    return nominal[engine.link] * engine.efficiency
