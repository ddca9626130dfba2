"""Every path through a cluster gives the tokens that one process gives, and its journal replays; nothing is left."""

import pytest
from pdreal.control.logbook import read_journal, read_records
from pdreal.settings.options import Options

from pdsim import simulate
from pdsim.core.journal.replay import replay
from pdsim.scenario.building.machines import state_machines
from pdsim.system.catalog import load_model
from tests.real import clusters

STAGING = {"ring": "1 MB"}
AGGREGATED = {"gpu": "h100", "pool_tokens": 4096, "max_running_requests": 8, "chunked_prefill_tokens": 64}
TIGHT = {
    "workload__num_prefixes": 8,
    "workload__input_tokens": {"use": "uniform", "low": 3, "high": 30},
    "prefill__pool_tokens": 240,
    "prefill__host_cache": "4 MB",
    "decode__pool_tokens": 260,
    "decode__radix_cache": True,
    "decode__host_cache": "4 MB",
    "decode__admission": {"use": "reserve_decode_tokens", "reserved_tokens": 4},
}
"""Prompts continue what both sides have evicted to host memory."""
RETRACTIONS = {
    "decode__pool_tokens": 260,
    "decode__admission": {"use": "reserve_decode_tokens", "reserved_tokens": 4},
    "workload__output_tokens": 30,
}
LONG = {"use": "uniform", "low": 3, "high": 150}
"""Prompts of several chunks, and of several windows."""
DRAFTS = {"speculative_num_steps": 3, "speculative_accept_length": 2.5}
DECODE_DRAFTS = {f"decode__{name}": value for name, value in DRAFTS.items()}
HYBRID = {"model": "tiny-hybrid", "page_size": 16, "prefill__chunked_prefill_tokens": 48}
"""Prompts of several chunks, whose prefixes hit where chunks have left states."""
SENDING = {"gpu": "h100", "tp": 2, "ep": 2, "moe_a2a_backend": "deepep", "pool_tokens": 4096, "max_running_requests": 8}
PATHS = {
    "1P1D": {},
    "decode radix": {"decode__radix_cache": True},
    "no radix": {"prefill__radix_cache": False},
    "whole prompts": {"prefill__transfer": "whole_prompt", "prefill__overlap": False},
    "layer by layer": {"prefill__layer_groups": 3},
    "2P1D": {"prefill__instances": 2},
    "aggregated": {"prefill": None, "decode": None, "aggregated": AGGREGATED},
    "retractions": RETRACTIONS,
    "retractions, TP2": {"decode__tp": 2, **RETRACTIONS},
    "TP2 to TP1, slices": {"prefill__tp": 2},
    "TP1 to TP2, slices": {"decode__tp": 2},
    "TP2 to TP1, staged": {"prefill__tp": 2, "network__staging": STAGING},
    "TP1 to TP2, staged": {"decode__tp": 2, "network__staging": STAGING},
    "TP2 to TP1, pushed": {"prefill__tp": 2, "network__transport": "push"},
    "TP1 to TP2, pushed": {"decode__tp": 2, "network__transport": "push", "decode__radix_cache": True},
    "TP4 to TP2, pushed": {"prefill__tp": 4, "decode__tp": 2, "network__transport": "push"},
    "latents, layer by layer, pushed": {
        "model": "tiny-deepseek-v3",
        "prefill__layer_groups": 2,
        "network__transport": "push",
    },
    "experts, TP2 to TP1, slices": {"model": "tiny-qwen3-moe", "prefill__tp": 2},
    "whole experts, TP2 to TP2": {
        "model": "tiny-qwen3-moe",
        "prefill__tp": 2,
        "prefill__ep": 2,
        "decode__tp": 2,
        "decode__ep": 2,
    },
    "whole experts, latents, TP2 to TP1": {"model": "tiny-deepseek-v3", "prefill__tp": 2, "prefill__ep": 2},
    "all-to-all, TP2 to TP2, decode radix": {
        "model": "tiny-qwen3-moe",
        "prefill": SENDING,
        "decode": {**SENDING, "radix_cache": True},
    },
    "all-to-all, latents, aggregated": {
        "model": "tiny-deepseek-v3",
        "prefill": None,
        "decode": None,
        "aggregated": {**SENDING, "chunked_prefill_tokens": 64},
    },
    "latents": {"model": "tiny-deepseek-v3", "decode__radix_cache": True},
    "windows that are kept whole": {"model": "tiny-mistral", "decode__radix_cache": True},
    "windows": {"model": "tiny-windows", "prefill__host_cache": "4 MB", "workload__input_tokens": LONG},
    "windows, retractions": {
        "model": "tiny-windows",
        **RETRACTIONS,
        "workload__input_tokens": LONG,
        "decode__pool_tokens": 380,
    },
    "windows, TP2 to TP1, slices": {"model": "tiny-windows", "prefill__tp": 2},
    "windows, TP2 to TP1, staged": {"model": "tiny-windows", "prefill__tp": 2, "network__staging": STAGING},
    "windows, TP1 to TP2, pushed": {"model": "tiny-windows", "decode__tp": 2, "network__transport": "push"},
    "windows, aggregated": {"model": "tiny-windows", "prefill": None, "decode": None, "aggregated": AGGREGATED},
    "latents, aggregated": {"model": "tiny-deepseek-v3", "prefill": None, "decode": None, "aggregated": AGGREGATED},
    "latents, TP2 to TP1": {"model": "tiny-deepseek-v3", "prefill__tp": 2},
    "latents, TP1 to TP2, layer by layer": {
        "model": "tiny-deepseek-v3",
        "decode__tp": 2,
        "prefill__layer_groups": 2,
        "decode__pool_tokens": 260,
        "decode__admission": {"use": "reserve_decode_tokens", "reserved_tokens": 4},
    },
    "TP2 to TP2, layer by layer": {"prefill__tp": 2, "decode__tp": 2, "prefill__layer_groups": 2},
    "states": HYBRID,
    "states, decode radix, retractions": {
        **HYBRID,
        **RETRACTIONS,
        "decode__pool_tokens": 352,
        "decode__radix_cache": True,
        "decode__mamba_track_interval": 16,
    },
    "states, no radix, TP2 to TP2": {**HYBRID, "prefill__radix_cache": False, "prefill__tp": 2, "decode__tp": 2},
    "states, pushed": {**HYBRID, "network__transport": "push"},
    "states, aggregated": {
        **HYBRID,
        "prefill": None,
        "prefill__chunked_prefill_tokens": None,
        "decode": None,
        "aggregated": {**AGGREGATED, "mamba_track_interval": 16},
    },
    "host memory": TIGHT,
    "host memory, written back, layer by layer": {
        **TIGHT,
        "prefill__layer_groups": 2,
        "prefill__host_cache": "1 MB",
        "prefill__host_cache_write": "write_back",
        "decode__host_cache": "1 MB",
        "decode__host_cache_write": "write_back",
    },
    "host memory, TP1 to TP2, staged": {**TIGHT, "decode__tp": 2, "network__staging": STAGING},
    "host memory, latents, TP2 to TP2": {**TIGHT, "model": "tiny-deepseek-v3", "prefill__tp": 2, "decode__tp": 2},
    "host memory, aggregated": {
        **{name: value for name, value in TIGHT.items() if name.startswith("workload")},
        "prefill": None,
        "decode": None,
        "aggregated": {**AGGREGATED, "pool_tokens": 240, "host_cache": "4 MB"},
    },
    "drafts, decode radix, layer by layer": {
        **DECODE_DRAFTS,
        "decode__radix_cache": True,
        "prefill__layer_groups": 3,
    },
    "drafts, TP2 to TP1, staged": {**DECODE_DRAFTS, "prefill__tp": 2, "network__staging": STAGING},
    "drafts, latents, TP1 to TP2, pushed": {
        **DECODE_DRAFTS,
        "model": "tiny-deepseek-v3",
        "decode__tp": 2,
        "decode__radix_cache": True,
        "network__transport": "push",
    },
    "host memory, drafts": {**TIGHT, **DECODE_DRAFTS},
    "drafts, retractions": {**RETRACTIONS, **DECODE_DRAFTS, "decode__pool_tokens": 300},
    "drafts, aggregated": {"prefill": None, "decode": None, "aggregated": {**AGGREGATED, **DRAFTS}},
}
TRANSPORTS = ["mooncake-tcp", "nixl-cma"]
"""Besides shared memory, over which all paths go."""


def check(changes, logs, num_requests=clusters.DEFAULT["workload"]["num_requests"], options=None):
    changes = {**changes, "workload__num_requests": num_requests}
    real, resolved = clusters.run(clusters.scenario(**changes), logs=logs, options=options)
    assert real.failure is None
    assert not real.leaks
    assert len(real.outputs) == num_requests
    assert not clusters.wrong_outputs(resolved, real.outputs, options)
    drafted = real.drafted
    assert drafted.num_accepted == drafted.num_confirmed
    assert bool(drafted.num_accepted) == (resolved.acceptance is not None)
    records = read_records(logs)
    assert all(request.outcome == "finished" for request in records.requests)
    assert replay(read_journal(logs), state_machines(resolved)) > num_requests
    return records


def num_verifications(records):
    """Of a request in a step. The number depends on how many drafts each step accepts, and not on the batches."""
    return sum(step.num_requests for step in records.steps if step.kind == "decode")


@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_those_of_one_process(path, tmp_path):
    records = check(PATHS[path], tmp_path)
    if "drafts" in path:
        simulated = simulate(clusters.scenario(**PATHS[path])).records
        assert num_verifications(records) == num_verifications(simulated)
    if "retractions" in path:
        assert any(request.num_retractions for request in records.requests)
    if path.startswith("host memory"):
        roles = ["aggregated-0"] if "aggregated" in path else ["prefill-0", "decode-0"]
        copied = {(copy.instance_id, copy.kind) for copy in records.host_copies}
        assert copied == {(role, kind) for role in roles for kind in ("load", "write")}


FP8_PATHS = {
    "experts, TP2 to TP1, staged": {"model": "tiny-qwen3-moe", "prefill__tp": 2, "network__staging": STAGING},
    "experts, TP2 to TP1, pushed": {"model": "tiny-qwen3-moe", "prefill__tp": 2, "network__transport": "push"},
    "latents": {"model": "tiny-deepseek-v3", "decode__radix_cache": True},
    "latents, aggregated": PATHS["latents, aggregated"],
}


@pytest.mark.parametrize("path", FP8_PATHS)
def test_weights_and_kv_in_fp8(path, tmp_path):
    options = Options(check_kv=True, kv_cache_dtype="fp8", quantization="fp8")
    records = check(FP8_PATHS[path], tmp_path, options=options)
    model = load_model(FP8_PATHS[path]["model"])
    for moved in records.transfers:
        assert moved.num_bytes % model.attention.num_kv_elements(2 if "TP2" in path else 1) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_transport(transport, tmp_path):
    clusters.skip_without(transport)
    check({"network__transport": transport}, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS)
def test_two_hundred_prompts(path, tmp_path):
    check({**PATHS[path], "client__concurrency": 16}, tmp_path, num_requests=200)


@pytest.mark.nightly
@pytest.mark.parametrize("staging", [None, STAGING])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_hundred_prompts_over_any_transport(transport, staging, tmp_path):
    """Of whole pages, or through the ring."""
    clusters.skip_without(transport)
    staged = {"prefill__tp": 2, "network__staging": staging} if staging else {}
    check({**staged, "network__transport": transport, "client__concurrency": 16}, tmp_path, num_requests=200)
