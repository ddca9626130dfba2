"""Every path through a cluster gives the tokens that one process gives, and leaves nothing behind."""

import pytest
from pdreal.logbook import read_journal, read_records

from pdsim.core.journal import replay
from pdsim.scenario.build import state_machines
from tests.real import clusters

PATHS = {
    "1P1D": {},
    "decode radix": {"decode__radix_cache": True},
    "no radix": {"prefill__radix_cache": False},
    "whole prompts": {"prefill__transfer": "whole_prompt", "prefill__overlap": False},
    "layer by layer": {"prefill__layer_groups": 3},
    "2P1D": {"prefill__instances": 2},
    "one instance that does both": {
        "prefill": None,
        "decode": None,
        "aggregated": {"gpu": "h100", "pool_tokens": 4096, "max_running_requests": 8, "chunked_prefill_tokens": 64},
    },
    "tight": {"decode__pool_tokens": 400, "decode__admission": {"use": "reserve_decode_tokens", "reserved_tokens": 4}},
}


@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_those_of_one_process(path, tmp_path):
    real, resolved = clusters.run(clusters.scenario(**PATHS[path]), logs=tmp_path)
    assert real.failure is None
    assert not real.leaks
    assert real.outputs == clusters.expected_outputs(resolved)
    assert replay(read_journal(tmp_path), state_machines(resolved)) > 0
    assert all(request.outcome == "finished" for request in read_records(tmp_path).requests)
