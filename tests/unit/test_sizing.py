"""What a server's settings mean for one of its data-parallel ranks, and for what it drafts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.sizing import layout_of, resolve
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.yaml_file import ConfigError
from tests.support import request, small, small_aggregated


def ranks(chunk_tokens):
    return small(request(0, 10, 10), prefill__tp=4, prefill__dp=4, prefill__chunked_prefill_tokens=chunk_tokens)


def test_ranks_of_a_server_share_its_chunk():
    cluster = build(ranks(64))
    assert cluster.scenario.prefill.chunked_prefill_tokens == 64
    assert [i.limits.chunked_prefill_tokens for i in cluster.instances[:4]] == [16] * 4


def test_no_chunking_stays_no_chunking():
    assert build(ranks(0)).instances[0].limits.chunked_prefill_tokens is None


def test_each_rank_needs_a_page_of_the_chunk():
    with pytest.raises(
        ConfigError, match="chunked_prefill_tokens 12 is less than a page for each of 4 ranks, with pages of 4 tokens"
    ):
        build(ranks(12))


@pytest.mark.parametrize(("dp", "conservativeness"), [(1, 2.0), (2, 0.6)])
def test_data_parallel_attention_begins_prompts_more_readily(dp, conservativeness):
    scenario = small_aggregated(
        request(0, 10, 10), aggregated__tp=2, aggregated__dp=dp, aggregated__schedule_conservativeness=2.0
    )
    assert build(scenario).instances[0].limits.schedule_conservativeness == pytest.approx(conservativeness)


def test_draft_tokens_take_memory_from_the_pool():
    def fraction(**changes):
        return build(
            small(request(0, 10, 10), decode__max_running_requests=4096, **changes)
        ).scenario.decode.mem_fraction

    drafts = {"decode__speculative_draft_tokens": 4, "decode__speculative_accept_length": 2}
    assert fraction(**drafts) < fraction()


GIVEN = {"mem_fraction": 0.5, "pool_tokens": 4096, "chunked_prefill_tokens": 64, "max_running_requests": 7}
OWN = {"mem_fraction": 0.92, "chunked_prefill_tokens": 8192, "max_running_requests": 1024}


def of_vllm(**changes):
    """On H100; without changes, all that can be left out is."""
    data = {
        "model": "qwen3-8b",
        "engine": "vllm",
        "prefill": {"gpu": "h100"},
        "decode": {"gpu": "h100"},
        "workload": {"use": "random_lengths", "num_requests": 1, "input_tokens": 1, "output_tokens": 1},
        **changes,
    }
    return resolve(parse_scenario(data, base=Path()))


@given(st.sets(st.sampled_from(sorted(GIVEN))), st.sampled_from(["prefill", "decode", "aggregated"]))
def test_vllm_sizes_what_a_scenario_leaves_out_and_nothing_else(names, role):
    told = {name: GIVEN[name] for name in names if role != "decode" or name != "chunked_prefill_tokens"}
    changes = {role: {"gpu": "h100", **told}}
    if role == "aggregated":
        changes |= {"prefill": None, "decode": None}
    scenario = of_vllm(**changes)
    found = getattr(scenario, role)
    pool_tokens = layout_of(scenario, role).pool_tokens(found.mem_fraction, 16)
    expected = {"pool_tokens": pool_tokens, **OWN, **told}
    if role == "decode":
        del expected["chunked_prefill_tokens"]
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(("given_tokens", "page_size"), [({}, 16), ({"page_size": 1}, 1), ({"page_size": 64}, 64)])
def test_vllm_has_blocks_of_16_tokens_unless_told(given_tokens, page_size):
    assert of_vllm(**given_tokens).page_size == page_size
    assert of_vllm(**given_tokens, engine="sglang").page_size == given_tokens.get("page_size", 1)


def test_each_rank_of_vllm_has_a_batch_of_its_own():
    scenario = of_vllm(prefill={"gpu": "h100", "tp": 4, "dp": 4})
    assert scenario.prefill.rank_chunk_tokens == 8192
    assert scenario.prefill.resolved_max_running == 1024


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("given", [None, 4, 9])
def test_what_is_resolved_resolves_to_itself(engine, given):
    """A kept scenario gives the numbers of its run."""
    servers = {"gpu": "h200", "tp": 2, "dp": 2, "max_running_requests": given}
    once = resolve(small_aggregated(engine=engine, page_size=16, aggregated=servers))
    assert resolve(once) == once
    assert given is None or once.aggregated.resolved_max_running == given // 2


def test_a_workload_has_requests():
    with pytest.raises(ConfigError, match="the workload has no requests"):
        build(small())
