"""Rules that relate several sections of a scenario."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdsim.core.engine_rules import RELEASES
from pdsim.cost.settings import Affine, AiConfigurator
from pdsim.policy.prefill import HighestResponseRatioFirst, ShortestPrefillFirst
from pdsim.workload.client import ClosedLoop

_DIVIDING_BACKENDS = {
    "sglang": (("mooncake", "nixl", "mori", "ascend"), "0.5.23, arg_groups/pd_disaggregation_hook.py:85"),
    "vllm": (("nixl",), "0.33.0, config/vllm.py:1575"),
}
"""Attention backends with which decode GPUs can divide the KV of a request (dcp), with the source."""
_ORDERS_SINCE_0_5_12 = (HighestResponseRatioFirst, ShortestPrefillFirst)
NOT_MODELLED = {
    "decode.cp": "decode computes no prompts; to divide KV say decode.dcp",
    "prefill.dcp": (
        "pdsim divides KV on decode and aggregated servers only; on prefill servers it usually makes nothing faster "
        "(SGLang 0.5.23, arg_groups/pd_disaggregation_hook.py:57)"
    ),
}
"""Fields that a reader may look for on servers of a role that lacks them, each with the reason for a message. Servers
of other roles have the field.
"""


if TYPE_CHECKING:
    from pdsim.scenario.schema import Scenario
    from pdsim.scenario.sections.servers import ServerSettings, StorageSettings


def _of_its_engine(scenario: "Scenario") -> str:
    wrong = _wrong_for_vllm(scenario) if scenario.engine == "vllm" else _wrong_for_sglang(scenario)
    return f"engine {scenario.engine}: {wrong}" if wrong else ""


def _of_its_release(scenario: "Scenario") -> str:
    releases = RELEASES[scenario.engine]
    if scenario.engine_version not in (None, *releases):
        return f"engine_version {scenario.engine_version}: pdsim models {', '.join(releases)} of {scenario.engine}"
    if scenario.engine_version == "0.5.12":
        for role, computing in (("prefill", scenario.prefill), ("aggregated", scenario.aggregated)):
            if computing is not None and isinstance(computing.policy, _ORDERS_SINCE_0_5_12):
                return (
                    f"{role}.policy: SGLang 0.5.12 has neither hrrn nor shortest_prefill_first "
                    "(managers/schedule_policy.py:124); leave engine_version out"
                )
    return ""


def _wrong_for_sglang(scenario: "Scenario") -> str:
    prefill = scenario.prefill
    for role, servers in scenario.roles.items():
        if servers.host_cache is not None and not servers.radix_cache:
            return f"{role}.host_cache needs radix_cache: true (0.5.23, arg_groups/hicache_hook.py:45)"
        if servers.host_cache_connector != "offloading":
            return (
                f"{role}.host_cache_connector: pdsim does not model SGLang's LMCache (--enable-lmcache) and KVBM; "
                "leave it out"
            )
    for role, computing in (("prefill", prefill), ("aggregated", scenario.aggregated)):
        if computing is not None and computing.long_prefill_tokens is not None:
            return f"{role}.long_prefill_tokens is a setting of vLLM; leave it out, or say engine: vllm"
        if computing is not None and computing.long_prefill_adaptive:
            return f"{role}.long_prefill_adaptive is a setting of vLLM; leave it out, or say engine: vllm"
        if computing is not None and not computing.chunked_media:
            return f"{role}.chunked_media is a setting of vLLM; leave it out, or say engine: vllm"
    if scenario.network.nixl_push:
        return "network.nixl_push is a setting of vLLM; leave it out, or say engine: vllm"
    if prefill is not None and prefill.hold_timeout is not None:
        return "prefill.hold_timeout is a setting of vLLM; leave it out, or say engine: vllm"
    if scenario.aggregated is not None and scenario.aggregated.load_balance_method == "follow_bootstrap_room":
        return (
            "aggregated.load_balance_method: follow_bootstrap_room: requests of an aggregated server have no bootstrap "
            "room (0.5.23, managers/data_parallel_controller.py:905); say round_robin, total_requests or total_tokens"
        )
    if scenario.aggregated is not None and scenario.aggregated.mixed_chunk:
        if scenario.aggregated.chunked_prefill_tokens in (0, -1):
            return "aggregated.mixed_chunk needs chunked_prefill_tokens (0.5.23, managers/scheduler.py:1376)"
        if scenario.aggregated.speculative_draft_tokens is not None:
            return "aggregated.mixed_chunk: pdsim does not model mixed steps with drafts; leave one of them out"
    if scenario.aggregated is not None and scenario.aggregated.prefill_schedule_interval > 1:
        return "aggregated.prefill_schedule_interval is a setting of vLLM; leave it out, or say engine: vllm"
    if scenario.router.disaggregation is not None:
        return "router.disaggregation: decode computes no prompts in SGLang; leave it out, or say engine: vllm"
    return ""


def _wrong_for_vllm(scenario: "Scenario") -> str:
    prefill, decode = scenario.prefill, scenario.decode
    for role, servers in scenario.roles.items():
        if servers.load_balance_method not in ("auto", "router"):
            return f"{role}.load_balance_method: {servers.load_balance_method} is a setting of SGLang; leave it out"
        if servers.dp == 1 and (servers.moe_a2a_backend or "none") != "none":
            return f"{role}.moe_a2a_backend: it needs dp > 1 in vLLM (0.33.0, config/parallel.py:788); leave it out"
    if prefill is not None and prefill.dynamic_chunks:
        return "prefill.dynamic_chunks is a setting of SGLang; leave it out"
    for role, servers in scenario.roles.items():
        if servers.split.cp > 1:
            return f"{role}.cp: {servers.split.cp}: pdsim does not model vLLM's context parallelism; leave it out"
    if decode is not None and decode.allocation != "prefill_complete":
        return f"decode.allocation: {decode.allocation}: decode allocates pages for computed prompts; leave it out"
    if decode is not None and decode.speculative_draft_tokens is not None:
        return "decode.speculative_draft_tokens: pdsim does not model vLLM's drafts; leave it out"
    if any(servers.mamba_radix_cache_strategy is not None for servers in scenario.roles.values()):
        return "mamba_radix_cache_strategy is a setting of SGLang; leave it out"
    if any(servers.mamba_track_interval is not None for servers in scenario.roles.values()):
        return "mamba_track_interval is a setting of SGLang; leave it out"
    if wrong := _wrong_tiers_for_vllm(scenario):
        return wrong
    for role, computing in (("prefill", prefill), ("aggregated", scenario.aggregated)):
        if computing is not None and computing.prefill_max_requests is not None:
            return f"{role}.prefill_max_requests is a setting of SGLang; leave it out"
        if computing is not None and not computing.chunked_media and computing.long_prefill_tokens is not None:
            return (
                f"{role}.chunked_media: false beside {role}.long_prefill_tokens: pdsim does not model an item beyond "
                "this limit; leave one of the two out"
            )
    if (aggregated := scenario.aggregated) is not None:
        if aggregated.speculative_draft_tokens is not None:
            return "aggregated.speculative_draft_tokens: pdsim does not model vLLM's drafts; leave it out"
        if aggregated.prefill_schedule_interval > 1 and aggregated.dp > 1:
            return "aggregated.prefill_schedule_interval: pdsim does not model it for several ranks; give dp: 1"
        if aggregated.schedule_conservativeness != 1:
            return "aggregated.schedule_conservativeness is a setting of SGLang; leave it out"
        if aggregated.priority_preemption_threshold is not None:
            return "aggregated.priority_preemption_threshold is a setting of SGLang; leave it out"
        if aggregated.mixed_chunk:
            return "aggregated.mixed_chunk is SGLang's: vLLM's steps always mix prompts and outputs; leave it out"
    if scenario.network.staging is not None:
        return "network.staging is a setting of SGLang; leave it out"
    return _wrong_push(scenario)


def _wrong_push(scenario: "Scenario") -> str:
    if not scenario.network.nixl_push:
        return ""
    if not scenario.network.transport.startswith("nixl"):
        return f"network.nixl_push: the transport is {scenario.network.transport}; give one of NIXL"
    if scenario.decode is not None and scenario.decode.returns_kv:
        return "network.nixl_push: NixlPushConnector returns no KV (0.33.0, push_scheduler.py:73); leave one out"
    return ""


def _wrong_tiers_for_vllm(scenario: "Scenario") -> str:
    if scenario.decode is not None and scenario.decode.host_cache is not None:
        return (
            "decode.host_cache: one connector loads all KV of a request, and decode's reads it from prefill "
            "(0.33.0, multi_connector.py:467); leave it out"
        )
    for role, servers in scenario.roles.items():
        if servers.host_cache_write != "write_through":
            return f"{role}.host_cache_write: {servers.host_cache_write} is a setting of SGLang; leave it out"
        if servers.host_cache_connector == "lmcache" and servers.host_cache_chunk_tokens % scenario.page_size:
            return (
                f"{role}.host_cache_chunk_tokens: {servers.host_cache_chunk_tokens} is no multiple of page_size "
                f"{scenario.page_size}; pdsim models LMCache's chunks of whole pages only"
            )
        if (beside := _beside_kvbm(scenario, servers)) and servers.host_cache is not None:
            return f"{role}.host_cache_connector: kvbm: {beside}"
    return "" if scenario.storage is None else _wrong_storage_for_vllm(scenario, scenario.storage)


def _wrong_storage_for_vllm(scenario: "Scenario", storage: "StorageSettings") -> str:
    """LMCache's remote store, read with enable_async_loading."""
    for name in ("prefetch", "prefetch_threshold"):
        if getattr(storage, name) != type(storage).model_fields[name].default:
            return f"storage.{name}: it is a setting of SGLang; leave it out"
    for role, servers in scenario.roles.items():
        if servers.host_cache is not None and servers.host_cache_connector != "lmcache":
            return f"storage: pdsim models vLLM's storage behind {role}.host_cache_connector lmcache only; leave it out"
        if servers.host_cache_layerwise:
            return f"storage: pdsim does not model it beside {role}.host_cache_layerwise; leave one of the two out"
    return ""


def _beside_kvbm(scenario: "Scenario", servers: "ServerSettings") -> str:
    """Names a setting that KVBM lacks, or that pdsim does not model with KVBM. Empty: there is none."""
    if servers.host_cache_connector != "kvbm":
        return ""
    network, decode = scenario.network, scenario.decode
    if decode is not None and (network.nixl_push or not network.transport.startswith("nixl")):
        return (
            f"network.transport is {network.transport}{' with nixl_push' * network.nixl_push}, but beside KVBM prefill "
            "sends KV by NixlConnector only (kvbm 1.6.1, pd_connector.py:108); give nixl-rdma"
        )
    if decode is not None and decode.returns_kv:
        return "prefill asks KVBM alone for KV (kvbm 1.6.1, pd_connector.py:165); leave decode.returns_kv out"
    sizes = {"pp": servers.split.pp, "dp": servers.dp, "dcp": servers.split.dcp}
    found = next((name for name, size in sizes.items() if size > 1), "")
    return f"pdsim does not model {found} {sizes[found]} beside KVBM; leave one of the two out" if found else ""


def _of_shedding(scenario: "Scenario") -> str:
    if scenario.router.shedding is None or not isinstance(scenario.client, ClosedLoop):
        return ""
    return (
        "router.shedding: a closed-loop client whose request is refused sends its next one at once; "
        "give client: open_loop, or leave shedding out"
    )


def _of_queue(scenario: "Scenario") -> str:
    if scenario.router.queue is None or getattr(scenario.router.prefill, "is_kv_aware", False):
        return ""
    return "router.queue: Dynamo's router holds requests in its kv mode only; say router: dynamo_kv, or leave queue out"


def _of_counts(scenario: "Scenario") -> str:
    if scenario.router.counts == "routed" or (scenario.aggregated is None and scenario.engine == "sglang"):
        return ""
    return "router.counts: streams: SGLang's gateway counts streams for prefill and decode servers only; leave it out"


def _of_returned_kv(scenario: "Scenario") -> str:
    prefill, decode = scenario.prefill, scenario.decode
    if decode is None or prefill is None or not decode.returns_kv:
        return ""
    wrong = ""
    if not (decode.radix_cache and prefill.radix_cache):
        wrong = "returned KV needs radix_cache: true on prefill and decode"
    elif (prefill.tp, prefill.dp) != (decode.tp, decode.dp):
        wrong = "returned KV needs the same tp and dp on prefill and decode"
    elif scenario.faults or scenario.health is not None or scenario.elastic is not None:
        wrong = (
            "pdsim does not model returned KV beside faults, health or elastic; leave returns_kv or these sections out"
        )
    return f"decode.returns_kv: {wrong}" if wrong else ""


def _of_divided_kv(scenario: "Scenario") -> str:
    """Names a setting that SGLang or pdsim lacks if decode GPUs divide the KV of a request (dcp). Empty: there is none.
    Models and sizes are checked by Layout.
    """
    prefill, servers = scenario.prefill, scenario.aggregated or scenario.decode
    if servers is None or servers.dcp == 1:
        return ""
    role = "aggregated" if scenario.aggregated else "decode"
    where = f"{role}.dcp {servers.dcp}"
    if scenario.engine_version == "0.5.12":
        return f"{where}: SGLang 0.5.12 does not divide KV; leave it out"
    backends, source = _DIVIDING_BACKENDS[scenario.engine]
    if prefill is not None and scenario.network.transport.partition("-")[0] not in backends:
        return f"{where}: engine {scenario.engine} divides KV with transports {', '.join(backends)} only ({source})"
    if scenario.network.nixl_push:
        return f"{where}: network.nixl_push: NixlPushConnector refuses it (0.33.0, nixl/connector.py:401)"
    if prefill is not None and prefill.cp > 1:
        return f"{where}: SGLang needs prefill.cp 1 (0.5.23, disaggregation/common/conn.py:1416), found {prefill.cp}"
    beside = {
        "decode.host_cache": prefill is not None and servers.host_cache is not None,
        "storage": scenario.storage is not None and servers.host_cache is not None,
        "vLLM's host_cache": scenario.engine == "vllm" and servers.host_cache is not None,
        "prefill.layer_groups": prefill is not None and prefill.layer_groups > 0,
        "decode.returns_kv": scenario.decode is not None and scenario.decode.returns_kv,
        "network.staging": scenario.network.staging is not None,
        "elastic": scenario.elastic is not None,
        "cost aiconfigurator": isinstance(scenario.cost.decode, AiConfigurator),
    }
    found = next((field for field, is_given in beside.items() if is_given), "")
    return f"pdsim does not model {where} beside {found}; leave one of the two out" if found else ""


def _of_split_prefill(scenario: "Scenario") -> str:
    prefill, decode = scenario.prefill, scenario.decode
    if prefill is None or decode is None:
        return ""
    if prefill.dynamic_chunks and (prefill.pp == 1 or prefill.chunked_prefill_tokens in (0, -1)):
        return "prefill.dynamic_chunks: SGLang has it with pp > 1 and chunked_prefill_tokens only; leave it out"
    beside = {
        "prefill.layer_groups": prefill.layer_groups > 0,
        "network.staging": scenario.network.staging is not None,
        "decode.returns_kv": decode.returns_kv,
        "elastic": scenario.elastic is not None,
    }
    of_stages = {
        "prefill.optimistic_attempts": (prefill.optimistic_attempts or 0) > (scenario.engine == "vllm"),
        "decode.allocation prefill_complete": scenario.engine == "sglang" and decode.allocation == "prefill_complete",
        "prefill.cp": prefill.cp > 1,
        "prefill.host_cache_connector lmcache": _is_lmcache(prefill),
        "decode.speculative_draft_layers": scenario.num_draft_layers > 0,
    }
    of_groups = {"prefill.dp": prefill.dp > 1, "prefill.host_cache": prefill.host_cache is not None}
    for name, size, others in (("pp", prefill.pp, beside | of_stages), ("cp", prefill.cp, beside | of_groups)):
        if size > 1 and (found := next((field for field, is_given in others.items() if is_given), "")):
            return f"pdsim does not model prefill.{name} {size} beside {found}; leave one of the two out"
    return ""


def _of_shared_prompts(scenario: "Scenario") -> str:
    """Names a setting that aggregated servers with context parallelism lack. Empty: there is none."""
    servers = scenario.aggregated
    if servers is None or servers.cp == 1:
        return ""
    where = f"aggregated.cp {servers.cp}"
    if servers.dcp > 1:
        return f"{where}: SGLang refuses it with aggregated.dcp (0.5.23, arg_groups/parallel_hook.py:249)"
    beside = {
        "aggregated.dp": servers.dp > 1,
        "aggregated.pp": servers.pp > 1,
        "aggregated.host_cache": servers.host_cache is not None,
    }
    found = next((field for field, is_given in beside.items() if is_given), "")
    return f"pdsim does not model {where} beside {found}; leave one of the two out" if found else ""


def _of_stages(scenario: "Scenario") -> str:
    """Names a setting that aggregated or decode servers with pipeline stages lack. Empty: there is none."""
    prefill, servers = scenario.prefill, scenario.aggregated or scenario.decode
    if servers is None or servers.pp == 1:
        return ""
    role = "aggregated" if scenario.aggregated else "decode"
    where = f"{role}.pp {servers.pp}"
    if prefill is not None and scenario.engine == "vllm":
        if scenario.network.transport.startswith("nixl"):
            return f"{where}: NixlConnector refuses pipeline stages of decode (0.33.0, nixl/base_worker.py:886); give 1"
        return f"{where}: pdsim does not model pipeline stages of vLLM's decode; leave it out"
    if prefill is not None and servers.pp != prefill.pp:
        return (
            f"{where}: SGLang's decode has as many pipeline stages as prefill, which has {prefill.pp}, or one "
            "(0.5.23, disaggregation/common/conn.py:1516)"
        )
    if servers.speculative_draft_tokens is not None:
        return f"{where}: SGLang drafts with pipeline stages on prefill only (0.5.23, validation_hook.py:161)"
    if role == "decode" and servers.host_cache is not None:
        return (
            f"{where}: SGLang's decode loop with pipeline stages never looks at copies of decode.host_cache, "
            "as its other loops do (0.5.23, disaggregation/decode.py:3460); leave one of the two out"
        )
    beside = {
        f"{role}.host_cache_connector lmcache": _is_lmcache(servers),
        "cost.cold_start": bool(scenario.cost.cold_start),
    }
    if scenario.decode is not None:
        beside["decode.polling_interval"] = scenario.decode.polling_interval > 1
    if scenario.aggregated is not None:
        beside["aggregated.prefill_schedule_interval"] = scenario.aggregated.prefill_schedule_interval > 1
    found = next((field for field, is_given in beside.items() if is_given), "")
    return f"pdsim does not model {where} beside {found}; leave one of the two out" if found else ""


def _of_ranks_with_stages(scenario: "Scenario") -> str:
    """Names a setting that servers with data-parallel attention and pipeline stages lack. Empty: there is none."""
    staged = [role for role, servers in scenario.roles.items() if servers.dp > 1 and servers.split.pp > 1]
    if not staged:
        return ""
    where = f"{staged[0]}.pp beside {staged[0]}.dp"
    if scenario.engine == "vllm":
        return (
            f"{where}: pdsim does not model the dummy batches that vLLM's ranks compute and wait for when a step "
            "schedules nothing (0.33.0, v1/engine/core.py:2507); leave one of the two out"
        )
    if scenario.faults or scenario.health is not None:
        return f"pdsim does not model {where} with faults or health; leave one of them out"
    return ""


def _is_lmcache(servers: "ServerSettings") -> bool:
    """True if LMCache copies KV. Each of its pipeline stages loads and saves when its own forward begins and ends,
    which pdsim does not model.
    """
    return servers.host_cache is not None and servers.host_cache_connector == "lmcache"


def _of_encoding(scenario: "Scenario") -> str:
    """Says what pdsim does not model beside encode instances. Empty: nothing."""
    if scenario.encode is None:
        return ""
    if scenario.engine == "vllm":
        return "encode: pdsim does not model vLLM's encoder instances (--ec-transfer-config); leave it out"
    if scenario.engine_version == "0.5.12":
        return "encode: pdsim follows SGLang 0.5.23's rules of encode instances only; leave engine_version out"
    prefill, decode = scenario.prefill, scenario.decode
    beside = {
        "prefill.pp": prefill is not None and prefill.pp > 1,
        "prefill.cp": prefill is not None and prefill.cp > 1,
        "aggregated.pp": scenario.aggregated is not None and scenario.aggregated.pp > 1,
        "aggregated.cp": scenario.aggregated is not None and scenario.aggregated.cp > 1,
        "decode.returns_kv": decode is not None and decode.returns_kv,
        "elastic": scenario.elastic is not None,
        "faults": bool(scenario.faults),
        "health": scenario.health is not None,
    }
    beside |= {f"{role}.dp": role != "decode" and servers.dp > 1 for role, servers in scenario.roles.items()}
    found = next((field for field, is_given in beside.items() if is_given), "")
    return f"pdsim does not model encode beside {found}; leave one of the two out" if found else ""


def _of_storage(scenario: "Scenario") -> str:
    if scenario.storage is None or any(servers.host_cache is not None for servers in scenario.roles.values()):
        return ""
    return "storage needs a host cache in front of it: give a role one (prefill: {host_cache: auto})"


def _of_elastic_clusters(scenario: "Scenario") -> str:
    if scenario.elastic is None:
        return ""
    prefill, decode = scenario.prefill, scenario.decode
    if prefill is None or decode is None:
        return "elastic: servers of prefill and decode change roles; this cluster is aggregated"
    wrong = ""
    if (prefill.gpu, prefill.tp) != (decode.gpu, decode.tp):
        wrong = "servers that change roles need the same gpu and tp in both"
    elif prefill.dp > 1 or decode.dp > 1:
        wrong = "dp: pdsim does not model servers with data-parallel attention that change their role; leave it out"
    elif scenario.network.staging is not None:
        wrong = "network.staging is for unequal tp; leave it out"
    elif scenario.faults:
        wrong = "faults: pdsim does not model faults of an elastic cluster; leave one of the two out"
    elif scenario.max_servers < (at_first := prefill.instances + decode.instances):
        wrong = f"max_servers {scenario.max_servers} is less than the {at_first} servers at the start"
    return f"elastic: {wrong}" if wrong else ""


def _of_roles(scenario: "Scenario") -> str:
    missing = [role for role in ("prefill", "decode") if role not in scenario.roles]
    if scenario.aggregated is None and missing:
        return f"no {' and '.join(missing)}: a cluster has prefill and decode instances, or aggregated ones"
    if scenario.aggregated is not None and len(scenario.roles) > 1:
        given = " and ".join(role for role in scenario.roles if role != "aggregated")
        return f"a cluster has aggregated instances, or prefill and decode: leave out aggregated, or {given}"
    return ""


def _of_costs(scenario: "Scenario") -> str:
    """Says that a cost has no time at all, which would make every step free. Empty: all costs have times."""
    costs = {"prefill": scenario.cost.prefill, "decode": scenario.cost.decode}
    empty = [role for role, cost in costs.items() if isinstance(cost, Affine) and not cost.has_terms]
    what = "the cost has no times, so every step would take 0 ns; give at least one time"
    return "; ".join(f"cost.{role}: {what}" for role in empty)


RULES: tuple[Callable[["Scenario"], str], ...] = (
    _of_its_engine,
    _of_its_release,
    _of_shedding,
    _of_queue,
    _of_counts,
    _of_returned_kv,
    _of_split_prefill,
    _of_shared_prompts,
    _of_stages,
    _of_ranks_with_stages,
    _of_divided_kv,
    _of_encoding,
    _of_storage,
    _of_elastic_clusters,
    _of_roles,
    _of_costs,
)
"""Checks of a scenario. Each returns a message if the scenario breaks its rule. Only the first message is reported."""
