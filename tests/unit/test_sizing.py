"""What a server's settings mean for one of its data-parallel ranks, and for what it drafts."""

import pytest

from pdsim.scenario.build import build
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
    with pytest.raises(ConfigError, match="chunked_prefill_tokens 12 is less than 4 ranks, each of a page of 4 tokens"):
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
