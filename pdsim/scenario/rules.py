"""Rules that relate several sections of a scenario, and the list of all rules. Most rules of a single engine are in
engines.py.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pdsim.cost.settings import Affine, AiConfigurator
from pdsim.scenario.engines import of_its_engine, of_its_release
from pdsim.workload.client import ClosedLoop

_DIVIDING_BACKENDS = {
    "sglang": (("mooncake", "nixl", "mori", "ascend"), "0.5.23, arg_groups/pd_disaggregation_hook.py:85"),
    "vllm": (("nixl",), "0.33.0, config/vllm.py:1575"),
}
"""Beginnings of names of transports with which decode GPUs can divide a request's KV (dcp), by engine; the source."""
NOT_MODELLED = {
    "decode.cp": "decode computes no prompts; to divide KV say decode.dcp",
    "prefill.dcp": (
        "pdsim divides KV on decode and aggregated servers only; on prefill servers it usually makes nothing faster "
        "(SGLang 0.5.23, arg_groups/pd_disaggregation_hook.py:57)"
    ),
    "aggregated.hisparse": (
        "pdsim models HiSparse on decode servers only; an aggregated server of SGLang computes KV on the GPU, and then "
        "copies all of it to host memory (0.5.23, managers/hisparse_coordinator.py:838); leave it out"
    ),
    "prefill.hisparse": "decode alone has it, because prefill sends KV to host memory of decode; say decode.hisparse",
}
"""Fields that one role lacks and another role has, such as decode.cp. Each comes with the reason that the error message
gives to a user who sets the field.
"""


if TYPE_CHECKING:
    from pdsim.scenario.schema import Scenario
    from pdsim.scenario.sections.servers import ServerSettings


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
    """Names a setting that the engine or pdsim cannot combine with GPUs that divide the KV of a request (dcp). Empty:
    there is none, or no GPUs divide KV. Models and sizes are checked when the scenario is resolved.
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
    return _not_modelled(where, beside)


def _of_hisparse(scenario: "Scenario") -> str:
    """Names a setting that SGLang or pdsim cannot combine with HiSparse. Empty: there is none. Models and sizes are
    checked when the scenario is resolved.
    """
    decode, network = scenario.decode, scenario.network
    if decode is None or decode.hisparse is None:
        return ""
    if scenario.engine != "sglang":
        return "decode.hisparse is a setting of SGLang; leave it out"
    refused = {
        "decode.radix_cache": (decode.radix_cache, "arg_groups/pd_disaggregation_hook.py:100"),
        "decode.dcp": (decode.dcp > 1, "arg_groups/hicache_hook.py:152"),
        "decode.allocation prefill_complete": (
            decode.allocation == "prefill_complete",
            "arg_groups/pd_disaggregation_hook.py:217",
        ),
        "network.transport ascend": (network.transport.startswith("ascend"), "disaggregation/ascend/conn.py:286"),
    }
    for field, (is_given, at) in refused.items():
        if is_given:
            return f"decode.hisparse: SGLang refuses it with {field} (0.5.23, {at}); leave one of the two out"
    beside = {
        "engine_version 0.5.12": scenario.engine_version == "0.5.12",
        "speculation": decode.speculative_draft_tokens is not None,
        "decode.pp": decode.pp > 1,
        "decode.returns_kv": decode.returns_kv,
        "network.staging": network.staging is not None,
        "elastic": scenario.elastic is not None,
    }
    return _not_modelled("decode.hisparse", beside)


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
        if size > 1 and (wrong := _not_modelled(f"prefill.{name} {size}", others)):
            return wrong
    return ""


def _of_shared_prompts(scenario: "Scenario") -> str:
    """Names the setting of aggregated servers that cannot be combined with context parallelism, in which groups of GPUs
    share the tokens of a prompt. Empty: the scenario has no such setting, or no context parallelism.
    """
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
    return _not_modelled(where, beside)


def _of_stages(scenario: "Scenario") -> str:
    """A message if decode or aggregated servers have pipeline stages that their engine or pdsim lacks, such as decode
    servers of vLLM, or that cannot be combined with another setting. Empty: the scenario has no such stages.
    """
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
        "cost.cold_kernels": scenario.cost.cold_kernels is not None,
    }
    if scenario.decode is not None:
        beside["decode.polling_interval"] = scenario.decode.polling_interval > 1
    if scenario.aggregated is not None:
        beside["aggregated.prefill_schedule_interval"] = scenario.aggregated.prefill_schedule_interval > 1
    return _not_modelled(where, beside)


def _of_ranks_with_stages(scenario: "Scenario") -> str:
    """Returns a message if servers have both data-parallel attention and pipeline stages, and the engine is vLLM or the
    scenario has faults or health. Empty: otherwise.
    """
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


def _not_modelled(where: str, beside: Mapping[str, bool]) -> str:
    """A message that pdsim does not model the setting `where` together with another setting. Empty: the scenario gives
    none of the other settings. beside: the other settings, each with True if the scenario gives it; the message names
    the first that is given.
    """
    found = next((field for field, is_given in beside.items() if is_given), "")
    return f"pdsim does not model {where} beside {found}; leave one of the two out" if found else ""


def _is_lmcache(servers: "ServerSettings") -> bool:
    """True if LMCache copies the servers' KV to host memory. pdsim refuses LMCache with pipeline stages, because each
    stage would copy KV at the times of its own forwards, which pdsim does not model.
    """
    return servers.host_cache is not None and servers.host_cache_connector == "lmcache"


def _of_encoding(scenario: "Scenario") -> str:
    """Names a setting that the engine lacks or that pdsim does not model together with encode instances. Empty: there
    is none.
    """
    if scenario.encode is None:
        return ""
    is_vllm = scenario.engine == "vllm"
    if wrong := scenario.encode.wrong_for(scenario.engine):
        return wrong
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
    for role, servers in scenario.roles.items():
        beside[f"{role}.dp"] = role != "decode" and servers.dp > 1
        beside[f"{role}.host_cache"] = is_vllm and role != "decode" and servers.host_cache is not None
    return _not_modelled("encode", beside)


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
    """Error text if all times of a cost are 0, so that every step would take no time. Empty: every cost has a time
    above 0.
    """
    costs = {"prefill": scenario.cost.prefill, "decode": scenario.cost.decode}
    empty = [role for role, cost in costs.items() if isinstance(cost, Affine) and not cost.has_terms]
    what = "the cost has no times, so every step would take 0 ns; give at least one time"
    return "; ".join(f"cost.{role}: {what}" for role in empty)


def _of_cold_kernels(scenario: "Scenario") -> str:
    if scenario.cost.cold_kernels is None:
        return ""
    if scenario.engine != "sglang":
        return "cost.cold_kernels: vLLM allocates pages without a kernel (0.33.0, v1/core/block_pool.py); leave it out"
    if scenario.page_size == 1:
        return (
            "cost.cold_kernels: SGLang allocates pages of one token without a kernel "
            "(0.5.23, mem_cache/allocator/token.py); leave it out, or give page_size"
        )
    beside = {
        "aggregated.mixed_chunk": scenario.aggregated is not None and scenario.aggregated.mixed_chunk,
        "drafts": scenario.acceptance is not None,
    }
    return _not_modelled("cost.cold_kernels", beside)


RULES: tuple[Callable[["Scenario"], str], ...] = (
    of_its_engine,
    of_its_release,
    _of_shedding,
    _of_queue,
    _of_counts,
    _of_returned_kv,
    _of_split_prefill,
    _of_shared_prompts,
    _of_stages,
    _of_ranks_with_stages,
    _of_divided_kv,
    _of_hisparse,
    _of_encoding,
    _of_storage,
    _of_elastic_clusters,
    _of_roles,
    _of_costs,
    _of_cold_kernels,
)
"""Checks of a scenario. Each returns a message if the scenario breaks its rule. Only the first message is reported."""
