"""Settings that an engine or its release lacks, or that pdsim does not model with this engine."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdsim.core.engine_rules import RELEASES
from pdsim.policy.prefill import HighestResponseRatioFirst, LongestOutputFirst, ShortestPrefillFirst

if TYPE_CHECKING:
    from pdsim.scenario.schema import Scenario
    from pdsim.scenario.sections.servers import ServerSettings, StorageSettings

_ORDERS_SINCE_0_5_12 = (HighestResponseRatioFirst, ShortestPrefillFirst)
_OF_VLLM = (
    "long_prefill_tokens",
    "long_prefill_adaptive",
    "chunked_media",
    "hold_timeout",
    "prefill_schedule_interval",
)
"""Settings of servers that only vLLM has."""
_OF_SGLANG = (
    "dynamic_chunks",
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "prefill_max_requests",
    "schedule_conservativeness",
    "priority_preemption_threshold",
)
"""Settings of servers that only SGLang has."""


def of_its_engine(scenario: "Scenario") -> str:
    """Names a setting that the scenario's engine lacks, or that pdsim does not model with this engine, and says why.
    Empty: there is none.
    """
    wrong = _wrong_for_vllm(scenario) if scenario.engine == "vllm" else _wrong_for_sglang(scenario)
    return f"engine {scenario.engine}: {wrong}" if wrong else ""


def of_its_release(scenario: "Scenario") -> str:
    """Says what is wrong with the scenario for the chosen release of its engine: a setting that the release lacks, or a
    release that pdsim does not model. Empty: nothing.
    """
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
    for role, servers in scenario.roles.items():
        if servers.host_cache is not None and not servers.radix_cache:
            return f"{role}.host_cache needs radix_cache: true (0.5.23, arg_groups/hicache_hook.py:45)"
        if servers.host_cache_connector != "offloading":
            return (
                f"{role}.host_cache_connector: pdsim does not model SGLang's LMCache (--enable-lmcache) and KVBM; "
                "leave it out"
            )
    if found := _given(scenario, _OF_VLLM):
        return f"{found} is a setting of vLLM; leave it out, or say engine: vllm"
    if scenario.network.nixl_push:
        return "network.nixl_push is a setting of vLLM; leave it out, or say engine: vllm"
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
    if found := _given(scenario, _OF_SGLANG):
        return f"{found} is a setting of SGLang; leave it out"
    for role, servers in scenario.roles.items():
        if servers.split.cp > 1:
            return f"{role}.cp: {servers.split.cp}: pdsim does not model vLLM's context parallelism; leave it out"
    if decode is not None and decode.allocation != "prefill_complete":
        return f"decode.allocation: {decode.allocation}: decode allocates pages for computed prompts; leave it out"
    if decode is not None and decode.speculative_draft_tokens is not None:
        return "decode.speculative_draft_tokens: pdsim does not model vLLM's drafts; leave it out"
    if wrong := _wrong_tiers_for_vllm(scenario):
        return wrong
    for role, computing in (("prefill", prefill), ("aggregated", scenario.aggregated)):
        if computing is not None and not computing.chunked_media and computing.long_prefill_tokens is not None:
            beside = f"{role}.chunked_media: false beside {role}.long_prefill_tokens"
            return f"{beside}: pdsim does not model an item beyond this limit; leave one of the two out"
    if (aggregated := scenario.aggregated) is not None:
        if aggregated.speculative_draft_tokens is not None:
            return "aggregated.speculative_draft_tokens: pdsim does not model vLLM's drafts; leave it out"
        if aggregated.prefill_schedule_interval > 1 and aggregated.dp > 1:
            return "aggregated.prefill_schedule_interval: pdsim does not model it for several ranks; give dp: 1"
        if aggregated.scheduler_recv_interval > 1:
            return "aggregated.scheduler_recv_interval is a setting of SGLang; leave it out"
        if isinstance(aggregated.policy, LongestOutputFirst):
            return (
                "aggregated.policy: lof is an order of SGLang. vLLM orders prompts by priority and arrival only "
                "(0.33.0, config/scheduler.py:159), and pdsim does not tell its scheduler requested outputs; give fcfs"
            )
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
    """Names a setting that vLLM's storage lacks, or that pdsim does not model with this storage. Empty: there is none.
    The only storage of vLLM in pdsim is LMCache's remote store, read in the background (enable_async_loading).
    """
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
    """Returns a sentence on a setting that does not work with KVBM, Dynamo's host cache, or that pdsim does not model
    with KVBM. Empty: there is no such setting.
    """
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


def _given(scenario: "Scenario", names: Iterable[str]) -> str:
    """Returns the first setting in `names` that a server of the scenario sets to another value than the default, such
    as "decode.dcp". Empty: all have their defaults.
    """
    for role, servers in scenario.roles.items():
        fields = type(servers).model_fields
        if found := next(
            (name for name in names if name in fields and getattr(servers, name) != fields[name].default), ""
        ):
            return f"{role}.{found}"
    return ""
